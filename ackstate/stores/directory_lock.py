"""Locks a store's directory for one process, and syncs the directory's own names."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, final

from ackstate.stores.base import StoreLockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "LOCK"
"""The name of the file with the id of the process that has the directory open; it stays, and is for people only."""


@contextmanager
def closed_to_others(directory: Path) -> Iterator[None]:
    """Prevent a store from being opened, but not from being copied by others too, and leave no trace.

    Raises:
        StoreLockedError: It is open.
        OSError: The directory cannot be read.
    """
    descriptor = _lock(directory, fcntl.LOCK_SH)
    try:
        yield
    finally:
        _unlock(descriptor)


@final
class DirectoryClaim:
    """The lock of a store's directory itself, which the kernel releases whenever the process ends.

    Raises:
        StoreLockedError: The store is open, in this process or another one, or is being copied; nothing was changed.
        OSError: The directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = -1
        self._descriptor = _lock(directory, fcntl.LOCK_EX)

    def sign(self) -> None:
        """Write the id of this process to ``LOCK``."""
        descriptor = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A disk without room for it must not keep the store closed.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Unlock the directory; no-op if already unlocked."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _unlock(descriptor)

    def __del__(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def _lock(directory: Path, kind: int) -> int:
    """Lock a directory and return its descriptor, which holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise StoreLockedError(f"{directory} is open in process {_holder(directory)}, or is being copied") from None
        raise
    return descriptor


def _holder(directory: Path) -> str:
    try:
        return (directory / LOCK).read_text(encoding="ascii", errors="replace")[:20].strip() or "unknown"
    except OSError:
        return "unknown"


def _unlock(descriptor: int) -> None:
    """Unlock a directory. Closing is not enough: it would stay locked while a forked child has it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names_above(directory: Path) -> None:
    """Sync the names of all directories above one: the process that created them may have died before its sync."""
    for path in directory.resolve().parents:
        # A directory that this process is not allowed to read was created and synced by another user.
        with suppress(PermissionError):
            sync_path(path)
        if path.is_mount():
            break
