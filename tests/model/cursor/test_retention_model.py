"""Trims, crashes and restarts in any order, against plain sets: no message is lost that someone has not acked durably,
and everything that may go is gone."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackstate import LogFencedError, Position
from ackstate.cursor import ManagedCursor, MemoryStore, Message, MessageLog, Retention, StoreError, trim_log
from ackstate.cursor.stores.memory import Fault, FaultKind
from ackstate.cursor.topic import retention
from ackstate.cursor.topic.log_ownership import LogOwnership, log_owner
from ackstate.cursor.topic.message_log import MessageLog as Log
from planted import assert_caught

NAMES = st.sampled_from("ab")
ENTRY_BYTES = 16 + 2  # of a message without a key and with two bytes
KINDS = st.sampled_from([FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
RETENTIONS = st.builds(Retention, size_bytes=st.sampled_from([0, 0, 60, 150]), age_ms=st.sampled_from([0, 0, 3, 20]))


class Trims(RuleBasedStateMachine):
    """One topic, two subscriptions that may be closed, an owner and an earlier owner."""

    @initialize()
    def begin(self):
        self.disk, self.now_ms, self.numbers = MemoryStore().disk, 0, count()
        self.published = {}  # position -> publish time
        self.acked, self.durable = {}, {}  # name -> acked positions, of the subscriptions that exist
        self.earlier = None
        self.log = None
        self.restart()

    @rule()
    def restart(self):
        """Lose the memory, with whatever was not persisted, or leave it to an earlier owner."""
        self.earlier = self.log
        self.log = MessageLog.open(MemoryStore(self.disk), topic="t", entries_per_ledger_max=3)
        self.cursors = {}
        self.acked = {name: set(positions) for name, positions in self.durable.items()}
        assert self.needed() <= set(self.in_log())

    def in_log(self):
        return [
            Position(ledger_id, each) for ledger_id, size in self.log.ledgers.counts().items() for each in range(size)
        ]

    def needed(self):
        return {position for acked in self.durable.values() for position in self.published.keys() - acked}

    @rule(sizes=st.lists(st.integers(1, 4), max_size=3))
    def publish(self, sizes):
        for size in sizes:
            messages = [Message(b"%2d" % (next(self.numbers) % 100), publish_time_ms=self.now_ms)] * size
            self.published |= dict.fromkeys(self.log.publish(messages), self.now_ms)

    @rule(later_ms=st.integers(1, 5))
    def wait(self, later_ms):
        self.now_ms += later_ms

    @rule(name=NAMES)
    def open(self, name):
        if name not in self.acked:  # A new one begins at the first message that the log has.
            first = self.log.ledgers.first_position
            self.acked[name] = {position for position in self.published if position < first}
            self.durable[name] = set(self.acked[name])
        if name not in self.cursors:
            self.cursors[name] = ManagedCursor.open(
                self.log.store, topic="t", subscription=name, ledgers=self.log.ledgers, now_ms=self.now_ms
            )
            unacked = sorted(self.published.keys() - self.acked[name])
            assert self.cursors[name].reader.read(1_000) == unacked

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
            self.durable[name] = set(self.acked[name])
            if then_closes:
                self.cursors.pop(name).close(now_ms=self.now_ms)

    @precondition(lambda self: self.cursors and self.published)
    @rule(name=NAMES, data=st.data())
    def seek(self, name, data):
        if name in self.cursors:
            position = data.draw(st.sampled_from(sorted(self.published)))
            self.cursors[name].reset(position, now_ms=self.now_ms)
            begin = max(position, self.log.ledgers.first_position)
            self.acked[name] = {each for each in self.published if each < begin}
            self.durable[name] = set(self.acked[name])

    def may_stay(self, kept):
        """The ledgers that a trim leaves, counted from plain sets."""
        needed, ledgers = self.needed(), list(self.log.ledgers)
        while len(ledgers) > 1:
            inside = {position for position in self.published if position.ledger_id == ledgers[0]}
            above = [position for position in self.published if position.ledger_id > ledgers[0]]
            newest_ms = max((self.published[position] for position in inside), default=self.now_ms - kept.age_ms)
            is_kept = len(above) * ENTRY_BYTES < kept.size_bytes or self.now_ms - newest_ms < kept.age_ms
            if needed & inside or is_kept:
                break
            del ledgers[0]
        return ledgers

    @rule(kept=RETENTIONS)
    def trim(self, kept):
        expected = self.may_stay(kept)
        trim_log(self.log, kept, now_ms=self.now_ms)
        assert list(self.log.ledgers) == self.log.store.ledgers.owned_by(log_owner("t")) == expected

    @rule(kept=RETENTIONS, ahead=st.integers(0, 3), kind=KINDS)
    def trim_and_fail(self, kept, ahead, kind):
        store = self.log.store
        store.inject(Fault(store.mutation_count + ahead, kind))
        with suppress(StoreError):
            trim_log(self.log, kept, now_ms=self.now_ms)
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
            assert trim_log(self.earlier, Retention(), now_ms=self.now_ms) == 0
        after = self.log.store.ledgers.owned_by(log_owner("t")), self.log.store.metadata.get("/message-logs/t")
        assert after[1] == before[1]
        # It may complete a trim of its own: those ledgers are no part of the log.
        assert set(self.log.ledgers) & set(before[0]) <= set(after[0])

    @invariant()
    def what_someone_needs_can_be_read(self):
        if self.log is not None:
            needed = sorted(self.needed())
            assert set(needed) <= set(self.in_log())
            found = MessageLog.find(MemoryStore(self.disk), topic="t")
            assert len(list(found.read(needed))) == len(needed)

    @invariant()
    def every_cursor_knows_what_is_left(self):
        for name, cursor in getattr(self, "cursors", {}).items():
            cursor._check()
            assert cursor.backlog == len(self.published.keys() - self.acked[name])


TestTrims = Trims.TestCase


def acks_in_memory_count(patch):
    # Planted where the machine's cursors are seen: that is what a broker would take by mistake.
    originals = {}

    def opened(store, **named):
        cursor = originals["open"](store, **named)
        originals.setdefault("cursors", {})[named["subscription"]] = cursor
        return cursor

    originals["open"] = ManagedCursor.open
    patch(ManagedCursor, "open", opened)
    stored = retention.stored_mark_deletes

    def in_memory(log):
        cursors = originals.get("cursors", {})
        return {
            name: cursors[name].mark_delete_position if name in cursors else found
            for name, found in stored(log).items()
        }

    patch(retention, "stored_mark_deletes", in_memory)


def closed_subscriptions_do_not_count(patch):
    patch(retention, "stored_mark_deletes", lambda log: dict(list(stored_mark_deletes(log).items())[:1]))


def the_ledger_of_the_mark_delete_goes_too(patch):
    patch(retention, "_lowest_unacked", lambda log, mark: Position(mark.ledger_id + 1, 0))


def nothing_goes(patch):
    patch(Log, "trim", lambda *_: 0)


def a_trim_is_not_recorded(patch):
    patch(LogOwnership, "trim", lambda *_, **__: None)


stored_mark_deletes = retention.stored_mark_deletes
PLANTED = [
    acks_in_memory_count,
    closed_subscriptions_do_not_count,
    the_ledger_of_the_mark_delete_goes_too,
    nothing_goes,
    a_trim_is_not_recorded,
]


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found(planted, monkeypatch):
    planted(monkeypatch.setattr)
    assert_caught(Trims, by=AssertionError)
