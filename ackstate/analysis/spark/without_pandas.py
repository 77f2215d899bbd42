"""Keeps Arrow from importing pandas with its first array: the import takes longer than the replay of a small trace."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_pandas() -> Iterator[None]:
    """Hide pandas while the block runs, unless it is already imported; Arrow then never uses it in this process."""
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@final
class _NoPandas:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        if name == "pandas":
            raise ModuleNotFoundError("pandas is hidden", name=name)
