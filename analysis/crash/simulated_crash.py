"""Which states could a power cut have left, after each call of a `SimulatedDisk`?

What was synced stays. Of each file's writes since its last sync any set may have reached the disk, in any order
(lost write, reordered writes), the last of them in part (torn write: cut at every byte, whole sectors as they were
before), and what lies between as zeros. Of the names made, changed and removed since the last sync of the directory any
set may be there, whether or not the files under them have their bytes (missing sync of the directory, rename before
data).

Where too many are unsynced at once it is not every set but each prefix, each one lost alone and each one kept alone.
"""

from __future__ import annotations

from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.simulated_disk import CallKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.crash.simulated_disk import DiskCall

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""

NOTHING = "nothing is lost"
_EVERY_SET_UP_TO = 4  # unsynced writes of a file, names of a directory, sectors of a write
_CUTS_MAX = 4_096  # of one write; a longer one is cut at as many bytes, evenly spaced
_STATES_MAX = 20_000  # of the files under one set of names at one moment, before they are varied one at a time


class Loss(NamedTuple):
    """What was lost of one file, or of the directory; said in words only when somebody asks.

    Attributes:
        where: The file's name at the time of the call, or ``directory``.
        what: A format.
        numbers: What goes into it.
    """

    where: str
    what: str
    numbers: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what.format(*self.numbers)}"


# What a `Loss` is made of: there are too many to make each.
_LossParts = tuple[str, str, tuple[object, ...]]
_Version = tuple[bytes, _LossParts]
Outline = tuple["Sequence[str]", Loss, "Sequence[_Version]"]
"""A state in parts: the names, what was lost of them, and what each file under them holds."""


class CrashState(NamedTuple):
    """What a power cut left.

    Attributes:
        files: Names and bytes, sorted by name; bytes are shared between states.
        outline: What it was put together from.
    """

    files: tuple[tuple[str, bytes], ...]
    outline: Outline

    def __str__(self) -> str:
        """Say what became of the directory, and of each file."""
        _, directory, contents = self.outline
        losses = [directory, *(Loss(*loss) for _, loss in contents)]
        return "; ".join(str(loss) for loss in losses if loss.what != NOTHING) or NOTHING


@final
class DiskHistory:
    r"""Follows the calls of a disk, and knows what is certain and what may be lost.

    Args:
        start: What the disk held at first.

    >>> from ackstate.analysis.crash.simulated_disk import SimulatedDisk
    >>> disk = SimulatedDisk()
    >>> file = disk.directory().create("log")
    >>> file.write(0, b"ab")
    >>> history = DiskHistory({})
    >>> for call in disk.calls:
    ...     history.follow(call)
    >>> [dict(state.files) for state in history.states()]
    [{}, {'log': b''}, {'log': b'ab'}, {'log': b'a'}, {'log': b'\x00\x00'}]
    """

    def __init__(self, start: Mapping[str, bytes]) -> None:
        self._files = {number: _FileHistory(content) for number, content in enumerate(start.values())}
        self._names = {name: number for number, name in enumerate(start)}  # those that are certain
        self._unsynced: list[DiskCall] = []
        self._listings: list[tuple[tuple[tuple[str, int], ...], Loss]] = []

    def follow(self, call: DiskCall) -> None:
        """Take the next call in."""
        match call.kind:
            case CallKind.WRITE:
                self._files[call.file_number].write(call)
            case CallKind.TRUNCATE:
                self._files[call.file_number].truncate(call)
            case CallKind.SYNC:
                self._files[call.file_number].sync()
            case CallKind.SYNC_DIRECTORY:
                self._names, self._unsynced = _listed(self._names, self._unsynced), []
                self._listings = []
            case _:
                if call.kind is CallKind.CREATE:
                    self._files[call.file_number] = _FileHistory(b"")
                self._unsynced.append(call)
                self._listings = []

    def states(self) -> Iterator[CrashState]:
        """Yield every state that a power cut now could leave, the one that loses all that is unsynced first.

        No two that differ in nothing but what was lost of a file's own bytes or of the names are yielded: equal
        contents of a file count once, and so do equal listings.
        """
        return map(put_together, self.outlines())

    def outlines(self) -> Iterator[Outline]:
        """Yield the same states in the same order, each to be put together by who wants to see it."""
        self._listings = self._listings or list(self._possible_listings())
        for listing, loss in self._listings:
            names = [name for name, _ in listing]
            versions = [self._files[number].versions(name) for name, number in listing]
            for contents in _choices(versions):
                yield names, loss, contents

    def _possible_listings(self) -> Iterator[tuple[tuple[tuple[str, int], ...], Loss]]:
        seen = set()
        for kept in _subsets(len(self._unsynced)):
            names = _listed(self._names, [self._unsynced[index] for index in kept])
            listing = tuple(sorted(names.items()))
            if listing not in seen:
                seen.add(listing)
                yield listing, _lost("directory", self._unsynced, kept)


def put_together(outline: Outline) -> CrashState:
    """Return a state of which only the parts were named."""
    names, _, contents = outline
    return CrashState(tuple(zip(names, [content for content, _ in contents], strict=True)), outline)


