"""The in-memory index of a `FileStore`, and the records of its log: their bytes and their replay.

The entries stay in the log. The index has the offset, the size and the checksum of each entry: 16 bytes.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.cursor.store import LedgerNotFoundError, Versioned, check_path
from ackstate.errors import CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Each begins with its kind, which is never zero.
_BEGIN = struct.Struct("<BQQQ")  # generation, next ledger id, first version
_CREATE = struct.Struct("<BQI")  # ledger id, size of the owner; the owner in UTF-8
_APPEND = struct.Struct("<BQII")  # ledger id, size of the entry, its checksum; the entry
_APPEND_BUT_KIND = struct.Struct("<xQII")  # The same without the kind.
_FENCE = struct.Struct("<BQ")  # ledger id
_DELETE = struct.Struct("<BQ")  # ledger id
_PUT = struct.Struct("<BQII")  # version, size of the path, size of the value; path in UTF-8, value
_REMOVE = struct.Struct("<BI")  # size of the path; the path in UTF-8
_BEGIN_KIND, _CREATE_KIND, _APPEND_KIND, _FENCE_KIND, _DELETE_KIND, _PUT_KIND, _REMOVE_KIND = range(1, 8)

APPEND_SIZE = _APPEND.size
"""The overhead of an entry in the log, in bytes."""


def begin_record(generation: int, next_ledger_id: int, first_version: int) -> bytes:
    """Return the first record of a log: its generation, and the next free ids."""
    return _BEGIN.pack(_BEGIN_KIND, generation, next_ledger_id, first_version)


def create_record(ledger_id: int, owner: bytes) -> bytes:
    """Return the record of a new ledger."""
    return _CREATE.pack(_CREATE_KIND, ledger_id, len(owner)) + owner


def entry_records(ledger_id: int, entries: Sequence[bytes], checksums: Iterable[int]) -> list[bytes]:
    """Return the bytes of entries in the log, in order: `APPEND_SIZE` bytes before each, and its own."""
    pack = _APPEND.pack
    return [
        part
        for entry, checksum in zip(entries, checksums, strict=True)
        for part in (pack(_APPEND_KIND, ledger_id, len(entry), checksum), entry)
    ]


def fence_record(ledger_id: int) -> bytes:
    """Return the record of a fence."""
    return _FENCE.pack(_FENCE_KIND, ledger_id)


def delete_record(ledger_id: int) -> bytes:
    """Return the record of a deleted ledger."""
    return _DELETE.pack(_DELETE_KIND, ledger_id)


def put_record(path: str, value: Versioned) -> bytes:
    """Return the record of a value."""
    name = path.encode()
    return _PUT.pack(_PUT_KIND, value.version, len(name), len(value.data)) + name + value.data


def remove_record(path: str) -> bytes:
    """Return the record of a deleted value."""
    name = path.encode()
    return _REMOVE.pack(_REMOVE_KIND, len(name)) + name


@final
class IndexedLedger:
    """A ledger; index n of each array belongs to entry n."""

    __slots__ = ("checksums", "fenced", "offsets", "owner", "record_size", "sizes")

    def __init__(self, owner: str, record_size: int) -> None:
        self.owner = owner
        self.fenced = False
        self.record_size = record_size  # The size of its own record in the log, without its entries, in bytes.
        self.offsets = array("Q")
        self.sizes = array("I")
        self.checksums = array("I")

    @property
    def live_size(self) -> int:
        """The size of its records in the log, in bytes; O(entries), at most 1 ms for a million."""
        # Computed on demand, when a ledger is deleted, not at each append. Computed on a copy: `keep` cannot shorten an
        # array while an interrupted thread still holds a view of it.
        sizes = np.array(self.sizes)
        return self.record_size + APPEND_SIZE * len(sizes) + int(sizes.sum(dtype=np.uint64))

    def keep(self, count: int) -> None:
        """Remove all entries but the first `count`."""
        for column in (self.offsets, self.sizes, self.checksums):
            del column[count:]


@final
class Index:
    """The state produced by the records up to a point. Each record costs O(1), plus freeing deleted entries."""

    def __init__(self) -> None:
        self.generation = 0  # 0 until a log is read.
        self.ledgers: dict[int, IndexedLedger] = {}
        self.ids_of: dict[str, set[int]] = {}
        self.values: dict[str, Versioned] = {}
        self._paths: list[str] | None = None  # The paths of the values, sorted; None until `paths` is called.
        # Above every id ever returned, also of deleted ledgers.
        self.next_ledger_id = 1
        # Above every version of every deleted value: a value that is created again never matches an old version.
        self.first_version = 0
        self.live_size = 0  # The size of the live records in the log, in bytes.

    def ledger(self, ledger_id: int) -> IndexedLedger:
        """Return a ledger; `LedgerNotFoundError` if there is none."""
        ledger = self.ledgers.get(ledger_id)
        if ledger is None:
            raise LedgerNotFoundError(f"there is no ledger {ledger_id}")
        return ledger

    def add_ledger(self, ledger_id: int, owner: str, size: int) -> None:
        """Add an empty ledger, whose record takes `size` bytes."""
        self.insert_ledger(ledger_id, IndexedLedger(owner, size))
        self.live_size += size
        self.next_ledger_id = max(self.next_ledger_id, ledger_id + 1)

    def insert_ledger(self, ledger_id: int, ledger: IndexedLedger) -> None:
        """Insert a ledger; the caller updates `live_size`."""
        self.ledgers[ledger_id] = ledger
        self.ids_of.setdefault(ledger.owner, set()).add(ledger_id)

    def remove_ledger(self, ledger_id: int) -> None:
        """Remove a ledger; `KeyError` if there is none."""
        ledger = self.ledgers.pop(ledger_id)
        self.live_size -= ledger.live_size
        self.forget_owner(ledger_id, ledger.owner)

    def forget_owner(self, ledger_id: int, owner: str) -> None:
        """Remove a ledger from its owner's list; no-op if it is not in it."""
        ids = self.ids_of.get(owner, set())
        ids.discard(ledger_id)
        if not ids:
            self.ids_of.pop(owner, None)

    def add_entries(self, ledger: IndexedLedger, offset: int, sizes: Sequence[int], checksums: Sequence[int]) -> None:
        """Add entries that follow each other in the log, the first of which is at an offset."""
        *offsets, end = accumulate([APPEND_SIZE + size for size in sizes], initial=offset)
        ledger.offsets.extend(offsets)
        ledger.sizes.extend(sizes)
        ledger.checksums.extend(checksums)
        self.live_size += end - offset

    def paths(self) -> list[str]:
        """Return the paths of the values, sorted; O(n log n) the first time. The caller must not change the list."""
        if self._paths is None:
            self._paths = sorted(self.values)
        return self._paths

    def set_value(self, path: str, value: Versioned | None) -> Versioned | None:
        """Replace a value, or remove it with None, and return the previous one.

        Once `paths` was called, a new path costs O(paths) to insert.
        """
        if self._paths is not None:
            _set_member(self._paths, path, is_member=value is not None)
        before = self.values.pop(path, None) if value is None else self.values.get(path)
        size_but_data = _PUT.size + len(path.encode())
        if before is not None:
            self.live_size -= size_but_data + len(before.data)
        if value is not None:
            self.values[path] = value
            self.live_size += size_but_data + len(value.data)
        return before

    def replay(self, groups: Iterable[tuple[int, bytes]], *, name: str) -> None:
        """Apply the records of some groups.

        Args:
            groups: For each group the offset of its body in the log, and the body.
            name: The name of the log in errors.

        Raises:
            CorruptStateError: A record is invalid.
        """
        unpack, ledgers = _APPEND_BUT_KIND.unpack_from, self.ledgers
        entries_size = 0  # The size of the entries with their records.
        for offset, body in groups:
            at, end = 0, len(body)
            entries_size += end
            try:
                while at < end:
                    if body[at] != _APPEND_KIND:
                        begin, at = at, _REPLAYS[body[at]](self, body, at)
                        entries_size -= at - begin
                        continue
                    # Most records are entries, so this repeats `add_entries` in a third of the time. Opening a store
                    # spends half of its time in these lines. Whole columns with numpy is no faster, because each
                    # record has to be read to find the next one.
                    ledger_id, size, checksum = unpack(body, at)
                    ledger = ledgers[ledger_id]
                    at += APPEND_SIZE
                    ledger.offsets.append(offset + at)
                    ledger.sizes.append(size)
                    ledger.checksums.append(checksum)
                    at += size
            except (KeyError, ValueError, struct.error) as error:
                raise CorruptStateError(name, offset=offset + at, expected="a record", found=repr(error)) from error
            if at > end:
                raise CorruptStateError(name, offset=offset + end, expected=f"{at - end} more bytes", found="none")
        self.live_size += entries_size


