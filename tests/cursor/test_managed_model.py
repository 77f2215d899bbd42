"""The cursor against a plain set of acked positions, with a crash between any two writes.

In both formats and from one to the other, with and without limits and generations, with a cursor ledger and without.
After every step the memory is compared with the set and the disk is read: it must hold exactly the last state that was
written or, after a write whose outcome nobody knows, one of those that it can be. What the gauge says follows from
those states. The safety rules that are asserted are named: I1 to I7, I9 to I11 and I13.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ackstate.cursor.ack_state
import ackstate.cursor.persister
import ackstate.cursor.undurable
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
from ackstate.cursor import AutoAge, CursorConfig, Format, ManagedCursor, Route, StoreError, UnreadableCursorError
from ackstate.cursor.ack_state import AckState, PersistLimits
from ackstate.cursor.journal import Journal, cursor_owner, cursor_path
from ackstate.cursor.persister import Persister
from ackstate.cursor.pulsar_format import PulsarFormat
from ackstate.cursor.recovery import Recovery, decode_record
from ackstate.cursor.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore, PowerCutError
from ackstate.cursor.undurable import EVERYTHING, RangeLimit
from ackstate.cursor.undurable_batches import UndurableBatches
from ackstate.wire import native
from ackstate.wire.pulsar import LimitRule, RangeForm
from planted import assert_caught
from planted_cursor import (
    new_owner_keeps_the_term,
    receipts_outlive_a_reset,
    receipts_outlive_a_reset_that_failed,
)

pytestmark = pytest.mark.slow

PATH = cursor_path("t", "s")
PLAIN = CursorConfig(flush_interval_ms=10, compaction_bytes_min=200, ledger_retry_ms=10)
PULSAR = replace(PLAIN, format=Format.PULSAR)
PASSING_BY = [
    replace(PLAIN, range_count_max=2),
    replace(PLAIN, range_count_max=2, keep=Keep.WIDEST, metadata_range_count_max=1),
    replace(PLAIN, become_old_ack_record_seconds=1, range_count_max=1, keep=Keep.WIDEST),
    replace(PULSAR, range_count_max=2, metadata_range_count_max=1, batch_count_max=1, range_form=RangeForm.LIST),
    replace(PULSAR, range_count_max=3, keep=Keep.WIDEST, become_old_ack_record_seconds=1),
    replace(PULSAR, range_count_max=2, metadata_range_count_max=1, range_limit_rule=LimitRule.PULSAR_4_2),
    replace(PULSAR, range_count_max=3, range_limit_rule=LimitRule.PULSAR_5_0, become_old_ack_record_seconds=1),
    replace(PULSAR, range_count_max=2, range_form=RangeForm.LIST, range_limit_rule=LimitRule.PULSAR_4_2),
]
CONFIGS = [
    PLAIN,
    replace(PLAIN, ledger_entry_count_max=3),
    replace(PLAIN, ledger_rollover_ms=1_000, metadata_range_count_max=2),
    replace(PLAIN, range_count_max=0),
    replace(PLAIN, become_old_ack_record_seconds=1),
    replace(PLAIN, become_old_ack_record_seconds=AutoAge(late_share_max=0.5, seconds_max=2)),
    PULSAR,
    replace(PULSAR, range_form=RangeForm.LIST, batch_count_max=2, ledger_entry_count_max=2),
    *PASSING_BY,
]
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 14), st.sampled_from(FaultKind)), max_size=2, unique_by=lambda f: f.mutation
)
PICKS = st.integers(0, 10_000)
INDEXES = st.sets(st.sampled_from([0, 1, 63, 64]))


class State(NamedTuple):
    """What one record makes durable, all of one instant."""

    acked: frozenset
    batches: dict  # position -> unacked indexes
    properties: dict


NOTHING = State(frozenset(), {}, {})


def words_of(indexes):
    words = [sum(1 << index % 64 for index in indexes if index // 64 == word) for word in range(2)]
    return [word - 2**64 if word >> 63 else word for word in words]


def indexes_of(words):
    return {64 * word + bit for word, bits in enumerate(words) for bit in range(64) if bits >> bit & 1}


def runs_of(positions):
    runs = []
    for position in sorted(positions):
        if runs and runs[-1][-1] == (position.ledger_id, position.entry_id - 1):
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def whole_ledgers(acked, limits: PersistLimits):
    """What Pulsar's words form keeps: ledgers by their acked entries, up to the first that the limit excludes."""
    kept = set()
    for ledger_id in sorted({position.ledger_id for position in acked}):
        entries = {position for position in acked if position.ledger_id == ledger_id}
        counted = len(kept) + len(entries) * (limits.rule is LimitRule.PULSAR_5_0)
        if counted > limits.range_count_max:
            break
        kept |= entries
    return kept


