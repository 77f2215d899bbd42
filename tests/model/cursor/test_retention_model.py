"""Trims, crashes and restarts in any order, against plain sets: no message is lost that someone has not acked durably,
and everything that may go is gone."""

from contextlib import suppress
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackstate import LogFencedError, ManagedCursor, MemoryStore, Message, Position, StoreError
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog, Retention, trim_log
from ackstate.topic.log import log_owner

NAMES = st.sampled_from("ab")
ENTRY_BYTES = 16 + 2  # of a message without a key and with two bytes
KINDS = st.sampled_from([FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
RETENTIONS = st.builds(Retention, size_bytes=st.sampled_from([0, 0, 60, 150]), age_ms=st.sampled_from([0, 0, 3, 20]))


class Trims(RuleBasedStateMachine):
    """One topic, two subscriptions that may be closed, an owner and an earlier owner."""

    @initialize()
    def begin(self):
        self.disk, self.now_ms, self.numbers = MemoryStore().disk, 0, count()
        self.published = {}  # position -> the broker's time
        self.seen = {}  # ledger -> the broker's time at an open at which it was the last one
        self.acked = {}  # name -> acked positions, of the subscriptions that exist
        self.durable = {}  # name -> sets of acked positions, one of which the store has: several after a failed seek
        self.earlier = None
        self.log = None
        self.restart()

    @rule()
    def restart(self):
        """Lose the memory, with whatever was not persisted, or leave it to an earlier owner."""
        self.earlier = self.log
        store = MemoryStore(self.disk)
        self.log = MessageLog.open(store, topic="t", entries_per_ledger_max=3, now_ms=self.now_ms)
        self.seen[self.log.ledgers.current_ledger_id] = self.now_ms
        self.cursors = {}
        for name, possible in self.durable.items():
            self.acked[name] = set(possible[0])
            if len(possible) > 1:  # Only opening it says which of them it is.
                cursor = self.opened(name)
                self.acked[name] = {position for position in self.published if cursor.is_acked(position)}
            assert self.acked[name] in possible
            self.durable[name] = [set(self.acked[name])]
        assert self.needed() <= set(self.in_log())

    def opened(self, name):
        self.cursors[name] = ManagedCursor.open(
            self.log.store, topic="t", subscription=name, ledgers=self.log.ledgers, now_ms=self.now_ms
        )
        return self.cursors[name]

    def in_log(self):
        return [
            Position(ledger_id, each) for ledger_id, size in self.log.ledgers.counts().items() for each in range(size)
        ]

    def needed(self):
        possible = [acked for each in self.durable.values() for acked in each]
        return {position for acked in possible for position in self.published.keys() - acked}

    @rule(sizes=st.lists(st.integers(1, 4), max_size=3), publish_time_ms=st.sampled_from([0, 1, 2**62]))
    def publish(self, sizes, publish_time_ms=0):
        for size in sizes:
            messages = [Message(b"%2d" % (next(self.numbers) % 100), publish_time_ms=publish_time_ms)] * size
            self.published |= dict.fromkeys(self.log.publish(messages, now_ms=self.now_ms), self.now_ms)

    @rule(later_ms=st.integers(1, 5))
    def wait(self, later_ms):
        self.now_ms += later_ms

    @rule(name=NAMES)
    def open(self, name):
        if name not in self.acked:  # A new one begins at the first message that the log has.
            first = self.log.ledgers.first_position
            self.acked[name] = {position for position in self.published if position < first}
            self.durable[name] = [set(self.acked[name])]
        if name not in self.cursors:
            unacked = sorted(self.published.keys() - self.acked[name])
            assert self.opened(name).reader.read(1_000) == unacked

    @precondition(lambda self: self.cursors)
    @rule(name=NAMES, data=st.data(), is_cumulative=st.booleans())
    def ack(self, name, data, is_cumulative):
        if name in self.cursors and (unacked := sorted(self.published.keys() - self.acked[name])):
            position = data.draw(st.sampled_from(unacked))
            if is_cumulative:
                self.cursors[name].mark_delete(position, now_ms=self.now_ms)
                self.acked[name] |= {each for each in self.published if each <= position}
            else:
                self.cursors[name].ack(position, now_ms=self.now_ms)
                self.acked[name].add(position)

    @precondition(lambda self: self.cursors)
    @rule(name=NAMES, then_closes=st.booleans())
    def persist(self, name, then_closes):
        if name in self.cursors:
            self.cursors[name].persist(now_ms=self.now_ms)
            self.durable[name] = [set(self.acked[name])]
            if then_closes:
                self.cursors.pop(name).close(now_ms=self.now_ms)

    @precondition(lambda self: self.cursors and self.published)
    @rule(name=NAMES, data=st.data(), kind=st.sampled_from([None, FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER]))
    def seek(self, name, data, kind):
        if name not in self.cursors:
            return
        position, store = data.draw(st.sampled_from(sorted(self.published))), self.log.store
        for ahead in range(9 if kind else 0):
            store.inject(Fault(store.mutation_count + ahead, kind))
        begin = max(position, self.log.ledgers.first_position)
        acked = {each for each in self.published if each < begin}
        try:
            self.cursors[name].reset(position, now_ms=self.now_ms)
        except StoreError:
            self.durable[name].append(acked)
        else:
            self.acked[name], self.durable[name] = acked, [set(acked)]
        store.forget_faults()

    def left(self, kept, seen):
        """The ledgers that a trim leaves, counted from plain sets.

        Args:
            kept: The retention.
            seen: The least time of the last publish to some ledgers.
        """
        needed, ledgers = self.needed(), list(self.log.ledgers)
        while len(ledgers) > 1:
            inside = {position for position in self.published if position.ledger_id == ledgers[0]}
            above = [position for position in self.published if position.ledger_id > ledgers[0]]
            newest_ms = max((self.published[position] for position in inside), default=self.now_ms - kept.age_ms)
            if inside:
                newest_ms = max(newest_ms, seen.get(ledgers[0], 0))
            is_kept = len(above) * ENTRY_BYTES < kept.size_bytes or self.now_ms - newest_ms < kept.age_ms
            if needed & inside or is_kept:
                break
            del ledgers[0]
        return ledgers

    @rule(kept=RETENTIONS)
    def trim(self, kept):
        must_stay, may_stay = self.left(kept, {}), self.left(kept, self.seen)
        trim_log(self.log, kept, self.cursors, now_ms=self.now_ms)
        assert list(self.log.ledgers) == self.log.store.ledgers.owned_by(log_owner("t"))
        assert set(must_stay) <= set(self.log.ledgers) <= set(may_stay)

    @rule(kept=RETENTIONS, ahead=st.integers(0, 3), kind=KINDS)
    def trim_and_fail(self, kept, ahead, kind):
        store = self.log.store
        store.inject(Fault(store.mutation_count + ahead, kind))
        with suppress(StoreError):
            trim_log(self.log, kept, self.cursors, now_ms=self.now_ms)
            store.forget_faults()
            return
        store.forget_faults()
        if kind in {FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER}:
            self.restart()

    @precondition(lambda self: self.earlier is not None)
    @rule()
    def an_earlier_owner_trims(self):
        before = self.log.store.ledgers.owned_by(log_owner("t")), self.log.store.metadata.get("/message-logs/t")
        with suppress(LogFencedError, StoreError):
            assert trim_log(self.earlier, Retention(), {}, now_ms=self.now_ms) == 0
        after = self.log.store.ledgers.owned_by(log_owner("t")), self.log.store.metadata.get("/message-logs/t")
        assert after[1] == before[1]
        # It may complete a trim of its own: those ledgers are no part of the log.
        assert set(self.log.ledgers) & set(before[0]) <= set(after[0])

    @invariant()
    def a_message_that_someone_needs_can_be_read(self):
        if self.log is not None:
            needed = sorted(self.needed())
            assert set(needed) <= set(self.in_log())
            found = MessageLog.find(MemoryStore(self.disk), topic="t")
            assert len(list(found.read(needed))) == len(needed)

    @invariant()
    def every_cursor_agrees_with_the_log(self):
        for name, cursor in getattr(self, "cursors", {}).items():
            cursor._check()
            assert cursor.backlog == len(self.published.keys() - self.acked[name])


TestTrims = Trims.TestCase
