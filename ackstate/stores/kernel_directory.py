"""The directory of a store on a local disk: plain system calls, and a kernel lock."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.stores.directory_lock import (
    LOCK,
    DirectoryClaim,
    leave_to_parent_at_fork,
    sync_names_above,
    sync_path,
)
from ackstate.stores.plain_files import make_directory, open_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.stores.store_directory import StoreDirectory


@final
class KernelDirectory:
    """A directory that only this process has open; see `StoreDirectory`.

    Args:
        path: The directory. A missing one is created with its parents, and only its owner may enter it.
        called: The name of the directory in errors; its path by default.

    Raises:
        StoreLockedError: It is open already, in this process or another one; nothing was changed.
        OSError: It cannot be created or written.
    """

    def __init__(self, path: str | os.PathLike[str], *, called: str = "") -> None:
        self._path = Path(path).absolute()
        self._name = called or str(self._path)
        make_directory(self._path)
        self._claim = DirectoryClaim(self._path)
        try:
            self._claim.take_lock()
            if not self.names():
                sync_names_above(self._path)
        except BaseException:
            self.close()
            raise
        leave_to_parent_at_fork(self)

    def __str__(self) -> str:
        return self._name

    def names(self) -> Sequence[str]:
        """See `StoreDirectory.names`; the lock is not among them."""
        return sorted({path.name for path in self._path.iterdir()} - {LOCK})

    def create(self, name: str) -> KernelFile:
        """See `StoreDirectory.create`."""
        return self._open(name, os.O_CREAT | os.O_EXCL)

    def open(self, name: str) -> KernelFile:
        """See `StoreDirectory.open`."""
        return self._open(name, 0)

    @property
    def free_size(self) -> int:
        """The bytes on the disk that are free for this user."""
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize

    def rename(self, name: str, new_name: str) -> None:
        """See `StoreDirectory.rename`."""
        (self._path / name).rename(self._path / new_name)

    def remove(self, name: str) -> None:
        """See `StoreDirectory.remove`."""
        (self._path / name).unlink()

    def sync(self) -> None:
        """See `StoreDirectory.sync`."""
        sync_path(self._path)

    def close(self) -> None:
        """See `StoreDirectory.close`; no-op if closed."""
        self._claim.release()

    def leave_to_parent(self) -> None:
        """See `ackstate.stores.directory_lock.OpenedFile`."""
        self._claim.leave_to_parent()

    def _open(self, name: str, flags: int) -> KernelFile:
        return KernelFile(open_file(self._path / name, os.O_RDWR | flags))


@final
class KernelFile:
    """An open file; see `StoreFile`.

    Args:
        descriptor: Open for reading and writing; closed with the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor, -1 if closed."""
        return self._descriptor

    @property
    def size(self) -> int:
        """See `StoreFile.size`."""
        # Each call reads the kernel's offset: an interrupted write needs to find out how much it has written. lseek
        # moves the descriptor's position, which no call uses; fstat takes three times as long.
        return os.lseek(self._descriptor, 0, os.SEEK_END)

    def write(self, offset: int, data: bytes) -> None:
        """See `StoreFile.write`."""
        written, size = os.pwrite(self._descriptor, data, offset), len(data)
        while written < size:
            # One call writes at most 2 GiB, and less if the disk becomes full.
            written += os.pwrite(self._descriptor, memoryview(data)[written:], offset + written)

    def read(self, offset: int, size: int) -> bytes:
        """See `StoreFile.read`."""
        try:
            found = os.pread(self._descriptor, size, offset)
        except MemoryError:
            # The size or the holes of a foreign file may exceed any memory.
            raise OSError(errno.ENOMEM, f"no memory for {size} bytes of a file") from None
        if not 0 < len(found) < size:
            return found
        # One call returns at most 2 GiB, and less if a signal arrives.
        parts = [found]
        while found and (size := size - len(found)):
            offset += len(found)
            found = os.pread(self._descriptor, size, offset)
            parts.append(found)
        return b"".join(parts)

    def next_data(self, offset: int) -> int:
        """Return the offset of the first data from `offset` on that is in no hole; the size if there is none."""
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return self.size

    def truncate(self, size: int) -> None:
        """See `StoreFile.truncate`."""
        os.ftruncate(self._descriptor, size)

    def allocate(self, size: int) -> None:
        """Enlarge the file to a size, with room on the disk for its new bytes, which are zeros.

        Raises:
            OSError: There is no room; the file may be larger than before.
        """
        before = os.fstat(self._descriptor).st_size
        os.posix_fallocate(self._descriptor, before, size - before)

    def sync(self) -> None:
        """See `StoreFile.sync`."""
        os.fdatasync(self._descriptor)

    def settle(self) -> None:
        """See `StoreFile.settle`.

        After a failed sync the pages are clean, so that a later sync skips them, but they can still be read. The kernel
        drops clean pages when advised that they are not needed, and then reads the bytes of the disk.
        """
        self.sync()
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """See `StoreFile.close`; no-op if closed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


if TYPE_CHECKING:
    _: type[StoreDirectory] = KernelDirectory
