"""A broker that lost its topic and continues to publish: its promises count until the takeover, and not after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.store import StoreError
from ackstate.errors import CursorFencedError
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic.message_log import Message, MessageLog
from crash.model.client_events import append

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.cursor.store import Store
    from ackstate.stores.memory import MemoryDisk
    from crash.model.simulation import BrokerSimulation


@final
class EarlierLog:
    """A message log that was open when its broker died, with the store of that broker.

    Args:
        simulation: The simulation of its log, just before the log is opened again.
        race_count_max: Most publishes of the earlier owner while the next one opens the log.
    """

    def __init__(self, simulation: BrokerSimulation, *, race_count_max: int) -> None:
        self._schedule = simulation
        self._log, self._store = simulation.message_log, simulation.log_store
        # Separate sources, so that other events do not change.
        self._random = simulation.random_of(f"log {simulation.step_count}")
        self._race_count = self._random.choice((0, *range(race_count_max + 1)))
        self._steps = simulation.random_of(f"log steps {simulation.step_count}")
        self._is_slow = self._race_count > 0 and self._steps.random() < 0.2

    def race(self) -> None:
        """Publish occasionally while the next owner opens the log: each position is a promise to a producer."""
        if self._race_count and self._random.random() < 0.5:
            self._race_count -= 1
            self._publish(self._messages())

    def be_taken_over(self, take_over: Callable[[], MessageLog]) -> MessageLog:
        """Take the log over, mostly during the calls of the store that a publish of this owner makes, if it is slow."""
        taken: list[MessageLog] = []
        calls_before = self._steps.randrange(6)

        def before_call() -> None:
            nonlocal calls_before
            calls_before -= 1
            if calls_before < 0 and not taken:
                taken.append(take_over())

        if self._is_slow:
            log, ownership = self._log, self._log._ownership
            assert ownership is not None
            store: Any = log.store
            log.store = ownership._store = _RacedStore(store, before_call)
            self._race_count = 0
            try:
                self._publish(self._messages())
            finally:
                log.store = ownership._store = store
        return taken[0] if taken else take_over()

    def _publish(self, messages: Sequence[Message]) -> None:
        """Publish, sometimes with an unknown outcome of a step that begins a ledger."""
        log, schedule, store = self._log, self._schedule, self._store
        ownership = log._ownership
        assert ownership is not None
        if not log.has_room_for(len(messages)) and ownership._created is None and self._steps.random() < 0.25:
            # Not of the append: the messages would be in the log, and no one would know.
            ahead = self._steps.randrange(2 if ownership._open_ledger_id is None else 3)
            schedule.note(f"[FAIL_AFTER at write {ahead} of the owner before]")
            store.inject(Fault(store.mutation_count + ahead, FaultKind.FAIL_AFTER))
        schedule.note("the owner before publishes")
        try:
            append(schedule, messages, log=log)
        except (CursorFencedError, StoreError) as error:
            schedule.note(f"-> {error}")
        else:
            schedule.counts["published_in_a_race"] += 1
        finally:
            store.forget_faults()

    def end_race(self) -> None:
        """Publish once more, and from then on only in `go_on`."""
        self.race()
        self._race_count = 0

    def go_on(self, disk: MemoryDisk) -> None:
        """Publish after the next owner has opened the log.

        Raises:
            PromiseBrokenError: A publish succeeds, or changes the store.
        """
        before, messages = _stored(disk), self._messages()
        self._schedule.note(f"the owner before publishes {len(messages)} messages")
        try:
            self._log.publish(messages)
        except CursorFencedError:
            self._schedule.counts["fenced_publishes"] += 1
        else:
            hold(Promise.I14, False, "a publish of an earlier owner ended well")
        hold(Promise.I14, _stored(disk) == before, "a publish of an earlier owner changed the log")

    def _messages(self) -> list[Message]:
        """Return messages for the open ledger, or enough messages to require the next ledger."""
        count = self._random.choice((1, 3, self._schedule.settings.entries_per_ledger_max))
        return [Message(b"", publish_time_ms=self._schedule.now_ms)] * min(count, self._schedule.settings.count_max)


def open_log(simulation: BrokerSimulation, store: Store, *, rival: EarlierLog | None) -> MessageLog:
    """Open a topic's log, and check that it has every message whose position a producer received.

    Args:
        simulation: The simulation of the log.
        store: The store.
        rival: The previous owner, which publishes meanwhile.

    Raises:
        PromiseBrokenError: A message is missing.
    """
    limit = simulation.settings.entries_per_ledger_max
    if rival is None:
        return MessageLog.open(store, topic="t", entries_per_ledger_max=limit)
    raced = _RacedStore(store, rival.race)
    log = rival.be_taken_over(lambda: MessageLog.open(raced, topic="t", entries_per_ledger_max=limit))
    rival.end_race()
    numbered = simulation.log
    missing = [number for number in numbered.kept if numbered.positions[number] not in log.ledgers]
    hold(Promise.I12, not missing, f"published, and not in the log: {simulation.log.text(missing)}")
    return log


def _stored(disk: MemoryDisk) -> dict[int, int]:
    return {ledger_id: len(ledger.entries) for ledger_id, ledger in disk.ledgers.items()}


@final
class _RacedStore:
    """A store that runs another owner before each of its calls."""

    def __init__(self, store: Store, race: Callable[[], None]) -> None:
        self.ledgers: Any = _RacedPart(store.ledgers, race)
        self.metadata: Any = _RacedPart(store.metadata, race)
        self.close = store.close


@final
class _RacedPart:
    def __init__(self, part: Any, race: Callable[[], None]) -> None:
        self._part, self._race = part, race

    def __getattr__(self, name: str) -> Any:
        self._race()
        return getattr(self._part, name)
