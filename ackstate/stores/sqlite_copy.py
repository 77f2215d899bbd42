"""Copies a store, open or not, without changing a byte of it.

A checkpoint copies pages from the log to the database at any time, but the next transaction begins the log anew only
after all of them are in the database: it then has another header. So while the header stays the same, a copy of the
database and, after it, of the log is the store at the end of the copy: whatever a checkpoint changed in the database
meanwhile is in the log too. If it has changed, both are copied again.

Temporary copies lie in ``ackstate-copy-*`` among the temporary files, and their process keeps them locked. An unlocked
one is the leftover of a killed process, and the next process of the same user removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, final

from ackstate.errors import CorruptStateError
from ackstate.stores.base import StoreError, StoreLockedError
from ackstate.stores.directory_lock import closed_to_others
from ackstate.stores.sqlite_connection import opened_here
from ackstate.stores.sqlite_database import DATABASE, check_no_links, check_not_lost
from ackstate.stores.sqlite_log import check_log
from ackstate.stores.system_errors import system_errors_in_our_words

COPY_BYTES_MAX = 4 << 30
"""The default limit for the total size of a store's files that are copied, in bytes."""
_PREFIX = "ackstate-copy-"
_LOG, _JOURNAL = f"{DATABASE}-wal", f"{DATABASE}-journal"
_CHUNK_BYTES = 1 << 20
_LOG_HEADER_BYTES = 32
_TRIES = 10


def copy_store(directory: Path, place: Path, *, bytes_max: int) -> None:
    """Copy the files of a store to a new directory; nothing is left of it if this raises.

    Raises:
        AckStateError: See `ackstate.stores.sqlite.SqliteStore.open_copy`.
    """
    with system_errors_in_our_words(f"{directory}: cannot copy the store"):
        if not (directory / DATABASE).exists():
            check_no_links(directory)
            check_not_lost(directory)
            raise StoreError(f"{directory} is not an ackstate store: it holds no {DATABASE}")
        check_no_links(directory)
        place.mkdir(0o700, parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise StoreError(f"{place} must be an empty directory, to copy {directory} there")
        try:
            _copy(directory, place, bytes_max)
            # With this name last: a copy of which a part is missing is no store.
            for name in (f"{DATABASE}.new", _LOG, _JOURNAL):
                with suppress(FileNotFoundError), (place / name).open("rb") as made:
                    os.fsync(made.fileno())
            (place / f"{DATABASE}.new").rename(place / DATABASE)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise


def _copy(directory: Path, place: Path, bytes_max: int) -> None:
    here = opened_here(directory)
    if here is not None:
        # Through its descriptor: to close another one would release the locks that SQLite has in this process.
        with here.reading():
            _copy_files(directory, place, bytes_max, here.descriptor)
        return
    with ExitStack() as closed:
        try:
            closed.enter_context(closed_to_others(directory))
        except StoreLockedError:
            _copy_while_it_is_written(directory, place, bytes_max)
        else:
            _copy_files(directory, place, bytes_max)


def _copy_while_it_is_written(directory: Path, place: Path, bytes_max: int) -> None:
    for tries_left in reversed(range(_TRIES)):
        before = _generation(directory)
        _copy_files(directory, place, bytes_max)
        if _generation(directory) == before:
            try:
                # Frames that are being written may be copied in part, and be followed by whole ones.
                check_log(place / _LOG, place / f"{DATABASE}.new")
            except CorruptStateError:
                if not tries_left:
                    raise
            else:
                return
    raise StoreError(f"{directory} is written too fast to be copied while it is open; try again, or close it")


def _generation(directory: Path) -> tuple[object, ...]:
    """Return what changes before a checkpoint can change a page of the database that the present log has not."""
    database = (directory / DATABASE).stat()
    try:
        with (directory / _LOG).open("rb") as log:
            header, file = log.read(_LOG_HEADER_BYTES), os.fstat(log.fileno()).st_ino
    except FileNotFoundError:
        header, file = b"", 0
    return database.st_ino, file, header, None if header else (database.st_mtime_ns, database.st_size)


def _copy_files(directory: Path, place: Path, bytes_max: int, descriptor: int = -1) -> None:
    """Copy the database, of which there may be a descriptor, and then its log."""
    logs = [name for name in (_LOG, _JOURNAL) if (directory / name).exists()]
    size = sum((directory / name).stat().st_size for name in (DATABASE, *logs))
    if size > bytes_max:
        raise StoreError(
            f"{directory}: copy_bytes_max (--copy-bytes-max) must be at least the {size} bytes that the files of the"
            f" store have, got {bytes_max}; nothing was copied"
        )
    with _created(place / f"{DATABASE}.new") as made:
        if descriptor >= 0:
            offset = 0
            while data := os.pread(descriptor, _CHUNK_BYTES, offset):
                made.write(data)
                offset += len(data)
        else:
            with (directory / DATABASE).open("rb") as found:
                shutil.copyfileobj(found, made, _CHUNK_BYTES)
    for name in (_LOG, _JOURNAL):
        with suppress(FileNotFoundError), (directory / name).open("rb") as found, _created(place / name) as made:
            shutil.copyfileobj(found, made, _CHUNK_BYTES)


def _created(path: Path) -> BinaryIO:
    """Create a file that only its owner may read, in the place of an earlier try."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


@final
class TemporaryCopy:
    """A new directory among the temporary files, removed with this object or at the end of the process that created it.

    Args:
        directory: The directory to copy; the name of the copy includes its name.

    Attributes:
        path: Its path; nothing is there yet.
    """

    def __init__(self, directory: Path) -> None:
        _remove_leftovers()
        place, lock = _locked_place()
        self.path = place / f"copy-of-{directory.absolute().name[:40]}"
        self._remove = weakref.finalize(self, _remove, place, lock, os.getpid())

    def cleanup(self) -> None:
        """Remove it with its contents; no-op if removed, or in a forked child."""
        self._remove()


def _locked_place() -> tuple[Path, int]:
    """Create a directory and lock it; return its path, and the descriptor that holds the lock."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another process may have removed it as a leftover before it was locked.
        if place.exists():
            return place, descriptor
        os.close(descriptor)


def _remove(place: Path, lock: int, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(place, ignore_errors=True)
    os.close(lock)


def _remove_leftovers() -> None:
    """Remove the copies of this user that no process has locked; a copy that cannot be removed stays."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)
