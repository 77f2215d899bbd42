"""Reads and checks the recorded input of one Pulsar broker until its end, from a line of JSON.

=================  =====================================================================================================
field              meaning
=================  =====================================================================================================
topic              a name
config             keys of ``broker.conf`` that differ from the defaults of 4.2; may be missing
end                ``kill`` (SIGKILL) or ``term`` (SIGTERM)
entries            runs of entries in the order of publishing, ``[ledger, first entry, last entry]``; entry index k is
                   the k-th entry of that list
batch_sizes        messages in each entry; null or missing for 1 each. Message i is the i-th of that concatenation
client_ack_order   numbers of the messages that the client acknowledged
broker_acks_ms     the ACK commands in their order, ``[received, handled, [index | [index, [words]]], type]``: entry
                   indexes; words of the batch ack set, 1 is not acknowledged; type ``Individual`` or ``Cumulative``
cursor_opened_ms   ``[earliest, latest]`` time at which the cursor was opened
broker_up_ms       the same of the broker
cursor_ledger_ms   when the broker logged ``Updated cursor ... with ledger id`` first; null or missing if unknown
t_end_ms           when the signal came
=================  =====================================================================================================

Times are ms of one clock, truncated. Other fields of a line are ignored here.

A cumulative ack is an ack of its last entry and of everything before it; entries listed before the last one are
redundant. The type may be missing from all commands of a line. Then they are read as individual acks and, if all of
them could be cumulative, also as cumulative acks: `RecordedRun.cumulative_commands`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ackstate.analysis.trace.events import TraceError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ackstate.analysis.pulsar.ack_commands import AckState

Made = TypeVar("Made")

ENTRY_COUNT_MAX = 10_000_000
"""A line with more entries is refused before it is expanded."""

_WORD_BITS, _WORDS = 64, range(-(2**63), 2**63)


class End(Enum):
    """How the broker ended."""

    KILL = "kill"
    TERM = "term"


class AckType(Enum):
    """The types of an ACK command, by Pulsar's names."""

    INDIVIDUAL = "Individual"
    """The entries that it lists."""

    CUMULATIVE = "Cumulative"
    """Everything up to the one entry that it lists."""


class Window(NamedTuple):
    """The time of an event in ms: at `first` or later, and before `end`."""

    first: float
    end: float


class Ack(NamedTuple):
    """One entry of an ACK command: the entry, and the words of its unacked messages, if any."""

    entry: int
    unacked_words: tuple[int, ...]


def mask_of(words: Sequence[int]) -> int:
    """Return words, signed or not, as one number: bit 64 * i + j is bit j of word i."""
    return sum((word % 2**_WORD_BITS) << (_WORD_BITS * number) for number, word in enumerate(words))


class AckCommand(NamedTuple):
    """One ACK command: the messages that it acked, and when the broker read its clock for it.

    Attributes:
        when: Between its receipt and the end of its handling.
        acks: The entries that it lists; exactly one if it is cumulative.
        type: The type of the ack.
    """

    when: Window
    acks: tuple[Ack, ...]
    type: AckType = AckType.INDIVIDUAL


class RecordSeen(NamedTuple):
    """A record that a broker was seen to begin in the cursor's ledger.

    Attributes:
        commands_min: It covers at least this number of commands, from the first.
        commands: And at most this number.
        mark_delete: Its mark-delete position; None: that of the last command that it covers.
        is_written: Whether it was seen to be written.
        begun_ms: The latest time at which it was begun.
    """

    commands_min: int
    commands: int
    mark_delete: Position | None
    is_written: bool
    begun_ms: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """See the module for each field; none of them was measured after the broker's end.

    Attributes:
        topic: The name of the topic.
        config: Values as text.
        end: How the broker ended.
        positions: The position of each entry, rising.
        first_messages: Number of each entry's first message, and at the end the number of messages.
        acked_messages: The messages that the client acknowledged.
        commands: In the order in which the broker handled them; individual acks if the line has no types.
        has_ack_types: Whether the line has the type of each command. True if there are no commands.
        cumulative_commands: The same commands if all of them could be cumulative acks. None if the line has types, or
            if a command cannot be cumulative.
        cursor_opened: When the cursor, and so its rate limiter, was created.
        broker_up: When the broker, and so its flush timer, started.
        cursor_ledger: When the first ledger of the cursor could be written; None if unknown.
        ended_ms: When the signal came.
        initial: The state at the opening; None: no entry is acked.
        records: The records that were seen, in order; empty if none was, or if the recording does not show records.
    """

    topic: str
    config: Mapping[str, str]
    end: End
    positions: Sequence[Position]
    first_messages: Sequence[int]
    acked_messages: frozenset[int]
    commands: Sequence[AckCommand]
    has_ack_types: bool
    cumulative_commands: Sequence[AckCommand] | None
    cursor_opened: Window
    broker_up: Window
    cursor_ledger: Window | None
    ended_ms: float
    initial: AckState | None = None
    records: Sequence[RecordSeen] = ()


