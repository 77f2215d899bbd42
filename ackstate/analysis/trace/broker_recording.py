"""Reads the files of the broker interceptor in `interceptor/`.

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
"""

from __future__ import annotations

import heapq
import json
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.trace.entry_set import EntrySet
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.rows import TEXT_BYTES_MAX
from ackstate.analysis.trace.times import WALL_CLOCK_MS
from ackstate.errors import UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


FORMAT = "ackstate broker recording"
VERSION = 1
LEDGER_ENTRIES_MAX = 1 << 24
"""A run with more entries is refused before it is expanded."""
BATCH_MAX = 1 << 20
_WORDS_MAX = BATCH_MAX // 64
_RANGE = re.compile(r"\((\d+):(-?\d+)\.\.(\d+):(\d+)\]")


class LedgerEntries(NamedTuple):
    """Entries of a ledger, both ends included; of one entry, the words of its unacked messages, if any."""

    ledger_id: int
    first: int
    last: int
    unacked_words: tuple[int, ...] = ()


class RecordId(NamedTuple):
    """A record in a cursor's ledger; both are -1 if the cursor has none."""

    ledger_id: int
    entry_id: int


NO_RECORD = RecordId(-1, -1)


class BrokerLife(NamedTuple):
    """One process of a broker."""

    name: str  # Unique
    broker: str  # Its address
    config: Mapping[str, str]  # Keys of ``broker.conf``.


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

    def time(self, name: str) -> int:
        """Return a field that is a time."""
        return self.number(name, WALL_CLOCK_MS.start, WALL_CLOCK_MS.stop - 1)

    def record(self, name: str) -> RecordId:
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
        return BrokerLife(self.text("life"), self.text("broker"), config)

    def _value(self, name: str) -> Any:
        if name not in self._found:
            raise TraceError(f"the field {name} is missing")
        return self._found[name]


def record_of(ledger_id: int, entry_id: int) -> RecordId:
    """Return a record; a ledger without entries has none."""
    return RecordId(ledger_id, entry_id) if min(ledger_id, entry_id) >= 0 else NO_RECORD


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
_READ_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
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
    before: RecordId = NO_RECORD  # The last record begun when an ack was received
    after: RecordId = NO_RECORD  # The same when it had been handled; of a look, the last record begun
    written: RecordId = NO_RECORD  # Of a look, the last record certainly written
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
        ts_ms = fields.time("ts_ms")
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
    """Yield the whole lines of a file, compressed or not; an incomplete last line is left out."""
    rest = b""
    size = 0
    number = 1
    for data in _blocks(path):
        size += len(data)
        if size > text_bytes_max:
            raise TraceError(f"{path}: more than {text_bytes_max} bytes of text; --text-bytes-max allows more")
        *lines, rest = (rest + data).split(b"\n")
        number += len(lines)
        yield from lines
        if len(rest) > _LINE_BYTES_MAX:
            raise TraceError(f"{path}, line {number}: longer than {_LINE_BYTES_MAX >> 20} MiB")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as opened:
        data = opened.read(_READ_BYTES)
        if data[:2] != _GZIP:
            while data:
                yield data
                data = opened.read(_READ_BYTES)
            return
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while data:
            try:
                yield unpacker.decompress(data, _READ_BYTES)
            except zlib.error as error:
                raise TraceError(f"{path}: the gzip file is damaged: {error}") from None
            if unpacker.eof:
                return
            data = unpacker.unconsumed_tail or opened.read(_READ_BYTES)
