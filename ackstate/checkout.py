"""Makes the folders of a checkout importable by name: `cursor.config` is the module `ackstate.cursor.config`.

Python would otherwise load a second copy of each module from the same file, whose classes and enum members would not
equal those of `ackstate`. An installed wheel has no such names.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType


def alias(folder: str) -> None:
    """Make a folder and all modules below it aliases of the package of that name in `ackstate`.

    Args:
        folder: A top-level name that is being imported.
    """
    if not any(isinstance(each, _FolderNames) and each.folder == folder for each in sys.meta_path):
        sys.meta_path.insert(0, _FolderNames(folder))
    sys.modules[folder] = import_module(f"{__package__}.{folder}")


@final
class _FolderNames:
    """Imports the modules of `ackstate` in place of those below a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return a spec that loads the module of `ackstate`; None for other names and for modules that are missing."""
        del path, target
        if not name.startswith(f"{self.folder}."):
            return None
        found = find_spec(f"{__package__}.{name}")
        if found is None:
            return None
        spec = ModuleSpec(name, self, origin=found.origin, is_package=found.submodule_search_locations is not None)  # type: ignore[arg-type]
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of `ackstate` itself."""
        module = import_module(f"{__package__}.{spec.name}")
        # The import system sets the new spec on the module, and `exec_module` restores the old one.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module unchanged: it was executed under its own name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that ``python -m`` runs."""
        found = find_spec(f"{__package__}.{name}")
        return found.loader.get_code(found.name) if found and found.loader else None  # type: ignore[attr-defined]
