"""Gathers the recorded run of each subscription and each process from the files of the broker interceptor.

A run of `ackstate.analysis.pulsar.recorded_run` begins when a cursor is opened, or sought, and ends with the process.
Records of the cursor's ledger are attributed to the commands during or before which they were begun.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.pulsar.ack_commands import AckState
from ackstate.analysis.pulsar.recorded_run import (
    ENTRY_COUNT_MAX,
    Ack,
    AckCommand,
    AckType,
    End,
    RecordedRun,
    RecordSeen,
    Window,
    mask_of,
)
from ackstate.analysis.trace.broker_fields import NO_RECORD, BrokerLife, RecordId
from ackstate.analysis.trace.broker_recording import BrokerEvent, read_recording
from ackstate.analysis.trace.events import TraceError
from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_WORD_BITS = 64


class SubscriptionRun(NamedTuple):
    """The run of a subscription in one process of a broker.

    Attributes:
        subscription: Its name.
        run: The run; its messages are numbered in the order of the topic's known entries.
        life: The process.
        dropped: Events that its recorder dropped, of any subscription: if there are some, the run may lack acks.
        is_reset: Whether requests or transactions changed the cursor in ways that the run does not have.
    """

    subscription: str
    run: RecordedRun
    life: BrokerLife
    dropped: int
    is_reset: bool


def broker_runs(files: Sequence[Path]) -> list[SubscriptionRun]:
    """Return the runs of all subscriptions that acked, in the order of their ends.

    The runs of a process that is alive end with its last line.

    Raises:
        TraceError: A file is damaged.
        UnsupportedVersionError: A newer interceptor wrote it.
        OSError: A file cannot be read.

    Memory: all events. Complexity: O(entries) for each subscription and process.
    """
    gathered = _Gathered()
    for event in read_recording(files):
        gathered.take(event)
    return list(gathered.runs())


@final
class _Topic:
    """The entries of a topic: the number of messages of each."""

    def __init__(self) -> None:
        self.messages: dict[Position, int] = {}

    def learn(self, event: BrokerEvent) -> None:
        """Add the entries of an event, with their numbers of messages if it has these."""
        for run in event.entries:
            if len(self.messages) + run.last - run.first >= ENTRY_COUNT_MAX:
                raise TraceError(f"{event.place[0]}, line {event.place[1]}: more than {ENTRY_COUNT_MAX} entries")
            for entry_id in range(run.first, run.last + 1):
                position = Position(run.ledger_id, entry_id)
                if event.kind == "ack":
                    # Of a batch that was published before the recording, the words have a bit for each message.
                    self.messages.setdefault(position, max(1, mask_of(run.unacked_words).bit_length()))
                else:
                    self.messages[position] = event.messages


@final
class _Segment:
    """The events of one cursor since it was opened or sought."""

    def __init__(self, opened: BrokerEvent) -> None:
        self.opened = opened
        self.commands: list[BrokerEvent] = []
        self.looks: list[BrokerEvent] = []
        self.partly: dict[Position, tuple[int, ...]] = {}
        self.touched: set[Position] = set()
        self.is_reset = False

    def take(self, event: BrokerEvent) -> None:
        """Add an event."""
        match event.kind:
            case "ack" if event.ack_type == "Transaction":
                self.is_reset = True
            case "ack":
                self.commands.append(event)
                self.touched.update(Position(run.ledger_id, run.first) for run in event.entries if run.unacked_words)
            case "look":
                self.looks.append(event)
            case "deliver":
                # A batch of which messages were acked when the cursor was opened.
                for run in event.entries:
                    position = Position(run.ledger_id, run.first)
                    if any(run.unacked_words) and position not in self.touched:
                        self.partly.setdefault(position, run.unacked_words)
            case "seek" | "unsubscribe":
                self.is_reset = True


@final
class _Gathered:
    """Every subscription in every process."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._segments: dict[tuple[str, str, str], _Segment] = {}  # process, topic, subscription
        self._last_ms: dict[str, int] = {}
        self._ended: set[str] = set()
        self._dropped: dict[str, int] = {}
        self._lives: dict[str, BrokerLife] = {}

    def take(self, event: BrokerEvent) -> None:
        """Add an event."""
        life = event.life.name
        self._lives[life] = event.life
        self._last_ms[life] = max(event.ts_ms, self._last_ms.get(life, 0))
        self._dropped[life] = self._dropped.get(life, 0) + event.count
        if event.kind == "end":
            self._ended.add(life)
        if event.subject is None:
            return
        topic = self._topics.setdefault(event.subject.topic, _Topic())
        topic.learn(event)
        if event.subject.subscription:
            key = (life, event.subject.topic, event.subject.subscription)
            segment = self._segments.get(key)
            if segment is None or (event.opened_ms >= 0 and self._is_new(segment, event)):
                segment = self._segments[key] = _Segment(event)
            segment.take(event)

    @staticmethod
    def _is_new(segment: _Segment, event: BrokerEvent) -> bool:
        """Return whether an opening begins a new run: another object of the cursor, or the state after a seek."""
        return segment.is_reset or segment.opened.opened_ms != event.opened_ms

    def runs(self) -> Iterator[SubscriptionRun]:
        """Yield the last run of each subscription in each process, the processes in the order of their ends."""
        for key in sorted(self._segments, key=lambda key: (self._last_ms[key[0]], *key)):
            segment = self._segments[key]
            life, topic, subscription = key
            if segment.commands:
                run = self._run(segment, life, topic)
                yield SubscriptionRun(subscription, run, self._lives[life], self._dropped[life], segment.is_reset)

    def _run(self, segment: _Segment, life: str, topic: str) -> RecordedRun:
        messages = self._topics[topic].messages
        initial = _initial(segment, messages)
        # A record may lack entries that were acked before, because of the limit on ranges.
        for deleted in initial.deleted.runs() if initial else ():
            for entry_id in range(deleted.first, deleted.end):
                messages.setdefault(Position(deleted.ledger_id, entry_id), 1)
        positions = sorted(messages)
        index = {position: number for number, position in enumerate(positions)}
        first_messages = list(accumulate((messages[position] for position in positions), initial=0))
        commands = [_command(event, index) for event in segment.commands]
        acked = (*_acked(commands, first_messages), *_acked_before(initial, index, first_messages))
        about, opened = self._lives[life], segment.opened
        opened_ms = opened.opened_ms if opened.opened_ms >= 0 else opened.ts_ms
        return RecordedRun(
            topic=topic,
            config=about.config,
            end=End.TERM if life in self._ended else End.KILL,
            positions=positions,
            first_messages=first_messages,
            acked_messages=frozenset(acked),
            commands=commands,
            has_ack_types=True,
            cumulative_commands=None,
            cursor_opened=Window(opened_ms, opened_ms + 1),
            broker_up=Window(about.timer_first_ms, about.timer_last_ms + 1),
            cursor_ledger=None,
            ended_ms=self._last_ms[life],
            initial=initial,
            records=_records(segment),
        )


