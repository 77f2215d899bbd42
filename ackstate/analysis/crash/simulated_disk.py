"""The states that a power cut could leave after each call that changed the files of a directory.

The guarantees: each 512-byte sector written since the last sync of a file is either as it was before or as a write left
it, independently of the other sectors. A file that has grown may end anywhere in between, and bytes below its end that
never reached the disk read as zeros. A name that was created, changed or removed is durable after the next sync of the
directory; unless the file was synced before, a renamed one may have none or part of its bytes. A killed process may
have written any number of the first bytes of its last write.

Every state without a guarantee is generated, even if no current file system causes it. In the terms of LazyFS and
ALICE: a torn write (cut at every byte, with whole sectors unchanged), a lost write, reordered writes, a missing sync of
the directory, a rename before its data. With too many unsynced items, only each prefix, each item lost alone and each
item kept alone are generated.
"""

from __future__ import annotations

from enum import Enum
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from random import Random


SECTOR_BYTES = 512
"""The size of the unit that a disk writes atomically."""

NOTHING = "nothing is lost"
_EVERY_SET_UP_TO = 4  # unsynced writes of a file, names of a directory, sectors of a write
_CUTS_MAX = 4_096  # of one write; a longer one is cut at as many bytes, evenly spaced
_TORN_SHARE = 0.3  # of the states drawn at random
_STATES_MAX = 20_000  # of the files under one set of names at one moment, before they are varied one at a time


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


class Loss(NamedTuple):
    """The loss of one file, or of the directory; formatted as text only on demand."""

    where: str  # The file's name at the time of the call, or ``directory``
    what: str  # The format of the text
    numbers: tuple[object, ...] = ()  # The values of the format

    def __str__(self) -> str:
        return f"{self.where}: {self.what.format(*self.numbers)}"


# The fields of a `Loss`: there are too many to create each object.
_LossParts = tuple[str, str, tuple[object, ...]]
_Version = tuple[bytes, _LossParts]


class CrashState(NamedTuple):
    """A state after a power cut."""

    files: tuple[tuple[str, bytes], ...]  # names and bytes, sorted by name; bytes are shared between states
    directory: Loss  # of names
    contents: Sequence[_Version]  # of each file, with its loss

    def __str__(self) -> str:
        """Describe the loss of the directory and of each file."""
        losses = [self.directory, *(Loss(*loss) for _, loss in self.contents)]
        return "; ".join(str(loss) for loss in losses if loss.what != NOTHING) or NOTHING


@final
class DiskHistory:
    r"""Follows the calls on a directory, and separates durable from unsynced data; `start` is its content at first.

    >>> history = DiskHistory({})
    >>> for call in (DiskCall(CallKind.CREATE, "log", 0), DiskCall(CallKind.WRITE, "log", 0, 0, b"ab")):
    ...     history.follow(call)
    >>> [dict(state.files) for state in history.states()]
    [{}, {'log': b''}, {'log': b'ab'}, {'log': b'a'}, {'log': b'\x00\x00'}]
    """

    def __init__(self, start: Mapping[str, bytes]) -> None:
        self._files = {number: _FileHistory(content) for number, content in enumerate(start.values())}
        self._names = {name: number for number, name in enumerate(start)}  # the durable ones
        self._unsynced: list[DiskCall] = []
        self._calls: list[DiskCall] = []
        self._listings: list[tuple[tuple[tuple[str, int], ...], Loss]] = []

    def follow(self, call: DiskCall) -> None:
        """Process the next call."""
        self._calls.append(call)
        match call.kind:
            case CallKind.WRITE:
                self._files[call.file_number].write(call)
            case CallKind.TRUNCATE:
                self._files[call.file_number].truncate(call)
            case CallKind.SYNC:
                self._files[call.file_number].sync()
            case CallKind.SYNC_DIRECTORY:
                # A rename between directories is durable with either of them.
                synced = {each.file_number for each in self._unsynced if call.name in _parents(each)}
                committed = [each for each in self._unsynced if each.file_number in synced]
                self._names = _listed(self._names, committed)
                self._unsynced = [each for each in self._unsynced if each.file_number not in synced]
                self._listings = []
            case _:
                if call.kind is CallKind.CREATE:
                    self._files[call.file_number] = _FileHistory(b"")
                self._unsynced.append(call)
                self._listings = []

    def states(self) -> Iterator[CrashState]:
        """Yield every state that a power cut now could leave, first the one that loses all unsynced data.

        States that differ only in the loss of a file's own bytes or of the names are yielded once: equal contents of a
        file count once, and so do equal listings.
        """
        self._listings = self._listings or list(self._possible_listings())
        for listing, loss in self._listings:
            names = [name for name, _ in listing]
            versions = [self._files[number].versions(name) for name, number in listing]
            for contents in _choices(versions):
                files = tuple(zip(names, [content for content, _ in contents], strict=True))
                yield CrashState(files, loss, contents)

    def whole(self) -> dict[str, bytes]:
        """Return the names and bytes without any loss."""
        return {name: self._files[number].whole for name, number in _listed(self._names, self._unsynced).items()}

    def drawn(self, chance: Random) -> tuple[dict[str, bytes], list[str]]:
        """Return the names and bytes of a state at random, and each loss as text, in the order of the calls."""
        kept = _drawn(len(self._unsynced), chance)
        lost = {id(call): "" for index, call in enumerate(self._unsynced) if index not in kept}
        names = _listed(self._names, [self._unsynced[index] for index in kept])
        contents = {number: self._files[number].drawn(chance, lost) for number in sorted(set(names.values()))}
        losses = [_loss_line(call, lost[id(call)]) for call in self._calls if id(call) in lost]
        return {name: contents[number] for name, number in names.items()}, losses

    def _possible_listings(self) -> Iterator[tuple[tuple[tuple[str, int], ...], Loss]]:
        seen = set()
        for kept in _subsets(len(self._unsynced)):
            names = _listed(self._names, [self._unsynced[index] for index in kept])
            listing = tuple(sorted(names.items()))
            if listing not in seen:
                seen.add(listing)
                yield listing, _lost("directory", self._unsynced, kept)


