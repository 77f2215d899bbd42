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
from typing import TYPE_CHECKING, BinaryIO, Protocol, final

from ackstate.cursor.store import StoreError, StoreLockedError
from ackstate.cursor.stores.plain_files import open_file, read_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "LOCK"
"""The name of the lock in a store's directory."""
_HOLDER_BYTES_MAX = 20


class OpenedFile(Protocol):
    """A store, or a part of one, that this process has open."""

    def leave_to_parent(self) -> None:
        """Refuse every later call, and let go of what was inherited without touching the store.

        Called in a forked child, whose only thread this is. Locks that other threads held will never be let go of:
        take none, make new ones. Nothing may be raised.
        """
        ...


_OPENED: weakref.WeakSet[OpenedFile] = weakref.WeakSet()


def leave_to_parent_at_fork(opened: OpenedFile) -> None:
    """Have `OpenedFile.leave_to_parent` called in each child that is forked from now on, as long as the object lives.

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
        StoreError: ``LOCK`` is no plain file, or has a second name; nothing was changed.
        OSError: There is none and it cannot be made, or it may not be written.
    """
    with suppress(FileExistsError):
        os.close(open_file(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    lock = os.fdopen(open_file(directory / LOCK, os.O_RDWR), "r+b", buffering=0)
    try:
        _lock(lock, fcntl.LOCK_EX, directory)
    except BaseException:
        lock.close()
        raise
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


def _lock_directory(directory: Path, kind: int) -> int:
    """Lock a directory itself and return its descriptor, which holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor, kind, directory)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(opened: int | BinaryIO, kind: int, directory: Path) -> None:
    try:
        fcntl.flock(opened, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLockedError(_why_locked(directory)) from None


def _why_locked(directory: Path) -> str:
    """Say who has a store. ``LOCK`` is read and not tried: whoever has the directory may be about to take it."""
    try:
        holder = read_start(directory / LOCK, _HOLDER_BYTES_MAX).decode("ascii", "replace").strip()
    except (OSError, StoreError):
        return f"{directory} is being copied, or is open though its {LOCK} was removed"
    return f"{directory} is open in process {holder or 'unknown'}, or is being copied"


def _unlock_directory(descriptor: int) -> None:
    """Unlock a directory: closing alone would leave it locked for as long as a forked child has it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def closed_to_others(directory: Path) -> Iterator[None]:
    """Keep a store from being opened, but not from being copied by others too, and leave no trace.

    Raises:
        StoreLockedError: It is open.
        OSError: The directory cannot be read.
    """
    descriptor = _lock_directory(directory, fcntl.LOCK_SH)
    try:
        yield
    finally:
        _unlock_directory(descriptor)


@final
class DirectoryClaim:
    """A store's directory, which is locked itself first, and then ``LOCK`` in it.

    The name of ``LOCK`` may be removed while it is held; a directory cannot be taken away unnoticed.

    Raises:
        StoreLockedError: It is open already, in another process or in this one, or being copied; nothing was changed.
        OSError: The directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: BinaryIO | None = None
        self._descriptor = -1  # As long as it is not locked, there is nothing to close.
        self._descriptor = _lock_directory(directory, fcntl.LOCK_EX)

    def take_lock(self) -> None:
        """Take ``LOCK``, too; see `claim`."""
        self._lock = claim(self._directory)

    def let_go(self) -> None:
        """Unlock both; doing it twice does nothing."""
        if self._lock is not None:
            unlock(self._lock)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _unlock_directory(descriptor)

    def leave_to_parent(self) -> None:
        """Close both in a forked child, and leave them locked."""
        with suppress(OSError):
            if self._lock is not None:
                self._lock.close()
        self.__del__()

    def __del__(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
