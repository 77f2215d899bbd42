"""Brokers that lost a topic or a cursor and have not noticed: what they do counts until the takeover alone."""

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.results import PersistTarget
from ackstate.errors import CursorFencedError
from ackstate.message import Message
from ackstate.stores.base import StoreError
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic.log import MessageLog
from crash.model.client_events import append
from crash.promises import hold
from wrapped_store import WrappedStore


class EarlierLog:
    """A message log that was open when its broker died, with the store of that broker."""

    def __init__(self, simulation, *, race_count_max):
        self._schedule = simulation
        self._log, self._store = simulation.message_log, simulation.log_store
        # Separate sources, so that other events do not change.
        self._random = simulation.random_of(f"log {simulation.step_count}")
        self._race_count = self._random.choice((0, *range(race_count_max + 1)))
        self._steps = simulation.random_of(f"log steps {simulation.step_count}")
        self._is_slow = self._race_count > 0 and self._steps.random() < 0.2

    def race(self):
        """Publish occasionally while the next owner opens the log: each position is a promise to a producer."""
        if self._race_count and self._random.random() < 0.5:
            self._race_count -= 1
            self._publish(self._messages())

    def be_taken_over(self, take_over):
        """Take the log over, mostly during the calls of the store that a publish of this owner makes, if it is slow."""
        taken = []
        calls_before = self._steps.randrange(6)

        def before_call():
            nonlocal calls_before
            calls_before -= 1
            if calls_before < 0 and not taken:
                taken.append(take_over())

        if self._is_slow:
            log, ownership = self._log, self._log._ownership
            assert ownership is not None
            store = log.store
            log.store = ownership._store = _raced(store, before_call)
            self._race_count = 0
            try:
                self._publish(self._messages())
            finally:
                log.store = ownership._store = store
        return taken[0] if taken else take_over()

    def _publish(self, messages):
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

    def end_race(self):
        """Publish once more, and from then on only in `go_on`."""
        self.race()
        self._race_count = 0

    def go_on(self, disk):
        before, messages = _stored(disk), self._messages()
        self._schedule.note(f"the owner before publishes {len(messages)} messages")
        try:
            self._log.publish(messages)
        except CursorFencedError:
            self._schedule.counts["fenced_publishes"] += 1
        else:
            hold(Promise.I14, False, "a publish of an earlier owner ended well")
        hold(Promise.I14, _stored(disk) == before, "a publish of an earlier owner changed the log")

    def _messages(self):
        count = self._random.choice((1, 3, self._schedule.settings.entries_per_ledger_max))
        return [Message(b"", publish_time_ms=self._schedule.now_ms)] * min(count, self._schedule.settings.count_max)


def open_log(simulation, store, *, rival):
    limit = simulation.settings.entries_per_ledger_max
    if rival is None:
        return MessageLog.open(store, topic="t", entries_per_ledger_max=limit)
    raced = _raced(store, rival.race)
    log = rival.be_taken_over(lambda: MessageLog.open(raced, topic="t", entries_per_ledger_max=limit))
    rival.end_race()
    numbered = simulation.log
    missing = [number for number in numbered.kept if numbered.positions[number] not in log.ledgers]
    hold(Promise.I12, not missing, f"published, and not in the log: {simulation.log.text(missing)}")
    return log


def _stored(disk):
    return {ledger_id: len(ledger.entries) for ledger_id, ledger in disk.ledgers.items()}


def _raced(store, race):
    """Return a store that runs another owner before each of its calls."""

    def race_first(_, call):
        race()
        return call

    return WrappedStore(store, race_first)


_ACKS_MAX = 3


class EarlierOwner:
    """A cursor that was open when its broker died, with the store of that broker."""

    def __init__(self, side, *, race_count):
        self.cursor = side.cursor
        self.store = side.store
        self.race_count = race_count
        self._log_end = len(side.simulation.log)  # it no longer sees the log grow
        # After a deletion its broker lives on, and trims entries that this owner has not acked.
        self._ledgers = side.simulation.message_log.ledgers
        self.cursor.remove_listener(side)
        self.store.forget_faults()

    def race(self, side):
        """Ack and persist while the next owner opens the cursor, which must have all successful acks."""
        if not self.race_count or self.store.is_over:
            return
        self.race_count -= 1
        receipts = self._ack(side)
        side.model.ack(list(receipts))
        try:
            result = self.cursor.persist(now_ms=side.simulation.now_ms)
        except (StoreError, CursorFencedError) as error:
            side.simulation.note(f"{side.name} before: -> {error}")
            side.is_certain = side.left_ledgers_clean = False
            return
        side.simulation.note(f"{side.name} before: persists", receipts)
        if result.route is not PersistTarget.NOTHING:
            side.simulation.counts["raced"] += 1
            side.wrote_before()
        for number, receipt in receipts.items():
            is_lie = self.cursor.durable(receipt) and number not in side.model.durable
            hold(Promise.I2, not is_lie, f"the receipt of {side.simulation.log.positions[number]} lied")

    def go_on(self, side):
        """Act as an owner after the next one has opened the cursor: no action may count."""
        if self.store.is_over:
            return
        simulation, cursor = side.simulation, self.cursor
        before, receipts = side.written.raw(), self._ack(side)
        simulation.note("the owner before continues", receipts)
        acts = [
            lambda: cursor.persist(now_ms=simulation.now_ms) if cursor.view.is_dirty else self._refused(),
            lambda: cursor.set_cursor_properties({"owner": "before"}),
            lambda: cursor.tick(now_ms=simulation.now_ms) or self._refused(),
            lambda: (
                cursor.reset(simulation.log.positions[0], now_ms=simulation.now_ms) if receipts else self._refused()
            ),
        ]
        simulation.random.shuffle(acts)
        for act in acts[:3]:
            self._must_fail(side, act)
            hold(Promise.I14, side.written.raw() == before, "an earlier owner changed the durable state")
        for number, receipt in receipts.items():
            found = f"{simulation.log.positions[number]} is durable, says an earlier owner"
            hold(Promise.I14, not cursor.durable(receipt), found)

    def _must_fail(self, side, act):
        try:
            act()
        except CursorFencedError:
            side.simulation.counts["fenced"] += 1
        except StoreError as error:
            side.simulation.note(f"-> {error}")
        else:
            hold(Promise.I14, False, "a write of an earlier owner ended well")

    def _refused(self):
        raise StoreError("there was nothing to do")

    def _ack(self, side):
        simulation, positions = side.simulation, side.simulation.log.positions
        known = [number for number in range(self._log_end) if positions[number] in self._ledgers]
        numbers = [number for number in known if not self.cursor.is_acked(positions[number])]
        numbers = simulation.random.sample(numbers, min(len(numbers), simulation.random.randint(1, _ACKS_MAX)))
        return {number: self.cursor.ack(positions[number], now_ms=simulation.now_ms) for number in numbers}