def limited(durable, candidates, limits: PersistLimits, keep):
    """What a durable state has room for, run by run: the obvious way."""
    runs = runs_of(durable | candidates)
    if limits.range_count_max is None:
        return durable | candidates
    if limits.rule is not LimitRule.EXACT:
        kept = whole_ledgers(durable | candidates, limits)
        if kept or limits.rule is not LimitRule.PULSAR_5_0:
            return kept
    others = runs if limits.displaces else [run for run in runs if not durable & set(run)]
    room = max(limits.range_count_max - (len(runs) - len(others)), 0)
    if keep is Keep.WIDEST:
        others = sorted(others, key=lambda run: (-len(run), run[0]))
    return (durable | candidates) - {position for run in others[room:] for position in run}


def written_positions(log: LedgerMap) -> list[Position]:
    return [Position(ledger, entry) for ledger, count in log.counts().items() for entry in range(count)]


def ranges_of(positions):
    ranges = DeletedRanges()
    for position in positions:
        ranges.add(position)
    return ranges


def replayed(entries, log):
    """Every record of a journal of ours in turn, with plain sets: the obvious way."""
    acked, batches = set(), {}
    for entry in entries:
        record = native.decode(entry)
        acked |= {Position(run.ledger_id, n) for run in record.deleted.runs() for n in range(run.first, run.end)}
        acked |= {position for position in written_positions(log) if position <= record.mark_delete}
        for position, words in record.batch.items():
            batches[position] = batches.get(position, indexes_of(words)) & indexes_of(words)
        batches = {p: unacked for p, unacked in batches.items() if p not in acked}
    return State(frozenset(acked), batches, record.properties)


