"""Reads one line of a recording of the broker interceptor, and checks each field when it is read."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.times import WALL_CLOCK_MS
from ackstate.errors import UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """One process of a broker.

    Attributes:
        name: Unique.
        broker: Its address.
        timer_first_ms: The timer that flushes cursors was started at this time or later.
        timer_last_ms: And at this time or earlier.
        config: Keys of ``broker.conf``.
    """

    name: str
    broker: str
    timer_first_ms: int
    timer_last_ms: int
    config: Mapping[str, str]


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
        times = (self.time("timer_first_ms"), self.time("timer_last_ms"))
        return BrokerLife(self.text("life"), self.text("broker"), *times, config)

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
