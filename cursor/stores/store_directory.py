"""The calls of a file system that `FileStore` makes, and what each promises about a power cut.

Below them is the kernel (`KernelDirectory`), or a disk in memory that shows every state a crash could leave
(`ackstate.analysis.crash.simulated_disk`). A name is a plain file name without a slash. Every call may raise `OSError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreFile(Protocol):
    """A file that is written and read anywhere.

    A power cut leaves each sector of 512 bytes that was written since the last sync as it was before or as a write left
    it, whatever becomes of the others; a file that has grown may end anywhere in between, and what never reached the
    disk below its end reads as zeros. A process that is killed may leave any number of the first bytes of its last
    write.
    """

    @property
    def size(self) -> int:
        """Bytes in the file, those not yet synced included."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Write over what stands at `offset`, which is at most `size`, and beyond the end as far as it reaches.

        The first bytes of it may have been written if it raises.
        """
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on; fewer only where the file ends."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; certain after the next sync."""
        ...

    def sync(self) -> None:
        """Return when all that was written survives a power cut; the file's name may still not.

        If it raises, what was written since the last sync may be lost although it can be read, and a later sync that
        succeeds proves nothing about it.
        """
        ...

    def settle(self) -> None:
        """Sync, and forget what a sync that failed earlier, in whatever process, left to be read and not on the disk.

        From now on reading shows what a power cut would leave: sectors that are lost read as zeros.
        """
        ...

    def close(self) -> None:
        """Let go of the file; nothing is synced."""
        ...


class StoreDirectory(Protocol):
    """A directory that holds one store."""

    @property
    def free_size(self) -> float:
        """The bytes that its files may still take together; infinite if nothing says how many."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of the files in it, sorted."""
        ...

    def create(self, name: str) -> StoreFile:
        """Make an empty file; `FileExistsError` if there is one. Its name is certain after `sync`."""
        ...

    def open(self, name: str) -> StoreFile:
        """Open a file that exists; `FileNotFoundError` if there is none."""
        ...

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name, replacing what has it, all or nothing; certain after `sync`.

        Without a sync of the file before, a power cut may leave the new name with none or part of its bytes.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a name; certain after `sync`."""
        ...

    def sync(self) -> None:
        """Return when every name made, changed or removed so far survives a power cut."""
        ...

    def close(self) -> None:
        """Let another process have the directory."""
        ...