class CursorMachine(RuleBasedStateMachine):
    configs = CONFIGS

    @initialize(data=st.data(), faults=FAULTS)
    def begin_anywhere(self, data, faults):
        self.begin(config=data.draw(st.sampled_from(self.configs)), faults=faults)

    def begin(self, config, faults=()):
        self.disk = MemoryDisk()
        self.log = LedgerMap.from_counts({3: 5})
        self.now_ms = 0
        self.possible = [NOTHING]  # what the disk may hold; one state unless the outcome of a write is unknown
        self.possible_resets = []
        self.possible_names = [{}]  # cursor properties
        self.accepted, self.batches, self.properties = set(), {}, {}
        self.durable_mark_delete = Position(0, -1)
        self.disk_seen = None
        self.open_cursor(config, faults)

    @property
    def promised(self):
        """Acked in whatever the disk may hold."""
        return frozenset.intersection(*(state.acked for state in self.possible))

    @property
    def lost(self):
        """What is acked and not in what the disk may hold, for each."""
        return [self.accepted - acked for acked in (self.promised, *(reset.acked for reset in self.possible_resets))]

    @property
    def is_certain(self):
        return len(self.possible) == 1 and not self.possible_resets

    def open_cursor(self, config=None, faults=()):
        self.config = config or self.config
        for attempt in (faults, ()):
            self.store = MemoryStore(self.disk, faults=attempt)
            term = self.term()
            try:
                self.cursor = ManagedCursor.open(
                    self.store, topic="t", subscription="s", ledgers=self.log, config=self.config, now_ms=self.now_ms
                )
            except StoreError:
                continue  # It died while it recovered: the next one must find the same (I5).
            break
        assert self.term() > term, "the term was not raised"
        if not attempt:
            # A ledger that no record names is gone after an open.
            assert len(self.owned()) == (self.record().cursor_ledger_id is not None), "a ledger was left behind"
        found = State(frozenset(self.observed()), self.observed_batches(), dict(self.cursor.properties))
        if found not in self.possible_resets:
            assert self.promised <= found.acked, "a durable ack was lost"  # I2
            assert found.acked <= self.accepted, "an ack was invented"  # I1
        assert found in [*self.possible, *self.possible_resets], "the recovered state never was"
        assert self.cursor.cursor_properties in self.possible_names, "the cursor properties never were"
        self.possible, self.possible_resets = [found], []
        self.possible_names = [dict(self.cursor.cursor_properties)]
        self.accepted, self.batches, self.properties = set(found.acked), dict(found.batches), found.properties
        self.last_words = {}  # position -> what was unacked of a batch before its last ack
        self.receipts, self.deliveries = [], []
        self.held, self.cut, self.batches_cut, self.causes_known = set(), set(), set(), True
        self.range_count_at_open = self.cursor.deleted.range_count

    def record(self):
        return decode_record(self.disk.values[PATH].data).record

    def term(self):
        return self.record().term if PATH in self.disk.values else -1

    def owned(self):
        return MemoryStore(self.disk).ledgers.owned_by(cursor_owner(PATH))

    def observed_batches(self):
        return {position: indexes_of(words) for position, words in self.cursor.batch.items()}

    def observed(self):
        return {position for position in written_positions(self.log) if self.cursor.is_acked(position)}

    def pick(self, number):
        positions = written_positions(self.log)
        if not positions:
            self.log.append()
            return self.pick(number)
        return positions[number % len(positions)]

    def took(self, receipt, positions, batch=None):
        assert receipt.newly_acked == len(set(positions) - self.accepted)
        self.accepted |= set(positions)
        self.last_words |= {p: unacked for p, unacked in self.batches.items() if p in self.accepted}
        self.batches = {p: unacked for p, unacked in self.batches.items() if p not in self.accepted}
        self.receipts.append((receipt, set(positions), batch))

    @rule(count=st.integers(0, 5))
    def read(self, count):
        expected = [p for p in written_positions(self.log) if p >= self.cursor.read_position and p not in self.accepted]
        assert not expected or self.cursor.next_unread == expected[0]
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
    def trim(self, number):
        """Forget ledgers without a message, or with none above the durable mark-delete position, as a broker does."""
        needed = [
            p.ledger_id for p in written_positions(self.log) if p > self.durable_mark_delete or not self.is_certain
        ]
        ledger_ids = [each for each in self.log if each <= min(needed, default=self.log.current_ledger_id)]
        self.log.trim(ledger_ids[number % len(ledger_ids)])
        kept = set(written_positions(self.log))
        self.accepted &= kept
        self.possible = [state._replace(acked=state.acked & kept) for state in self.possible]
        self.possible_resets = [state._replace(acked=state.acked & kept) for state in self.possible_resets]
        self.receipts = [
            (receipt, positions & kept, batch if batch and batch[0] in kept else None)
            for receipt, positions, batch in self.receipts
        ]

    @rule()
    def clear_backlog(self):
        self.took(self.cursor.clear_backlog(now_ms=self.now_ms), written_positions(self.log))

    @rule()
    def mark_delete_again(self):
        """Where it stands already, whether the log still has that position or not."""
        self.took(self.cursor.mark_delete(self.cursor.mark_delete_position, now_ms=self.now_ms), [])

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

    @rule(number=PICKS, properties=st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(0, 2)))
    def mark_delete(self, number, properties=None):
        position = self.pick(number)
        if position >= self.cursor.mark_delete_position:
            covered = [other for other in written_positions(self.log) if other <= position]
            self.took(self.cursor.mark_delete(position, now_ms=self.now_ms, properties=properties), covered)
            self.properties = self.properties if properties is None else properties

    @rule(number=PICKS, unacked=INDEXES)
    def mark_delete_into_a_batch(self, number, unacked):
        position = self.pick(number)
        if position <= self.cursor.mark_delete_position or not unacked:
            return
        receipt = self.cursor.mark_delete(position, now_ms=self.now_ms, unacked_words=words_of(unacked))
        self.took_batch(receipt, position, unacked, [p for p in written_positions(self.log) if p < position])

    @rule(number=PICKS, unacked=INDEXES)
    def ack_batch(self, number, unacked):
        position = self.pick(number)
        self.took_batch(self.cursor.ack_batch(position, words_of(unacked), now_ms=self.now_ms), position, unacked, [])

    def took_batch(self, receipt, position, unacked, below):
        if position in self.accepted:
            self.took(receipt, [*below, position])
            return
        left = self.batches.get(position, unacked) & unacked
        self.took(receipt, below if left else [*below, position], (position, left) if left else None)
        if left:
            self.batches[position] = left

    @rule(count=st.integers(0, 4), counts_acked=st.booleans())
    def skip(self, count, counts_acked):
        following = [p for p in written_positions(self.log) if p > self.cursor.mark_delete_position]
        counted = [p for p in following if counts_acked or p not in self.accepted][:count]
        covered = [p for p in following if counted and p <= counted[-1]]
        self.took(self.cursor.skip(count, counts_acked=counts_acked, now_ms=self.now_ms), covered)

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

    @rule()
    def break_ledgers(self):
        self.store.break_ledgers()

    @rule()
    def mend_ledgers(self):
        self.store.mend_ledgers()

    @rule(number=PICKS)
    def reset(self, number):
        position = self.pick(number)
        below = frozenset(other for other in written_positions(self.log) if other < position)
        before, was_certain = self.record(), self.is_certain
        self.durable_mark_delete = Position(0, -1)
        self.possible_resets.append(State(below, {}, {}))
        try:
            self.cursor.reset(position, now_ms=self.now_ms)
        except PowerCutError:
            self.open_cursor()
        except StoreError:
            # Whether a recovery would find it reset is open until the next write, so there must be one.
            assert self.cursor.is_dirty(), "a failed reset left the cursor clean"
            self.causes_known = False
        else:
            self.forget(below)
            assert self.cursor.read_position == position
            is_raised = self.record().epoch > before.epoch or self.config.format is Format.PULSAR
            assert is_raised or not was_certain, "the epoch was not raised"  # I13

    def forget(self, below):
        """Everything that was known is void but that the reset has acked what lies below."""
        void = [receipt for receipt, _, _ in self.receipts]
        assert not any(map(self.cursor.durable, void)), "a receipt from before the reset counts"  # I13
        self.possible, self.possible_resets = [State(below, {}, {})], []
        self.accepted, self.batches, self.properties = set(below), {}, {}
        self.receipts, self.deliveries, self.last_words = [], [], {}
        self.held, self.cut, self.batches_cut, self.causes_known = set(), set(), set(), True
        self.range_count_at_open = 0

    @rule(text=st.sampled_from("xyz"))
    def set_cursor_properties(self, text):
        names = {"name": text}
        self.possible_names.append(names)
        try:
            self.cursor.set_cursor_properties(names)
        except PowerCutError:
            self.open_cursor()
        except StoreError:
            pass
        else:
            self.possible_names = [names]

    def frontier(self):
        age_ms = self.cursor.stats().young_age_ms
        if not age_ms:
            return EVERYTHING
        old = [position for time, position in self.deliveries if time <= self.now_ms - age_ms]
        return old[-1] if old else Position(0, -1)

    def planned(self, frontier, limits):
        """What is durable once everything that may be written now is."""
        mark_delete, promised = self.cursor.mark_delete_position, self.promised
        covered = {position for position in self.accepted if position <= mark_delete}
        waiting = self.accepted - promised - covered
        candidates = {position for position in waiting if position <= frontier}
        kept = limited(promised - covered, candidates, limits, self.config.keep)
        self.held, self.cut = waiting - candidates, (candidates | promised) - covered - kept
        left_out = {p: self.last_words[p] for p in self.held | self.cut if p in self.last_words}
        batches = sorted((self.batches | left_out).items())
        within = dict(batches[: limits.batch_count_max])
        self.batches_cut = {position for position, _ in batches} - within.keys()
        return State(frozenset(covered | kept), within, self.properties)

    def room_in_metadata(self, state):
        """Whether the metadata store may be given a state: it is within the limit, and gives nothing durable up."""
        limit = self.config.metadata_limits.range_count_max
        above = {position for position in state.acked if position > self.cursor.mark_delete_position}
        return (limit is None or len(runs_of(above)) <= limit) and len(state.acked) >= len(self.promised)

    @rule()
    def persist(self):
        self.write(lambda: self.cursor.persist(now_ms=self.now_ms))

    @rule(number=PICKS, ahead=st.integers(0, 5), kind=st.sampled_from(FaultKind))
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
        frontier, before = self.frontier(), self.cursor.stats()
        self.before = self.held, self.cut, self.batches_cut, self.last_words
        to_ledger = self.planned(frontier, self.config.ledger_limits)
        try:
            result = persist()
        except PowerCutError:
            self.possible += [to_ledger, self.planned(frontier, self.config.metadata_limits)]
            self.open_cursor()
            return
        except StoreError:
            result = None
        if result is not None and result.route is Route.NOTHING:
            assert not self.cursor.is_dirty(), "what waits was not written"
            self.held, self.cut, self.batches_cut, self.last_words = self.before
            return
        self.count_write(result, before, to_ledger, frontier)

    def count_write(self, result, before, to_ledger, frontier):
        after = self.cursor.stats()
        if after.ledger_error_count > before.ledger_error_count:
            self.possible.append(to_ledger)
        elif result is None or result.route is Route.METADATA:
            self.held, self.cut, self.batches_cut, self.last_words = self.before  # No ledger was tried.
        written = to_ledger
        if result is None or result.route is Route.METADATA:
            written = self.planned(frontier, self.config.metadata_limits)
            has_room = self.room_in_metadata(written)
            assert has_room == (result is not None or after.metadata_error_count > before.metadata_error_count)
        if result is None:
            if has_room:
                self.possible.append(written)
            self.causes_known = False
            assert self.cursor.is_persist_due(now_ms=self.now_ms + 3_600_000), "a failed write is not tried again"
            return
        assert result.messages_covered == len(written.acked) - len(self.promised)
        assert (result.messages_held_back, result.messages_cut) == (len(self.held), len(self.cut))
        in_metadata = after.metadata_write_count - before.metadata_write_count
        in_ledger = after.ledger_write_count - before.ledger_write_count
        assert (in_metadata, in_ledger) == ((1, 0) if result.route is Route.METADATA else (0, 1)), "not counted"
        assert after.bytes_persisted - before.bytes_persisted == result.bytes_written > 0, "not counted"
        self.wrote(written)

    def wrote(self, state):
        self.possible, self.possible_resets, self.causes_known = [state], [], True
        self.last_words = {p: unacked for p, unacked in self.last_words.items() if p not in state.acked}
        if self.config.format is Format.PULSAR:
            self.range_count_at_open = 0

    @rule(faults=FAULTS, config=st.none() | st.sampled_from(CONFIGS))
    def crash(self, faults=(), config=None):
        kept = len(self.accepted) - self.cursor.redelivery_if_crashed
        was_certain = self.is_certain
        self.open_cursor(config, faults)
        # I3: what comes back is what the gauge said; less, if a write of unknown outcome saved some of it.
        assert len(self.accepted) >= kept, "the gauge was too low"
        assert not was_certain or len(self.accepted) == kept, "the gauge was wrong"

    @rule(faults=FAULTS, config=st.none() | st.sampled_from(CONFIGS))
    def close_and_reopen(self, faults=(), config=None):
        limits = self.config.ledger_limits, self.config.list_limits, self.config.metadata_limits
        attempted = [self.planned(EVERYTHING, limit) for limit in limits]
        try:
            result = self.cursor.close(now_ms=self.now_ms)
        except StoreError:
            self.possible += attempted
            self.open_cursor(config, faults)
            return
        if result.route is not Route.NOTHING:
            self.possible, self.possible_resets = attempted, []
        kept = len(self.accepted) - self.cursor.redelivery_if_crashed
        self.open_cursor(config, faults)
        assert len(self.accepted) == kept, "the gauge was wrong"  # I3

    @rule(number=PICKS)
    def second_owner(self, number):
        older = self.cursor
        self.open_cursor()
        older.ack(self.pick(number), now_ms=self.now_ms)
        if older.is_dirty():
            # StoreError where a scripted fault comes first; what matters is that it never gets through.
            with pytest.raises((StoreError, CursorFencedError)):
                older.persist(now_ms=self.now_ms)

    @rule(damage=st.sampled_from(["record", "ledger", "both"]))
    def open_a_damaged_copy(self, damage):
        """I10: what cannot be read is not taken for absent, and is left as it is."""
        copy = MemoryDisk()
        ledger_id = self.record().cursor_ledger_id
        copy.ledgers, copy.values, copy.next_ledger_id = dict(self.disk.ledgers), dict(self.disk.values), 10_000
        if damage != "ledger" or ledger_id is None:
            copy.values[PATH] = copy.values[PATH]._replace(data=b"\xff")
        if damage != "record":
            copy.ledgers.pop(ledger_id, None)
        before = dict(copy.ledgers), dict(copy.values)
        with pytest.raises(UnreadableCursorError):
            ManagedCursor.open(MemoryStore(copy), topic="t", subscription="s", ledgers=self.log, now_ms=self.now_ms)
        assert (copy.ledgers, copy.values) == before, "an unreadable cursor was changed"

    @invariant()
    def agrees_with_the_set(self):
        cursor, mark_delete = self.cursor, self.cursor.mark_delete_position
        cursor._check()
        assert self.observed() == self.accepted, "membership differs"
        unacked = [position for position in written_positions(self.log) if position not in self.accepted]
        assert cursor.backlog == len(unacked), "the backlog is wrong"
        assert self.log.next_valid(mark_delete) == (
            unacked[0] if unacked else self.log.next_valid(self.log.last_confirmed)
        )
        assert self.observed_batches() == self.batches, "the batches differ"
        assert cursor.properties == self.properties, "the properties differ"

    @invariant()
    def counts_what_a_crash_redelivers(self):
        """I4: what is kept incrementally is what a recount says."""
        cursor, stats, mark_delete = self.cursor, self.cursor.stats(), self.cursor.mark_delete_position
        assert cursor.redelivery_if_crashed == max(map(len, self.lost)), "the gauge differs"
        if self.causes_known:
            assert stats.redelivery_young == sum(position > mark_delete for position in self.held), "young is wrong"
            assert stats.redelivery_cut == sum(position > mark_delete for position in self.cut), "cut is wrong"
        record_bytes = max(ranges_of(p for p in lost if p > mark_delete).record_bytes for lost in self.lost)
        # Each of its parts is counted by itself; with no limit and no age there is one.
        assert cursor.unpersisted_record_bytes >= record_bytes, "the un-persisted bytes are too few"
        if self.config is PLAIN:
            assert cursor.unpersisted_record_bytes == record_bytes, "the un-persisted bytes are wrong"

    @invariant()
    def receipts_do_not_lie(self):
        for receipt, positions, batch in self.receipts:
            may_hold = [*self.possible, *self.possible_resets]
            is_durable = all(positions <= state.acked for state in may_hold)
            if batch is not None:
                position, unacked = batch
                is_durable = is_durable and all(
                    position in state.acked or state.batches.get(position, {-1}) <= unacked for state in may_hold
                )
            assert is_durable or not self.cursor.durable(receipt), "a receipt lied"  # I2
            assert self.cursor.is_dirty() or self.cursor.durable(receipt) == is_durable, "a receipt is late"

    @invariant()
    def the_disk_holds_what_was_promised(self):
        """What a crash now would leave, read without changing it."""
        value = self.disk.values[PATH]
        ledger_id = self.record().cursor_ledger_id
        entries = [] if ledger_id is None else self.disk.ledgers[ledger_id].entries
        if self.disk_seen == (value.version, ledger_id, len(entries)):
            return
        self.disk_seen = value.version, ledger_id, len(entries)
        found = Recovery(MemoryStore(self.disk), PATH, self.log).find(self.owned())
        content = found.recovered.content
        below = {position for position in written_positions(self.log) if position <= content.mark_delete}
        above = {Position(run.ledger_id, n) for run in content.deleted.runs() for n in range(run.first, run.end)}
        batches = {position: indexes_of(words) for position, words in content.batch.items()}
        state = State(frozenset(below | above), batches, dict(content.properties))
        # I1, I2, I3, I5, I9: mark-delete, ranges, batches and properties are those of one instant, and of the last.
        assert state in [*self.possible, *self.possible_resets], "the disk holds another state"
        if found.form.name is Format.NATIVE and entries:
            assert state == replayed(entries, self.log), "the fold is not the replay"  # I6
            self.check_journal_size([len(entry) for entry in entries])
        elif found.form.name is not self.config.format:
            return
        # I4: the durable state is within its limit; natively what was durable stays, even beyond one that was lowered.
        limits = self.config.list_limits if ledger_id is None else self.config.ledger_limits
        if limits.rule is LimitRule.EXACT:
            limit = limits.range_count_max
            assert limit is None or len(runs_of(above)) <= max(limit, self.range_count_at_open), "over the limit"
        elif not self.range_count_at_open:
            assert limited(above, set(), limits, self.config.keep) == above, "over the limit"
        if not self.possible_resets:
            assert content.mark_delete >= self.durable_mark_delete, "the durable mark-delete went back"  # I7
        if self.is_certain:
            self.durable_mark_delete = content.mark_delete

    def check_journal_size(self, sizes):
        """I11, of what was written with one of our configurations: they all compact alike."""
        snapshot, *deltas = sizes
        bound = snapshot + max(4 * snapshot, self.config.compaction_bytes_min) + max(deltas, default=0)
        assert sum(sizes) <= bound, "the journal outgrows the state"


