"""Locks a store's directory for one process, and syncs the directory's own names.

``LOCK`` contains the id of the process that has the directory open. The file stays; the kernel releases the lock on it
whenever the process ends.

A forked child must not use a store that its parent has open (`leave_to_parent_at_fork`): it would overwrite the
parent's writes or, with SQLite, remove the parent's log when it exits.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO, Protocol, final

from ackstate.cursor.store import StoreError, StoreLockedError
from ackstate.stores.plain_files import open_file, read_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "LOCK"
"""The name of the lock in a store's directory."""
_HOLDER_BYTES_MAX = 20


class OpenedFile(Protocol):
    """A store, or a part of one, that this process has open."""

    def leave_to_parent(self) -> None:
        """Refuse every later call, and release the inherited resources without touching the store.

        Called in a forked child while it has a single thread. Locks that other threads held are never released: take
        none, create new ones. This method must not raise.
        """
        ...


_OPENED: weakref.WeakSet[OpenedFile] = weakref.WeakSet()


def leave_to_parent_at_fork(opened: OpenedFile) -> None:
    """Call `OpenedFile.leave_to_parent` in each child that is forked from now on, while the object lives.

    Args:
        opened: Hashable by identity.
    """
    _OPENED.add(opened)


def _leave_all_to_parent() -> None:
    for opened in list(_OPENED):
        opened.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def claim(directory: Path) -> BinaryIO:
    """Take the lock. It is held until `unlock`, or until all processes that inherited the returned file end.

    Raises:
        StoreLockedError: This process or another one holds the lock; nothing was changed.
        StoreError: ``LOCK`` is not a plain file, or has a second name; nothing was changed.
        OSError: ``LOCK`` cannot be created or written.
    """
    with suppress(FileExistsError):
        os.close(open_file(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    lock = os.fdopen(open_file(directory / LOCK, os.O_RDWR), "r+b", buffering=0)
    try:
        _lock(lock, fcntl.LOCK_EX, directory)
    except BaseException:
        lock.close()
        raise
    # The process id is for people only: a disk without room for it must not keep the store closed.
    with suppress(OSError):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
    return lock


def unlock(lock: BinaryIO) -> None:
    """Release the lock and close its file; no-op if already released.

    Closing the file is not enough: the directory would stay locked while a forked child has the file open.
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
    """Return why a store is locked. ``LOCK`` is read but not locked: its holder may be about to lock it."""
    try:
        holder = read_start(directory / LOCK, _HOLDER_BYTES_MAX).decode("ascii", "replace").strip()
    except (OSError, StoreError):
        return f"{directory} is being copied, or is open and its {LOCK} was removed"
    return f"{directory} is open in process {holder or 'unknown'}, or is being copied"


def _unlock_directory(descriptor: int) -> None:
    """Unlock a directory. Closing is not enough: it would stay locked while a forked child has it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def closed_to_others(directory: Path) -> Iterator[None]:
    """Prevent a store from being opened, but not from being copied by others too, and leave no trace.

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
    """The locks of a store's directory: first the directory itself is locked, then ``LOCK`` in it.

    The name ``LOCK`` can be removed while the lock is held; the directory cannot be removed unnoticed.

    Raises:
        StoreLockedError: The store is open, in this process or another one, or is being copied; nothing was changed.
        OSError: The directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: BinaryIO | None = None
        self._descriptor = -1  # While the directory is not locked, there is no descriptor to close.
        self._descriptor = _lock_directory(directory, fcntl.LOCK_EX)

    def take_lock(self) -> None:
        """Also take ``LOCK``; see `claim`."""
        self._lock = claim(self._directory)

    def release(self) -> None:
        """Unlock both; no-op if already unlocked."""
        if self._lock is not None:
            unlock(self._lock)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _unlock_directory(descriptor)

    def leave_to_parent(self) -> None:
        """Close both in a forked child without unlocking them."""
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
    """Sync the names of all directories above one: the process that created them may have died before its sync."""
    for path in directory.resolve().parents:
        # A directory that this process is not allowed to read was created and synced by another user.
        with suppress(PermissionError):
            sync_path(path)
        if path.is_mount():
            break
