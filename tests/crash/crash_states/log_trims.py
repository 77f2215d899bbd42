"""Opens every state that a power cut could leave while a message log is published to, trimmed and taken over.

A part of L1: see `crash.crash_states.examination`. The log has one subscription, which acks in order. Each recovery
opens the log and its cursor, and reads all messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from ackstate.analysis.crash.oracle import Broken, Promise
from ackstate.cursor.cursor import ManagedCursor
from ackstate.message import Message
from ackstate.position import Position
from ackstate.topic.log import MessageLog, log_owner
from ackstate.topic.retention import Retention, trim_log
from crash.crash_states.examination import WorkloadRun
from crash.crash_states.sqlite import ProcessKilledError, broken_by_error
from crash.promises import PromiseBrokenError, hold

_TOPIC, _SUBSCRIPTION = "t", "s"
_STEPS = 12


class LogStepKind(Enum):
    """The kinds of steps; the values are the texts of a story."""

    PUBLISH = "publish"
    ACK = "ack up to message"
    PERSIST = "persist"
    TRIM = "trim"
    REOPEN = "open again"
    KILL = "be killed during a publish and a trim, after calls of the store:"


class LogStep(NamedTuple):
    """One step; the number is that of messages, of the last acked message, or of calls, and has no meaning else."""

    kind: LogStepKind
    number: int

    def __str__(self):
        is_plain = self.kind in {LogStepKind.PERSIST, LogStepKind.TRIM, LogStepKind.REOPEN}
        return self.kind.value if is_plain else f"{self.kind.value} {self.number}"


_WEIGHTS = {
    LogStepKind.PUBLISH: 6,
    LogStepKind.ACK: 4,
    LogStepKind.PERSIST: 3,
    LogStepKind.TRIM: 3,
    LogStepKind.REOPEN: 1,
    LogStepKind.KILL: 1.5,
}


@dataclass(frozen=True, slots=True)
class LogWorkload:
    """The workload of one run."""

    entries_per_ledger_max: int  # As for `MessageLog.open`
    steps: tuple[LogStep, ...]  # In order

    def on(self, storage):
        return _Execution(self, storage)

    def story(self):
        yield f"a message log with {self.entries_per_ledger_max} entries a ledger"
        for number, step in enumerate(self.steps, start=1):
            yield f"{number}. {step}"


def draw_log_workload(random):
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=_STEPS)
    steps = []
    for kind in kinds:
        most = {LogStepKind.PUBLISH: 3, LogStepKind.KILL: 5}.get(kind, 20)
        steps.append(LogStep(kind, random.randint(1, most)))
    return LogWorkload(random.choice((1, 2, 4)), tuple(steps))


@dataclass(frozen=True, slots=True)
class _KnownEntries:
    """The promises at one moment."""

    # The messages whose publish returned, by position. Each holds its number
    confirmed: dict[Position, int] = field(default_factory=dict)
    attempted: int = 0  # How many messages publishes have started to store; they are numbered from 0
    first_ledger_id: int = 0  # The first ledger that no trim has started to delete
    trimmed_to: int = 0  # The first ledger that the last trim which returned has left
    acked_up_to: Position | None = None  # The mark-delete position that a persist has made durable; None for none
    acks_begun: Position | None = None  # The highest one that a persist may have made durable


class _Recovered(NamedTuple):
    """The result of opening one disk."""

    ledger_ids: list[int]
    messages: dict[Position, int]
    mark_delete: Position


class _Execution(WorkloadRun):
    def __init__(self, workload, storage):
        super().__init__(workload, storage)
        self.counts["log_workloads"] = 1
        self._known = _KnownEntries()

    def begin(self):
        with self.noted():
            self._open()

    def do(self, step):
        with self.noted():
            self._do(step)

    def promised(self):
        return self._known

    @staticmethod
    def recover(store):
        log, cursor = _opened(store, 1)
        ledger_ids, owned = list(log.ledgers), list(store.ledgers.owned_by(log_owner(_TOPIC)))
        hold(Promise.I11, owned == ledger_ids, f"the store has ledgers {owned}, the log {ledger_ids}")
        positions = [Position(each, entry) for each, count in log.ledgers.counts().items() for entry in range(count)]
        numbers = [int(message.payload) for message in log.read(positions)]
        return _Recovered(ledger_ids, dict(zip(positions, numbers, strict=True)), cursor.mark_delete_position)

    @staticmethod
    def differing(first, again):
        return None if first == again else Broken(Promise.I5, f"first {first}, then {again}")

    @staticmethod
    def judge(recovered, promised, **_):
        """Return the first promise that a recovery broke, None if it kept all."""
        try:
            _check(recovered, promised[0], promised[-1])
        except PromiseBrokenError as error:
            return broken_by_error(error)
        return None

    def _open(self):
        self._store = self.storage.open()
        self._log, self._cursor = _opened(self._store, self.workload.entries_per_ledger_max)

    def _do(self, step):
        match step.kind:
            case LogStepKind.PUBLISH:
                self._publish(step.number)
            case LogStepKind.ACK:
                self._ack(step.number)
            case LogStepKind.PERSIST:
                self._persist()
            case LogStepKind.TRIM:
                self._trim()
            case LogStepKind.REOPEN:
                self._persist()
                self._cursor.close(now_ms=0)
                self._store.close()
                self._open()
            case LogStepKind.KILL:
                self.storage.kill_after(step.number)
                try:
                    self._publish(2)
                    self._trim()
                except ProcessKilledError:
                    pass
                self.storage.kill()
                self._open()

    def _publish(self, count):
        first = self._known.attempted
        self._known = replace(self._known, attempted=first + count)
        positions = self._log.publish([Message(b"%d" % number) for number in range(first, first + count)])
        confirmed = self._known.confirmed | dict(zip(positions, range(first, first + count), strict=True))
        self._known = replace(self._known, confirmed=confirmed)

    def _ack(self, number):
        positions = sorted(position for position in self._known.confirmed if position in self._log.ledgers)
        position = positions[min(number, len(positions)) - 1] if positions else None
        if position is not None and position > self._cursor.mark_delete_position:
            self._cursor.mark_delete(position, now_ms=0)

    def _persist(self):
        position = self._cursor.mark_delete_position
        self._known = replace(self._known, acks_begun=position)
        self._cursor.persist(now_ms=0)
        self._known = replace(self._known, acked_up_to=position)

    def _trim(self):
        ledgers, acked_up_to = self._log.ledgers, self._known.acked_up_to
        target = ledgers.first_ledger_id if acked_up_to is None else ledgers.next_valid(acked_up_to).ledger_id
        self._known = replace(self._known, first_ledger_id=max(target, self._known.first_ledger_id))
        self.counts["trimmed_ledgers"] += trim_log(self._log, Retention(), {_SUBSCRIPTION: self._cursor}, now_ms=0)
        self._known = replace(self._known, trimmed_to=self._known.first_ledger_id)


def _opened(store, entries_per_ledger_max):
    log = MessageLog.open(store, topic=_TOPIC, entries_per_ledger_max=entries_per_ledger_max)
    cursor = ManagedCursor.open(store, topic=_TOPIC, subscription=_SUBSCRIPTION, ledgers=log.ledgers, now_ms=0)
    return log, cursor


def _check(recovered, before, after):
    first = recovered.ledger_ids[0]
    hold(Promise.I11, first >= before.trimmed_to, f"the log begins with ledger {first}, trimmed to {before.trimmed_to}")
    for position, number in before.confirmed.items():
        if position.ledger_id >= after.first_ledger_id:
            found = recovered.messages.get(position)
            hold(Promise.I12, found == number, f"{position} was message {number}, and is {found}")
    numbers = list(recovered.messages.values())
    is_plain = numbers == sorted({number for number in numbers if number < after.attempted})
    hold(Promise.I12, is_plain, f"the messages are {numbers}, and {after.attempted} were published")
    if before.acked_up_to is not None and before.acked_up_to.ledger_id >= first:
        found_up_to = recovered.mark_delete
        hold(Promise.I7, found_up_to >= before.acked_up_to, f"acked up to {found_up_to}, was {before.acked_up_to}")
    unacked = [position for position in recovered.messages if position <= recovered.mark_delete]
    is_acked = not unacked or (after.acks_begun is not None and unacked[-1] <= after.acks_begun)
    hold(Promise.I1, is_acked, f"acked up to {recovered.mark_delete}, and persisted up to {after.acks_begun}")