class PassingByMachine(CursorMachine):
    """The same where a persist leaves much out: what is planted there is found by a short search."""

    configs = PASSING_BY


TestCursorModel = CursorMachine.TestCase


def machine_of(config, *, entries=15):
    """A machine without hypothesis: a test tells it the story in which a planted bug shows."""
    machine = CursorMachine()
    machine.begin(config)
    machine.publish(entries - 5)
    return machine


def check(machine):
    machine.agrees_with_the_set()
    machine.counts_what_a_crash_redelivers()
    machine.receipts_do_not_lie()
    machine.the_disk_holds_what_was_promised()


def fail_both(machine):
    """Persist into a failed sync: neither the ledger nor the metadata store can be written."""
    machine.persist_into_a_fault(3, 0, FaultKind.SYNC_FAILED)


def test_model_catches_acks_forgotten_by_a_failed_persist(monkeypatch):
    monkeypatch.setattr(AckState, "abandon_persist", lambda self: None)
    machine = machine_of(PLAIN)
    fail_both(machine)
    with pytest.raises(AssertionError, match="the un-persisted bytes are too few"):
        check(machine)


def test_model_catches_a_receipt_given_before_the_write(monkeypatch):
    plan = Persister.plan

    def planned(self, frontier, *, now_ms):
        decided = plan(self, frontier, now_ms=now_ms)
        if decided is not None:
            self.durable_number = decided.number
        return decided

    monkeypatch.setattr(Persister, "plan", planned)
    machine = machine_of(PLAIN)
    fail_both(machine)
    with pytest.raises(AssertionError, match="a receipt lied"):
        check(machine)


