"""The states that a power cut could leave after each call that changed the files of a directory.

Each write since the last sync of a file may be lost, independently of the others, and the last one that is there may be
cut at any byte; bytes below its end that never reached the disk read as zeros. A name that was created, changed or
removed is durable after the next sync of the directory; unless the file was synced before, a renamed one may have none
or part of its bytes. In the terms of LazyFS and ALICE: a torn write, a lost write, reordered writes, a missing sync of
the directory, a rename before its data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

_TORN_SHARE = 0.3  # of the states


class CallKind(Enum):
    """The kinds of calls."""

    CREATE = "create"
    WRITE = "write"
    TRUNCATE = "truncate"
    SYNC = "sync"
    RENAME = "rename"
    LINK = "link"
    REMOVE = "remove"
    SYNC_DIRECTORY = "sync the directory"


class DiskCall(NamedTuple):
    """One call that changed the disk or made data durable."""

    kind: CallKind  # The kind of the call
    # The file's path in the directory at that time; a subdirectory ends with a slash. SYNC_DIRECTORY: the synced one,
    # without a slash, empty for the directory itself.
    name: str = ""
    file_number: int = -1  # The number of the file, independent of its name and never reused. -1 for the directory
    offset: int = 0  # WRITE: the start of the data. TRUNCATE: the new size
    data: bytes = b""  # WRITE: the written data
    new_name: str = ""  # RENAME, LINK: the name after it

    def __str__(self) -> str:
        match self.kind:
            case CallKind.WRITE:
                return f"write bytes {self.offset} to {self.offset + len(self.data)} of {self.name}"
            case CallKind.TRUNCATE:
                return f"truncate {self.name} to {self.offset} bytes"
            case CallKind.RENAME | CallKind.LINK:
                return f"{self.kind.value} {self.name} to {self.new_name}"
        return f"{self.kind.value} {self.name}".rstrip()


@dataclass(slots=True)
class _File:
    """The durable content of one file, its present one, and the calls between them."""

    certain: bytes
    whole: bytes
    changes: list[DiskCall] = field(default_factory=list)


@final
class DiskHistory:
    """Follows the calls on a directory, and separates durable from unsynced data; `start` is its content at first."""

    def __init__(self, start: Mapping[str, bytes]) -> None:
        self._files = {number: _File(content, content) for number, content in enumerate(start.values())}
        self._names = {name: number for number, name in enumerate(start)}  # the durable ones
        self._unsynced: list[DiskCall] = []
        self._calls: list[DiskCall] = []

    def follow(self, call: DiskCall) -> None:
        """Process the next call."""
        self._calls.append(call)
        match call.kind:
            case CallKind.WRITE | CallKind.TRUNCATE:
                file = self._files[call.file_number]
                file.whole = _changed(file.whole, call)
                file.changes.append(call)
            case CallKind.SYNC:
                whole = self._files[call.file_number].whole
                self._files[call.file_number] = _File(whole, whole)
            case CallKind.SYNC_DIRECTORY:
                # A rename between directories is durable with either of them.
                synced = {each.file_number for each in self._unsynced if call.name in _parents(each)}
                committed = [each for each in self._unsynced if each.file_number in synced]
                self._names = _listed(self._names, committed)
                self._unsynced = [each for each in self._unsynced if each.file_number not in synced]
            case _:
                if call.kind is CallKind.CREATE:
                    self._files[call.file_number] = _File(b"", b"")
                self._unsynced.append(call)

    def whole(self) -> dict[str, bytes]:
        """Return the names and bytes without any loss."""
        return {name: self._files[number].whole for name, number in _listed(self._names, self._unsynced).items()}

    def drawn(self, chance: Random) -> tuple[dict[str, bytes], list[str]]:
        """Return the names and bytes of a state at random, and each loss as text, in the order of the calls."""
        kept = _drawn(len(self._unsynced), chance)
        lost = {id(call): "" for index, call in enumerate(self._unsynced) if index not in kept}
        names = _listed(self._names, [self._unsynced[index] for index in kept])
        contents = {number: _drawn_bytes(self._files[number], chance, lost) for number in sorted(set(names.values()))}
        losses = [_loss_line(call, lost[id(call)]) for call in self._calls if id(call) in lost]
        return {name: contents[number] for name, number in names.items()}, losses


def _drawn_bytes(file: _File, chance: Random, lost: dict[int, str]) -> bytes:
    """Return one of the possible contents at random; add the lost calls by `id`, with the part that is there."""
    kept, content = _drawn(len(file.changes), chance), file.certain
    lost.update({id(call): "" for index, call in enumerate(file.changes) if index not in kept})
    for index in kept:
        call, size = file.changes[index], len(file.changes[index].data)
        if index == kept[-1] and size > 1 and chance.random() < _TORN_SHARE:
            arrived = chance.randrange(1, size)
            lost[id(call)] = f", but the first {arrived}"
            call = call._replace(data=call.data[:arrived])
        content = _changed(content, call)
    return content


def _changed(content: bytes, call: DiskCall) -> bytes:
    """Return the content of a file after a call; lost data below it is a hole of zeros."""
    before = content[: call.offset].ljust(call.offset, b"\0")
    if call.kind is CallKind.TRUNCATE:
        return before
    return before + call.data + content[call.offset + len(call.data) :]


def _listed(names: Mapping[str, int], calls: Iterable[DiskCall]) -> dict[str, int]:
    """Return the names in a directory after calls, if some of the earlier calls were lost."""
    listed = dict(names)
    for call in calls:
        if call.kind is CallKind.CREATE:
            listed[call.name] = call.file_number
            continue
        if call.kind is not CallKind.LINK and listed.get(call.name) == call.file_number:
            del listed[call.name]
        if call.new_name:
            listed[call.new_name] = call.file_number
    return listed


def parent(name: str) -> str:
    """Return the path of the directory of a name, without a slash at its end."""
    return name.rstrip("/").rpartition("/")[0]


def _parents(call: DiskCall) -> set[str]:
    return {parent(name) for name in (call.name, call.new_name) if name}


def _loss_line(call: DiskCall, arrived: str) -> str:
    if call.kind in {CallKind.WRITE, CallKind.TRUNCATE}:
        return f"the disk lost: {call}{arrived} (the file was not synced after that)"
    directory = " or ".join(sorted(f"directory {name or '.'}" for name in _parents(call)))
    return f"the disk lost: {call} (the {directory} was not synced after that)"


def _drawn(count: int, chance: Random) -> Sequence[int]:
    """Return a set of the indexes below a count, in order; often none, all, or the first."""
    toss = chance.random()
    if toss < 0.35:
        return ()
    if toss < 0.75:
        return range(count if toss < 0.55 else chance.randint(0, count))
    return [index for index in range(count) if chance.random() < 0.5]
