"""Copies the files of a store to a temporary directory, and removes the leftovers of earlier processes.

A copy lies in ``ackstate-copy-*`` among the temporary files, and its process keeps it locked. An unlocked one is the
leftover of a killed process, and the next process of the same user removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.cursor.store import StoreError
from ackstate.stores.directory_lock import leave_to_parent_at_fork
from ackstate.stores.kernel_directory import KernelFile
from ackstate.stores.plain_files import make_directory, open_file

if TYPE_CHECKING:
    from collections.abc import Sequence

COPY_BYTES_MAX = 4 << 30
"""The default limit for the total size of a store's files that are copied, in bytes."""
_PREFIX = "ackstate-copy-"
_CHUNK_BYTES = 1 << 20


@final
class TemporaryCopy:
    """A new directory among the temporary files, removed with this object or at the end of the process that created it.

    Args:
        directory: The directory to copy; the name of the copy includes its name.

    Attributes:
        name: Its path.
    """

    def __init__(self, directory: Path) -> None:
        _remove_leftovers()
        place, self._lock = _locked_place()
        self.name = str(place / f"copy-of-{directory.absolute().name[:40]}")
        self._remove = weakref.finalize(self, _remove, place, self._lock)
        make_directory(Path(self.name))
        leave_to_parent_at_fork(self)

    def take(self, sources: Sequence[Path], *, bytes_max: int) -> None:
        """Copy files, each under its own name; holes in them take no room in the copy either.

        Raises:
            StoreError: They have more than `bytes_max` bytes together, holes included, or one is no plain file.
            OSError: One cannot be read or written.
        """
        size = sum(os.lstat(source).st_size for source in sources)
        if size > bytes_max:
            raise StoreError(
                f"{sources[0].parent}: copy_bytes_max (--copy-bytes-max) must be at least the {size} bytes that the"
                f" files of the store have, got {bytes_max}; nothing was copied"
            )
        for source in sources:
            copy_file(source, Path(self.name, source.name))

    def cleanup(self) -> None:
        """Remove it with its contents; no-op if removed, or in a forked child."""
        self._remove()

    def leave_to_parent(self) -> None:
        """See `ackstate.stores.directory_lock.OpenedFile`."""
        if self._remove.detach() is not None:
            with suppress(OSError):
                os.close(self._lock)


def copy_file(source: Path, copy: Path) -> None:
    """Copy a plain file to a new one that only its owner may read.

    Raises:
        StoreError: The source is no plain file.
        OSError: One of them cannot be opened, read or written.
    """
    with (
        closing(KernelFile(open_file(source, os.O_RDONLY))) as found,
        closing(KernelFile(open_file(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL))) as made,
    ):
        offset, size = 0, found.size
        made.truncate(size)
        while (offset := found.next_data(offset)) < size:
            data = found.read(offset, min(_CHUNK_BYTES, size - offset))
            if not data:
                raise OSError(errno.EIO, "the file became shorter while it was copied", str(source))
            made.write(offset, data)
            offset += len(data)


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


def _remove(place: Path, lock: int) -> None:
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