def test_model_catches_a_failed_promotion_that_nobody_tries_again(monkeypatch):
    can_promote = AckState.can_promote
    monkeypatch.setattr(
        AckState, "can_promote", lambda self, frontier: bool(self._undurable.held) and can_promote(self, frontier)
    )
    machine = machine_of(CONFIGS[4])
    machine.deliver(9)
    machine.ack(7)
    machine.persist()
    machine.wait(1_000)
    machine.store.inject(Fault(machine.store.mutation_count, FaultKind.SYNC_FAILED))
    with pytest.raises(AssertionError, match="a failed write is not tried again"):
        machine.persist()


def test_model_catches_an_old_ledger_deleted_before_the_pointer_swings(monkeypatch):
    swing = Journal._swing

    def delete_first(self, record, form):
        if self._pointed_at is not None:
            self.store.ledgers.delete(self._pointed_at)
        return swing(self, record, form)

    monkeypatch.setattr(Journal, "_swing", delete_first)
    machine = machine_of(CONFIGS[1])
    for number in (1, 2):
        machine.ack(number)
        machine.persist()
    with pytest.raises(CorruptStateError, match="expected cursor ledger"):
        machine.persist_into_a_fault(3, 3, FaultKind.CRASH_BEFORE)


def test_model_catches_appending_after_a_failed_append(monkeypatch):
    prepare = Journal.prepare

    def keep_ledger(self, content):
        ledger_id, encoded = prepare(self, content)
        self._open_ledger = ledger_id
        return ledger_id, encoded

    monkeypatch.setattr(Journal, "prepare", keep_ledger)
    machine = machine_of(replace(PLAIN, metadata_range_count_max=0))
    machine.ack(7)
    machine.persist()
    machine.persist_into_a_fault(3, 0, FaultKind.FAIL_AFTER)  # The metadata store may not have what is durable.
    machine.persist()
    with pytest.raises(CorruptStateError, match=r"expected .kind, epoch, sequence, chain."):
        machine.crash()