def for_each_line(path: Path, work: Callable[[str], Made]) -> Iterator[Made]:
    """Yield the result of `work` for each line of a file of runs, except blank lines.

    Raises:
        OSError: The file cannot be read.
        TraceError: The file is damaged or has no run, or `work` raised it: the message then also names the line.
    """
    is_empty = True
    for number, line in enumerate(_lines(path), start=1):
        if not line.isspace():
            is_empty = False
            try:
                yield work(line)
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
    if is_empty:
        raise TraceError(f"{path} has no run: it is empty")


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceError(f"{path} is not a gzip file, or cut short: {error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text in UTF-8: {error}") from None


def parse_run(line: str) -> RecordedRun:
    """Parse a line.

    Raises:
        TraceError: It is not a valid run; the message names the field and, in a list, the element.
    """
    fields = parse_object(line)
    positions = _positions(fields)
    first_messages = list(accumulate(_batch_sizes(fields, len(positions)), initial=0))
    try:
        end = End(_field(fields, "end"))
    except ValueError:
        raise TraceError(f"end must be kill or term, got {fields['end']!r}") from None
    commands, has_ack_types = _commands(fields, first_messages)
    cursor_ledger = fields.get("cursor_ledger_ms")
    return RecordedRun(
        topic=_text(_field(fields, "topic"), "topic"),
        config=_config(fields),
        end=end,
        positions=positions,
        first_messages=first_messages,
        acked_messages=message_numbers(fields, "client_ack_order", first_messages[-1]),
        commands=commands,
        has_ack_types=has_ack_types,
        cumulative_commands=None if has_ack_types else _as_cumulative(commands, first_messages),
        cursor_opened=_window(_field(fields, "cursor_opened_ms"), "cursor_opened_ms"),
        broker_up=_window(_field(fields, "broker_up_ms"), "broker_up_ms"),
        cursor_ledger=None if cursor_ledger is None else _window(cursor_ledger, "cursor_ledger_ms"),
        ended_ms=_time(_field(fields, "t_end_ms"), "t_end_ms"),
    )


