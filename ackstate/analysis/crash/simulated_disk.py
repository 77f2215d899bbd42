"""A directory in memory that records every call, so that all states after a power cut can be generated.

The terms are those of LazyFS and ALICE: a torn write, a lost write, reordered writes, a missing sync of the directory,
a rename before its data. `ackstate.analysis.crash.store_directory` defines the guarantees of each call; every state
without a guarantee is generated, even if no current file system causes it.
"""

from __future__ import annotations

import errno
import os
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.stores.base import StoreLockedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.analysis.crash.store_directory import StoreDirectory, StoreFile


class CallKind(Enum):
    """The kinds of calls of the disk."""

    CREATE = "create"
    WRITE = "write"
    TRUNCATE = "truncate"
    SYNC = "sync"
    RENAME = "rename"
    REMOVE = "remove"
    SYNC_DIRECTORY = "sync the directory"


class DiskCall(NamedTuple):
    """One call that changed the disk or made data durable.

    Attributes:
        kind: The kind of the call.
        name: The file's name at that time; empty for the directory.
        file_number: The number of the file, independent of its name and never reused. -1 for the directory.
        offset: WRITE: the start of the data. TRUNCATE: the new size.
        data: WRITE: the written data.
        new_name: RENAME: the name after it.
    """

    kind: CallKind
    name: str = ""
    file_number: int = -1
    offset: int = 0
    data: bytes = b""
    new_name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case CallKind.WRITE:
                return f"write bytes {self.offset} to {self.offset + len(self.data)} of {self.name}"
            case CallKind.TRUNCATE:
                return f"truncate {self.name} to {self.offset} bytes"
            case CallKind.RENAME:
                return f"rename {self.name} to {self.new_name}"
        return f"{self.kind.value} {self.name}".rstrip()


class ProcessKilledError(BaseException):
    """The process that has the disk open was killed; not an `Exception`, so that none of its code continues."""


