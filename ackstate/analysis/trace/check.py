"""Checks events in their order, against each other and of a whole Parquet trace, and counts those that are wrong."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np

from ackstate.analysis.trace.chunks import (
    ROWS_AT_ONCE,
    EventOrder,
    Events,
    TraceClock,
    bitmaps_of,
    check_ledgers,
    events_of,
    pieces,
)
from ackstate.analysis.trace.events import EVENT_COLUMNS, NAMES_ENTRIES, EventKind, TraceError
from ackstate.analysis.trace.parquet import check_trace, days_of, opened_parquet, trace_files
from ackstate.analysis.trace.recording import EntrySet
from ackstate.analysis.wording import dropped_line
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.chunks import Mask


SAMPLES_MAX = 5
_THRESHOLD = re.compile(r"(\d+(?:\.\d+)?)%|(\d{1,18})", re.ASCII)


class Wrong(Enum):
    """The reason why a row is bad; the value is its text."""

    NOT_JSON = "not a JSON object"
    NOT_UTF8 = "not UTF-8"
    MISSING = "something is missing"
    WRONG_TYPE = "a value of another type"
    UNKNOWN_KIND = "an unknown kind"
    NEGATIVE = "a negative number"
    BEYOND = "a number too large"
    BACKWARDS = "last_entry below first_entry"
    SEQ_AGAIN = "a seq that was there before, or out of order"
    SEQ_GAP = "a gap in seq before it"
    TIME_OUTSIDE = "a time outside 2000 to 2100"
    TIME_BACK = "a time before that of the event before"
    NEVER_PUBLISHED = "entries that were never published"
    TWO_CURSORS = "two cursors under one name"
    WRONG_BOUNDS = "times that are not those the chunk states"


@dataclass(frozen=True, slots=True)
class BadRowsMax:
    """A limit on the number of bad rows."""

    count: int | None = 0  # Most bad rows; None for a share
    share: float = 0.0  # Largest share of bad rows among all rows, 0 to 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a number, ``12``, or a share, ``0.1%``."""
        match = _THRESHOLD.fullmatch(text)
        if match is None or (match[1] and float(match[1]) > 100):
            raise ValueError(f"must be a number such as 12 or a share such as 0.1%, got {text!r}")
        return cls(None, float(match[1]) / 100) if match[1] else cls(int(match[2]))

    def allows(self, bad: int, rows: int) -> bool:
        """Return whether `bad` of `rows` rows may be bad."""
        return bad <= (self.share * rows if self.count is None else self.count)

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.count is None else str(self.count)


@final
@dataclass(slots=True)
class BadRows:
    """Counts bad rows by reason, and stores samples of each."""

    rows: int = 0  # Number of rows, good and bad
    counts: dict[Wrong, int] = field(default_factory=dict)  # Number of bad rows by reason
    samples: dict[Wrong, list[str]] = field(default_factory=dict)  # The first rows of each reason: place and content

    @property
    def count(self) -> int:
        """The number of bad rows."""
        return sum(self.counts.values())

    def add(self, wrong: Wrong, count: int, samples: Iterable[str]) -> None:
        """Count bad rows; take samples only up to a fixed number per reason."""
        self.counts[wrong] = self.counts.get(wrong, 0) + count
        kept = self.samples.setdefault(wrong, [])
        for sample in samples if len(kept) < SAMPLES_MAX else ():
            kept.append(sample)
            if len(kept) == SAMPLES_MAX:
                return

    def check(self, most: BadRowsMax, *, what: str, hint: str, finished: bool = True) -> None:
        """Raise an error if too many rows are bad; a share is judged only when all rows are known."""
        if (finished or most.count is not None) and not most.allows(self.count, self.rows):
            so_far = "" if finished else " so far"
            said = "; ".join((*self.lines(), hint))
            raise TraceError(f"{what}: {self.count} bad of {self.rows} rows{so_far}, more than {most}: {said}")

    def lines(self) -> list[str]:
        """Return a line for each reason: its count, and its first places."""
        return [
            f"{wrong.value}: {count}, {'first' if count > len(self.samples[wrong]) else 'at'} "
            + ", ".join(self.samples[wrong])
            for wrong, count in self.counts.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "rows": self.rows,
            "bad_rows": self.count,
            "bad": [
                {"what": wrong.value, "count": count, "first": self.samples[wrong]}
                for wrong, count in self.counts.items()
            ],
        }


