"""Directories for the duration of a run, named after its process: a later run removes those of a killed one."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/dev/shm")  # noqa: S108 - only the parent of private directories


def fast_parent() -> Path:
    """Return a directory in memory if the system has one, otherwise the one for temporary files."""
    is_usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return _MEMORY if is_usable else Path(tempfile.gettempdir())


@contextmanager
def scratch_directory(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory ``ackstate-PURPOSE-PID-*`` and remove it with its content at the end.

    First, those of the same purpose whose process has ended are removed.
    """
    parent = parent or fast_parent()
    remove_leftovers(purpose, parent)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(purpose, os.getpid()), dir=parent) as directory:
        yield Path(directory).resolve()


def remove_leftovers(purpose: str, parent: Path | None = None) -> None:
    """Remove the scratch directories of a purpose whose process has ended; failures are ignored."""
    for left in leftovers(purpose, parent or fast_parent()):
        shutil.rmtree(left, ignore_errors=True)


def scratch_prefix(purpose: str, pid: int) -> str:
    """Return the prefix of the names of a process's directories for a purpose."""
    return f"ackstate-{purpose}-{pid}-"


def leftovers(purpose: str, parent: Path) -> Iterator[Path]:
    """Yield the directories of a purpose, named by `scratch_prefix`, whose process has ended."""
    for left in parent.glob(f"ackstate-{purpose}-*-*"):
        pid = left.name.removeprefix(f"ackstate-{purpose}-").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield left
