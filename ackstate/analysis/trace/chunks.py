"""Events as arrays, and chunks of them as rows of a Parquet trace, packed into bytes.

Spark splits lists into values and rebuilds them on the way to a Python worker, which takes several times as long as a
replay. It copies bytes. Packed numbers are as narrow as the widest one requires:

==========  =====================  ==================================================================================
size        type                   meaning
==========  =====================  ==================================================================================
1           u8                     width of the numbers: 0, 1, 2, 4 or 8; plus 16 if it has steps
8           i64                    only with steps: the first number
8           i64                    the least of all numbers, or of all steps
width each  unsigned               each number, or each step from one number to the next, minus the least
==========  =====================  ==================================================================================

All is little-endian, and sums are taken modulo 2^64. The count of numbers is stored elsewhere; with steps there is
one number more than there are steps.

Times are ms since 1970, from 2000 to 2100; or all times of a trace are ms on its own clock that starts at 0. That clock
ends before any number of seconds from 2000 on, so that seconds, microseconds and nanoseconds are never accepted.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.events import (
    CHUNK_EVENTS,
    DROPPED_KEY,
    EVENT_COLUMNS,
    FILES_KEY,
    ONLY,
    SCALAR_COLUMNS,
    SEVERAL,
    TRACE_VERSION,
    VERSION_KEY,
    EventKind,
    TraceError,
)
from ackstate.entry_bitmap import bitmap_of_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.analysis.location import Location


Int64s = npt.NDArray[np.int64]

_STEPS = 16
_WIDTHS = (0, 1, 2, 4, 8)
_NUMBER = struct.Struct("<q")


def pack(numbers: Int64s, *, has_steps: bool | None = None) -> bytes:
    """Return numbers as bytes."""
    numbers = numbers.astype(np.int64, copy=False)
    if len(numbers) < 2:
        return _packed(0, numbers)
    steps = np.diff(numbers)
    if has_steps or (has_steps is None and _width(steps) < _width(numbers)):
        return _packed(_STEPS, steps, _NUMBER.pack(int(numbers[0])))
    return _packed(0, numbers)


def unpack(data: memoryview, count: int, at: int = 0, out: Int64s | None = None) -> tuple[Int64s, int]:
    """Return `count` numbers that start at a byte, and the byte after them."""
    if at >= len(data):
        raise ValueError("no packed numbers")
    form = data[at]
    has_steps, width = bool(form & _STEPS), form & ~_STEPS
    if width not in _WIDTHS:
        raise ValueError(f"the form of packed numbers must be known, got {form}")
    begin = at + 1 + _NUMBER.size * (1 + has_steps)
    left = max(count - has_steps, 0)
    end = begin + width * left
    if end > len(data):
        raise ValueError(f"packed numbers are cut short, {len(data) - at} bytes of {end - at}")
    (least,) = _NUMBER.unpack_from(data, begin - _NUMBER.size)
    numbers = np.empty(count, np.int64) if out is None else out
    above = numbers[int(has_steps) :]
    above[:] = np.frombuffer(data, f"<u{width}", left, begin) if width else 0
    above += least
    if has_steps:
        numbers[:1] = _NUMBER.unpack_from(data, at + 1)
        np.cumsum(numbers, out=numbers)
    return numbers, end


def _packed(form: int, numbers: Int64s, first: bytes = b"") -> bytes:
    width = _width(numbers)
    least = int(numbers.min()) if len(numbers) else 0
    above = (numbers - least).view(np.uint64).astype(f"<u{width}").tobytes() if width else b""
    return b"".join((bytes((form + width,)), first, _NUMBER.pack(least), above))


def _width(numbers: Int64s) -> int:
    """Return the bytes needed for the distance from the least to the highest number."""
    span = int(numbers.max()) - int(numbers.min()) if len(numbers) else 0
    return next(width for width in _WIDTHS if span < 1 << 8 * width)


Mask = npt.NDArray[np.bool_]
LEDGERS_TYPE = pa.list_(
    pa.field("element", pa.struct([
        pa.field(name, pa.int64(), nullable=False) for name in ("ledger_id", "entry_count", "published", "acked")
    ]), nullable=False)
)  # fmt: skip
"""The entries that a chunk's events name in each ledger, rising; see `ackstate.analysis.trace.events`."""
TRACE_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.type_for_alias(kind), nullable=False) for name, kind in SCALAR_COLUMNS.items()),
        pa.field("event_count", pa.int32(), nullable=False),
        *(pa.field(name, pa.binary(), nullable=False) for name in EVENT_COLUMNS),
        pa.field("ledgers", LEDGERS_TYPE, nullable=False),
    ],
    metadata={VERSION_KEY: str(TRACE_VERSION).encode()},
)
# Spark verifies the checksums too, so damage inside a page is detected.
WRITE_OPTIONS = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": ["topic", "subscription"]}
"""How a trace's Parquet files are written, for `pyarrow.parquet.ParquetWriter`."""
# Neighbours differ by little. A key-shared trace takes 0.7 bytes an event, against 2 with the shorter form for each.
_IN_STEPS = frozenset(("ts_ms", "first_entry"))
ROWS_AT_ONCE = 64
"""Readers hold at most this many rows."""
EVENTS_AT_ONCE = 1 << 20
"""Events that are unpacked at once, unless a single chunk has more."""