def count_wrong(wrong: dict[Wrong, Mask], bad_rows: BadRows, shown: Callable[[Wrong, int], str]) -> Mask:
    """Count the bad rows, each under its first reason, and return which rows are bad."""
    bad: Mask = np.zeros(len(next(iter(wrong.values()))), np.bool_)
    for problem, mask in wrong.items():
        fresh = np.flatnonzero(mask & ~bad)
        if len(fresh):
            bad_rows.add(problem, len(fresh), [shown(problem, row) for row in fresh[:SAMPLES_MAX].tolist()])
        bad |= mask
    return bad


_ACKS = (EventKind.ACK, EventKind.MARK_DELETE)


@final
class PublishedEntries:
    """The published and the acked entries of each topic.

    Nothing is checked for a topic without PUBLISH events, nor before its first published ledger.
    """

    def __init__(self) -> None:
        self._published: dict[str, EntrySet] = {}
        self._acked: dict[str, EntrySet] = {}

    def follow(self, key: tuple[str, str], events: Events) -> None:
        """Add the next events of a (topic, subscription)."""
        topic, subscription = key
        kinds, found = (_ACKS, self._acked) if subscription else ((EventKind.PUBLISH,), self._published)
        named = events.where(np.isin(events.kind, kinds))
        named_entries = found.setdefault(topic, EntrySet())
        for ledger_id, entries in bitmaps_of(named.ledger_id, named.first_entry, named.last_entry):
            named_entries.add(ledger_id, entries)

    def count_never(self, bad_rows: BadRows) -> None:
        """Count the entries of each topic that were acked but never published, and name the first one."""
        for topic, published in self._published.items():
            left = self._acked.get(topic, EntrySet()) - published
            left.remove_before(*next(published.runs(), (0, 0, 0))[:2])
            if len(published) and len(left):
                ledger_id, entry_id, _ = next(left.runs())
                bad_rows.add(Wrong.NEVER_PUBLISHED, len(left), [f"{ledger_id}:{entry_id} of {topic}"])


_KEY = ("topic", "subscription", "chunk")
_KINDS = np.array(sorted(EventKind))
NAMING = np.array(sorted(NAMES_ENTRIES))
"""The kinds that always have entries."""
_EVENTS = tuple(EVENT_COLUMNS)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The contents of a trace; every event of it is valid."""

    trace: str  # Its path
    sha256: str  # Its `trace_hash`
    events: int  # Number of events
    chunks: int  # Number of chunks
    topics: int  # Number of topics
    subscriptions: int  # Number of subscriptions, not counting the topics themselves
    first_ts_ms: int  # Time of the earliest event
    last_ts_ms: int  # Time of the latest event
    kinds: dict[str, int]  # Number of events by kind, named in small letters; kinds without events are omitted
    dropped_events: int = 0  # Events that the trace lacks because a recorder dropped them

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
        self._published.count_never(self._bad_rows)
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
        is_known = np.isin(events.kind, _KINDS)
        wrong = {Wrong.UNKNOWN_KIND: ~is_known, **wrong_alone(events)}
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


def wrong_alone(events: Events) -> dict[Wrong, Mask]:
    """Return the events with entries that are invalid by themselves; -1 is no negative number, but a missing one."""
    naming = np.isin(events.kind, NAMING) | (events.ledger_id >= 0)
    negative = (events.ts_ms < 0) | (events.number < -1)
    for column in (events.ledger_id, events.first_entry, events.last_entry):
        negative |= column < np.where(naming, 0, -1)
    return {
        Wrong.BEYOND: (events.first_entry > ENTRY_ID_MAX) | (events.last_entry > ENTRY_ID_MAX),
        Wrong.NEGATIVE: negative,
        Wrong.BACKWARDS: events.last_entry < events.first_entry,
    }


def read_chunks(path: Location) -> Iterator[CheckedChunk]:
    """Yield every chunk of a trace, in the order of the files; its events are not checked yet."""
    for file in trace_files(path):
        with opened_parquet(file) as parquet:
            for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE):
                yield from _chunks_of(file, batch)


def _chunks_of(file: Location, batch: pa.RecordBatch) -> Iterator[CheckedChunk]:
    try:
        for piece in pieces(batch):
            offsets, columns = events_of(piece, _EVENTS)
            bounds = offsets.tolist()
            rows = (piece[name].to_pylist() for name in (*_KEY, "first_seq", "first_ts_ms", "last_ts_ms"))
            for row, (topic, subscription, number, first_seq, *times) in enumerate(zip(*rows, strict=True)):
                events = Events(*(column[bounds[row] : bounds[row + 1]] for column in columns))
                yield CheckedChunk((topic, subscription), number, first_seq, (times[0], times[1]), events)
            check_ledgers(piece, offsets, _EVENTS, columns)
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from None


def _time(ts_ms: int) -> str:
    """Return a time in words, or as a number if it is outside the calendar."""
    try:
        return datetime.fromtimestamp(ts_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ts_ms} ms"
