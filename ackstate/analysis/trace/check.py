"""Checks every event of a Parquet trace, columnar and without Spark, for `ackstate trace check`."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.bad_rows import BadRows, BadRowsMax, Wrong
from ackstate.analysis.trace.chunk_rows import ROWS_AT_ONCE, check_ledgers, events_of, has_intervals, pieces
from ackstate.analysis.trace.days import days_of
from ackstate.analysis.trace.events import (
    EVENT_COLUMNS,
    NAMES_ENTRIES,
    POLLED_KINDS,
    POLLED_ONLY,
    EventKind,
    TraceError,
)
from ackstate.analysis.trace.order import EventOrder
from ackstate.analysis.trace.parquet import check_trace, trace_files
from ackstate.analysis.trace.published import PublishedEntries
from ackstate.analysis.trace.rows import Events, count_wrong
from ackstate.analysis.trace.times import TraceClock
from ackstate.analysis.wording import dropped_line
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.rows import Mask

_KEY = ("topic", "subscription", "chunk")
_KINDS = {False: np.array(sorted(set(EventKind) - POLLED_ONLY)), True: np.array(sorted(POLLED_KINDS))}
"""The kinds that a trace may have, by whether it is one of polls."""
_NAMING = np.array(sorted(NAMES_ENTRIES))
_EVENTS = tuple(EVENT_COLUMNS)
_LEDGERS = ("kind", "ledger_id", "last_entry")


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The contents of a trace; every event of it is valid.

    Attributes:
        trace: Its path.
        sha256: Its `trace_hash`.
        events: Number of events.
        chunks: Number of chunks.
        topics: Number of topics.
        subscriptions: Number of subscriptions, not counting the topics themselves.
        first_ts_ms: Time of the earliest event.
        last_ts_ms: Time of the latest event.
        kinds: Number of events by kind, named in small letters; kinds without events are omitted.
        dropped_events: Events that the trace lacks because a recorder dropped them.
    """

    trace: str
    sha256: str
    events: int
    chunks: int
    topics: int
    subscriptions: int
    first_ts_ms: int
    last_ts_ms: int
    kinds: dict[str, int]
    dropped_events: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def lines(self) -> list[str]:
        """Return the summary in words."""
        kinds = ", ".join(f"{count:,} {name}" for name, count in self.kinds.items())
        return [
            f"{self.trace}: {self.events:,} events of {self.subscriptions:,} subscriptions and {self.topics:,} topics",
            f"from {_time(self.first_ts_ms)} to {_time(self.last_ts_ms)}, in {self.chunks:,} chunks",
            kinds,
            *([dropped_line(self.dropped_events)] if self.dropped_events else []),
            f"sha256 {self.sha256}",
        ]


def trace_hash(path: Location) -> str:
    """Return a SHA-256 in hexadecimal that identifies a trace: that of its files' SHA-256s, in order of days and names.

    It does not depend on the path of the trace or the names of its files, only on their order and bytes.

    Raises:
        TraceError: There is no trace.
        OSError: A file cannot be read.
    """
    whole = hashlib.sha256()
    for file in (file for day in days_of(path) for file in trace_files(day)):
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def check_events(
    path: Location, *, progress: Callable[[int, int | None], None] = lambda _done, _total: None
) -> TraceSummary:
    """Check every event of a trace and count.

    Memory: a row group of its files, about a kilobyte for each subscription, and a bitmap of the published and the
    acked entries of each topic. Chunks that the files hold out of order are held until the chunks before them have
    come.

    Raises:
        TraceError: It is not a trace, or an event is invalid; the message has the reason and the place.
        UnsupportedVersionError: It has another version.
        OSError: It cannot be read.
    """
    span = check_trace(path, is_timed=False)
    check = _TraceCheck()
    for done, chunk in enumerate(read_chunks(path), start=1):
        check.take(chunk)
        progress(done, span.chunk_count)
    check.finish(path)
    return TraceSummary(
        str(path),
        trace_hash(path),
        sum(check.kinds.values()),
        span.chunk_count,
        len({topic for topic, _ in check.keys}),
        sum(subscription != "" for _, subscription in check.keys),
        check.first_ms,
        check.last_ms,
        {EventKind(kind).name.lower(): check.kinds[kind] for kind in sorted(check.kinds)},
        span.dropped_events,
    )


class CheckedChunk(NamedTuple):
    """A row of a trace."""

    key: tuple[str, str]
    number: int
    first_seq: int
    bounds_ms: tuple[int, int]
    events: Events
    is_polled: bool = False


@final
class _Followed:
    """The state of a subscription or a topic after the chunks checked so far."""

    def __init__(self) -> None:
        self.next_chunk = self.next_seq = 0
        self.order = EventOrder()
        self.early: dict[int, CheckedChunk] = {}


