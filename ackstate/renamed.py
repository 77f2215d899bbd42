"""Warns about names that were replaced, and still work for a release."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def warn_renamed(old: str, new: str, *, category: type[Warning] = DeprecationWarning, stacklevel: int = 2) -> None:
    """Warn that a name has been replaced.

    Args:
        old: The former name, as the caller wrote it.
        new: The replacement.
        category: `DeprecationWarning` for names in Python code, `FutureWarning` for words on the command line.
        stacklevel: As in `warnings.warn`, counted from the caller: 1 is the caller, 2 the caller of the caller.
    """
    warnings.warn(f"{old} is deprecated, and release 0.3 removes it: write {new}", category, stacklevel=stacklevel + 1)


def moved_names(old: str, new: str, names: Collection[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names are in another module now, which is imported when one is used.

    Args:
        old: The former module.
        new: The other module.
        names: The names that have moved.
    """

    def find(name: str) -> Any:
        """Return a name of the other module, with a warning; see `moved_names`."""
        if name not in names:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warn_renamed(f"{old}.{name}", f"{new}.{name}")
        return getattr(import_module(new), name)

    return find
