"""Acked ranges in Pulsar's forms: encoded and decoded as a list or as words, limited, and resolved into entries.

One element of a list is a ``MessageRange`` ::

    tag, length                     field 3 or 4 of the record
    0x0a, length                    lower endpoint, open
    0x08, ledger
    0x10, first - 1                 ten bytes for -1
    0x12, length                    upper endpoint, closed
    0x08, ledger
    0x10, last

The numbers are varints, all else is one byte each. Words are those of a Java ``BitSet``: entry 64 i + j of a ledger is
bit j of word i.

Source: ``MLDataFormats.proto``, ``ManagedCursorImpl`` of Apache Pulsar.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyroaring import BitMap

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import bitmap_of_runs, runs_of
from ackstate.position import ENTRY_ID_MAX
from ackstate.selection import Selection, select
from ackstate.wire.pulsar.fields import Int64s, RowLayout, decode_rows, encode_rows, varint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ackstate.ledger_map import LedgerMap


class RangeForm(Enum):
    """The form of the acked entries in a `PositionInfo`."""

    LIST = "list"
    """Field 3, a list of ranges: about 20 bytes a range."""

    WORDS = "words"
    """Field 6, a bit for each entry from 0 to a ledger's last acked one."""


class LimitRule(Enum):
    """The unit that the limit on ranges counts. Versions are those of Apache Pulsar."""

    EXACT = "exact"
    """At most `range_count_max` ranges, in either form."""

    PULSAR_4_2 = "4.2"
    """List: one range more than the limit. Words: acked entries of whole ledgers; a ledger is kept if the previous ones
    do not exceed the limit, so the ledger that crosses it is kept."""

    PULSAR_5_0_M1 = "5.0.0-M1"
    """List: exact. Words: as 4.2."""

    PULSAR_5_0 = "5.0"
    """List: exact. Words: acked entries of whole ledgers, up to the first ledger that would cross the limit."""

    @classmethod
    def of_release(cls, version: str) -> LimitRule:
        """Return the rule of a release such as ``5.0.0-M1``; that of 4.2 for earlier ones, and for other text."""
        major = version.partition(".")[0]
        if not (major.isascii() and major.isdigit() and int(major) >= 5):
            return cls.PULSAR_4_2
        return cls.PULSAR_5_0_M1 if version.startswith("5.0.0-M1") else cls.PULSAR_5_0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the contents of a record.

    Attributes:
        range_count_max: As ``managedLedgerMaxUnackedRangesToPersist``; None is no limit.
        batch_index_count_max: Most partly acked batches, lowest positions first, as
            ``managedLedgerMaxBatchDeletedIndexToPersist``; None is no limit.
        rule: The unit that `range_count_max` counts.
    """

    range_count_max: int | None = None
    batch_index_count_max: int | None = None
    rule: LimitRule = LimitRule.EXACT

    def __post_init__(self) -> None:
        for name in ("range_count_max", "batch_index_count_max"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ValueError(f"{name} must be at least 0, got {limit}")


UNLIMITED = Limits()


def limit_ranges(deleted: DeletedRanges, *, form: RangeForm, limits: Limits) -> Selection:
    """Return the ranges that a record of this form would keep, and the number of acked entries that it excludes.

    If the words form would keep nothing, the record falls back to the list form and its rule, as in Pulsar.
    """
    (kept, excluded_count), _ = apply_limits(deleted, form=form, limits=limits)
    return Selection(kept.copy() if kept is deleted else kept, excluded_count)


def apply_limits(deleted: DeletedRanges, *, form: RangeForm, limits: Limits) -> tuple[Selection, RangeForm]:
    """Return the selection, which may be `deleted` itself, and the form in which it is written."""
    if limits.range_count_max is None:
        return Selection(deleted, 0), form if deleted else RangeForm.LIST
    if form is RangeForm.WORDS:
        kept = _limited_words(deleted, limits.range_count_max, limits.rule)
        if kept:
            return Selection(kept, len(deleted) - len(kept)), form
    one_over = limits.rule is LimitRule.PULSAR_4_2
    return select(deleted, range_count_max=limits.range_count_max + one_over), RangeForm.LIST


def _limited_words(deleted: DeletedRanges, limit: int, rule: LimitRule) -> DeletedRanges:
    if rule is LimitRule.EXACT:
        return select(deleted, range_count_max=limit).kept
    # The lowest ledgers while their acked entries, with or without the ledger's own, do not exceed the limit.
    kept, before = DeletedRanges(), 0
    for ledger_id, bitmap in deleted.bitmaps():
        reached = before + len(bitmap)
        if (reached if rule is LimitRule.PULSAR_5_0 else before) > limit:
            break
        kept.add_entries(ledger_id, bitmap)
        before = reached
    return kept


class InvalidRecordError(Exception):
    """A record that is impossible: what was expected and found; the decoder adds which record it is."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found