class Events(NamedTuple):
    """Events of one subscription, or of a topic, in parallel arrays; columns as in the trace."""

    ts_ms: Int64s
    kind: Int64s
    ledger_id: Int64s
    first_entry: Int64s
    last_entry: Int64s
    number: Int64s

    @classmethod
    def of_rows(cls, rows: Int64s) -> Self:
        """Return the events of a matrix, a row each, whose first columns are these."""
        return cls(*(np.ascontiguousarray(column) for column in rows.T[: len(cls._fields)]))

    def where(self, chosen: Int64s | Mask | slice) -> Events:
        """Return the events selected by indexes, a mask or a slice."""
        return Events(*(column[chosen] for column in self))


def joined(parts: Sequence[Events]) -> Events:
    """Return the concatenated events."""
    return Events(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def bitmaps_of(ledger_id: Int64s, first: Int64s, last: Int64s) -> Iterator[tuple[int, BitMap]]:
    """Yield each ledger with the entries that some runs name, which may be in any order and overlap."""
    order = np.argsort(first, kind="stable")
    for each in np.unique(ledger_id).tolist():
        of_ledger = order[ledger_id[order] == each]
        yield each, bitmap_of_runs(first[of_ledger], last[of_ledger])


def _written(events: Events, name: str) -> Int64s:
    column: Int64s = np.asarray(getattr(events, name), np.int64)
    return column - events.first_entry if name == "last_entry" else column


def _ledgers_of(events: Sequence[Events]) -> pa.Array:
    found = [named_entries(each.kind, each.ledger_id, each.last_entry) for each in events]
    offsets = np.cumsum([0, *(each.shape[1] for each in found)], dtype=np.int32)
    columns = np.concatenate(found, axis=1)
    fields = list(LEDGERS_TYPE.value_type)
    structs = pa.StructArray.from_arrays([pa.array(column) for column in columns], fields=fields)
    return pa.ListArray.from_arrays(pa.array(offsets), structs, LEDGERS_TYPE)


def named_entries(kind: Int64s, ledger_id: Int64s, last_entry: Int64s) -> npt.NDArray[np.int64]:
    """Return the entries that events name, a row for each field of `LEDGERS_TYPE` and a column for each ledger."""
    begins = np.flatnonzero(np.append(True, ledger_id[1:] != ledger_id[:-1])[: len(ledger_id)])
    begins = begins[ledger_id[begins] >= 0] if len(begins) else begins
    if not len(begins):
        return np.empty((len(LEDGERS_TYPE.value_type), 0), np.int64)
    ends = last_entry + 1
    # A run of events without a ledger is merged into the run before it; its ends are ignored.
    ends[ledger_id < 0] = 0
    # Compared as plain numbers: an enum's member would be one of 64 bits, which takes ten times as long.
    acked = (kind == int(EventKind.ACK)) | (kind == int(EventKind.MARK_DELETE))
    counts = [
        np.maximum.reduceat(ends if of_kind is None else ends * of_kind, begins) if of_kind is None or of_kind.any()
        else np.zeros(len(begins), np.int64)
        for of_kind in (None, kind == int(EventKind.PUBLISH), acked)
    ]  # fmt: skip
    ledgers, at = np.unique(ledger_id[begins], return_inverse=True)
    named = np.zeros((1 + len(counts), len(ledgers)), np.int64)
    named[0] = ledgers
    for row, count in enumerate(counts, start=1):
        np.maximum.at(named[row], at, count)
    return named


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in groups of at most `EVENTS_AT_ONCE` events, but at least one row."""
    counts = batch["event_count"].fill_null(0).to_numpy()
    begin, waiting = 0, 0
    for row, count in enumerate(counts.tolist()):
        if waiting and waiting + count > EVENTS_AT_ONCE:
            yield batch.slice(begin, row - begin)
            begin, waiting = row, 0
        waiting += count
    if batch.num_rows:
        yield batch.slice(begin)


def events_of(batch: pa.RecordBatch, names: Sequence[str]) -> tuple[Int64s, list[Int64s]]:
    """Return the offsets of each row's events, including the end of the last, and columns of all rows' events."""
    counts = batch["event_count"].fill_null(0).to_numpy()
    for row in np.flatnonzero(counts < 1)[:1].tolist():
        damaged(batch, row, "it has no events")
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    columns = {name: _joined(batch, name, counts.tolist(), int(offsets[-1])) for name in packed_columns(names)[1:]}
    if "last_entry" in columns:
        columns["last_entry"] += columns["first_entry"]
    return offsets, [columns[name] for name in names]


def check_ledgers(batch: pa.RecordBatch, offsets: Int64s, names: Sequence[str], columns: Sequence[Int64s]) -> None:
    """Check that the ledgers of rows are those that their events name; `names` and `columns` as in `events_of`."""
    kind, ledger_id, last_entry = (columns[names.index(name)] for name in ("kind", "ledger_id", "last_entry"))
    starts, told = ledgers_told(batch)
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        named = named_entries(kind[begin:end], ledger_id[begin:end], last_entry[begin:end])
        if not np.array_equal(named, told[:, starts[row] : starts[row + 1]]):
            damaged(batch, row, "'ledgers' are not those of its events")


def ledgers_told(batch: pa.RecordBatch) -> tuple[Int64s, npt.NDArray[np.int64]]:
    """Return the offset of each row's ledgers, and all rows' ledgers as `named_entries` returns them."""
    column = batch["ledgers"]
    for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[:1].tolist():
        damaged(batch, row, "it has no 'ledgers'")
    structs = column.flatten()
    if structs.null_count or any(each.null_count for each in structs.flatten()):
        damaged(batch, 0, "'ledgers' has nulls")
    offsets = column.offsets.to_numpy().astype(np.int64) - column.offsets[0].as_py()
    return offsets, np.array([each.to_numpy(zero_copy_only=False) for each in structs.flatten()], np.int64)


def packed_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that `events_of` reads for some columns."""
    # `last_entry` is packed as the distance above `first_entry`.
    more = ("first_entry",) if "last_entry" in names else ()
    return ("event_count", *dict.fromkeys((*names, *more)))


def damaged(batch: pa.RecordBatch, row: int, what: str = "") -> None:
    """Raise `TraceError` for a row."""
    keys = [batch[name][row].as_py() for name in ("chunk", "subscription", "topic") if name in batch.schema.names]
    chunk = " of ".join(str(each) for each in keys if each not in {"", None})
    raise TraceError(f"not a trace, damaged chunk {chunk}{what and f': {what}'}")


def _joined(batch: pa.RecordBatch, name: str, counts: Sequence[int], total: int) -> Int64s:
    joined = np.empty(total, np.int64)
    begin = 0
    for row, (cell, count) in enumerate(zip(batch[name], counts, strict=True)):
        try:
            data = memoryview(cell.as_buffer() or b"")
            _, end = unpack(data, count, out=joined[begin : begin + count])
            if end != len(data):
                raise ValueError(f"{len(data) - end} surplus bytes")
        except ValueError as error:
            damaged(batch, row, f"{name!r}: {error}")
        begin += count
    return joined


@final
class Gatherer:
    """Gathers rows by (topic, subscription), and passes those of each on in chunks."""

    def __init__(self, pass_on: Callable[[tuple[str, str], Int64s], None]) -> None:
        self._pass_on = pass_on
        self._waiting: dict[tuple[str, str], list[Int64s]] = defaultdict(list)
        self._count: Counter[tuple[str, str]] = Counter()

    def add(self, key: tuple[str, str], rows: Int64s) -> None:
        """Add the next rows, and pass whole chunks on; `flush` passes on the rest."""
        self._waiting[key].append(rows)
        self._count[key] += len(rows)
        if self._count[key] >= CHUNK_EVENTS:
            self._settle(key, least=CHUNK_EVENTS)

    def flush(self) -> None:
        """Pass on all rows that wait."""
        for key in self._waiting:
            self._settle(key, least=1)

    def _settle(self, key: tuple[str, str], *, least: int) -> None:
        rows = np.concatenate(self._waiting[key])
        while len(rows) >= least:
            self._pass_on(key, rows[:CHUNK_EVENTS])
            rows = rows[CHUNK_EVENTS:]
        # A copy, because a view would keep all rows in memory.
        self._waiting[key], self._count[key] = [rows.copy()], len(rows)


_EVENTS_PER_ROW_GROUP = 1 << 20
_CHUNKS_PER_ROW_GROUP = 4_096


@final
class ChunkWriter:
    """Writes a Parquet file of a trace, or a further one after those that `written` counts. Memory: a row group."""

    def __init__(
        self,
        file: Location,
        *,
        written: Mapping[tuple[str, str], tuple[int, int]] | None = None,
        notes: Mapping[bytes, int] | None = None,  # further key-value metadata
    ) -> None:
        self.events = 0
        self.dropped_events = 0  # that the source lacks, because its recorder dropped them; may be set until the end
        metadata = {**TRACE_SCHEMA.metadata, FILES_KEY: ONLY if written is None else SEVERAL}
        metadata |= {key: str(number).encode() for key, number in (notes or {}).items()}
        self._sink = file.open("wb")
        self._writer = pq.ParquetWriter(self._sink, TRACE_SCHEMA.with_metadata(metadata), **WRITE_OPTIONS)
        self._begun: dict[tuple[str, str], tuple[int, int]] = dict(written or {})
        self._rows: list[tuple[tuple[str, str], int, int, Events]] = []  # key, number of the chunk, its first `seq`
        self._waiting = 0

    @property
    def written(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The number of chunks and of events of each (topic, subscription) so far, with those of earlier files."""
        return dict(self._begun)

    def write(self, key: tuple[str, str], events: Events) -> None:
        """Write the next chunk of a (topic, subscription); no-op without events."""
        count = len(events.kind)
        if not count:
            return
        chunk, first_seq = self._begun.get(key, (0, 0))
        self._begun[key] = chunk + 1, first_seq + count
        self._rows.append((key, chunk, first_seq, events))
        self.events += count
        self._waiting += count
        if self._waiting >= _EVENTS_PER_ROW_GROUP or len(self._rows) >= _CHUNKS_PER_ROW_GROUP:
            self._write_row_group()

    def close(self) -> None:
        """Write the pending rows and the footer."""
        with self._sink:
            if self._rows:
                self._write_row_group()
            if self.dropped_events:
                self._writer.add_key_value_metadata({DROPPED_KEY: str(self.dropped_events).encode()})
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.close()
            return
        # After a failure the file is discarded: another error while closing it would hide the first.
        with suppress(pa.ArrowException, OSError, ValueError):
            self._writer.close()
        with suppress(OSError):
            self._sink.close()

    def _write_row_group(self) -> None:
        keys, chunks, first_seqs, events = zip(*self._rows, strict=True)
        topics, subscriptions = zip(*keys, strict=True)
        columns = {
            "topic": topics, "subscription": subscriptions, "chunk": chunks, "first_seq": first_seqs,
            "first_ts_ms": [int(each.ts_ms[0]) for each in events],
            "last_ts_ms": [int(each.ts_ms[-1]) for each in events],
            "event_count": [len(each.kind) for each in events],
        }  # fmt: skip
        for name in EVENT_COLUMNS:
            columns[name] = [pack(_written(each, name), has_steps=name in _IN_STEPS) for each in events]
        arrays = [pa.array(columns[name], TRACE_SCHEMA.field(name).type) for name in columns]
        self._writer.write_table(pa.Table.from_arrays([*arrays, _ledgers_of(events)], schema=self._writer.schema))
        self._rows.clear()
        self._waiting = 0


_SECOND_MS = 1_000
_YEAR_2000_S, _YEAR_2100_S = 946_684_800, 4_102_444_800
WALL_CLOCK_MS = range(_YEAR_2000_S * _SECOND_MS, _YEAR_2100_S * _SECOND_MS)
"""From the start of 2000 to the start of 2100."""
OWN_CLOCK_MS = range(_YEAR_2000_S)
"""The trace's own clock: almost eleven days."""
RULE = "ms since 1970, from 2000 to 2100, or below 946684800 for all events of a trace"


@final
class TraceClock:
    """The clock of one trace, chosen by its first valid time."""

    def __init__(self) -> None:
        self._clock: range | None = None

    def judge(self, ts_ms: Int64s) -> Mask:
        """Return which of the next times are outside this clock."""
        on_wall, on_own = (_within(ts_ms, clock) for clock in (WALL_CLOCK_MS, OWN_CLOCK_MS))
        known = np.flatnonzero(on_wall | on_own)
        if self._clock is None and len(known):
            self._clock = WALL_CLOCK_MS if on_wall[known[0]] else OWN_CLOCK_MS
        right = on_own if self._clock is OWN_CLOCK_MS else on_wall
        return np.asarray(~right, np.bool_)

    def wrong(self, ts_ms: int) -> str:
        """Describe a time that `judge` refused, and its probable unit."""
        return f"ts_ms {ts_ms}, {_hint(ts_ms)}"


def _within(ts_ms: Int64s, clock: range) -> Mask:
    return np.asarray((ts_ms >= clock.start) & (ts_ms < clock.stop), np.bool_)


def _hint(ts_ms: int) -> str:
    units = (("seconds", 1, _SECOND_MS), ("microseconds", 1_000, 1), ("nanoseconds", 1_000_000, 1))
    for unit, divisor, factor in units:
        if ts_ms * factor // divisor in WALL_CLOCK_MS:
            return f"which looks like {unit}: write {RULE}"
    if ts_ms in WALL_CLOCK_MS or ts_ms in OWN_CLOCK_MS:
        return f"which has another clock than the first event: write {RULE}"
    return f"write {RULE}"


_PERSIST_ENDS = (EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED)
_PERSISTS = (EventKind.PERSIST_BEGUN, *_PERSIST_ENDS)
_LIVES = (EventKind.CRASH, EventKind.RECOVER)  # The end of a process, and the start of the next one
_ACKS = (EventKind.ACK, EventKind.MARK_DELETE)
_SETTLED = (EventKind.PERSIST_ENDED, EventKind.CRASH, EventKind.RECOVER, EventKind.REDELIVER, EventKind.RESET)
# Events that only a live cursor causes.
_ALIVE = (
    EventKind.DELIVER, *_ACKS, *_PERSISTS, EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED, EventKind.RESET,
)  # fmt: skip
_NONE = -1


@final
class EventOrder:
    """Checks the events of one subscription, or of a topic: times never fall, and only one cursor lives at a time.

    Two cursors under one name are detected by actions impossible for one: it acks, sends or persists after its crash
    and before a recovery; a persist begins while another is in progress, or one ends that did not begin; it is
    recovered while acks are in memory, without a recorded death.
    """

    def __init__(self) -> None:
        self._last_ms = -1
        # The latest relevant event of each kind, in order.
        self._context = Events(*(np.zeros(0, np.int64) for _ in Events._fields))

    def judge_times(self, ts_ms: Int64s) -> Mask:
        """Return which of the next events are earlier than a previous event."""
        highest = np.maximum.accumulate(np.concatenate(([self._last_ms], ts_ms)))
        self._last_ms = int(highest[-1])
        return np.asarray(ts_ms < highest[:-1], np.bool_)

    def judge_lives(self, events: Events) -> Mask:
        """Return which of the next events cannot come from a single cursor."""
        known = len(self._context.kind)
        every = Events(*(np.concatenate(pair) for pair in zip(self._context, events, strict=True)))
        kind, number = every.kind, every.number
        life, persist = _latest_before(kind, _LIVES), _latest_before(kind, (*_PERSISTS, *_LIVES))
        settled = _latest_before(kind, (*_ACKS, *_SETTLED))
        is_dead = _kind_at(kind, life) == EventKind.CRASH
        is_persisting = _kind_at(kind, persist) == EventKind.PERSIST_BEGUN
        begun = np.where(is_persisting, number[persist], _NONE)
        is_other = (begun != _NONE) & (number != _NONE) & (number != begun)
        wrong = is_dead & np.isin(kind, _ALIVE)
        wrong |= is_persisting & ((kind == EventKind.PERSIST_BEGUN) | (np.isin(kind, _PERSIST_ENDS) & is_other))
        wrong |= (kind == EventKind.RECOVER) & np.isin(_kind_at(kind, settled), _ACKS)
        latest = [np.flatnonzero(np.isin(kind, group))[-1:] for group in (
            _LIVES, (*_PERSISTS, *_LIVES), (*_ACKS, *_SETTLED)
        )]  # fmt: skip
        self._context = every.where(np.unique(np.concatenate(latest)).astype(np.int64))
        told: Mask = wrong[known:]
        return told


def _latest_before(kind: Int64s, group: tuple[EventKind, ...]) -> Int64s:
    """Return, for each event, the index of the latest of a group before it, -1 without one."""
    known = np.where(np.isin(kind, group), np.arange(len(kind)), _NONE)
    return np.maximum.accumulate(np.concatenate(([_NONE], known)))[:-1]


def _kind_at(kind: Int64s, index: Int64s) -> Int64s:
    return np.where(index >= 0, kind[index], 0)