@final
class _FileHistory:
    """What is certain of one file, and what was done to it since its last sync."""

    def __init__(self, content: bytes) -> None:
        self._certain = self._whole = content
        self._changes: list[DiskCall] = []
        self._torn: dict[bytes, _LossParts] = {}
        self._versions: list[_Version] = []

    def write(self, call: DiskCall) -> None:
        for content, loss in _torn(self._whole, call):
            self._torn.setdefault(content, loss)
        self._change(call)

    def truncate(self, call: DiskCall) -> None:
        self._change(call)

    def sync(self) -> None:
        self._certain, self._changes, self._torn, self._versions = self._whole, [], {}, []

    def versions(self, name: str) -> Sequence[_Version]:
        """Return what a reader could find, once each: what is certain first, the torn writes last."""
        if not self._versions:
            found: dict[bytes, _LossParts] = {}
            for kept in _subsets(len(self._changes)):
                content = self._certain
                for index in kept:
                    content = _changed(content, self._changes[index])
                found.setdefault(content, _lost(name, self._changes, kept))
            for content, loss in self._torn.items():
                found.setdefault(content, loss)
            self._versions = list(found.items())
        return self._versions

    def _change(self, call: DiskCall) -> None:
        self._whole = _changed(self._whole, call)
        self._changes.append(call)
        self._versions = []


def _changed(content: bytes, call: DiskCall) -> bytes:
    """Return what a file holds after a call; what was lost before it and lies below is a hole of zeros."""
    before = content[: call.offset].ljust(call.offset, b"\0")
    if call.kind is CallKind.TRUNCATE:
        return before
    return before + call.data + content[call.offset + len(call.data) :]


def _torn(before: bytes, call: DiskCall) -> Iterator[_Version]:
    """Yield what a write of which a part arrived leaves, all writes before it having arrived."""
    offset, data, size = call.offset, call.data, len(call.data)
    replaced = before[offset : offset + size].ljust(size, b"\0")
    head, behind = before[:offset], before[offset + size :]
    for kept in _cuts(replaced, call, grows=len(before) < offset + size):
        what = "of the {} bytes written at {} the first {} are there"
        yield head + data[:kept] + before[offset + kept :], (call.name, what, (size, offset, kept))
    sectors = [(low, high) for low, high in _sectors(offset, size) if data[low:high] != replaced[low:high]]
    for lost in _subsets(len(sectors)):
        torn = bytearray(data)
        for low, high in (sectors[index] for index in lost):
            torn[low:high] = replaced[low:high]
        if lost:
            what = "of the {} bytes written at {} those in the sectors {} are as before"
            numbers = [(offset + sectors[index][0]) // SECTOR_BYTES for index in lost]
            yield head + torn + behind, (call.name, what, (size, offset, numbers))


def _cuts(replaced: bytes, call: DiskCall, *, grows: bool) -> Iterator[int]:
    """Yield how many bytes of a write may have arrived, but none and all: any number up to the last that it changes.

    Behind that only the size of the file can be another: where the zeros of a log that is laid out end is all the same.
    """
    size = len(call.data)
    changed_bits = int.from_bytes(call.data, "little") ^ int.from_bytes(replaced, "little")
    changed = -(-changed_bits.bit_length() // 8)
    yield from range(1, changed, max(1, -(-changed // _CUTS_MAX)))
    if grows and 0 < changed < size:
        yield changed


def _sectors(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where in bytes that are written at `offset` each of their sectors begins and ends."""
    low, high = 0, SECTOR_BYTES - offset % SECTOR_BYTES
    while low < size:
        yield low, min(high, size)
        low, high = high, high + SECTOR_BYTES


def _listed(names: Mapping[str, int], calls: Iterable[DiskCall]) -> dict[str, int]:
    """Return what a directory lists after calls, some of those before them lost."""
    listed = dict(names)
    for call in calls:
        if call.kind is CallKind.CREATE:
            listed[call.name] = call.file_number
            continue
        if listed.get(call.name) == call.file_number:
            del listed[call.name]
        if call.kind is CallKind.RENAME:
            listed[call.new_name] = call.file_number
    return listed


def _lost(where: str, calls: Sequence[DiskCall], kept: Sequence[int]) -> Loss:
    missing = [call for index, call in enumerate(calls) if index not in kept]
    if not missing:
        return Loss(where, NOTHING)
    return Loss(where, "lost: {}", (_Listed(missing),))


class _Listed:
    """Calls, in words when they are asked for."""

    def __init__(self, calls: Sequence[DiskCall]) -> None:
        self._calls = calls

    def __str__(self) -> str:
        return ", ".join(map(str, self._calls))


def _subsets(count: int) -> Iterator[Sequence[int]]:
    """Yield sets of the indexes below a count, each in order: the empty one first, then the whole one; once each."""
    everything = range(count)
    yield ()
    if not count:
        return
    yield everything
    if count <= _EVERY_SET_UP_TO:
        for size in range(1, count):
            yield from combinations(everything, size)
        return
    for index in everything:
        yield (index,)
        yield [other for other in everything if other != index]
        if 1 < index < count - 1:
            yield range(index)


def _choices(versions: Sequence[Sequence[_Version]]) -> Iterator[Sequence[_Version]]:
    """Yield one version for each file, in every combination or, if these are too many, one file varied at a time."""
    if prod(map(len, versions)) <= _STATES_MAX:
        yield from product(*versions)
        return
    # The second version of each is the one that lost nothing, where there is more than one.
    for others in (
        [possible[0] for possible in versions],
        [possible[min(1, len(possible) - 1)] for possible in versions],
    ):
        for index, possible in enumerate(versions):
            for version in possible:
                yield [*others[:index], version, *others[index + 1 :]]


def fates(calls: Sequence[DiskCall], start: Mapping[str, bytes]) -> Iterator[tuple[int, CrashState]]:
    """Yield how many calls had been made, from 0 to all, and every state that a power cut then could leave."""
    history = DiskHistory(start)
    for made in range(len(calls) + 1):
        if made:
            history.follow(calls[made - 1])
        for state in history.states():
            yield made, state
