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


def lock_directory(path: Path, kind: int) -> int:
    """Lock a directory itself and return its descriptor, which holds the lock.

    Args:
        path: The directory.
        kind: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`.

    Raises:
        StoreLockedError: A store is open in it or, for `LOCK_EX`, is being copied.
        OSError: It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreLockedError(f"{path} is being copied, or is open though its {LOCK} was removed") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def let_go(descriptor: int) -> None:
    """Unlock a directory: closing alone would leave it locked for as long as a forked child has it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def shared(directory: Path) -> Iterator[None]:
    """Keep what is in a directory from being opened, but not from being copied, and leave no trace.

    Raises:
        As `lock_directory`.
    """
    descriptor = lock_directory(directory, fcntl.LOCK_SH)
    try:
        yield
    finally:
        let_go(descriptor)


@final
class DirectoryClaim:
    """A store's directory, and the one that its files really are in: first the latter is locked, then ``LOCK``.

    Args:
        directory: The store's.
        place: Where its files are.

    Raises:
        StoreLockedError: Either is open already, in another process or in this one; nothing was changed.
        OSError: The latter cannot be read.
    """

    def __init__(self, directory: Path, place: Path) -> None:
        self._directory = directory
        self._lock: BinaryIO | None = None
        self._descriptor = -1
        try:
            self._descriptor = lock_directory(place, fcntl.LOCK_EX)
        except StoreLockedError:
            # LOCK says who has it, if it is there.
            with closed_to_others(directory):
                raise

    def take_lock(self) -> None:
        """Take ``LOCK``, too; see `claim`."""
        self._lock = claim(self._directory)

    def let_go(self) -> None:
        """Unlock both; doing it twice does nothing."""
        if self._lock is not None:
            unlock(self._lock)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            let_go(descriptor)

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