def parse_object(line: str) -> dict[str, Any]:
    """Parse a JSON object; raise `TraceError` if the line is not one."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"it is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"a run must be a JSON object, got {_shown(fields)}")
    return fields


def message_numbers(fields: Mapping[str, Any], name: str, message_count: int) -> frozenset[int]:
    """Read a list of distinct message numbers; raise `TraceError` if it is invalid."""
    numbers = _list(_field(fields, name), name)
    for index, number in enumerate(numbers):
        if not _is_whole(number) or not 0 <= number < message_count:
            raise TraceError(f"{name}[{index}] must be a message number below {message_count}, got {_shown(number)}")
    return frozenset(numbers)


def _positions(fields: Mapping[str, Any]) -> list[Position]:
    positions: list[Position] = []
    for index, run in enumerate(_list(_field(fields, "entries"), "entries")):
        name = f"entries[{index}]"
        if len(_list(run, name)) != 3 or not all(map(_is_whole, run)):
            raise TraceError(f"{name} must be [ledger, first entry, last entry], got {_shown(run)}")
        ledger_id, first, last = run
        if not (0 <= ledger_id <= LEDGER_ID_MAX and 0 <= first <= last <= ENTRY_ID_MAX):
            raise TraceError(f"{name} must be a run of entries, got {_shown(run)}")
        if len(positions) + last - first >= ENTRY_COUNT_MAX:
            raise TraceError(f"{name} must have at most {ENTRY_COUNT_MAX} entries")
        if positions and positions[-1] >= (ledger_id, first):
            raise TraceError(f"{name} must start behind {positions[-1]}, got {ledger_id}:{first}")
        positions.extend(Position(ledger_id, entry_id) for entry_id in range(first, last + 1))
    if not positions:
        raise TraceError("entries must not be empty")
    return positions


def _batch_sizes(fields: Mapping[str, Any], entry_count: int) -> list[int]:
    sizes = fields.get("batch_sizes")
    if sizes is None:
        return [1] * entry_count
    if len(_list(sizes, "batch_sizes")) != entry_count:
        raise TraceError(f"batch_sizes must have {entry_count} numbers, one per entry, got {len(sizes)}")
    for index, size in enumerate(sizes):
        if not _is_whole(size) or not 1 <= size <= ENTRY_COUNT_MAX:
            raise TraceError(f"batch_sizes[{index}] must be a number of messages, got {_shown(size)}")
    return list(sizes)


def _config(fields: Mapping[str, Any]) -> dict[str, str]:
    config = fields.get("config", {})
    if not isinstance(config, dict):
        raise TraceError(f"config must be an object, got {_shown(config)}")
    for key, value in config.items():
        if not isinstance(value, str | int | float):
            raise TraceError(f"config.{key} must be text, a number or true or false, got {_shown(value)}")
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in config.items()}


def _commands(fields: Mapping[str, Any], first_messages: Sequence[int]) -> tuple[list[AckCommand], bool]:
    """Return the commands, and whether each has a type: either all of a line have one or none."""
    rows = _list(_field(fields, "broker_acks_ms"), "broker_acks_ms")
    sizes = {len(row) for row in rows if isinstance(row, list)}
    commands = [_command(row, f"broker_acks_ms[{index}]", first_messages) for index, row in enumerate(rows)]
    if len(sizes) > 1:
        raise TraceError("broker_acks_ms must have the ack type of every command or of none")
    return commands, 3 not in sizes


def _command(row: Any, name: str, first_messages: Sequence[int]) -> AckCommand:
    if len(_list(row, name)) not in {3, 4}:
        raise TraceError(f"{name} must be [received, handled, entries, type], got {_shown(row)}")
    when = _window(row[:2], name)
    kind = _ack_type(row[3], f"{name}[3]") if len(row) == 4 else AckType.INDIVIDUAL
    listed = enumerate(_list(row[2], f"{name}[2]"))
    acks = tuple(_ack(ack, f"{name}[2][{index}]", first_messages) for index, ack in listed)
    if kind is AckType.CUMULATIVE:
        if not acks or any(ack.unacked_words or ack.entry >= acks[-1].entry for ack in acks[:-1]):
            raise TraceError(f"{name}[2] must end with the last entry of the cumulative ack, got {_shown(row[2])}")
        acks = acks[-1:]
    return AckCommand(when, acks, kind)


def _ack_type(value: Any, name: str) -> AckType:
    for kind in AckType:
        if isinstance(value, str) and value.lower() == kind.value.lower():
            return kind
    raise TraceError(f"{name} must be Individual or Cumulative, got {_shown(value)}")


def _as_cumulative(commands: Sequence[AckCommand], first_messages: Sequence[int]) -> list[AckCommand] | None:
    """Return the commands as cumulative acks; None if one of them skips an entry below its last."""
    found = []
    acked = 0  # entries, from the first
    for command in commands:
        if not command.acks:
            return None
        *before, last = command.acks
        batch_size = first_messages[last.entry + 1] - first_messages[last.entry]
        if any(ack.unacked_words for ack in before) or not _is_end(mask_of(last.unacked_words), batch_size):
            return None
        if [ack.entry for ack in before] != list(range(acked, last.entry)):
            return None
        acked = max(acked, last.entry + (not last.unacked_words))
        found.append(AckCommand(command.when, (last,), AckType.CUMULATIVE))
    return found


def _is_end(unacked: int, batch_size: int) -> bool:
    """Return whether all messages of a batch, or all before some message, are acked."""
    return unacked in {0, (1 << batch_size) - (unacked & -unacked)}


def _ack(value: Any, name: str, first_messages: Sequence[int]) -> Ack:
    entry, words = (value, []) if not isinstance(value, list) or len(value) != 2 else value
    entry_count = len(first_messages) - 1
    if not _is_whole(entry) or not 0 <= entry < entry_count:
        raise TraceError(f"{name} must be an entry index below {entry_count}, got {_shown(entry)}")
    batch_size = first_messages[entry + 1] - first_messages[entry]
    for number, word in enumerate(_list(words, f"{name}[1]")):
        fits = _is_whole(word) and word in _WORDS
        room = max(batch_size - number * _WORD_BITS, 0)
        # A word is signed, and must not have bits beyond the batch's messages.
        if not fits or (word % 2**_WORD_BITS) >> min(room, _WORD_BITS):
            raise TraceError(f"{name}[1][{number}] must be a word of a batch of {batch_size}, got {_shown(word)}")
    return Ack(entry, tuple(words))


def _window(value: Any, name: str) -> Window:
    if len(_list(value, name)) != 2:
        raise TraceError(f"{name} must be two times, got {_shown(value)}")
    first, last = (_time(time, f"{name}[{index}]") for index, time in enumerate(value))
    if last < first:
        raise TraceError(f"the end of {name} must not be before its begin {first}, got {last}")
    # Times are truncated to whole ms, so the actual last time may be almost a ms later.
    return Window(first, last + 1)


def _time(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53 or not isfinite(value):
        raise TraceError(f"{name} must be a time in ms, got {_shown(value)}")
    return value


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise TraceError(f"the field {name} is missing")
    return fields[name]


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TraceError(f"{name} must be a list, got {_shown(value)}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TraceError(f"{name} must be text, got {_shown(value)}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