@final
class _TraceCheck:
    """Accepts chunks in any order, and checks each subscription's chunks in their order."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, str], _Followed] = {}
        self.kinds: Counter[int] = Counter()
        self.first_ms, self.last_ms = 2**63 - 1, -(2**63)
        self._bad_rows = BadRows()
        self._published = PublishedEntries()
        self._clock = TraceClock()

    def take(self, chunk: CheckedChunk) -> None:
        """Add the next chunk of a file."""
        followed = self.keys.setdefault(chunk.key, _Followed())
        followed.early[chunk.number] = chunk
        while followed.next_chunk in followed.early:
            self._judge(followed, followed.early.pop(followed.next_chunk))

    def finish(self, path: Location) -> None:
        """Finish the checks of the whole trace."""
        for topic, count, sample in self._published.never():
            self._bad_rows.add(Wrong.NEVER_PUBLISHED, count, [f"{sample} of {topic}"])
        self._bad_rows.check(BadRowsMax(), what=str(path), hint="record it again, or convert it from its source")

    def _judge(self, followed: _Followed, chunk: CheckedChunk) -> None:
        events = chunk.events

        def shown(problem: Wrong, row: int) -> str:
            """Return where a bad row is, as an error reports it."""
            kind = int(events.kind[row])
            name = EventKind(kind).name.lower() if kind in set(EventKind) else f"kind {kind}"
            run = f"{events.ledger_id[row]}:{events.first_entry[row]}..{events.last_entry[row]}"
            where = " of ".join(filter(None, reversed(chunk.key)))
            if problem is Wrong.TIME_OUTSIDE:
                return f"seq {chunk.first_seq + row} of {where} ({self._clock.wrong(int(events.ts_ms[row]))})"
            return f"seq {chunk.first_seq + row} of {where} ({name} {run} at {events.ts_ms[row]})"

        self._bad_rows.rows += len(events.kind)
        wrong = _wrong_alone(events, is_polled=chunk.is_polled)
        wrong[Wrong.TIME_OUTSIDE] = self._clock.judge(events.ts_ms)
        wrong[Wrong.TIME_BACK] = followed.order.judge_times(events.ts_ms)
        wrong[Wrong.TWO_CURSORS] = followed.order.judge_lives(events)
        wrong[Wrong.SEQ_GAP] = np.arange(len(events.kind)) < (chunk.first_seq > followed.next_seq)
        wrong[Wrong.SEQ_AGAIN] = np.arange(len(events.kind)) < (chunk.first_seq < followed.next_seq)
        ends = (int(events.ts_ms[0]), int(events.ts_ms[-1]))
        wrong[Wrong.WRONG_BOUNDS] = np.arange(len(events.kind)) < (ends != chunk.bounds_ms)
        count_wrong(wrong, self._bad_rows, shown)
        followed.next_chunk, followed.next_seq = chunk.number + 1, chunk.first_seq + len(events.kind)
        self._published.follow(chunk.key, events)
        self.kinds.update(
            dict(zip(*(part.tolist() for part in np.unique(events.kind, return_counts=True)), strict=True))
        )
        self.first_ms, self.last_ms = min(self.first_ms, ends[0]), max(self.last_ms, ends[1])


def _wrong_alone(events: Events, *, is_polled: bool) -> dict[Wrong, Mask]:
    """Return the events that are invalid by themselves."""
    naming = np.isin(events.kind, _NAMING) | (events.ledger_id >= 0)
    entries = (events.ledger_id, events.first_entry, events.last_entry)
    negative = (events.ts_ms < 0) | (events.number < -1)
    for column in entries:
        negative |= column < np.where(naming, 0, -1)
    return {
        Wrong.UNKNOWN_KIND: ~np.isin(events.kind, _KINDS[is_polled]),
        Wrong.BEYOND: (events.first_entry > ENTRY_ID_MAX) | (events.last_entry > ENTRY_ID_MAX),
        Wrong.NEGATIVE: negative,
        Wrong.BACKWARDS: events.last_entry < events.first_entry,
    }


def read_chunks(path: Location) -> Iterator[CheckedChunk]:
    """Yield every chunk of a trace, in the order of the files; its events are not checked yet.

    Raises:
        TraceError: A file is damaged, or is no trace.
    """
    for file in trace_files(path):
        try:
            with file.open("rb") as source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
                for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE):
                    yield from _chunks_of(file, batch)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise TraceError(f"{file}: not a readable Parquet file, {said}") from error


def _chunks_of(file: Location, batch: pa.RecordBatch) -> Iterator[CheckedChunk]:
    try:
        for piece in pieces(batch):
            is_polled = has_intervals(piece.schema)
            offsets, columns = events_of(piece, (*_EVENTS, "until_ms") if is_polled else _EVENTS)
            columns = columns[: len(_EVENTS)]
            bounds = offsets.tolist()
            rows = (piece[name].to_pylist() for name in (*_KEY, "first_seq", "first_ts_ms", "last_ts_ms"))
            for row, (topic, subscription, number, first_seq, *times) in enumerate(zip(*rows, strict=True)):
                events = Events(*(column[bounds[row] : bounds[row + 1]] for column in columns))
                yield CheckedChunk((topic, subscription), number, first_seq, (times[0], times[1]), events, is_polled)
            check_ledgers(piece, offsets, *(columns[_EVENTS.index(name)] for name in _LEDGERS))
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from None


def _time(ts_ms: int) -> str:
    """Return a time in words, or as a number if it is outside the calendar."""
    try:
        return datetime.fromtimestamp(ts_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ts_ms} ms"