def _set_member(ordered: list[str], name: str, *, is_member: bool) -> None:
    """Add a name to a sorted list or remove it; no-op if nothing would change."""
    at = bisect_left(ordered, name)
    was_member = at < len(ordered) and ordered[at] == name
    if is_member and not was_member:
        ordered.insert(at, name)
    elif was_member and not is_member:
        del ordered[at]


def _replay_begin(index: Index, body: bytes, at: int) -> int:
    if index.generation:
        raise ValueError("a second beginning")
    _, index.generation, next_ledger_id, first_version = _BEGIN.unpack_from(body, at)
    index.next_ledger_id, index.first_version = _countable(next_ledger_id), _countable(first_version)
    return at + _BEGIN.size


def _replay_create(index: Index, body: bytes, at: int) -> int:
    size: int
    _, ledger_id, size = _CREATE.unpack_from(body, at)
    begin = at + _CREATE.size
    if ledger_id in index.ledgers:
        raise ValueError(f"ledger {ledger_id} is created twice")
    index.add_ledger(_countable(ledger_id), body[begin : begin + size].decode(), _CREATE.size + size)
    return begin + size


def _replay_fence(index: Index, body: bytes, at: int) -> int:
    _, ledger_id = _FENCE.unpack_from(body, at)
    index.ledgers[ledger_id].fenced = True
    return at + _FENCE.size


