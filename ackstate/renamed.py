"""Warns about names that were replaced, and still work for a release."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, *, category: type[Warning] = DeprecationWarning, stacklevel: int = 2) -> None:
    """Warn that a name has been replaced.

    Args:
        old: The former name, as the caller wrote it.
        new: The replacement.
        category: `DeprecationWarning` for names in Python code, `FutureWarning` for words on the command line.
        stacklevel: As in `warnings.warn`, counted from the caller: 1 is the caller, 2 the caller of the caller.
    """
    warnings.warn(f"{old} is deprecated, and release 0.3 removes it: write {new}", category, stacklevel=stacklevel + 1)
