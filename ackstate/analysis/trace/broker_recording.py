"""Reads the files of the broker interceptor in `interceptor/`, and turns them into events of a trace of entries.

Each line is a JSON object of one kind:

- ``start``: the broker, its process, and the settings that decide when cursors are written
- ``subject``: the number of a topic, a consumer or a cursor in this file, and its names
- ``publish``, ``deliver``: entries ``[ledger, first, last]``, unacked messages of a batch
- ``ack``: when the command was handled, its type, entries and bits of a batch that are not acked, and the last record
  that the cursor had begun before and after it
- ``look``: a cursor's ledger has changed: the last record begun, the last one written, and its mark-delete position
- ``consumer``, ``closed``: a consumer was created or closed; the first one of a cursor has the cursor's state
- ``redeliver``: which entries a consumer requests again, or all
- ``seek``, ``unsubscribe``, ``admin``: requests that change a subscription; of an admin request its method and path
- ``dropped``: the number of events that are missing before this line
- ``alive``, ``next``, ``end``: the recording continues, in another file, or ended in order

Each file stands alone: it begins with a ``start`` line, and numbers its consumers and topics itself. The file of a
broker that was killed ends anywhere, even inside a compressed block: everything before is read. Whatever else is not as
the interceptor writes it raises `TraceError` with the file and the line; fields that are not needed are not read.

A batch counts as acked when all of its messages are. A persist begins where the recording shows that the broker began a
record of the cursor's ledger, and ends where the record is seen to be written. A broker that was killed becomes a
crash; the state with which its cursor was opened again shows the redelivery.

A kill takes the lines of the last flush with it, and files may be missing: an entry that is delivered or acked was
published, so what no file says is published where the recording first names it.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ackstate.analysis.trace.chunks import WALL_CLOCK_MS
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recording import EntrySet
from ackstate.analysis.trace.rows import NO_SEQ, TEXT_BYTES_MAX, TraceRows, open_text, rows_of
from ackstate.cursor.config import cursor_settings
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.pulsar_conf import BATCH_INDEX_ACKS
from ackstate.wire.pulsar import LimitRule, Limits, RangeForm
from ackstate.wire.pulsar.ranges import limit_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


FORMAT = "ackstate broker recording"
VERSION = 1
LEDGER_ENTRIES_MAX = 1 << 24
"""A run with more entries is refused before it is expanded."""
BATCH_MAX = 1 << 20
_WORDS_MAX = BATCH_MAX // 64
_RANGES_MAX = 10_000  # the default of Pulsar
_RELEASE = "pulsarVersion"  # beside the settings
_RANGE = re.compile(r"\((\d+):(-?\d+)\.\.(\d+):(\d+)\]")


class LedgerEntries(NamedTuple):
    """Entries of a ledger, both ends included; of one entry, the words of its unacked messages, if any."""

    ledger_id: int
    first: int
    last: int
    unacked_words: tuple[int, ...] = ()


NO_RECORD = Position(-1, -1)
"""Instead of a record in a cursor's ledger, if it has none."""


class BrokerLife(NamedTuple):
    """One process of a broker."""

    name: str  # Unique
    broker: str  # Its address
    form: RangeForm  # Of the ranges in its records
    limits: Limits  # On these ranges
    has_index_acks: bool  # Whether acks of single messages of a batch count