def _replay_delete(index: Index, body: bytes, at: int) -> int:
    _, ledger_id = _DELETE.unpack_from(body, at)
    index.remove_ledger(ledger_id)
    return at + _DELETE.size


def _replay_put(index: Index, body: bytes, at: int) -> int:
    _, version, path_size, size = _PUT.unpack_from(body, at)
    begin = at + _PUT.size
    end = begin + path_size
    path = body[begin:end].decode()
    if path not in index.values:
        check_path(path)
    index.set_value(path, Versioned(body[end : end + size], _countable(version)))
    return int(end + size)


def _replay_remove(index: Index, body: bytes, at: int) -> int:
    size: int
    _, size = _REMOVE.unpack_from(body, at)
    begin = at + _REMOVE.size
    value = index.set_value(body[begin : begin + size].decode(), None)
    if value is None:
        raise ValueError("a value that is not there is removed")
    index.first_version = max(index.first_version, value.version + 1)
    return begin + size


def _countable(number: int) -> int:
    if number >> 63:
        raise ValueError(f"an id or version must be below 2**63, got {number}")
    return number


_REPLAYS: dict[int, Callable[[Index, bytes, int], int]] = {
    _BEGIN_KIND: _replay_begin,
    _CREATE_KIND: _replay_create,
    _FENCE_KIND: _replay_fence,
    _DELETE_KIND: _replay_delete,
    _PUT_KIND: _replay_put,
    _REMOVE_KIND: _replay_remove,
}