def test_model_catches_a_delta_that_forgets_the_mark_delete(monkeypatch):
    encode = Journal._encode

    def stale(self, content):
        return encode(self, content._replace(mark_delete=Position(content.mark_delete.ledger_id, -1)))

    monkeypatch.setattr(Journal, "_encode", stale)
    machine = machine_of(PLAIN)
    machine.ack_next()
    machine.persist()
    with pytest.raises(AssertionError, match="the disk holds another state"):
        check(machine)
    with pytest.raises(AssertionError, match="a durable ack was lost"):
        machine.crash()


def test_model_catches_a_receipt_that_forgets_what_was_held_back(monkeypatch):
    monkeypatch.setattr(AckState, "is_undurable", lambda self, candidates: False)
    assert_caught(PassingByMachine, by=AssertionError, saying="a receipt lied")


def test_model_catches_young_acks_that_count_as_written(monkeypatch):
    begin = AckState.begin_persist

    def all_written(self, **settings):
        return begin(self, **settings)._replace(acked_count=self._acked_count)

    monkeypatch.setattr(AckState, "begin_persist", all_written)
    assert_caught(PassingByMachine, by=AssertionError)


def test_model_catches_a_limit_that_drops_what_is_durable(monkeypatch):
    def forgetful(ranges, *, range_count_max, keep, always):
        return select(ranges, range_count_max=range_count_max, keep=keep)

    monkeypatch.setattr(ackstate.cursor.undurable, "select", forgetful)
    machine = machine_of(PASSING_BY[1])
    for numbers in ([2, 4], [6, 7]):
        machine.ack_many(numbers)
        with pytest.raises(AssertionError) if 6 in numbers else nullcontext():
            machine.persist()


