"""The cursor against a plain set of acked positions, with a crash between any two writes.

With and without a range limit, with and without generations. Checked after every step: membership, batches,
mark-delete, ranges, backlog, the redelivery gauge and its causes, every receipt. After every crash: nothing that was
promised is lost, nothing is acked that was not accepted or from before a reset, and what comes back is exactly what the
gauge said, unless a write whose outcome nobody knew saved some of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cursor.ack_state
from ackstate import (
    AckStateError,
    BatchIndexes,
    CorruptStateError,
    CursorFencedError,
    DeletedRanges,
    Keep,
    LedgerMap,
    Position,
    select,
)
from ackstate.wire import native
from cursor import CursorConfig, ManagedCursor, StoreError
from cursor.ack_state import AckState
from cursor.journal import Journal
from cursor.persister import Persister
from cursor.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore, PowerCutError
from planted import assert_caught

pytestmark = pytest.mark.slow

PLAIN = CursorConfig(flush_interval_ms=10, compaction_bytes_min=200)
CONFIGS = [
    PLAIN,
    replace(PLAIN, ledger_entry_count_max=3),
    replace(PLAIN, range_count_max=2),
    replace(PLAIN, range_count_max=2, keep=Keep.WIDEST),
    replace(PLAIN, range_count_max=0),
    replace(PLAIN, become_old_ack_record_seconds=1),
    replace(PLAIN, become_old_ack_record_seconds=1, range_count_max=1, keep=Keep.WIDEST),
]
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 14), st.sampled_from(FaultKind)), max_size=2, unique_by=lambda f: f.mutation
)
PICKS = st.integers(0, 10_000)


def words_of(indexes):
    words = [sum(1 << index % 64 for index in indexes if index // 64 == word) for word in range(2)]
    return [word - 2**64 if word >> 63 else word for word in words]


def limited(durable, candidates, config):
    """What of the candidates a durable state has room for, run by run: the obvious way."""
    if config.range_count_max is None:
        return set(candidates)
    runs = []
    for position in sorted(durable | candidates):
        if runs and runs[-1][-1] == (position.ledger_id, position.entry_id - 1):
            runs[-1].append(position)
        else:
            runs.append([position])
    others = [run for run in runs if not durable & set(run)]
    room = max(config.range_count_max - (len(runs) - len(others)), 0)
    if config.keep is Keep.WIDEST:
        others.sort(key=lambda run: (-len(run), run[0]))
    left_out = {position for run in others[room:] for position in run}
    return candidates - left_out


def written_positions(log: LedgerMap) -> list[Position]:
    return [Position(ledger, entry) for ledger, count in log.counts().items() for entry in range(count)]


class CursorMachine(RuleBasedStateMachine):
    @initialize(faults=FAULTS, config=st.sampled_from(CONFIGS))
    def begin(self, faults, config):
        self.config = config
        self.disk = MemoryDisk()
        self.log = LedgerMap.from_counts({3: 5})
        self.now_ms = 0
        self.accepted = set()
        self.promised = set()
        self.batches = {}  # position -> unacked indexes
        self.promised_batches = {}
        self.unknown = []  # states that a write of unknown outcome may have made durable
        self.unknown_resets = []
        self.receipts = []
        self.open_cursor(faults)

    def open_cursor(self, faults):
        for attempt in (faults, ()):
            self.store = MemoryStore(self.disk, faults=attempt)
            try:
                self.cursor = ManagedCursor.open(
                    self.store, topic="t", subscription="s", ledgers=self.log, config=self.config, now_ms=self.now_ms
                )
            except StoreError:
                continue  # It died while it recovered: the next one must find the same.
            break
        found, found_batches = self.observed(), self.observed_batches()
        if found in self.unknown_resets and not found_batches:
            # It happened after all: what lies below is acked, and what was promised above is void.
            self.accepted |= found
            self.promised &= found
        assert self.promised <= found, "a durable ack was lost"
        assert found <= self.accepted, "an ack was invented"
        assert found in [self.promised, *self.unknown, *self.unknown_resets], "the recovered state never was"
        for position, unacked in found_batches.items():
            assert unacked >= self.batches.get(position, set()), "an ack of a batch index was invented"
            assert position in self.batches or position in self.accepted, "a batch was invented"
        if not self.unknown_resets:
            for position, unacked in self.promised_batches.items():
                left = set() if position in found else found_batches.get(position, {-1})
                assert left <= unacked, "a durable ack in a batch was lost"
        self.accepted, self.promised, self.unknown, self.receipts = found, set(found), [], []
        self.batches, self.promised_batches, self.unknown_resets = found_batches, dict(found_batches), []
        self.deliveries, self.held, self.cut, self.last_frontier = [], set(), set(), None

    def observed_batches(self):
        return {
            position: {64 * word + bit for word, bits in enumerate(words) for bit in range(64) if bits >> bit & 1}
            for position, words in self.cursor.batch.items()
        }

    def observed(self):
        return {position for position in written_positions(self.log) if self.cursor.is_acked(position)}

    def pick(self, number):
        positions = written_positions(self.log)
        return positions[number % len(positions)]

    def took(self, receipt, positions):
        assert receipt.newly_acked == len(set(positions) - self.accepted)
        self.accepted |= set(positions)
        self.batches = {p: unacked for p, unacked in self.batches.items() if p not in self.accepted}
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

    @rule(number=PICKS, unacked=st.sets(st.sampled_from([0, 1, 63, 64])))
    def ack_batch(self, number, unacked):
        position = self.pick(number)
        receipt = self.cursor.ack_batch(position, words_of(unacked), now_ms=self.now_ms)
        if position in self.accepted:
            assert receipt.newly_acked == 0
            return
        left = self.batches.get(position, unacked) & unacked
        self.took(receipt, [] if left else [position])
        if left:
            self.batches[position] = left

    @rule(number=PICKS, beyond=PICKS)
    def mark_lost(self, number, beyond):
        first, last = sorted((self.pick(number), self.pick(beyond)))
        lost = [position for position in written_positions(self.log) if first <= position <= last]
        self.took(self.cursor.mark_lost(first, last, now_ms=self.now_ms), lost)

    @rule(number=PICKS)
    def deliver(self, number):
        position = self.pick(number)
        self.cursor.delivered(position, now_ms=self.now_ms)
        if not self.deliveries or position > self.deliveries[-1][1]:
            self.deliveries.append((self.now_ms, position))

    @rule(passed_ms=st.sampled_from([1, 500, 1_000]))
    def wait(self, passed_ms):
        self.now_ms += passed_ms

    @rule(number=PICKS)
    def reset(self, number):
        position = self.pick(number)
        below = {other for other in written_positions(self.log) if other < position}
        self.unknown_resets.append(below)
        try:
            self.cursor.reset(position, now_ms=self.now_ms)
        except PowerCutError:
            self.open_cursor(())
        except StoreError:
            # Whether a recovery would find it reset is open until the next write, so there must be one.
            assert self.cursor.is_dirty(), "a failed reset left the cursor clean"
        else:
            self.forget(below)
            assert self.cursor.read_position == position

    def forget(self, below):
        """Everything that was known is void but that the reset has acked what lies below."""
        void = [receipt for receipt, _ in self.receipts]
        assert not any(map(self.cursor.durable, void)), "a receipt from before the reset counts"
        self.accepted, self.promised = set(below), set(below)
        self.batches, self.promised_batches, self.receipts = {}, {}, []
        self.unknown, self.unknown_resets = [], []
        self.deliveries, self.held, self.cut = [], set(), set()

    def frontier(self):
        age_ms = 1_000 * self.config.become_old_ack_record_seconds
        if not age_ms:
            return Position(2**62, 0)
        old = [position for time, position in self.deliveries if time <= self.now_ms - age_ms]
        return old[-1] if old else Position(0, -1)

    def planned(self, frontier):
        """What is durable once everything that may be written now is."""
        mark_delete = self.cursor.mark_delete_position
        covered = {position for position in self.accepted if position <= mark_delete}
        waiting = self.accepted - self.promised - covered
        candidates = {position for position in waiting if position <= frontier}
        taken = limited(self.promised - covered, candidates, self.config)
        self.held, self.cut = waiting - candidates, candidates - taken
        return covered | self.promised | taken

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
        was_dirty = self.cursor.is_dirty()
        attempted = self.planned(self.frontier())
        self.unknown.append(attempted)
        try:
            result = persist()
        except PowerCutError:
            self.open_cursor(())
        except StoreError:
            assert self.cursor.is_dirty() == was_dirty, "a failed write left the cursor clean"
            assert self.cursor.is_dirty() or self.cursor.stats().redelivery_unwritten
        else:
            assert result.messages_covered == len(attempted - self.promised)
            assert (result.messages_held_back, result.messages_cut) == (len(self.held), len(self.cut))
            self.promised, self.unknown, self.unknown_resets = attempted, [], []
            self.promised_batches = dict(self.batches)

    @rule(faults=FAULTS)
    def crash(self, faults):
        expected = len(self.accepted) - self.cursor.redelivery_if_crashed
        exact = not self.unknown and not self.unknown_resets
        may_be_reset = bool(self.unknown_resets)
        self.open_cursor(faults)
        assert may_be_reset or len(self.accepted) >= expected
        assert not exact or len(self.accepted) == expected, "the gauge was wrong"

    @precondition(lambda self: not self.unknown and not self.unknown_resets)
    @rule(faults=FAULTS)
    def close_and_reopen(self, faults):
        attempted = self.planned(Position(2**62, 0))
        try:
            self.cursor.close(now_ms=self.now_ms)
        except StoreError:
            self.unknown.append(attempted)
        else:
            self.promised, self.promised_batches = attempted, dict(self.batches)
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
        assert self.observed_batches() == self.batches, "the batches differ"
        assert cursor.redelivery_if_crashed == len(self.accepted - self.promised), "the gauge differs"
        stats, mark_delete = cursor.stats(), cursor.mark_delete_position
        assert stats.redelivery_young == sum(position > mark_delete for position in self.held), "young is wrong"
        assert stats.redelivery_cut == sum(position > mark_delete for position in self.cut), "cut is wrong"
        if (
            self.config.range_count_max is not None
            and cursor.mark_delete_position == cursor.persisted_mark_delete_position
        ):
            durable = DeletedRanges()
            for position in self.promised:
                if position > mark_delete:
                    durable.add(position)
            assert durable.range_count <= self.config.range_count_max, "over the limit"
        above = DeletedRanges()
        for position in self.accepted - self.promised:
            if position > cursor.mark_delete_position:
                above.add(position)
        if self.config is PLAIN:
            assert cursor.unpersisted_record_bytes == above.record_bytes, "the un-persisted bytes are wrong"
        # Each of its parts is counted by itself.
        assert cursor.unpersisted_record_bytes >= above.record_bytes, "the un-persisted bytes are too few"
        for receipt, positions in self.receipts:
            assert not cursor.durable(receipt) or positions <= self.promised, "a receipt lied"
            assert cursor.is_dirty() or cursor.durable(receipt) == (positions <= self.promised), "a receipt is late"


class PassingByMachine(CursorMachine):
    """The same where a persist leaves much out: what is planted there is found by a short search."""

    @initialize(faults=st.just([]), config=st.sampled_from([CONFIGS[2], CONFIGS[3], CONFIGS[6]]))
    def begin(self, faults, config):
        super().begin(faults=faults, config=config)


TestCursorModel = CursorMachine.TestCase


def test_model_catches_acks_forgotten_by_a_failed_persist(monkeypatch):
    monkeypatch.setattr(AckState, "abandon_persist", lambda self: None)
    assert_caught(CursorMachine, by=AssertionError, saying="the un-persisted bytes are (wrong|too few)")


def test_model_catches_a_receipt_given_before_the_write(monkeypatch):
    plan = Persister.plan

    def planned(self, frontier):
        decided = plan(self, frontier)
        if decided is not None:
            self.durable_number = decided.number
        return decided

    monkeypatch.setattr(Persister, "plan", planned)
    assert_caught(CursorMachine, by=AssertionError, saying="a receipt lied|a failed write left the cursor clean")


def test_model_catches_an_old_ledger_deleted_before_the_pointer_swings(monkeypatch):
    swing = Journal._swing

    def delete_first(self, ledger_id):
        if self._pointed_at is not None:
            self.store.ledgers.delete(self._pointed_at)
        swing(self, ledger_id)

    monkeypatch.setattr(Journal, "_swing", delete_first)
    assert_caught(CursorMachine, by=CorruptStateError, saying="expected the cursor ledger")


def test_model_catches_appending_after_a_failed_append(monkeypatch):
    append = Journal.append_delta

    def keep_ledger(self, content):
        ledger_id = self._open_ledger
        try:
            return append(self, content)
        finally:
            self._open_ledger = ledger_id

    monkeypatch.setattr(Journal, "append_delta", keep_ledger)
    machine = CursorMachine()
    machine.begin(faults=[], config=PLAIN)
    machine.persist_into_a_fault(1, 0, FaultKind.FAIL_AFTER)
    machine.persist()
    with pytest.raises(CorruptStateError, match=r"expected .kind, epoch, sequence, chain."):
        machine.crash([])


def test_model_catches_a_delta_that_forgets_the_mark_delete(monkeypatch):
    encode = Journal._encode

    def stale(self, kind, content):
        return encode(self, kind, content._replace(mark_delete=Position(content.mark_delete.ledger_id, -1)))

    monkeypatch.setattr(Journal, "_encode", stale)
    assert_caught(CursorMachine, by=AssertionError, saying="a durable ack was lost")


def test_model_catches_a_receipt_that_forgets_what_was_held_back(monkeypatch):
    monkeypatch.setattr(AckState, "is_undurable", lambda self, candidates: False)
    assert_caught(PassingByMachine, by=AssertionError, saying="a receipt lied")


def test_model_catches_young_acks_that_count_as_written(monkeypatch):
    begin = AckState.begin_persist
    monkeypatch.setattr(
        AckState,
        "begin_persist",
        lambda self, *, frontier: replace(begin(self, frontier=frontier), acked_count=self._acked_count),
    )
    assert_caught(PassingByMachine, by=AssertionError)


def test_model_catches_a_limit_that_drops_what_is_durable(monkeypatch):
    def forgetful(ranges, *, range_count_max, keep, always):
        return select(ranges, range_count_max=range_count_max, keep=keep)

    monkeypatch.setattr(cursor.ack_state, "select", forgetful)
    machine = CursorMachine()
    machine.begin(faults=[], config=CONFIGS[3])
    machine.publish(5)
    machine.ack(2)
    machine.ack(4)
    machine.persist()
    machine.ack(6)
    machine.ack(7)
    with pytest.raises(AssertionError):
        machine.persist()


def test_model_catches_a_limit_that_is_one_off(monkeypatch):
    def one_more(ranges, *, range_count_max, keep, always):
        return select(ranges, range_count_max=range_count_max + 1, keep=keep, always=always)

    monkeypatch.setattr(cursor.ack_state, "select", one_more)
    assert_caught(PassingByMachine, by=AssertionError)


def test_model_catches_batches_that_a_recovery_forgets(monkeypatch):
    decode = native.decode
    monkeypatch.setattr(native, "decode", lambda data: replace(decode(data), batch=BatchIndexes()))
    assert_caught(CursorMachine, by=AssertionError, saying="a durable ack in a batch was lost")


def test_model_catches_a_reset_that_keeps_the_acks(monkeypatch):
    reset = AckState.reset

    def keep(self, mark_delete):
        deleted = self.deleted
        reset(self, mark_delete)
        deleted.remove_at_most(mark_delete)
        self.deleted = deleted

    monkeypatch.setattr(AckState, "reset", keep)
    assert_caught(CursorMachine, by=AssertionError)


def test_model_catches_a_reset_whose_receipts_still_count(monkeypatch):
    reset = ManagedCursor.reset

    def forgiving(self, position, *, now_ms):
        result = reset(self, position, now_ms=now_ms)
        self._persister.void_number = -1
        return result

    monkeypatch.setattr(ManagedCursor, "reset", forgiving)
    assert_caught(CursorMachine, by=AssertionError, saying="a receipt from before the reset counts")
