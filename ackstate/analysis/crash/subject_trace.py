"""The requests and answers of a subject as a trace, for `ackstate trace` and `ackstate redelivery`.

In a trace, a persist covers every ack before its start; a subject reports afterwards which operations are durable. So
a persist is placed after the longest prefix of operations, in order of acceptance, that are all durable: it never
covers more than was reported. It ends at the time of the report. If that start would be before the end of the previous
persist, because persists of the subject overlap or are reported out of order, the earlier one is omitted and the later
one ends for both: persists in a trace do not overlap, and a late promise is safer than an early one.

A subject is judged by its recovered state, but a trace by the operations before. So a recovered operation counts as
accepted even without an answer. If the recovered prefix is longer than the reported one, a persist that covers it was
in progress when the process ended. It started after the end of the previous one if nothing else had been accepted by
then; otherwise the previous one is omitted, as above.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple, Self, final

from ackstate.analysis.crash.acked_set import Numbering
from ackstate.analysis.crash.conversation import Accepted, Durable
from ackstate.analysis.crash.process_run import entries_of
from ackstate.analysis.crash.subject import Operation, OperationKind
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ackstate.analysis.crash.acked_set import AckedSet
    from ackstate.analysis.crash.conversation import Answer

TOPIC_PREFIX = "persistent://crash/"
SUBSCRIPTION = "subject"
_KINDS = {OperationKind.ACK: EventKind.ACK, OperationKind.MARK_DELETE: EventKind.MARK_DELETE}


class Lived(NamedTuple):
    """One process run, from its start to the recovery after its crash.

    Attributes:
        log: The number of entries of each ledger, by id in order.
        steps: The requests and answers in order, each with its time, ms since the epoch.
        died_ms: The time of the end of the process.
        recovered: Every entry that is acked after the recovery.
    """

    log: Mapping[int, int]
    steps: Sequence[tuple[int, Operation | Answer]]
    died_ms: int
    recovered: AckedSet


@final
class SubjectTrace:
    """A recording of process runs; each topic is one directory of a subject.

    Args:
        directory: The recording; created if missing, otherwise continued.

    Raises:
        OSError: It cannot be written; any call may raise it.
    """

    def __init__(self, directory: Path) -> None:
        self._recorder = Recorder(directory)
        self._accepted: dict[str, AckedSet] = {}
        self._last_ms = 0

    def record(self, topic: str, lived: Lived) -> None:
        """Append a process run, its crash and its recovery.

        Args:
            topic: Runs of one topic follow one another: each starts with the state that the previous one recovered.
            lived: The process run.
        """
        timeline = _Timeline(lived)
        accepted = timeline.accepted() | self._accepted.pop(topic, timeline.numbering.nothing)
        again = accepted - lived.recovered
        self._recorder.record(f"{TOPIC_PREFIX}{topic}", SUBSCRIPTION, self._in_time([
            *timeline.events(),
            Event(lived.died_ms, EventKind.CRASH),
            Event(lived.died_ms, EventKind.RECOVER),
            *(Event(lived.died_ms, EventKind.REDELIVER, ledger_id, first, end - 1)
              for ledger_id, first, end in again.runs()),
        ]))  # fmt: skip
        self._accepted[topic] = accepted - again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._recorder.close()

    def _in_time(self, events: Sequence[Event]) -> list[Event]:
        """Return events with times that never decrease, even if the clock did."""
        times = accumulate((event.ts_ms for event in events), max, initial=self._last_ms)
        timed = [event._replace(ts_ms=ts_ms) for event, ts_ms in zip(events, islice(times, 1, None), strict=True)]
        self._last_ms = timed[-1].ts_ms
        return timed


class _Row(NamedTuple):
    """An accepted operation, or a prefix of the operations that became durable."""

    ts_ms: int
    operation: Operation | None
    durable_count: int = 0


@final
class _Timeline:
    """The operations of one process run in order of acceptance, and the persists between them."""

    def __init__(self, lived: Lived) -> None:
        self._lived = lived
        self.numbering = Numbering(lived.log)
        self._rows: list[_Row] = []
        self._positions: list[int] = []  # of the operations in the rows
        self._seen: set[int] = set()
        self._gather()

    def accepted(self) -> AckedSet:
        """Return the entries of every accepted operation."""
        operations = [row.operation for row in self._rows if row.operation is not None]
        return self.numbering.runs(run for operation in operations for run in self._entries(operation).runs())

    def events(self) -> Iterator[Event]:
        """Yield the events until the crash."""
        persists = self._persists()
        begins = {begin: number for number, (begin, _) in enumerate(persists, start=1)}
        ends = {end: number for number, (_, end) in enumerate(persists, start=1)}
        for index, (ts_ms, operation, _) in enumerate(self._rows):
            if operation is not None:
                for ledger_id, first, end in self._entries(operation).runs():
                    yield Event(ts_ms, _KINDS[operation.kind], ledger_id, first, end - 1, 0)
            if index in ends:
                yield Event(ts_ms, EventKind.PERSIST_ENDED, number=ends[index])
            if index in begins:
                yield Event(ts_ms, EventKind.PERSIST_BEGUN, number=begins[index])

    def _gather(self) -> None:
        asked = {step.number: step for _, step in self._lived.steps if isinstance(step, Operation)}
        durable: set[int] = set()
        durable_count = 0
        for ts_ms, step in self._lived.steps:
            match step:
                case Accepted(number):
                    self._accept(ts_ms, asked[number])
                case Durable(numbers):
                    for number in sorted(numbers):
                        self._accept(ts_ms, asked[number])
                    durable.update(numbers)
                    durable_count = self._prefix(durable_count, durable)
                    self._rows.append(_Row(ts_ms, None, durable_count))
        recovered = {number for number, operation in asked.items() if self._is_recovered(operation)}
        for number in sorted(recovered):
            self._accept(self._lived.died_ms, asked[number])
        self._recovered_count = self._prefix(durable_count, recovered | durable)

    def _accept(self, ts_ms: int, operation: Operation) -> None:
        """Record an operation unless it is recorded; a PERSIST acks nothing."""
        if operation.number not in self._seen and operation.kind is not OperationKind.PERSIST:
            self._seen.add(operation.number)
            self._positions.append(len(self._rows))
            self._rows.append(_Row(ts_ms, operation))

    def _prefix(self, durable_count: int, durable: set[int]) -> int:
        """Return how many of the first operations are durable, at least as many as before."""
        for position in self._positions[durable_count:]:
            operation = self._rows[position].operation
            if operation is None or operation.number not in durable:
                break
            durable_count += 1
        return durable_count

    def _persists(self) -> list[tuple[int, int]]:
        """Return the rows after which persists started and ended, in order; the last may have no end."""
        persists: list[tuple[int, int]] = []
        covered = 0
        for index, row in enumerate(self._rows):
            if row.durable_count > covered:
                covered = row.durable_count
                begin = self._positions[covered - 1]
                if persists and begin < persists[-1][1]:
                    persists.pop()
                persists.append((begin, index))
        if self._recovered_count > covered:
            persists.append((self._begin_under_way(persists), len(self._rows)))
        return persists

    def _begin_under_way(self, persists: list[tuple[int, int]]) -> int:
        """Return the row after which the persist in progress started; an earlier one that overlaps it is removed."""
        count = self._recovered_count
        begin = self._positions[count - 1]
        if not persists or begin > persists[-1][1]:
            return begin
        ended = persists[-1][1]
        if all(position > ended for position in self._positions[count : count + 1]):
            return ended
        persists.pop()
        return begin

    def _is_recovered(self, operation: Operation) -> bool:
        own = self._entries(operation)
        return bool(own) and own <= self._lived.recovered

    def _entries(self, operation: Operation) -> AckedSet:
        return entries_of(operation, self.numbering)
