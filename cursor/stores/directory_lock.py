"""How does one process have a store's directory to itself, and how are the directory's own names put on the disk?

``LOCK`` names the process that has the directory open. It stays; the kernel lets go of the lock on it when the process
ends, however it ends.

A forked child has no part in a store that its parent has open (`leave_to_parent_at_fork`). It would write over what the
parent writes or, with SQLite, at its end remove the log that the parent goes on writing.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO, Protocol

from cursor.store import StoreLockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "LOCK"
"""The name of the lock in a store's directory."""


class Opened(Protocol):
    """A store, or a part of one, that this process has open."""

    def leave_to_parent(self) -> None:
        """Refuse every later call, and let go of what was inherited without touching the store.

        Called in a forked child, whose only thread this is. Locks that other threads held will never be let go of:
        take none, make new ones. Nothing may be raised.
        """
        ...


_OPENED: weakref.WeakSet[Opened] = weakref.WeakSet()


def leave_to_parent_at_fork(opened: Opened) -> None:
    """Have `Opened.leave_to_parent` called in each child that is forked from now on, as long as the object lives.

    Args:
        opened: Hashable by identity.
    """
    _OPENED.add(opened)


def _leave_all_to_parent() -> None:
    for opened in list(_OPENED):
        opened.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def claim(directory: Path) -> BinaryIO:
    """Take the lock until it is let go of by `unlock`, or all processes that have inherited the returned file end.

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


def unlock(lock: BinaryIO) -> None:
    """Let go of the lock and close its file; doing it twice does nothing.

    Closing alone would leave the directory locked for as long as a forked child has the file open.
    """
    if not lock.closed:
        with lock:
            fcntl.flock(lock, fcntl.LOCK_UN)


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
    try:
        yield
    finally:
        unlock(lock)


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