@final
class _FileHistory:
    """The durable content of one file, and its changes since its last sync."""

    def __init__(self, content: bytes) -> None:
        self._certain = self.whole = content
        self._changes: list[DiskCall] = []
        # Made on demand, from the changes that are not in them yet, and the content before these.
        self._torn: dict[bytes, _LossParts] = {}
        self._untorn: list[tuple[bytes, DiskCall]] = []
        self._versions: list[_Version] = []

    def write(self, call: DiskCall) -> None:
        self._untorn.append((self.whole, call))
        self._change(call)

    def truncate(self, call: DiskCall) -> None:
        self._change(call)

    def sync(self) -> None:
        self._certain, self._changes, self._versions = self.whole, [], []
        self._torn, self._untorn = {}, []

    def drawn(self, chance: Random, lost: dict[int, str]) -> bytes:
        """Return one of the possible contents at random; add the lost calls by `id`, with the part that is there."""
        kept, content = _drawn(len(self._changes), chance), self._certain
        lost.update({id(call): "" for index, call in enumerate(self._changes) if index not in kept})
        for index in kept:
            call, size = self._changes[index], len(self._changes[index].data)
            if index == kept[-1] and size > 1 and chance.random() < _TORN_SHARE:
                arrived = chance.randrange(1, size)
                lost[id(call)] = f", but the first {arrived}"
                call = call._replace(data=call.data[:arrived])
            content = _changed(content, call)
        return content

    def versions(self, name: str) -> Sequence[_Version]:
        """Return the possible contents, once each: the durable one first, the torn writes last."""
        if not self._versions:
            found: dict[bytes, _LossParts] = {}
            for kept in _subsets(len(self._changes)):
                content = self._certain
                for index in kept:
                    content = _changed(content, self._changes[index])
                found.setdefault(content, _lost(name, self._changes, kept))
            for before, call in self._untorn:
                for content, loss in _torn(before, call):
                    self._torn.setdefault(content, loss)
            self._untorn = []
            for content, loss in self._torn.items():
                found.setdefault(content, loss)
            self._versions = list(found.items())
        return self._versions

    def _change(self, call: DiskCall) -> None:
        self.whole = _changed(self.whole, call)
        self._changes.append(call)
        self._versions = []


def _changed(content: bytes, call: DiskCall) -> bytes:
    """Return the content of a file after a call; lost data below it is a hole of zeros."""
    before = content[: call.offset].ljust(call.offset, b"\0")
    if call.kind is CallKind.TRUNCATE:
        return before
    return before + call.data + content[call.offset + len(call.data) :]


def _torn(before: bytes, call: DiskCall) -> Iterator[_Version]:
    """Yield the contents after a partial write, with all earlier writes complete."""
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
    """Yield how many bytes of a write may have arrived, except none and all: any number up to the last changed byte.

    After that only the size of the file can differ, which is irrelevant for the zeros of a preallocated log.
    """
    size = len(call.data)
    changed_bits = int.from_bytes(call.data, "little") ^ int.from_bytes(replaced, "little")
    changed = -(-changed_bits.bit_length() // 8)
    yield from range(1, changed, max(1, -(-changed // _CUTS_MAX)))
    if grows and 0 < changed < size:
        yield changed


def _sectors(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each sector within bytes that are written at `offset`."""
    low, high = 0, SECTOR_BYTES - offset % SECTOR_BYTES
    while low < size:
        yield low, min(high, size)
        low, high = high, high + SECTOR_BYTES


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


def _lost(where: str, calls: Sequence[DiskCall], kept: Sequence[int]) -> Loss:
    missing = [call for index, call in enumerate(calls) if index not in kept]
    if not missing:
        return Loss(where, NOTHING)
    return Loss(where, "lost: {}", (_Listed(missing),))


class _Listed:
    """Calls, formatted as text on demand."""

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
    """Yield one version for each file, in every combination or, if too many, with one file varied at a time."""
    if prod(map(len, versions)) <= _STATES_MAX:
        yield from product(*versions)
        return
    # If there are several versions, the second one is the complete one.
    for others in (
        [possible[0] for possible in versions],
        [possible[min(1, len(possible) - 1)] for possible in versions],
    ):
        for index, possible in enumerate(versions):
            for version in possible:
                yield [*others[:index], version, *others[index + 1 :]]


def fates(calls: Sequence[DiskCall], start: Mapping[str, bytes]) -> Iterator[tuple[int, CrashState]]:
    """Yield each number of calls, from 0 to all, with every state that a power cut could leave then."""
    history = DiskHistory(start)
    for made in range(len(calls) + 1):
        if made:
            history.follow(calls[made - 1])
        for state in history.states():
            yield made, state