def test_model_catches_a_limit_that_is_one_off(monkeypatch):
    def one_more(ranges, *, range_count_max, keep, always):
        return select(ranges, range_count_max=range_count_max + 1, keep=keep, always=always)

    monkeypatch.setattr(ackstate.cursor.undurable, "select", one_more)
    machine = machine_of(PASSING_BY[0])
    machine.ack_many([2, 4, 6, 8])
    with pytest.raises(AssertionError):
        machine.persist()


def test_model_catches_a_gauge_that_counts_ranges_where_whole_ledgers_are_excluded(monkeypatch):
    monkeypatch.setattr(RangeLimit, "usage", lambda self, ranges: ranges.range_count)
    machine = machine_of(replace(PULSAR, range_count_max=2, range_limit_rule=LimitRule.PULSAR_4_2), entries=10)
    machine.roll(1)
    machine.publish(3)
    for number in (1, 2, 3, 11):
        machine.ack(number)
    with pytest.raises(AssertionError, match="messages_covered"):
        machine.persist()


def test_model_catches_displaced_ranges_that_count_as_durable(monkeypatch):
    end = AckState.end_persist

    def with_displaced(self, written):
        return end(self, written._replace(acked_count=written.acked_count + len(self._undurable.displaced)))

    monkeypatch.setattr(AckState, "end_persist", with_displaced)
    machine = machine_of(PASSING_BY[3])
    machine.ack_many([6, 8])
    machine.persist()
    machine.ack(2)
    with pytest.raises(AssertionError):
        machine.persist()


def test_model_catches_a_displaced_batch_whose_receipt_still_counts(monkeypatch):
    monkeypatch.setattr(AckState, "is_batch_cut", lambda self, position: False)
    machine = machine_of(PASSING_BY[3])
    machine.ack_batch(8, {0})
    machine.persist()
    check(machine)
    machine.ack_batch(2, {0})
    machine.persist()
    with pytest.raises(AssertionError, match="a receipt lied"):
        check(machine)


def test_model_catches_batches_that_a_recovery_forgets(monkeypatch):
    restore = AckState.restore

    def without(self, *content, batch, **settings):
        restore(self, *content, batch=BatchIndexes(), **settings)

    monkeypatch.setattr(AckState, "restore", without)
    machine = machine_of(PLAIN)
    machine.ack_batch(3, {0, 1})
    machine.persist()
    with pytest.raises(AssertionError, match="the recovered state never was"):
        machine.crash()


def test_model_catches_acks_in_a_batch_that_go_with_its_last_one(monkeypatch):
    """A batch is durable in part, then its last ack is left out of a whole state as young."""
    monkeypatch.setattr(UndurableBatches, "_left_out", lambda self: [])
    machine = machine_of(replace(CONFIGS[4], ledger_entry_count_max=1))
    machine.ack_batch(3, {0})
    machine.persist()
    machine.ack_batch(3, set())
    machine.persist()
    with pytest.raises(AssertionError, match=r"a receipt is late|the disk holds another state"):
        check(machine)


def test_model_catches_an_excluded_batch_that_is_not_persisted_once_there_is_room(monkeypatch):
    begin_write = UndurableBatches.begin_write

    def forget_excluded(self, batch_count_max):
        for position in self._cut:
            self._completed.discard(position)
        return begin_write(self, batch_count_max)

    monkeypatch.setattr(UndurableBatches, "begin_write", forget_excluded)
    machine = machine_of(replace(PULSAR, range_count_max=0, batch_count_max=1))
    machine.ack_batch(1, {0})
    machine.ack_batch(8, {0})
    machine.ack(8)
    machine.persist()
    machine.mark_delete(1)
    machine.persist()
    with pytest.raises(AssertionError, match="a receipt is late"):
        check(machine)


