"""The file system calls of a store, and the guarantees of each about a power cut.

A disk in memory implements them (`ackstate.analysis.crash.simulated_disk`), and shows every state after a crash.
Names contain no slash. Every call may raise `OSError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreFile(Protocol):
    """A file that can be read and written at any offset.

    A power cut leaves each 512-byte sector written since the last sync either as it was before or as a write left it,
    independently of the other sectors. A file that has grown may end anywhere in between, and bytes below its end that
    never reached the disk read as zeros. A killed process may have written any number of the first bytes of its last
    write.
    """

    @property
    def size(self) -> int:
        """The size of the file in bytes, unsynced bytes included."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite the bytes at `offset`, which is at most `size`, and extend the file as needed.

        If this raises, the first bytes of the data may have been written.
        """
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on; fewer only at the end of the file."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; durable after the next sync."""
        ...

    def sync(self) -> None:
        """Return when all written bytes survive a power cut; the file's name may still not.

        If this raises, the bytes written since the last sync may be lost although they can be read, and a later
        successful sync proves nothing about them.
        """
        ...

    def settle(self) -> None:
        """Sync, and drop cached bytes that are not on the disk because an earlier sync failed, in any process.

        From now on, reading returns the bytes that a power cut would leave: lost sectors read as zeros.
        """
        ...

    def close(self) -> None:
        """Close the file without a sync."""
        ...


class StoreDirectory(Protocol):
    """A directory that holds one store."""

    @property
    def free_size(self) -> float:
        """The room for its files in bytes; infinite if there is no limit."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of the files in it, sorted."""
        ...

    def create(self, name: str) -> StoreFile:
        """Create an empty file; `FileExistsError` if it exists. Its name is durable after `sync`."""
        ...

    def open(self, name: str) -> StoreFile:
        """Open a file that exists; `FileNotFoundError` if there is none."""
        ...

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, replacing a file of the new name, all or nothing; durable after `sync`.

        Unless the file was synced before, a power cut may leave the new name with none or part of its bytes.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a name; durable after `sync`."""
        ...

    def sync(self) -> None:
        """Return when every name created, changed or removed so far survives a power cut."""
        ...

    def close(self) -> None:
        """Unlock the directory for other processes."""
        ...