# The list.
_LAYOUTS = {
    tag: RowLayout(
        (tag, None, 0x0A, None, 0x08, None, 0x10, None, 0x12, None, 0x08, None, 0x10, None),
        ((1, 12), (3, 4), (9, 4)),
        (5, 7, 11, 13),
        bytes_max=10,
    )
    for tag in (0x1A, 0x22)
}
_SHORT_BYTES = 1_024
_FEW_RANGES = 32  # from here on, columns are faster than one by one
_MINUS_ONE = b"\xff" * 9 + b"\x01"


class RangeRows(NamedTuple):
    """Ranges as columns: ``(lower_ledger:lower_entry .. upper_ledger:upper_entry]``, in the order of the record."""

    lower_ledger: Int64s
    lower_entry: Int64s
    upper_ledger: Int64s
    upper_entry: Int64s


def encode_range_list(deleted: DeletedRanges, *, tag: int) -> Sequence[bytes | bytearray]:
    """Return the pieces of all ranges, each an element of a repeated field with a one-byte tag."""
    if deleted.range_count < _FEW_RANGES:
        return [_element(tag, varint(ledger_id), first, end - 1) for ledger_id, first, end in deleted.runs()]
    ledger_ids, firsts, lasts = zip(*((each, *runs_of(bitmap)) for each, bitmap in deleted.bitmaps()), strict=True)
    ledgers: Int64s | int = ledger_ids[0]
    if len(ledger_ids) > 1:
        ledgers = np.repeat(np.array(ledger_ids, np.int64), [*map(len, firsts)])
    lower, upper = np.concatenate(firsts).astype(np.int64) - 1, np.concatenate(lasts).astype(np.int64)
    return encode_rows((ledgers, lower, ledgers, upper), _LAYOUTS[tag])


def _element(tag: int, ledger: bytes, first: int, last: int) -> bytes:
    """Encode one range with inclusive ends, given its ledger id as a varint."""
    lower = b"\x08" + ledger + b"\x10" + (varint(first - 1) if first else _MINUS_ONE)
    upper = b"\x08" + ledger + b"\x10" + varint(last)
    size = 4 + len(lower) + len(upper)
    return bytes((tag, size, 0x0A, len(lower))) + lower + bytes((0x12, len(upper))) + upper


def decode_range_list(data: bytes, begin: int, *, tag: int) -> tuple[RangeRows, int]:
    """Decode the elements from `begin` on, as long as they have the layout of `encode_range_list`; return the end."""
    if len(data) - begin < _SHORT_BYTES:  # The protobuf runtime is faster for few elements.
        return RangeRows(*np.empty((4, 0), np.int64)), begin
    columns, end = decode_rows(data, begin, _LAYOUTS[tag])
    return RangeRows(*columns), end


# Words.
WORD_COUNT_MAX = (ENTRY_ID_MAX + 1) // 64
# An unpacked bit takes a byte: a piece takes 256 KiB and stays in the cache.
_PIECE_WORDS = 4_096


def words_of(bitmap: BitMap) -> list[int]:
    """Return a bitmap's words, signed, up to the last that is not zero; the bitmap must not be empty."""
    count = bitmap.max() // 64 + 1
    is_dense = len(bitmap) > count * 32
    # The fewer ones of the entries and of the rest are set.
    some = BitMap.flip(bitmap, 0, count * 64) if is_dense else bitmap
    bits = np.frombuffer(some.to_array(), np.uint32)
    words = np.zeros(count, np.int64)
    begins = np.arange(0, count + _PIECE_WORDS, _PIECE_WORDS)
    cuts = np.searchsorted(bits, begins * 64).tolist()
    for begin, low, high in zip(begins.tolist(), cuts[:-1], cuts[1:], strict=False):
        if low < high:
            piece = words[begin : begin + _PIECE_WORDS]
            one_a_byte = np.zeros(len(piece) * 64, np.uint8)
            one_a_byte[bits[low:high] - np.uint32(begin * 64)] = 1
            piece[:] = np.packbits(one_a_byte, bitorder="little").view(np.int64)
    found: list[int] = (~words if is_dense else words).tolist()
    return found if count > 1 else [*found, 0]  # as Pulsar; readers accept the zero word


def bitmap_of_words(words: Sequence[int]) -> BitMap:
    """Return the entries whose bits are set in signed words, at most `WORD_COUNT_MAX` of them."""
    bitmap = BitMap()
    for begin in range(0, len(words), _PIECE_WORDS):
        piece = np.array(words[begin : begin + _PIECE_WORDS], np.int64)
        if not piece.any():
            continue
        is_dense = int.from_bytes(piece.tobytes(), "little").bit_count() > len(piece) * 32
        bits = np.unpackbits((~piece if is_dense else piece).view(np.uint8), bitorder="little")
        some = BitMap(array("I", (np.flatnonzero(bits) + begin * 64).astype(np.uint32).tobytes()))
        bitmap |= BitMap.flip(some, begin * 64, (begin + len(piece)) * 64) if is_dense else some
    return bitmap


