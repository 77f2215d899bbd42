"""The cursor against a plain set of acked positions, with a crash between any two writes.

Checked after every step: membership, mark-delete, ranges, backlog, the redelivery gauge, every receipt. After every
crash: nothing that was promised is lost, nothing is acked that was not accepted, and what comes back is exactly what
the gauge said, unless a write whose outcome nobody knew saved some of it.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackstate import AckStateError, CorruptStateError, CursorFencedError, DeletedRanges, LedgerMap, Position
from cursor import CursorConfig, ManagedCursor, StoreError
from cursor.ack_state import AckState
from cursor.journal import Journal
from cursor.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore, PowerCutError
from planted import assert_caught

pytestmark = pytest.mark.slow

CONFIG = CursorConfig(flush_interval_ms=10, compaction_bytes_min=200)
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 14), st.sampled_from(FaultKind)), max_size=2, unique_by=lambda f: f.mutation
)
PICKS = st.integers(0, 10_000)


def written_positions(log: LedgerMap) -> list[Position]:
    return [Position(ledger, entry) for ledger, count in log.counts().items() for entry in range(count)]


class CursorMachine(RuleBasedStateMachine):
    @initialize(faults=FAULTS)
    def begin(self, faults):
        self.disk = MemoryDisk()
        self.log = LedgerMap.from_counts({3: 5})
        self.now_ms = 0
        self.accepted = set()
        self.promised = set()
        self.unknown = []  # states that a write of unknown outcome may have made durable
        self.receipts = []
        self.open_cursor(faults)

    def open_cursor(self, faults):
        for attempt in (faults, ()):
            self.store = MemoryStore(self.disk, faults=attempt)
            try:
                self.cursor = ManagedCursor.open(
                    self.store, topic="t", subscription="s", ledgers=self.log, config=CONFIG, now_ms=self.now_ms
                )
            except StoreError:
                continue  # It died while it recovered: the next one must find the same.
            break
        found = self.observed()
        assert self.promised <= found, "a durable ack was lost"
        assert found <= self.accepted, "an ack was invented"
        assert found in [self.promised, *self.unknown], "the recovered state never was"
        self.accepted, self.promised, self.unknown, self.receipts = found, set(found), [], []

    def observed(self):
        return {position for position in written_positions(self.log) if self.cursor.is_acked(position)}

    def pick(self, number):
        positions = written_positions(self.log)
        return positions[number % len(positions)]

    def took(self, receipt, positions):
        assert receipt.newly_acked == len(set(positions) - self.accepted)
        self.accepted |= set(positions)
        self.receipts.append((receipt, set(positions)))

    @rule(count=st.integers(0, 5))
    def read(self, count):
        expected = [p for p in written_positions(self.log) if p >= self.cursor.read_position and p not in self.accepted]
        assert self.cursor.read(count) == expected[:count]
        rest = expected[count:]
        assert not rest or self.cursor.read_position <= rest[0]

    @rule()
    def rewind(self):
        self.cursor.rewind()

    @rule(count=st.integers(1, 6))
    def publish(self, count):
        self.log.append(count)

    @rule(step=st.integers(1, 3))
    def roll(self, step):
        self.log.roll(self.log.current_ledger_id + step)

    @rule(number=PICKS)
    def ack(self, number):
        position = self.pick(number)
        self.took(self.cursor.ack(position, now_ms=self.now_ms), [position])

    @rule()
    def ack_next(self):
        position = self.log.next_valid(self.cursor.mark_delete_position)
        if position in self.log:
            self.took(self.cursor.ack(position, now_ms=self.now_ms), [position])

    @rule(numbers=st.lists(PICKS, max_size=6))
    def ack_many(self, numbers):
        positions = [self.pick(number) for number in numbers]
        self.took(self.cursor.ack_many(positions, now_ms=self.now_ms), positions)

    @rule(number=PICKS, offsets=st.sets(st.integers(0, 5)))
    def ack_entries(self, number, offsets):
        ledger_id, entry_id = self.pick(number)
        entries = [entry_id + k for k in offsets if Position(ledger_id, entry_id + k) in self.log]
        receipt = self.cursor.ack_entries(ledger_id, entries, now_ms=self.now_ms)
        self.took(receipt, [Position(ledger_id, entry) for entry in entries])

    @rule(numbers=st.lists(PICKS, max_size=4), beyond=st.integers(1, 3))
    def ack_with_a_stranger_among_them(self, numbers, beyond):
        stranger = Position(self.log.current_ledger_id, self.log.entry_count(self.log.current_ledger_id) + beyond - 1)
        with pytest.raises(AckStateError):
            self.cursor.ack_many([*map(self.pick, numbers), stranger], now_ms=self.now_ms)

    @rule(number=PICKS)
    def mark_delete(self, number):
        position = self.pick(number)
        if position >= self.cursor.mark_delete_position:
            covered = [other for other in written_positions(self.log) if other <= position]
            self.took(self.cursor.mark_delete(position, now_ms=self.now_ms), covered)

    @rule()
    def persist(self):
        self.write(lambda: self.cursor.persist(now_ms=self.now_ms))

    @rule(number=PICKS, ahead=st.integers(0, 3), kind=st.sampled_from(FaultKind))
    def persist_into_a_fault(self, number, ahead, kind):
        self.ack(number)
        self.store.inject(Fault(self.store.mutation_count + ahead, kind))
        self.persist()

    @rule(passed_ms=st.integers(0, 12))
    def tick(self, passed_ms):
        self.now_ms += passed_ms
        if self.cursor.is_persist_due(now_ms=self.now_ms):
            self.write(lambda: self.cursor.tick(now_ms=self.now_ms))
        else:
            assert self.cursor.tick(now_ms=self.now_ms) is None

    def write(self, persist):
        attempted = set(self.accepted)
        self.unknown.append(attempted)
        try:
            result = persist()
        except PowerCutError:
            self.open_cursor(())
        except StoreError:
            assert self.cursor.is_dirty(), "a failed write left the cursor clean"
        else:
            assert result.messages_covered == len(attempted - self.promised)
            self.promised, self.unknown = attempted, []

    @rule(faults=FAULTS)
    def crash(self, faults):
        expected = len(self.accepted) - self.cursor.redelivery_if_crashed
        exact = not self.unknown
        self.open_cursor(faults)
        assert len(self.accepted) >= expected
        assert not exact or len(self.accepted) == expected, "the gauge was wrong"

    @precondition(lambda self: not self.unknown)
    @rule(faults=FAULTS)
    def close_and_reopen(self, faults):
        try:
            self.cursor.close(now_ms=self.now_ms)
        except StoreError:
            self.unknown.append(set(self.accepted))
        else:
            self.promised = set(self.accepted)
        self.open_cursor(faults)

    @rule(number=PICKS)
    def second_owner(self, number):
        older = self.cursor
        self.open_cursor(())
        position = self.pick(number)
        older.ack(position, now_ms=self.now_ms)
        if older.is_dirty():
            # StoreError where a scripted fault comes first; what matters is that it never gets through.
            with pytest.raises((StoreError, CursorFencedError)):
                older.persist(now_ms=self.now_ms)

    @invariant()
    def agrees_with_the_set(self):
        cursor = self.cursor
        cursor._check()
        assert self.observed() == self.accepted, "membership differs"
        unacked = [position for position in written_positions(self.log) if position not in self.accepted]
        assert cursor.backlog == len(unacked), "the backlog is wrong"
        assert self.log.next_valid(cursor.mark_delete_position) == (
            unacked[0] if unacked else self.log.next_valid(self.log.last_confirmed)
        )
        assert cursor.redelivery_if_crashed == len(self.accepted - self.promised), "the gauge differs"
        above = DeletedRanges()
        for position in self.accepted - self.promised:
            if position > cursor.mark_delete_position:
                above.add(position)
        assert cursor.unpersisted_record_bytes == above.record_bytes, "the un-persisted bytes are wrong"
        for receipt, positions in self.receipts:
            assert not cursor.durable(receipt) or positions <= self.promised, "a receipt lied"
        if not cursor.is_dirty():
            assert all(cursor.durable(receipt) for receipt, _ in self.receipts)


TestCursorModel = CursorMachine.TestCase


def test_model_catches_acks_forgotten_by_a_failed_persist(monkeypatch):
    monkeypatch.setattr(AckState, "abandon_persist", lambda self: None)
    assert_caught(CursorMachine, by=AssertionError, saying="the un-persisted bytes are wrong")


def test_model_catches_a_receipt_given_before_the_write(monkeypatch):
    plan = ManagedCursor._plan

    def planned(self):
        decided = plan(self)
        if decided is not None:
            self._durable_number = decided.number
        return decided

    monkeypatch.setattr(ManagedCursor, "_plan", planned)
    assert_caught(CursorMachine, by=AssertionError, saying="a receipt lied|a failed write left the cursor clean")


def test_model_catches_an_old_ledger_deleted_before_the_pointer_swings(monkeypatch):
    swing = Journal._swing

    def delete_first(self, ledger_id):
        if self._pointed_at is not None:
            self._store.ledgers.delete(self._pointed_at)
        swing(self, ledger_id)

    monkeypatch.setattr(Journal, "_swing", delete_first)
    assert_caught(CursorMachine, by=CorruptStateError, saying="expected the cursor ledger")


def test_model_catches_appending_after_a_failed_append(monkeypatch):
    append = Journal.append_delta

    def keep_ledger(self, mark_delete, new, *, properties):
        ledger_id = self._open_ledger
        try:
            return append(self, mark_delete, new, properties=properties)
        finally:
            self._open_ledger = ledger_id

    monkeypatch.setattr(Journal, "append_delta", keep_ledger)
    assert_caught(CursorMachine, by=CorruptStateError, saying="expected .kind, epoch, sequence, chain.")


def test_model_catches_a_delta_that_forgets_the_mark_delete(monkeypatch):
    encode = Journal._encode

    def stale(self, kind, mark_delete, deleted, properties):
        return encode(self, kind, Position(mark_delete.ledger_id, -1), deleted, properties)

    monkeypatch.setattr(Journal, "_encode", stale)
    assert_caught(CursorMachine, by=AssertionError, saying="a durable ack was lost")
