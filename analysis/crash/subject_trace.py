"""What a subject was asked and said, as a trace: `ackstate trace` and `ackstate redelivery` read it like a broker's.

A trace says that a persist covers every ack before it began; a subject says which operations are durable, afterwards.
So a persist is put after the longest run of first operations, in the order in which they were accepted, of which all
are durable: it never covers more than was said. It ends when that was said. Where that beginning would be before the
end of the persist before it, because the subject's persists overlap or report out of order, the earlier one is left out
and the later one ends for both: persists follow one another in a trace, and one promises rather later than too much.

A subject is judged by what it recovers, but a trace by what it says of the time before. So an operation that was
recovered counts as accepted, heard or not, and if the first operations that were recovered are more than were said to
be durable, a persist had begun that covers those and was under way when the process died. It began after the end of the
one before if nothing else had been accepted by then; else that one is left out, as above.
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
    """One life, from its start to what a recovery after its crash holds.

    Attributes:
        log: The number of entries of each ledger, by id in order.
        steps: What was asked and what was said, in order, each with its time, ms since the epoch.
        died_ms: When the process was dead.
        recovered: Every entry that is acked after the recovery.
    """

    log: Mapping[int, int]
    steps: Sequence[tuple[int, Operation | Answer]]
    died_ms: int
    recovered: AckedSet


@final
class SubjectTrace:
    """A recording of lives; each topic is one directory that a subject lived in.

    Args:
        directory: The recording; made if missing, else gone on with.

    Raises:
        OSError: It cannot be written; any call may raise it.
    """

    def __init__(self, directory: Path) -> None:
        self._recorder = Recorder(directory)
        self._accepted: dict[str, AckedSet] = {}
        self._last_ms = 0

    def record(self, topic: str, lived: Lived) -> None:
        """Append a life, its crash and its recovery.

        Args:
            topic: Lives of one topic follow one another: each begins with what the one before has recovered.
            lived: The life.
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
        """Return events whose time never falls, whatever the clock did."""
        times = accumulate((event.ts_ms for event in events), max, initial=self._last_ms)
        timed = [event._replace(ts_ms=ts_ms) for event, ts_ms in zip(events, islice(times, 1, None), strict=True)]
        self._last_ms = timed[-1].ts_ms
        return timed


class _Row(NamedTuple):
    """An operation that was accepted, or the first so many of them having become durable."""

    ts_ms: int
    operation: Operation | None
    durable_count: int = 0


@final
class _Timeline:
    """The operations of one life in the order in which they were accepted, and the persists between them."""

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
        """Yield what happened until the crash."""
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
        """Note an operation that was not noted before; a PERSIST acks nothing."""
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
        """Return the rows after which persists began and ended, one after the other; the last may end never."""
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
        """Return the row after which the persist began that was under way; an earlier one in its way is taken out."""
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