class LineFields:
    """The fields of a line, each checked when it is read."""

    def __init__(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"it is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise TraceError(f"it must be a JSON object, got {_short(found)}")
        self._found: dict[str, Any] = found

    def has(self, name: str) -> bool:
        """Return whether the line has a field."""
        return name in self._found

    def shown(self, name: str) -> str:
        """Return a field as an error message shows it."""
        return _short(self._found.get(name))

    def text(self, name: str) -> str:
        """Return a field that is text."""
        value = self._value(name)
        if not isinstance(value, str):
            raise TraceError(f"{name} must be text, got {_short(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TraceError(f"{name} must be text in Unicode, got {_short(value)}") from None
        return value

    def number(self, name: str, least: int, most: int) -> int:
        """Return a field that is a whole number between two, both included."""
        return _number(self._value(name), name, least, most)

    def record(self, name: str) -> Position:
        """Return a field that is a record of a cursor's ledger."""
        values = _list(self._value(name), name, count=2)
        ledger_id, entry_id = (_number(value, name, -1, most) for value, most in zip(
            values, (LEDGER_ID_MAX, ENTRY_ID_MAX), strict=True
        ))  # fmt: skip
        return record_of(ledger_id, entry_id)

    def position(self, name: str) -> Position | None:
        """Return a field that is a position or null."""
        if self._value(name) is None:
            return None
        text = self.text(name)
        try:
            return Position.parse(text)
        except ValueError:
            raise TraceError(f"{name} must be a position, got {_short(text)}") from None

    def ranges(self) -> tuple[tuple[Position, Position], ...] | None:
        """Return the deleted ranges, lower ends excluded and upper ends included; None if the line omits them."""
        if self._value("deleted") is None:
            return None
        text = self.text("deleted")
        found = list(_RANGE.finditer(text))
        if f"[{','.join(each[0] for each in found)}]" != text:
            raise TraceError(f"deleted must be ranges as Pulsar writes them, got {_short(text)}")
        ranges = []
        for each in found:
            lower_ledger, lower, upper_ledger, upper = map(int, each.groups())
            if not (lower_ledger <= upper_ledger <= LEDGER_ID_MAX and -1 <= lower <= ENTRY_ID_MAX >= upper):
                raise TraceError(f"deleted must be ranges of entries, got {_short(each[0])}")
            ranges.append((Position(lower_ledger, lower), Position(upper_ledger, upper)))
        return tuple(ranges)

    def runs(self) -> tuple[LedgerEntries, ...]:
        """Return the entries of the line."""
        return tuple(_run(value, index) for index, value in enumerate(_list(self._value("entries"), "entries")))

    def life(self) -> BrokerLife:
        """Return the process of a ``start`` line."""
        if self.text("format") != FORMAT:
            raise TraceError(f"format must be {FORMAT!r}, got {self.shown('format')}")
        version = self.number("version", 1, 2**31)
        if version > VERSION:
            raise UnsupportedVersionError(f"the recording has version {version}; this release reads up to {VERSION}")
        config = self._value("config")
        if not isinstance(config, dict) or not all(isinstance(each, str) for each in config.values()):
            raise TraceError(f"config must be an object of texts, got {_short(config)}")
        try:
            settings = cursor_settings({key: value for key, value in config.items() if key != _RELEASE})
        except ValueError as error:
            raise TraceError(f"config: {error}") from None
        most, rule = settings.get("range_count_max", _RANGES_MAX), LimitRule.of_release(config.get(_RELEASE, ""))
        form, has_index_acks = settings.get("range_form", RangeForm.WORDS), config.get(BATCH_INDEX_ACKS, "true")
        limits = Limits(most, None, rule)
        return BrokerLife(self.text("life"), self.text("broker"), form, limits, has_index_acks.lower() == "true")

    def _value(self, name: str) -> Any:
        if name not in self._found:
            raise TraceError(f"the field {name} is missing")
        return self._found[name]


def record_of(ledger_id: int, entry_id: int) -> Position:
    """Return a record; a ledger without entries has none."""
    return Position(ledger_id, entry_id) if min(ledger_id, entry_id) >= 0 else NO_RECORD


def _run(value: Any, index: int) -> LedgerEntries:
    name = f"entries[{index}]"
    if not isinstance(value, list) or len(value) not in {3, 4}:
        raise TraceError(f"{name} must be [ledger, first entry, last entry], got {_short(value)}")
    ledger_id = _number(value[0], name, 0, LEDGER_ID_MAX)
    first, last = (_number(entry, name, 0, ENTRY_ID_MAX) for entry in value[1:3])
    if not first <= last < first + LEDGER_ENTRIES_MAX:
        raise TraceError(f"{name} must be a run of at most {LEDGER_ENTRIES_MAX} entries, got {_short(value)}")
    if len(value) == 3:
        return LedgerEntries(ledger_id, first, last)
    words = _list(value[3], name)
    if first != last or len(words) > _WORDS_MAX:
        raise TraceError(f"{name} must be one entry with the words of a batch, got {_short(value)}")
    return LedgerEntries(ledger_id, first, last, tuple(_number(word, name, -(2**63), 2**63 - 1) for word in words))


def _list(value: Any, name: str, *, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        what = "a list" if count is None else f"a list of {count}"
        raise TraceError(f"{name} must be {what}, got {_short(value)}")
    return value


def _number(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TraceError(f"{name} must be a whole number from {least} to {most}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


FILE_GLOB = "ackstate-*.jsonl.gz"
_LINE_BYTES_MAX = 64 << 20
_SUBJECT_KINDS = frozenset((
    "publish", "deliver", "ack", "look", "consumer", "closed", "redeliver", "seek", "unsubscribe",
))  # fmt: skip
_MARKS = frozenset(("admin", "dropped", "alive", "end", "next"))
_OF_PUBLISH = (b'"publish"', b'"topic"')  # those lines, and those that introduce their topics
_TYPES = frozenset(("Individual", "Cumulative", "Transaction"))


class Subject(NamedTuple):
    """The subject of an event: a consumer, or a topic if the others are empty."""

    topic: str
    subscription: str = ""
    consumer: str = ""


@dataclass(frozen=True, slots=True)
class BrokerEvent:
    """One line. Which attributes it has depends on its kind."""

    kind: str  # Its name
    ts_ms: int  # When it happened; of an ack, when the command had been handled
    life: BrokerLife  # The process that wrote it
    place: tuple[Path, int]  # File and line
    subject: Subject | None = None  # The consumer or topic; None for a line about the whole recording
    entries: tuple[LedgerEntries, ...] = ()  # The entries concerned
    ack_type: str = ""  # ``Individual``, ``Cumulative`` or ``Transaction``
    before: Position = NO_RECORD  # The last record begun when an ack was received
    after: Position = NO_RECORD  # The same when it had been handled; of a look, the last record begun
    written: Position = NO_RECORD  # Of a look, the last record certainly written
    # Of a look, the position of the last record written; of the first consumer, the cursor's.
    mark_delete: Position | None = None
    # Of the first consumer, the ranges acked above it; None if unknown.
    deleted: tuple[tuple[Position, Position], ...] | None = ()
    count: int = 0  # Number of dropped events


def recording_files(path: Path) -> list[Path]:
    """Return the files of a recording in order: a directory's, or the file itself; none if it is something else."""
    if path.is_dir():
        return sorted(path.glob(FILE_GLOB))
    try:
        first = next(_lines(path, TEXT_BYTES_MAX), b"")
    except TraceError:
        return []
    return [path] if FORMAT.encode() in first else []


def read_recording(files: Sequence[Path], *, text_bytes_max: int = TEXT_BYTES_MAX) -> Iterator[BrokerEvent]:
    """Yield the events of files by one or several brokers, those of each process in their order, merged by time."""
    lives: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for file in files:
        reader = _File(file, text_bytes_max)
        start = next(reader.events(), None)
        if start is not None:
            lives[start.life.name].append((start.ts_ms, file))
    streams = [
        chain.from_iterable(_File(file, text_bytes_max).events() for _, file in sorted(found))
        for found in lives.values()
    ]
    for _, _, event in heapq.merge(*(_timed(stream, number) for number, stream in enumerate(streams))):
        yield event


def published_entries(files: Sequence[Path], *, text_bytes_max: int = TEXT_BYTES_MAX) -> dict[str, EntrySet]:
    """Return the entries of each topic that the files say were published; arguments and errors as `read_recording`."""
    found: dict[str, EntrySet] = defaultdict(EntrySet)
    for file in files:
        for event in _File(file, text_bytes_max).events(_OF_PUBLISH):
            if event.kind == "publish":
                assert event.subject is not None
                for run in event.entries:
                    found[event.subject.topic].add_run(run.ledger_id, run.first, run.last + 1)
    return found


def _timed(events: Iterator[BrokerEvent], stream: int) -> Iterator[tuple[int, tuple[int, int], BrokerEvent]]:
    """Yield events with a time that never falls, so that merging keeps their order."""
    highest = 0
    for number, event in enumerate(events):
        highest = max(highest, event.ts_ms)
        yield highest, (stream, number), event


@dataclass
class _File:
    """Reads one file."""

    path: Path
    text_bytes_max: int
    line: int = 0
    life: BrokerLife | None = None
    subjects: dict[int, Subject] = field(default_factory=dict)

    def events(self, having: Sequence[bytes] = (b"",)) -> Iterator[BrokerEvent]:
        """Yield its events, the ``start`` line included, of the lines that have one of some texts."""
        for line in _lines(self.path, self.text_bytes_max):
            self.line += 1
            if self.life is not None and not any(text in line for text in having):
                continue
            try:
                event = self._event(LineFields(line))
            except TraceError as error:
                raise TraceError(f"{self.path}, line {self.line}: {error}") from None
            if event is not None:
                yield event

    def _event(self, fields: LineFields) -> BrokerEvent | None:
        kind = fields.text("kind")
        if (kind == "start") != (self.life is None):
            raise TraceError("a recording must begin with its only line of the kind start")
        if kind == "subject":
            self._introduce(fields)
            return None
        ts_ms = fields.number("ts_ms", WALL_CLOCK_MS.start, WALL_CLOCK_MS.stop - 1)
        place = (self.path, self.line)
        if kind == "start":
            self.life = fields.life()
            return BrokerEvent(kind, ts_ms, self.life, place)
        assert self.life is not None
        if kind in _MARKS:
            count = fields.number("events", 0, 2**63 - 1) if kind == "dropped" else 0
            return BrokerEvent(kind, ts_ms, self.life, place, count=count)
        if kind not in _SUBJECT_KINDS:
            raise TraceError(f"kind {kind[:40]!r} is unknown")
        subject = self.subjects.get(fields.number("subject", 0, 2**31))
        if subject is None:
            raise TraceError(f"subject {fields.shown('subject')} was not introduced")
        if kind != "publish" and not subject.subscription:
            raise TraceError(f"{kind} must concern a consumer, got a topic")
        return BrokerEvent(kind, ts_ms, self.life, place, subject, **_details(kind, fields))

    def _introduce(self, fields: LineFields) -> None:
        topic = fields.text("topic")
        if not topic:
            raise TraceError("topic must not be empty")
        rest = [fields.text(name) if fields.has(name) else "" for name in ("subscription", "consumer")]
        self.subjects[fields.number("subject", 0, 2**31)] = Subject(topic, *rest)


def _details(kind: str, fields: LineFields) -> dict[str, Any]:
    """Return the attributes that only events of a kind have."""
    match kind:
        case "publish" | "deliver":
            return {"entries": fields.runs()}
        case "ack":
            ack_type = fields.text("type")
            if ack_type not in _TYPES:
                raise TraceError(f"type must be one of {', '.join(sorted(_TYPES))}, got {ack_type[:40]!r}")
            records = {"before": fields.record("before"), "after": fields.record("after")}
            return {"entries": fields.runs(), "ack_type": ack_type, **records}
        case "look":
            ledger_id = fields.number("ledger_id", 0, LEDGER_ID_MAX)
            begun, written = (fields.number(name, -1, ENTRY_ID_MAX) for name in ("begun", "written"))
            records = {"after": record_of(ledger_id, begun), "written": record_of(ledger_id, written)}
            return {**records, "mark_delete": fields.position("mark_delete")}
        case "consumer" if fields.has("opened_ms"):
            return {"mark_delete": fields.position("mark_delete"), "deleted": fields.ranges()}
    return {}


def _lines(path: Path, text_bytes_max: int) -> Iterator[bytes]:
    """Yield the whole lines of a file, compressed or not; what is incomplete at its end is left out."""
    size, number = 0, 1
    with open_text(path) as (text, _), suppress(EOFError):
        while line := text.readline(min(_LINE_BYTES_MAX, text_bytes_max - size) + 1):
            size += len(line)
            if size > text_bytes_max:
                raise TraceError(f"{path}: more than {text_bytes_max} bytes of text; --text-bytes-max allows more")
            if len(line) > _LINE_BYTES_MAX:
                raise TraceError(f"{path}, line {number}: longer than {_LINE_BYTES_MAX >> 20} MiB")
            if line.endswith(b"\n"):
                yield line[:-1]
                number += 1


_ROWS_AT_ONCE = 50_000
_OF_LINE = 0  # instead of a time, which is at least that of the year 2000
_WORD_BITS = 64


@final
class BrokerRows:
    """Converts events, and counts the events that a recording lacks."""

    def __init__(self, published: Mapping[str, EntrySet]) -> None:
        # The entries of each topic that were published, by the whole recording.
        self.published = defaultdict(EntrySet, published)
        self.dropped = 0  # events that the recorders dropped
        self.transactions = 0  # ACK commands of transactions, which are left out
        self._published_ms: dict[str, int] = {}
        self._topics: dict[str, dict[int, int]] = defaultdict(dict)  # ledger -> last entry known
        self._followed: dict[tuple[str, str], _FollowedCursor] = {}
        self._consumers: dict[str, int] = {}
        self._heard_ms: dict[str, int] = {}  # The time of the last line of each process.

    def rows(self, events: Iterable[BrokerEvent]) -> Iterator[tuple[Path, TraceRows]]:
        """Yield the events of a trace, those of each file together; their numbers are those of its lines."""
        found = ((event.place, key, mine) for event in events for key, mine in self._events(event))
        while some := list(islice(found, _ROWS_AT_ONCE)):
            for path, of_file in groupby(some, key=lambda each: each[0][0]):
                places, keys, mine = zip(*of_file, strict=True)
                lines = np.array([(NO_SEQ, line) for _, line in places], np.int64)
                yield path, rows_of(keys, np.column_stack((np.array(mine, np.int64), lines)))

    def _events(self, event: BrokerEvent) -> Iterator[tuple[tuple[str, str], Event]]:
        """Yield (topic, subscription) and event."""
        subject = event.subject
        self._heard_ms[event.life.name] = event.ts_ms
        if subject is None:
            self.dropped += event.count
            for key, followed in self._followed.items():
                if event.kind == "end":
                    followed.end(event.life)
                if event.kind == "start":
                    yield from ((key, crash) for crash in followed.crash_before(event))
            return
        ledgers = self._topics[subject.topic]
        for run in event.entries:
            ledgers[run.ledger_id] = max(run.last, ledgers.get(run.ledger_id, -1))
        if event.kind == "publish":
            yield from (self._publish(subject.topic, event.ts_ms, *run[:3]) for run in event.entries)
            return
        key = subject.topic, subject.subscription
        if key not in self._followed:
            self._followed[key] = _FollowedCursor(ledgers, self._heard_ms)
        followed = self._followed[key]
        self.transactions += event.ack_type == "Transaction"
        consumer = self._consumers.setdefault(subject.consumer, len(self._consumers))
        for each in followed.follow(event, consumer):
            if each.ledger_id >= 0:
                yield from self._published_before(subject.topic, each)
            yield key, each

    def _published_before(self, topic: str, event: Event) -> Iterator[tuple[tuple[str, str], Event]]:
        """Yield the publishing of an event's entries of which the recording says nothing."""
        named = EntrySet.of([(event.ledger_id, event.first_entry, event.last_entry + 1)])
        for ledger_id, first, end in (named - self.published[topic]).runs():
            self.published[topic].add_run(ledger_id, first, end)
            yield self._publish(topic, event.ts_ms, ledger_id, first, end - 1)

    def _publish(self, topic: str, ts_ms: int, ledger_id: int, first: int, last: int) -> tuple[tuple[str, str], Event]:
        # Lines of a process that has lost the topic may come late.
        ts_ms = self._published_ms[topic] = max(ts_ms, self._published_ms.get(topic, 0))
        return (topic, ""), Event(ts_ms, EventKind.PUBLISH, ledger_id, first, last)


class _Contents(NamedTuple):
    """The contents of a record."""

    mark_delete: Position
    ranges: DeletedRanges


@final
class _FollowedCursor:
    """One subscription."""

    def __init__(self, ledgers: dict[int, int], heard_ms: dict[str, int]) -> None:
        self._ledgers = ledgers
        self._heard_ms = heard_ms
        self._acked = EntrySet()
        self._partly: dict[Position, int] = {}
        self._mark_delete = Position(0, -1)
        self._deleted = DeletedRanges()  # acked above the mark-delete position
        # The contents of the latest record, and those of the latest one that is written.
        self._latest = self._durable = _Contents(self._mark_delete, DeletedRanges())
        self._life: BrokerLife | None = None
        self._last_ms = 0
        self._record = NO_RECORD  # the latest
        self._seen: tuple[Position, Position | None] = NO_RECORD, None  # the latest written one, its position if known
        self._persist: tuple[int, Position] | None = None  # under way: its number, and the record
        self._persist_count = 0
        self._is_dirty = self._has_crashed = self._is_reset = False

    def follow(self, event: BrokerEvent, consumer: int) -> Iterator[Event]:
        """Yield the events that a line shows."""
        for each in self._of_kind(event, consumer):
            self._last_ms = max(self._last_ms, event.ts_ms)
            yield each._replace(ts_ms=each.ts_ms or self._last_ms)

    def end(self, life: BrokerLife) -> None:
        """A process has closed its cursors in order."""
        if self._life == life:
            self._is_dirty = False

    def crash_before(self, start: BrokerEvent) -> Iterator[Event]:
        """Yield a crash if the process that had the cursor was replaced without an end."""
        life = self._life
        is_replaced = life is not None and life.broker == start.life.broker and life.name != start.life.name
        if is_replaced and self._is_dirty and not self._has_crashed:
            self._has_crashed, self._persist = True, None
            self._last_ms = self._died_ms()
            yield Event(self._last_ms, EventKind.CRASH)

    def _died_ms(self) -> int:
        """Return the time of the last line of the process that had the cursor: it writes one at each flush."""
        assert self._life is not None
        return max(self._last_ms, self._heard_ms[self._life.name])

    # The next methods yield events without times: they have that of the line.

    def _of_kind(self, event: BrokerEvent, consumer: int) -> Iterator[Event]:
        is_opened = event.kind == "consumer" and event.mark_delete is not None
        if self._has_crashed and not is_opened and event.kind in {"deliver", "ack", "look"}:
            # The line of the opening was dropped.
            self._has_crashed = False
            yield Event(_OF_LINE, EventKind.RECOVER)
        match event.kind:
            case "consumer" if is_opened and event.life != self._life:
                yield from self._opened(event)
            case "consumer" if is_opened and self._is_reset:
                yield from self._reset(event)
            case "seek":
                self._is_reset = True
            case "deliver":
                for run in event.entries:
                    # The broker may know acks of a batch from before the recording, or from before its restart.
                    if any(run.unacked_words):
                        self._partly[Position(run.ledger_id, run.first)] = _mask(run.unacked_words)
                    yield Event(_OF_LINE, EventKind.DELIVER, *run[:3], consumer)
            case "ack" if event.ack_type != "Transaction":
                # A look may have seen the record that this command began, before the command's line was written.
                if event.before < self._record <= event.after:
                    self._record = event.before
                yield from self._begun(event.before, event.life)
                yield from self._acks(event, consumer)
                yield from self._begun(event.after, event.life)
                yield from self._written(*self._seen)
            case "look":
                self._seen = event.written, event.mark_delete if event.written == event.after else None
                yield from self._begun(event.after, event.life)
                yield from self._written(*self._seen)
        self._life = event.life

    def _acks(self, event: BrokerEvent, consumer: int) -> Iterator[Event]:
        self._is_dirty = True
        if event.ack_type == "Cumulative":
            runs, kind = list(self._up_to(event)), EventKind.MARK_DELETE
        else:
            has_index_acks = event.life.has_index_acks
            runs = [run for run in event.entries if self._is_whole(run, has_index_acks=has_index_acks)]
            kind = EventKind.ACK
        for run in runs:
            self._acked.add_run(run.ledger_id, run.first, run.last + 1)
            if kind is EventKind.ACK:
                self._deleted.add_run(run.ledger_id, run.first, run.last + 1)
            yield Event(_OF_LINE, kind, *run[:3], consumer)
        self._advance(self._mark_delete)

    def _advance(self, mark_delete: Position) -> None:
        """Move the mark-delete position to an entry, and over the acked entries behind it."""
        while (run := self._deleted.run_containing(self._after(mark_delete))) is not None:
            mark_delete = Position(run.ledger_id, run.end - 1)
        self._mark_delete = mark_delete
        self._deleted.remove_at_most(mark_delete)

    def _after(self, position: Position) -> Position:
        """Return the position of the next entry."""
        if position.entry_id < self._ledgers.get(position.ledger_id, -1):
            return position._replace(entry_id=position.entry_id + 1)
        later = [ledger_id for ledger_id in self._ledgers if ledger_id > position.ledger_id]
        return Position(min(later), 0) if later else position._replace(entry_id=position.entry_id + 1)

    def _is_whole(self, run: LedgerEntries, *, has_index_acks: bool) -> bool:
        """Return whether an individual ack leaves no message of its entries."""
        position = Position(run.ledger_id, run.first)
        left = _mask(run.unacked_words)
        if left and has_index_acks:
            left &= self._partly.get(position, left)
            self._partly[position] = left
        if not left:
            self._partly.pop(position, None)
        return not left

    def _up_to(self, event: BrokerEvent) -> Iterator[LedgerEntries]:
        """Yield the entries of a cumulative ack, those of each ledger."""
        if not event.entries:
            return
        *_, run = event.entries
        last = Position(run.ledger_id, run.last - any(run.unacked_words))
        if last <= self._mark_delete:
            return
        for ledger_id in sorted(self._ledgers):
            if self._mark_delete.ledger_id <= ledger_id <= last.ledger_id:
                first = self._mark_delete.entry_id + 1 if ledger_id == self._mark_delete.ledger_id else 0
                end = last.entry_id if ledger_id == last.ledger_id else self._ledgers[ledger_id]
                if first <= end:
                    yield LedgerEntries(ledger_id, first, end)
        self._mark_delete = last

    def _begun(self, record: Position, life: BrokerLife) -> Iterator[Event]:
        """Yield the begin of a persist if a record was begun; it replaces one that was not seen to be written."""
        if record <= self._record:
            return
        self._record = record
        if self._persist is not None:
            yield _persist(EventKind.PERSIST_FAILED, self._persist[0])
        self._persist_count += 1
        self._persist = self._persist_count, record
        yield _persist(EventKind.PERSIST_BEGUN, self._persist_count)
        yield from self._excluded(life)

    def _excluded(self, life: BrokerLife) -> Iterator[Event]:
        """Yield the acked entries that the limit on ranges excludes from the record just begun."""
        kept, most = self._deleted, life.limits.range_count_max
        if most is not None and (kept.range_count > most or (life.form is RangeForm.WORDS and len(kept) > most)):
            kept = limit_ranges(kept, form=life.form, limits=life.limits).kept
        self._latest = _Contents(self._mark_delete, kept.copy())
        if kept is not self._deleted:
            cut = self._deleted.copy()
            cut.difference_update(kept)
            displaced = cut.copy()
            cut.difference_update(self._durable.ranges)
            displaced.difference_update(cut)
            yield from _named(EventKind.CUT_OFF, cut)
            yield from _named(EventKind.DISPLACED, displaced)

    def _written(self, record: Position, mark_delete: Position | None = None) -> Iterator[Event]:
        """Yield the end of a persist if its record was written, with this mark-delete position if that is known."""
        if self._persist is None or record < self._persist[1]:
            return
        if mark_delete is not None and mark_delete < self._latest.mark_delete:
            yield from self._corrected(max(mark_delete, self._durable.mark_delete))
        yield _persist(EventKind.PERSIST_ENDED, self._persist_count)
        self._persist, self._durable = None, self._latest

    def _corrected(self, mark_delete: Position) -> Iterator[Event]:
        """Yield that the persist under way has an older mark-delete position than the cursor had at its start.

        The first record of a ledger has the position before the ledger was created, and the ranges after that.
        """
        self._latest = self._latest._replace(mark_delete=mark_delete)
        left = self._acked - self._entries_up_to(mark_delete) - EntrySet.of(self._latest.ranges.runs())
        new = left - EntrySet.of(self._durable.ranges.runs())
        yield _persist(EventKind.PERSIST_FAILED, self._persist_count)
        self._persist_count += 1
        yield _persist(EventKind.PERSIST_BEGUN, self._persist_count)
        yield from _named(EventKind.HELD_BACK, new)
        yield from _named(EventKind.DISPLACED, left - new)

    def _opened(self, event: BrokerEvent) -> Iterator[Event]:
        """Yield the events that the opening of the cursor by another process shows."""
        assert event.mark_delete is not None
        found = self._state(event)
        lost = len(self._acked - found)
        if self._life is not None and not self._has_crashed:
            if lost:
                yield Event(self._died_ms(), EventKind.CRASH)
            else:
                # Closed in order: everything was written.
                yield from self._written(self._record)
                self._persist_count += 1
                yield _persist(EventKind.PERSIST_BEGUN, self._persist_count)
                yield _persist(EventKind.PERSIST_ENDED, self._persist_count)
        if self._life is not None or len(found):
            yield from self._moved(EventKind.RECOVER, found)
        self._take(found, event.mark_delete)

    def _reset(self, event: BrokerEvent) -> Iterator[Event]:
        """Yield the events that the state after a seek shows; the seek has made it durable."""
        assert event.mark_delete is not None
        found = self._state(event)
        yield from self._written(self._record)
        yield from self._moved(EventKind.RESET, found)
        self._take(found, event.mark_delete)

    def _moved(self, kind: EventKind, found: EntrySet) -> Iterator[Event]:
        yield from list(_named(kind, found - self._acked)) or [Event(_OF_LINE, kind)]
        yield from _named(EventKind.REDELIVER, self._acked - found)

    def _take(self, found: EntrySet, mark_delete: Position) -> None:
        self._acked, self._persist = found, None
        self._record, self._seen = NO_RECORD, (NO_RECORD, None)
        self._deleted = DeletedRanges()
        for ledger_id, first, end in found.runs():
            self._deleted.add_run(ledger_id, first, end)
        self._advance(mark_delete)
        self._latest = self._durable = _Contents(self._mark_delete, self._deleted.copy())
        self._is_dirty = self._has_crashed = self._is_reset = False
        self._partly.clear()

    def _state(self, event: BrokerEvent) -> EntrySet:
        assert event.mark_delete is not None
        found = self._entries_up_to(event.mark_delete)
        for lower, upper in event.deleted or ():
            for ledger_id in {lower.ledger_id, upper.ledger_id}:
                first = lower.entry_id + 1 if ledger_id == lower.ledger_id else 0
                end = upper.entry_id if ledger_id == upper.ledger_id else self._ledgers.get(ledger_id, -1)
                found.add_run(ledger_id, first, end + 1)
        return found

    def _entries_up_to(self, mark_delete: Position) -> EntrySet:
        """Return the known entries up to a mark-delete position, included."""
        found = EntrySet()
        for ledger_id, last in self._ledgers.items():
            if ledger_id <= mark_delete.ledger_id:
                end = mark_delete.entry_id if ledger_id == mark_delete.ledger_id else last
                found.add_run(ledger_id, 0, end + 1)
        return found


def _mask(words: Iterable[int]) -> int:
    return sum((word % 2**_WORD_BITS) << (_WORD_BITS * number) for number, word in enumerate(words))


def _named(kind: EventKind, entries: EntrySet | DeletedRanges) -> Iterator[Event]:
    """Yield an event for each run of entries."""
    return (Event(_OF_LINE, kind, ledger_id, first, end - 1) for ledger_id, first, end in entries.runs())


def _persist(kind: EventKind, number: int) -> Event:
    return Event(_OF_LINE, kind, number=number)