@final
class SimulatedDisk:
    """One directory of files, as visible to the running system, and the calls that led to it.

    Args:
        files: The initial files by name, all durable.

    >>> disk = SimulatedDisk()
    >>> directory = disk.directory()
    >>> file = directory.create("log")
    >>> file.write(0, b"one")
    >>> [str(call) for call in disk.calls]
    ['create log', 'write bytes 0 to 3 of log']
    >>> disk.files()
    {'log': b'one'}
    """

    def __init__(self, files: Mapping[str, bytes] | Iterable[tuple[str, bytes]] = ()) -> None:
        self.start: dict[str, bytes] = dict(files)
        self.calls: list[DiskCall] = []
        self.numbers: dict[str, int] = dict(zip(self.start, range(len(self.start)), strict=True))
        self.contents: list[bytes] = list(self.start.values())
        self.owner: object = None  # The directory that has it open.
        self._calls_left: int | None = None  # The number of calls until its process is killed.

    @classmethod
    def from_state(cls, state: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> SimulatedDisk:
        """Return the disk of the restarted machine. Complexity: O(files); the bytes are shared."""
        return cls(state)

    def directory(self) -> StoreDirectory:
        """Open the directory.

        Raises:
            StoreLockedError: It is open already.
        """
        if self.owner is not None:
            raise StoreLockedError("the simulated disk is open already")
        directory = _SimulatedDirectory(self)
        self.owner = directory
        return directory

    def files(self) -> dict[str, bytes]:
        """Return the files as visible now, ordered by name: nothing is lost while the machine runs."""
        return {name: self.contents[self.numbers[name]] for name in sorted(self.numbers)}

    def kill(self) -> None:
        """Kill the process that has it open: its calls so far count, and later calls fail."""
        self.owner, self._calls_left = None, None

    def kill_after(self, call_count: int) -> None:
        """Kill the process later: after `call_count` more calls, a call raises `ProcessKilledError`, until `kill`."""
        self._calls_left = call_count

    def note(self, call: DiskCall) -> None:
        """Record a call before its effect."""
        if self._calls_left is not None:
            if self._calls_left <= 0:
                raise ProcessKilledError
            self._calls_left -= 1
        self.calls.append(call)


@final
class _SimulatedDirectory:
    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def __str__(self) -> str:
        return "the simulated disk"

    @property
    def free_size(self) -> float:
        return inf

    def names(self) -> Sequence[str]:
        return sorted(self._open().numbers)

    def create(self, name: str) -> StoreFile:
        disk = self._open()
        if not name or "/" in name or name in {".", ".."}:
            raise ValueError(f"not a plain file name: {name!r}")
        if name in disk.numbers:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        number = len(disk.contents)
        disk.note(DiskCall(CallKind.CREATE, name, number))
        disk.numbers[name] = number
        disk.contents.append(b"")
        return _SimulatedFile(disk, number, name)

    def open(self, name: str) -> StoreFile:
        return _SimulatedFile(self._open(), self._number(name), name)

    def rename(self, name: str, new_name: str) -> None:
        disk, number = self._open(), self._number(name)
        if not new_name or "/" in new_name:
            raise ValueError(f"not a plain file name: {new_name!r}")
        disk.note(DiskCall(CallKind.RENAME, name, number, new_name=new_name))
        del disk.numbers[name]
        disk.numbers[new_name] = number

    def remove(self, name: str) -> None:
        disk, number = self._open(), self._number(name)
        disk.note(DiskCall(CallKind.REMOVE, name, number))
        del disk.numbers[name]

    def sync(self) -> None:
        self._open().note(DiskCall(CallKind.SYNC_DIRECTORY))

    def close(self) -> None:
        if self._disk.owner is self:
            self._disk.owner = None

    def _open(self) -> SimulatedDisk:
        if self._disk.owner is not self:
            raise OSError(errno.EBADF, "the directory is closed")
        return self._disk

    def _number(self, name: str) -> int:
        numbers = self._open().numbers
        if name not in numbers:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return numbers[name]


@final
class _SimulatedFile:
    def __init__(self, disk: SimulatedDisk, number: int, name: str) -> None:
        self._disk, self._number, self._name = disk, number, name
        self._is_open = True

    @property
    def size(self) -> int:
        return len(self._disk.contents[self._number])

    def write(self, offset: int, data: bytes) -> None:
        contents, data = self._open().contents, bytes(data)
        before = contents[self._number]
        if not 0 <= offset <= len(before):
            raise ValueError(f"cannot write at {offset} of a file of {len(before)} bytes")
        self._note(CallKind.WRITE, offset, data)
        contents[self._number] = before[:offset] + data + before[offset + len(data) :]

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0:
            raise ValueError(f"cannot read {size} bytes from {offset}")
        return self._open().contents[self._number][offset : offset + size]

    def truncate(self, size: int) -> None:
        contents = self._open().contents
        if not 0 <= size <= len(contents[self._number]):
            raise ValueError(f"cannot cut a file of {len(contents[self._number])} bytes to {size}")
        self._note(CallKind.TRUNCATE, size)
        contents[self._number] = contents[self._number][:size]

    def sync(self) -> None:
        self._open()
        self._note(CallKind.SYNC)

    def settle(self) -> None:
        # No sync of this disk fails, so all readable data is then durable.
        self.sync()

    def close(self) -> None:
        self._is_open = False

    def _open(self) -> SimulatedDisk:
        if not self._is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._name)
        # A file stays open when its directory is closed, as with the kernel.
        return self._disk

    def _note(self, kind: CallKind, offset: int = 0, data: bytes = b"") -> None:
        # The current name, for the story; most files keep theirs.
        name = self._name
        if self._disk.numbers.get(name) != self._number:
            name = next((new for new, number in self._disk.numbers.items() if number == self._number), name)
        self._disk.note(DiskCall(kind, name, self._number, offset, data))