def _command(event: BrokerEvent, index: dict[Position, int]) -> AckCommand:
    received_ms = event.received_ms if 0 <= event.received_ms <= event.ts_ms else event.ts_ms
    acks = tuple(
        Ack(index[Position(run.ledger_id, entry_id)], run.unacked_words if any(run.unacked_words) else ())
        for run in event.entries
        for entry_id in range(run.first, run.last + 1)
    )
    kind = AckType(event.ack_type)
    return AckCommand(Window(received_ms, event.ts_ms + 1), acks[-1:] if kind is AckType.CUMULATIVE else acks, kind)


def _acked(commands: Sequence[AckCommand], first_messages: Sequence[int]) -> Iterator[int]:
    """Yield the messages that the client acked."""
    end = 0  # of the cumulative acks
    for command in commands:
        for entry, words in command.acks:
            first, last = first_messages[entry], first_messages[entry + 1]
            unacked = mask_of(words)
            if command.type is AckType.CUMULATIVE:
                yield from range(end, first)
                end = max(end, first)
            yield from (message for message in range(first, last) if not unacked >> (message - first) & 1)


def _acked_before(initial: AckState | None, index: dict[Position, int], first_messages: Sequence[int]) -> Iterator[int]:
    """Yield the messages above the mark-delete position that were acked when the cursor was opened."""
    if initial is None:
        return
    for run in initial.deleted.runs():
        for entry_id in range(run.first, run.end):
            entry = index[Position(run.ledger_id, entry_id)]
            yield from range(first_messages[entry], first_messages[entry + 1])
    for position in initial.batch:
        first, unacked = first_messages[index[position]], mask_of(initial.batch[position])
        end = first_messages[index[position] + 1]
        yield from (message for message in range(first, end) if not unacked >> (message - first) & 1)


def _initial(segment: _Segment, messages: dict[Position, int]) -> AckState | None:
    """Return the state at the opening; None if the recording lacks it."""
    opened = segment.opened
    if opened.mark_delete is None:
        return None
    counts: dict[int, int] = {}
    for position in messages:
        counts[position.ledger_id] = max(counts.get(position.ledger_id, 0), position.entry_id + 1)
    deleted, batch = DeletedRanges(), BatchIndexes()
    for lower, upper in opened.deleted or ():
        if upper.entry_id - max(lower.entry_id, 0) >= ENTRY_COUNT_MAX:
            raise TraceError(f"{opened.place[0]}, line {opened.place[1]}: more than {ENTRY_COUNT_MAX} entries")
        if lower.ledger_id == upper.ledger_id:
            deleted.add_run(lower.ledger_id, lower.entry_id + 1, upper.entry_id + 1)
        else:
            deleted.add_run(lower.ledger_id, lower.entry_id + 1, counts.get(lower.ledger_id, 0))
            deleted.add_run(upper.ledger_id, 0, upper.entry_id + 1)
    for position, words in segment.partly.items():
        batch.ack(position, words)
    return AckState(opened.mark_delete, deleted, batch)


def _records(segment: _Segment) -> list[RecordSeen]:
    """Attribute each record that was seen to the commands that it covers."""
    found: list[tuple[RecordId, int, int, float]] = []  # record, commands at least and at most, time
    highest = NO_RECORD
    for number, event in enumerate(segment.commands):
        if event.before > highest:
            # Begun after the command before this one, or by another thread at its end.
            found.append((event.before, number, number, event.received_ms))
            highest = event.before
        if event.after > highest:
            is_first = event.after.ledger_id != highest.ledger_id
            # The first record of a ledger is begun by another thread, which need not have seen this command.
            found.append((event.after, number + (not is_first), number + 1, event.ts_ms))
            highest = event.after
    for look in segment.looks:
        if look.after > highest:
            count = len(segment.commands)
            found.append((look.after, count, count, look.ts_ms))
            highest = look.after
    return [_seen(segment, *each) for each in found]


def _seen(segment: _Segment, record: RecordId, least: int, most: int, begun_ms: float) -> RecordSeen:
    written = [look for look in segment.looks if look.written >= record]
    exact = next((look for look in written if look.written == record and look.after == record), None)
    return RecordSeen(least, most, None if exact is None else exact.mark_delete, bool(written), begun_ms)