# From ranges to entries.
# A range costs nothing to write, but its bitmap takes a container of about 70 bytes, in up to five copies while it is
# counted, for each 65,536 entries. Ranges over unknown ledgers may span this many containers in a record of any size:
# 67 million entries, where a real ledger has 50,000. Each byte of the record allows more.
_SPANNED_FREE = 1_024
_BYTES_PER_SPANNED = 32
_CONTAINER_BITS = 16


class _Runs(NamedTuple):
    """Runs as columns, both ends inclusive; a run whose last is below its first is empty."""

    ledger: Int64s
    first: Int64s
    last: Int64s

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> _Runs:
        return _Runs(*(column[chosen] for column in self))


def resolve(rows: RangeRows, ledgers: LedgerMap | None, *, record_bytes: int) -> DeletedRanges:
    """Return the entries of ranges ``(lower .. upper]``, in any order; `InvalidRecordError` if one is impossible.

    A range across ledgers contains the entries between its ends: in the upper ledger always, in the others if they are
    in `ledgers`: fewer acks, never more. The size of the record bounds the span of ranges over unknown ledgers.

    Source: ``ManagedCursorImpl.recoverIndividualDeletedMessages`` of Apache Pulsar.
    """
    _check_ids(rows)
    crossing = rows.lower_ledger != rows.upper_ledger
    runs = _Runs(rows.upper_ledger, np.where(crossing, 0, rows.lower_entry + 1), rows.upper_entry)
    _check_spanned(runs, ledgers, _SPANNED_FREE + record_bytes // _BYTES_PER_SPANNED)
    if ledgers is not None and crossing.any():
        filled = np.array([*_filled(rows, np.flatnonzero(crossing), ledgers)], np.int64).reshape(-1, 3)
        runs = _Runs(*(np.concatenate(pair) for pair in zip(runs, filled.T, strict=True)))
    some = runs.first <= runs.last
    return _collect(runs if some.all() else runs.where(some))


def _check_ids(rows: RangeRows) -> None:
    bad = (rows.lower_ledger < 0) | (rows.upper_ledger < rows.lower_ledger)
    bad |= (rows.upper_ledger == rows.lower_ledger) & (rows.upper_entry < rows.lower_entry)
    for entries in (rows.lower_entry, rows.upper_entry):
        bad |= (entries < -1) | (entries > ENTRY_ID_MAX)
    if bad.any():
        index = int(bad.argmax())
        text = "({}:{}..{}:{}]".format(*(int(column[index]) for column in rows))
        raise InvalidRecordError(f"range {index} as (ledger:entry..ledger:entry] that rises", text)


def _check_spanned(runs: _Runs, ledgers: LedgerMap | None, spanned_max: int) -> None:
    spanned = _spanned(runs.first, runs.last)
    if int(spanned.sum()) <= spanned_max:
        return
    if ledgers is not None:
        ids, which = np.unique(runs.ledger, return_inverse=True)
        known = np.array([ledgers.entry_count(ledger_id) for ledger_id in ids.tolist()], np.int64)
        spanned = _spanned(np.maximum(runs.first, known[which]), runs.last)
    if int(spanned.sum()) > spanned_max:
        expected = f"ranges over at most {spanned_max} times 65536 entries of no known ledger"
        raise InvalidRecordError(expected, f"{int(spanned.sum())} times")


def _spanned(first: Int64s, last: Int64s) -> Int64s:
    """Return the number of containers that each run needs besides its first."""
    return np.maximum((last >> _CONTAINER_BITS) - (first >> _CONTAINER_BITS), 0)


def _filled(rows: RangeRows, crossing: NDArray[np.int64], ledgers: LedgerMap) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of ranges that cross ledgers, except those in the upper ledger."""
    gaps = []
    for index in crossing.tolist():
        lower, upper = int(rows.lower_ledger[index]), int(rows.upper_ledger[index])
        yield lower, int(rows.lower_entry[index]) + 1, ledgers.entry_count(lower) - 1
        gaps.append((lower, upper))
    # Overlapping ranges share most of their ledgers: each ledger is visited once.
    reached = -1
    for lower, upper in sorted(gaps):
        for ledger_id in ledgers.ledgers_between(max(lower, reached), upper):
            yield ledger_id, 0, ledgers.entry_count(ledger_id) - 1
        # The upper end itself was skipped, and may be inside the next range.
        reached = max(reached, upper - 1)


def _collect(runs: _Runs) -> DeletedRanges:
    """Return the entries of runs in any order, overlapping or not."""
    deleted = DeletedRanges()
    runs = runs.where(np.argsort(runs.ledger, kind="stable"))
    changes = np.flatnonzero(runs.ledger[1:] != runs.ledger[:-1]) + 1
    for begin, end in pairwise([0, *changes.tolist(), len(runs.ledger)]):
        if end - begin == 1:
            deleted.add_run(int(runs.ledger[begin]), int(runs.first[begin]), int(runs.last[begin]) + 1)
        elif begin < end:
            bitmap = bitmap_of_runs(runs.first[begin:end], runs.last[begin:end])
            deleted.add_entries(int(runs.ledger[begin]), bitmap)
    return deleted