def test_model_catches_a_cumulative_ack_that_forgets_the_batch_that_it_completes(monkeypatch):
    """Of the messages that it leaves unacked, all were acked one by one before."""
    cumulative = BatchIndexes.ack_cumulative

    def forgetful(self, position, unacked_words):
        cumulative(self, position, unacked_words)
        return False

    monkeypatch.setattr(BatchIndexes, "ack_cumulative", forgetful)
    machine = machine_of(PLAIN)
    machine.ack_batch(3, {0})
    with pytest.raises(AssertionError):
        machine.mark_delete_into_a_batch(3, {1})


def test_model_catches_a_conversion_that_loses_batches(monkeypatch):
    encode = PulsarFormat.encode_entry

    def without(self, content, **where):
        return encode(self, content._replace(batch=BatchIndexes()), **where)

    monkeypatch.setattr(PulsarFormat, "encode_entry", without)
    machine = machine_of(PLAIN)
    machine.ack_batch(3, {0})
    machine.persist()
    machine.crash(config=PULSAR)
    machine.ack(5)
    machine.persist()
    with pytest.raises(AssertionError, match="the disk holds another state"):
        check(machine)


def test_model_catches_cursor_properties_written_in_the_wrong_format(monkeypatch):
    swing = Journal._swing
    monkeypatch.setattr(Journal, "_swing", lambda self, record, form: swing(self, record, self.form))
    machine = machine_of(PLAIN)
    machine.crash(config=PULSAR)
    machine.set_cursor_properties("x")
    with pytest.raises(UnreadableCursorError):
        machine.crash()


def test_model_catches_a_fallback_that_forgets_acks(monkeypatch):
    write = Journal.write_record

    def without(self, content, buckets):
        return write(self, content._replace(deleted=DeletedRanges()), buckets)

    monkeypatch.setattr(Journal, "write_record", without)
    machine = machine_of(PLAIN)
    machine.break_ledgers()
    machine.ack(3)
    machine.persist()
    with pytest.raises(AssertionError, match="the disk holds another state"):
        check(machine)


def test_model_catches_a_fallback_that_deletes_no_ledger(monkeypatch):
    monkeypatch.setattr(Journal, "_delete", lambda self, ledger_ids: None)
    machine = machine_of(PLAIN)
    machine.break_ledgers()
    machine.ack(3)
    machine.persist()
    with pytest.raises(AssertionError, match="a ledger was left behind"):
        machine.crash()


def test_model_catches_a_fallback_that_is_not_counted(monkeypatch):
    count = Persister._count_written

    def ledgers_only(self, route, written, *, now_ms):
        if route is not Route.METADATA:
            count(self, route, written, now_ms=now_ms)

    monkeypatch.setattr(Persister, "_count_written", ledgers_only)
    machine = machine_of(PLAIN)
    machine.break_ledgers()
    machine.ack(3)
    with pytest.raises(AssertionError, match="not counted"):
        machine.persist()


def test_model_catches_an_earlier_owner_that_is_not_kept_out(monkeypatch):
    new_owner_keeps_the_term(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="the term was not raised"):
        machine_of(PLAIN).second_owner(3)


def test_model_catches_a_reset_in_the_same_epoch(monkeypatch):
    monkeypatch.setattr(Journal, "begin_epoch", lambda self: None)
    with pytest.raises(AssertionError, match="the epoch was not raised"):
        machine_of(PLAIN).reset(2)


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
    receipts_outlive_a_reset(monkeypatch.setattr)
    machine = machine_of(PLAIN)
    machine.ack(3)
    with pytest.raises(AssertionError, match="a receipt from before the reset counts"):
        machine.reset(2)


def resets_in_vain():
    machine = machine_of(PLAIN)
    machine.ack(3)
    machine.persist()
    machine.break_ledgers()
    machine.store.inject(Fault(machine.store.mutation_count, FaultKind.FAIL_AFTER))
    machine.reset(2)
    assert machine.possible_resets
    check(machine)


def test_model_catches_a_gauge_without_a_reset_that_may_have_happened(monkeypatch):
    resets_in_vain()
    monkeypatch.setattr(AckState, "begin_reset", lambda *_: None)
    with pytest.raises(AssertionError, match="the gauge differs"):
        resets_in_vain()


def test_model_catches_a_receipt_that_a_reset_may_have_voided(monkeypatch):
    receipts_outlive_a_reset_that_failed(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="a receipt lied"):
        resets_in_vain()


def test_model_catches_a_journal_that_is_never_compacted(monkeypatch):
    monkeypatch.setattr(ackstate.cursor.persister, "_COMPACTION_RATIO", 1_000)
    machine = machine_of(PLAIN)
    for step in range(40):
        machine.mark_delete(0, properties={"a": step})
        machine.persist()
    with pytest.raises(AssertionError, match="the journal outgrows the state"):
        check(machine)
