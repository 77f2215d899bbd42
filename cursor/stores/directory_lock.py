"""How does one process have a store's directory to itself, and how are the directory's own names put on the disk?

``LOCK`` names the process that has the directory open. It stays; the kernel lets go of the lock on it when the process
ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from cursor.store import StoreLockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "LOCK"
"""The name of the lock in a store's directory."""


def claim(directory: Path) -> BinaryIO:
    """Take the lock for as long as the returned file is open.

    Raises:
        StoreLockedError: Another process has it, or this one; nothing was changed.
        OSError: There is none and it cannot be made, or it may not be written.
    """
    lock = (directory / LOCK).open("a+b", buffering=0)
    _lock_file(lock, fcntl.LOCK_EX, directory)
    # The number is for people: a disk too full to take it must not keep the store shut.
    with suppress(OSError):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
    return lock


@contextmanager
def closed_to_others(directory: Path) -> Iterator[None]:
    """Keep a store from being opened, but not from being copied by others too, and leave no trace.

    Raises:
        StoreLockedError: It is open, or was opened in the meantime: then what was seen of it does not count.
        OSError: The lock may not be read.
    """
    name = directory / LOCK
    try:
        lock = name.open("rb", buffering=0)
    except FileNotFoundError:
        yield
        # There was nothing to lock, and whoever opens the store makes it.
        if name.exists():
            raise StoreLockedError(f"{directory} was opened while it was copied") from None
        return
    _lock_file(lock, fcntl.LOCK_SH, directory)
    with lock:
        yield


def _lock_file(lock: BinaryIO, kind: int, directory: Path) -> None:
    """Lock a file, or close it and say who has locked it."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read(20).decode("ascii", "replace").strip()
        lock.close()
        raise StoreLockedError(f"{directory} is open in process {holder or 'unknown'}") from None
    except BaseException:
        lock.close()
        raise


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names_above(directory: Path) -> None:
    """Sync the names on the way down to a directory: whoever made them may have died before they were."""
    for path in directory.resolve().parents:
        # A directory that we may not read was made and synced by somebody else.
        with suppress(PermissionError):
            sync_path(path)
        if path.is_mount():
            break
