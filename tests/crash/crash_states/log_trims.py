"""Opens every state that a power cut could leave while a message log is published to, trimmed and taken over.

A part of L1: see `crash.crash_states.examination`. The log is in a `FileStore` on a simulated
disk, with one subscription, which acks in order. Each recovery opens the log and its cursor, and reads all messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.oracle import Broken
from ackstate.analysis.crash.promises import Promise, PromiseBrokenError, hold
from ackstate.analysis.crash.simulated_crash import DiskHistory
from ackstate.analysis.crash.simulated_disk import ProcessKilledError, SimulatedDisk
from ackstate.cursor.managed import ManagedCursor
from ackstate.position import Position
from ackstate.topic.log_ownership import log_owner
from ackstate.topic.message_log import Message, MessageLog
from ackstate.topic.retention import Retention, trim_log
from crash.crash_states.moments import broken_by_error
from crash.crash_states.recovery import sample, written
from crash.crash_states.story import Examined, WorkloadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from ackstate.cursor.store import Store
    from ackstate.stores.store_directory import StoreDirectory
    from crash.crash_states.recovery import Files

    OpenStore = Callable[[StoreDirectory], Store]

_TOPIC, _SUBSCRIPTION = "t", "s"
_STEPS = 12
_CRASHES_AGAIN_ONE_IN = 20


class LogStepKind(Enum):
    """The kinds of steps; the values are the texts of a story."""

    PUBLISH = "publish"
    ACK = "ack up to message"
    PERSIST = "persist"
    TRIM = "trim"
    REOPEN = "open again"
    KILL = "be killed during a publish and a trim, after calls of the disk:"


class LogStep(NamedTuple):
    """One step; the number is that of messages, of the last acked message, or of calls, and has no meaning else."""

    kind: LogStepKind
    number: int

    def __str__(self) -> str:
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
    """The workload of one run.

    Attributes:
        entries_per_ledger_max: As for `MessageLog.open`.
        steps: In order.
    """

    entries_per_ledger_max: int
    steps: tuple[LogStep, ...]

    def story(self) -> Iterator[str]:
        """Yield the workload as lines."""
        yield f"a message log with {self.entries_per_ledger_max} entries a ledger"
        for number, step in enumerate(self.steps, start=1):
            yield f"{number}. {step}"


def draw_log_workload(random: Random) -> LogWorkload:
    """Return a random workload."""
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=_STEPS)
    steps = []
    for kind in kinds:
        most = {LogStepKind.PUBLISH: 3, LogStepKind.KILL: 12}.get(kind, 20)
        steps.append(LogStep(kind, random.randint(1, most)))
    return LogWorkload(random.choice((1, 2, 4)), tuple(steps))


@dataclass(frozen=True, slots=True)
class _KnownEntries:
    """The promises at one moment.

    Attributes:
        confirmed: The messages whose publish returned, by position. Each holds its number.
        attempted: How many messages publishes have started to store; they are numbered from 0.
        first_ledger_id: The first ledger that no trim has started to delete.
        trimmed_to: The first ledger that the last trim which returned has left.
        acked_up_to: The mark-delete position that a persist has made durable; None for none.
        acks_begun: The highest one that a persist may have made durable.
    """

    confirmed: dict[Position, int] = field(default_factory=dict)
    attempted: int = 0
    first_ledger_id: int = 0
    trimmed_to: int = 0
    acked_up_to: Position | None = None
    acks_begun: Position | None = None


class _Recovered(NamedTuple):
    """The result of opening one disk."""

    ledger_ids: list[int]
    messages: dict[Position, int]
    mark_delete: Position


class _Moment(NamedTuple):
    """The promises after some calls of the disk, those before and after the step in progress."""

    step: int
    before: _KnownEntries
    after: _KnownEntries


def examine_log(workload: LogWorkload, open_store: OpenStore) -> Examined:
    """Execute a workload on a simulated disk, and check its crash states up to the first that breaks a promise."""
    disk = SimulatedDisk()
    execution = _Execution(workload, disk, open_store)
    failure = None
    try:
        execution.run()
    except Exception as error:  # On a disk without faults no error may escape.
        broken = broken_by_error(error)
        failure = WorkloadFailure(broken, execution.step, (f"recovery: {broken.found}",))
    judge = _Judge(disk, execution.moments, open_store)
    failure = judge.first_failure() or failure
    counts = {"log_workloads": 1, "log_states": judge.judged, "log_recoveries": judge.recoveries}
    return Examined(judge.judged, counts | {"trimmed_ledgers": execution.trimmed_count}, failure)


@final
class _Execution:
    """A workload during its execution.

    Attributes:
        moments: By the number of calls of the disk.
        step: The number of the current step, from 1.
        trimmed_count: How many ledgers trims have deleted.
    """

    def __init__(self, workload: LogWorkload, disk: SimulatedDisk, open_store: OpenStore) -> None:
        self.moments: list[list[_Moment]] = []
        self.step = self.trimmed_count = 0
        self._workload, self._disk, self._open_store = workload, disk, open_store
        self._known = _KnownEntries()

    def run(self) -> None:
        """Open the log, and do all steps of the workload."""
        self._during(self._open)
        for step in self._workload.steps:
            self.step += 1
            self._during(lambda step=step: self._do(step))  # type: ignore[misc]

    def _during(self, call: Callable[[], None]) -> None:
        before, first = self._known, len(self._disk.calls)
        call()
        self.moments += [[] for _ in range(len(self._disk.calls) + 1 - len(self.moments))]
        for made in range(first + 1, len(self._disk.calls) + 1):
            self.moments[made].append(_Moment(self.step, before, self._known))
        self.moments[-1].append(_Moment(self.step, self._known, self._known))

    def _open(self) -> None:
        self._store = self._open_store(self._disk.directory())
        self._log, self._cursor = _opened(self._store, self._workload.entries_per_ledger_max)

    def _do(self, step: LogStep) -> None:
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
                self._disk.kill_after(step.number)
                try:
                    self._publish(2)
                    self._trim()
                except ProcessKilledError:
                    pass
                self._disk.kill()
                self._open()

    def _publish(self, count: int) -> None:
        first = self._known.attempted
        self._known = replace(self._known, attempted=first + count)
        positions = self._log.publish([Message(b"%d" % number) for number in range(first, first + count)])
        confirmed = self._known.confirmed | dict(zip(positions, range(first, first + count), strict=True))
        self._known = replace(self._known, confirmed=confirmed)

    def _ack(self, number: int) -> None:
        positions = sorted(position for position in self._known.confirmed if position in self._log.ledgers)
        position = positions[min(number, len(positions)) - 1] if positions else None
        if position is not None and position > self._cursor.mark_delete_position:
            self._cursor.mark_delete(position, now_ms=0)

    def _persist(self) -> None:
        position = self._cursor.mark_delete_position
        self._known = replace(self._known, acks_begun=position)
        self._cursor.persist(now_ms=0)
        self._known = replace(self._known, acked_up_to=position)

    def _trim(self) -> None:
        ledgers, acked_up_to = self._log.ledgers, self._known.acked_up_to
        target = ledgers.first_ledger_id if acked_up_to is None else ledgers.next_valid(acked_up_to).ledger_id
        self._known = replace(self._known, first_ledger_id=max(target, self._known.first_ledger_id))
        self.trimmed_count += trim_log(self._log, Retention(), {_SUBSCRIPTION: self._cursor}, now_ms=0)
        self._known = replace(self._known, trimmed_to=self._known.first_ledger_id)


def _opened(store: Store, entries_per_ledger_max: int) -> tuple[MessageLog, ManagedCursor]:
    log = MessageLog.open(store, topic=_TOPIC, entries_per_ledger_max=entries_per_ledger_max)
    cursor = ManagedCursor.open(store, topic=_TOPIC, subscription=_SUBSCRIPTION, ledgers=log.ledgers, now_ms=0)
    return log, cursor


@final
class _Judge:
    """Checks every crash state of a disk; each distinct one is opened once."""

    def __init__(self, disk: SimulatedDisk, moments: Sequence[Sequence[_Moment]], open_store: OpenStore) -> None:
        self.judged = self.recoveries = 0
        self._disk, self._moments, self._open_store = disk, moments, open_store
        self._of_files: dict[Files, _Recovered | Broken] = {}
        self._of_content: dict[object, _Recovered] = {}

    def first_failure(self) -> WorkloadFailure | None:
        """Return the first failure."""
        history = DiskHistory(self._disk.start)
        for made, moments in enumerate(self._moments):
            if made:
                history.follow(self._disk.calls[made - 1])
            for state in history.states() if moments else ():
                self.judged += 1
                recovered = self._recover(state.files)
                for moment in moments:
                    broken = recovered if isinstance(recovered, Broken) else _judge(recovered, moment)
                    if broken is not None:
                        told = (f"power cut: {state}", f"recovery: {broken.found}")
                        return WorkloadFailure(broken, moment.step, told)
        return None

    def _recover(self, files: Files, *, crashes_again: bool = True) -> _Recovered | Broken:
        found = self._of_files.get(files)
        if found is None:
            found = self._of_files[files] = self._opened(files, crashes_again=crashes_again)
        return found

    def _opened(self, files: Files, *, crashes_again: bool) -> _Recovered | Broken:
        disk = SimulatedDisk.from_state(files)
        try:
            store = self._open_store(disk.directory())
            # Opening a store discards torn data, after which most disks are equal.
            owned = store.ledgers.owned_by(log_owner(_TOPIC))
            key = written(disk), tuple([(each, store.ledgers.last(each)) for each in owned])
            recovered = self._of_content.get(key)
            if recovered is None:
                self.recoveries += 1
                recovered = self._of_content[key] = _recovered(store)
                if crashes_again and self.recoveries % _CRASHES_AGAIN_ONE_IN == 0:
                    self._check_crashes_of_recovery(disk, recovered)
        except Exception as error:
            return broken_by_error(error)
        finally:
            disk.kill()
        return recovered

    def _check_crashes_of_recovery(self, disk: SimulatedDisk, recovered: _Recovered) -> None:
        for state in sample(disk):
            found = self._recover(state.files, crashes_again=False)
            hold(Promise.I5, found == recovered, f"{found}, after a crash of the recovery that left: {state}")


def _recovered(store: Store) -> _Recovered:
    log, cursor = _opened(store, 1)
    ledger_ids, owned = list(log.ledgers), list(store.ledgers.owned_by(log_owner(_TOPIC)))
    hold(Promise.I11, owned == ledger_ids, f"the store has ledgers {owned}, the log {ledger_ids}")
    positions = [Position(each, entry) for each, count in log.ledgers.counts().items() for entry in range(count)]
    numbers = [int(message.payload) for message in log.read(positions)]
    return _Recovered(ledger_ids, dict(zip(positions, numbers, strict=True)), cursor.mark_delete_position)


def _judge(recovered: _Recovered, moment: _Moment) -> Broken | None:
    """Return the first promise that a recovery broke, None if it kept all."""
    try:
        _check(recovered, moment.before, moment.after)
    except PromiseBrokenError as error:
        return Broken(error.promise, error.found, error.entry_count)
    return None


def _check(recovered: _Recovered, before: _KnownEntries, after: _KnownEntries) -> None:
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
