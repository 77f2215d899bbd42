"""The cursor under Hypothesis, with a crash between any two writes: a second driver of the model that L0 drives.

In both formats and from one to the other, with and without limits and generations, with a cursor ledger and without.
The model compares memory and disk with plain sets after every step. Here are the calls that a subscription never makes:
a log that is trimmed under its cursor, positions that it does not have, reading, and acks of which the age is known.
"""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import AckStateError, CursorConfig, Format, Message, Position
from ackstate.limits import GateLimits
from ackstate.selection import Keep
from ackstate.stores.memory import Fault, FaultKind
from ackstate.wire.pulsar import LimitRule, RangeForm
from crash.model.client_events import append
from crash.model.numbered_log import words_of
from crash.model.settings import Settings
from crash.model.simulation import BrokerSimulation, judged
from strategies import few

pytestmark = pytest.mark.slow

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
    replace(PLAIN, become_old_ack_record_seconds=2),
    PULSAR,
    replace(PULSAR, range_form=RangeForm.LIST, batch_count_max=2, ledger_entry_count_max=2),
    *PASSING_BY,
]
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 14), st.sampled_from(FaultKind)), max_size=2, unique_by=lambda f: f.mutation
)
PICKS = st.integers(0, 10_000)
INDEXES = st.sets(st.sampled_from([0, 1, 63, 64]))
EVENTS = (
    *("persist", "tick", "wait", "promote", "set_cursor_properties", "break_ledgers"),
    *("mend_ledgers", "seek_in_vain", "crash", "go_on_before", "open_damaged_copy", "clear_backlog", "skip"),
)
"""Those of L0 that concern a cursor and send nothing: messages on their way are acked with the subscription."""


class CursorMachine(RuleBasedStateMachine):
    configs = CONFIGS

    @initialize(data=st.data())
    def begin_anywhere(self, data):
        self.begin(data.draw(st.sampled_from(self.configs)), entries_per_ledger_max=data.draw(st.sampled_from([3, 7])))

    def begin(self, config, *, entries_per_ledger_max=100):
        # Without a limit of the gate, which may exclude more than the cursor's settings do.
        self.schedule = BrokerSimulation(
            0,
            Settings(
                config=config,
                limits=GateLimits(max_unpersisted_ack_record_bytes=0),
                entries_per_ledger_max=entries_per_ledger_max,
                promotes_young=False,
                race_count_max=2,
                fault_share=1e-9,
            ),
        )
        (self.side,) = self.schedule.sides
        self.schedule.meanwhile_share = 0  # L0 has others at work while a persist writes.
        self.era, self.deliveries = None, []
        self.publish(5)

    @property
    def cursor(self):
        return self.side.cursor

    @property
    def ledgers(self):
        return self.schedule.message_log.ledgers

    def step(self, happen, *args, **named):
        with judged():
            self.schedule.step(happen, *args, **named)

    def call(self, method, *args, **named):
        return method(*args, now_ms=self.schedule.now_ms, **named)

    def pick(self, number):
        """A number of the log that its ledgers have still."""
        log = self.schedule.log
        first = next((at for at, position in enumerate(log.positions) if position in self.ledgers), None)
        if first is None:
            self.publish(1)
            return self.pick(number)
        return first + number % (len(log) - first)

    def acked(self, numbers, method, *args, **named):
        self.step(lambda *_: self.side.took(self.call(method, *args, **named), numbers))

    @rule(name=st.sampled_from(EVENTS), random=st.randoms(use_true_random=False))
    def happen(self, name, random):
        self.schedule.random = random
        self.step(name)

    @rule(count=st.integers(1, 6), skipped=st.sampled_from([0, 0, 0, 2]))
    def publish(self, count, skipped=0):
        self.schedule._log_disk.next_ledger_id += skipped
        self.step(lambda schedule, _: append(schedule, [Message(b"", publish_time_ms=schedule.now_ms)] * count))

    @rule(count=st.integers(0, 5))
    def read(self, count):
        positions, acked = self.schedule.log.positions, self.side.model.acked
        expected = [each for n, each in enumerate(positions) if each >= self.cursor.read_position and n not in acked]
        assert not expected or self.cursor.reader.next_unread == expected[0]
        assert self.cursor.reader.read(count) == expected[:count]
        assert not expected[count:] or self.cursor.read_position <= expected[count]

    @rule()
    def rewind(self):
        self.cursor.reader.rewind()

    @rule(number=PICKS)
    def trim(self, number):
        """Forget ledgers without a message, or with none above the durable mark-delete position, as a broker does."""
        log, mark_delete = self.schedule.log, self.cursor.persisted_mark_delete_position
        here = [position for position in log.positions if position in self.ledgers]
        needed = [position.ledger_id for position in here if position > mark_delete or not self.side.is_certain]
        ledger_ids = [each for each in self.ledgers if each <= min(needed, default=self.ledgers.current_ledger_id)]
        self.ledgers.trim(ledger_ids[number % len(ledger_ids)])
        # The record of the log loses them, too, when the next ledger begins.
        log.trimmed_count = max(log.trimmed_count, log.count_up_to(self.ledgers.first_position))

    @rule()
    def mark_delete_again(self):
        """Where it stands already, whether the log still has that position or not."""
        self.acked([], self.cursor.mark_delete, self.cursor.mark_delete_position)

    @rule(number=PICKS)
    def ack(self, number):
        number = self.pick(number)
        self.acked([number], self.cursor.ack, self.schedule.log.positions[number])

    @rule()
    def ack_next(self):
        position = self.ledgers.next_valid(self.cursor.mark_delete_position)
        if position in self.ledgers:
            self.acked([self.schedule.log.numbers[position]], self.cursor.ack, position)

    @rule(numbers=st.lists(PICKS, max_size=6))
    def ack_many(self, numbers):
        numbers = [self.pick(number) for number in numbers]
        self.acked(numbers, self.cursor.ack_many, [self.schedule.log.positions[number] for number in numbers])

    @rule(number=PICKS, offsets=st.sets(st.integers(0, 5)))
    def ack_entries(self, number, offsets):
        log = self.schedule.log
        ledger_id, entry_id = log.positions[self.pick(number)]
        entries = [entry_id + k for k in offsets if Position(ledger_id, entry_id + k) in self.ledgers]
        numbers = [log.numbers[Position(ledger_id, entry)] for entry in entries]
        self.acked(numbers, self.cursor.ack_entries, ledger_id, entries)

    @rule(numbers=st.lists(PICKS, max_size=4), beyond=st.integers(1, 3))
    def ack_with_a_stranger_among_them(self, numbers, beyond):
        positions = [self.schedule.log.positions[self.pick(number)] for number in numbers]
        last = self.ledgers.current_ledger_id
        stranger = Position(last, self.ledgers.entry_count(last) + beyond - 1)
        with pytest.raises(AckStateError):
            self.call(self.cursor.ack_many, [*positions, stranger])

    @rule(number=PICKS, properties=st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(0, 2)))
    def mark_delete(self, number, properties=None):
        number = self.pick(number)
        position = self.schedule.log.positions[number]
        if position >= self.cursor.mark_delete_position:
            if properties is not None:
                self.side.model.properties.mark(properties)
            self.acked(range(number + 1), self.cursor.mark_delete, position, properties=properties)

    @rule(number=PICKS, unacked=INDEXES)
    def mark_delete_into_a_batch(self, number, unacked):
        number = self.pick(number)
        if self.schedule.log.positions[number] > self.cursor.mark_delete_position and unacked:
            self.acked_part(number, unacked, self.cursor.mark_delete, below=range(number))

    @rule(number=PICKS, unacked=INDEXES)
    def ack_batch(self, number, unacked):
        self.acked_part(self.pick(number), unacked, self.cursor.ack_batch)

    def acked_part(self, number, unacked, method, *, below=()):
        left = self.side.model.unacked_of_batch.get(number, unacked) & unacked
        position, words = self.schedule.log.positions[number], words_of(unacked)
        self.step(
            lambda *_: self.side.took_part(self.call(method, position, unacked_words=words), number, left, below=below)
        )

    @rule(count=st.integers(0, 4))
    def skip_counting_acked(self, count):
        first = self.side.model.first_unacked()
        covered = range(min(first + count, len(self.schedule.log)) if count else 0)
        self.acked(covered, self.cursor.skip, count, counts_acked=True)

    @rule(number=PICKS, beyond=PICKS)
    def mark_lost(self, number, beyond):
        first, last = sorted((self.pick(number), self.pick(beyond)))
        positions = self.schedule.log.positions
        self.acked(range(first, last + 1), self.cursor.mark_lost, positions[first], positions[last])

    @rule(number=PICKS)
    def deliver(self, number):
        self.forget_deliveries()
        picked = self.pick(number)
        position = self.schedule.log.positions[picked]
        self.call(self.cursor.delivered, position)
        self.side.highest_sent = max(self.side.highest_sent, picked)
        if not self.deliveries or position > self.deliveries[-1][1]:
            self.deliveries.append((self.schedule.now_ms, position))

    def forget_deliveries(self):
        """Those of a cursor that was opened again or reset since count no more."""
        era = self.cursor, self.schedule.counts["resets"]
        if era != self.era:
            self.era, self.deliveries = era, []

    @rule(passed_ms=st.sampled_from([1, 500, 1_000]))
    def wait(self, passed_ms):
        self.schedule.now_ms += passed_ms

    @rule(number=PICKS)
    def reset(self, number):
        number = self.pick(number)
        before = self.cursor
        self.step("seek", number)
        assert self.cursor is not before or not self.side.is_certain or (
            self.cursor.read_position == self.schedule.log.positions[number]
        )  # fmt: skip

    @rule()
    def persist(self):
        """Persist, and see that it held back exactly the young acks."""
        self.forget_deliveries()
        model, positions, age_ms = self.side.model, self.schedule.log.positions, self.cursor.stats().young_age_ms
        old = [position for time, position in self.deliveries if time <= self.schedule.now_ms - age_ms]
        last = old[-1] if old else Position(0, -1)
        waiting = range(model.first_unacked(), len(positions))
        young = {n for n in waiting if age_ms and n in model.acked - model.durable and positions[n] > last}
        before, is_dirty = self.cursor, self.cursor.view.is_dirty
        self.step("persist")
        if self.cursor is before and is_dirty and self.side.excluded is not None:
            assert self.side.excluded.young == young

    @rule(number=PICKS, ahead=st.integers(0, 5), kind=st.sampled_from(FaultKind), count=st.sampled_from([1, 1, 6]))
    def persist_into_a_fault(self, number, ahead, kind, count=1):
        self.ack(number)
        self.schedule.script_faults(self.side, kind, ahead=ahead, count=count)
        self.persist()

    @rule(faults=FAULTS, config=st.none() | st.sampled_from(CONFIGS))
    def crash(self, faults=(), config=None):
        self.side.config = config or self.side.config
        with judged():
            self.side.crash_and_recover(faults)
            while self.side.store.is_over:  # A fault hit the deletion of a leftover, without which a cursor is opened.
                self.side.crash_and_recover()

    @rule(config=st.none() | st.sampled_from(CONFIGS), ahead=st.none() | st.integers(0, 5))
    def close_and_reopen(self, config=None, ahead=None):
        if ahead is not None:
            self.schedule.script_faults(self.side, FaultKind.FAIL_AFTER, ahead=ahead, count=1)
        self.step("reopen", config=config)

    @invariant()
    def agrees_with_the_model(self):
        with judged():
            self.schedule.check_all()
        self.cursor._check()
        first, positions = self.side.model.first_unacked(), self.schedule.log.positions
        if first < len(positions):
            assert self.ledgers.next_valid(self.cursor.mark_delete_position) == positions[first]


TestCursorModel = CursorMachine.TestCase
TestCursorModel.settings = few


YOUNG, SMALL_LEDGERS = CONFIGS[4], CONFIGS[1]
ONE_RANGE_AND_BATCH = replace(PULSAR, range_count_max=2, metadata_range_count_max=1, batch_count_max=1)
ONE_BATCH = replace(PULSAR, batch_count_max=1)
NO_RANGE_ONE_BATCH = replace(ONE_BATCH, range_count_max=0)
FIRST_LEDGER_WHOLE = replace(PULSAR, range_count_max=2, range_limit_rule=LimitRule.PULSAR_4_2)
STORIES = {  # the bug that each would tell of, the settings, and the calls of rules and events; L0 has more of them
    "forgets the acks of a persist that failed": (PLAIN, "fault 3 0 FAIL_BEFORE 6; persist"),
    "gives a receipt before the write": (PLAIN, "fault 3 0 FAIL_BEFORE 6"),
    "never tries a failed promotion again": (YOUNG, "deliver 9; ack 7; persist; wait 1000; faults 6; persist"),
    "deletes the old ledger before the pointer swings": (
        SMALL_LEDGERS, "ack 1; persist; ack 2; persist; fault 3 3 CRASH_BEFORE"
    ),
    # The metadata store need not have the durable acks.
    "appends after a failed append": (
        replace(PLAIN, metadata_range_count_max=0), "ack 7; persist; fault 3 0 FAIL_AFTER; persist"
    ),
    "forgets the mark-delete in a delta": (PLAIN, "ack_next; persist"),
    "drops what is durable at a limit": (PASSING_BY[1], "ack 2; ack 4; persist; ack 6; ack 7; persist"),
    "counts ranges where whole ledgers are excluded": (
        FIRST_LEDGER_WHOLE, "crash; publish 3; ack 1; ack 2; ack 3; ack 11; persist"
    ),
    "counts displaced ranges as durable": (PASSING_BY[3], "ack 6; ack 8; persist; ack 2; persist"),
    "counts receipts of a displaced batch": (ONE_RANGE_AND_BATCH, "ack_batch 8 0; persist; ack_batch 2 0; persist"),
    "forgets batches in a recovery": (PLAIN, "ack_batch 3 0,1; persist; crash"),
    # A batch is durable in part, then its last ack is left out of a whole state as young.
    "forgets acks in a batch whose last one is young": (
        replace(YOUNG, ledger_entry_count_max=1), "ack_batch 3 0; persist; ack_batch 3 -; persist"
    ),
    "forgets an excluded batch once there is room": (
        NO_RANGE_ONE_BATCH, "ack_batch 1 0; ack_batch 8 0; ack 8; persist; mark_delete 1; persist"
    ),
    # Of the messages that it leaves unacked, all were acked one by one before.
    "forgets that a cumulative ack completes a batch": (PLAIN, "ack_batch 3 0; mark_delete_into_a_batch 3 1"),
    "counts an excluded batch below a mark-delete that is not durable": (
        ONE_BATCH, "ack_batch 0 0; ack_batch 1 0; persist; mark_delete 3; persist"
    ),
    "counts an excluded batch after a write that fails": (
        ONE_BATCH, "ack_batch 0 0; ack_batch 1 0; persist; fault 0 0 FULL 6; persist"
    ),
    # The last ack is held back, and the limit on batches excludes the acks before it, twice.
    "counts an excluded batch whose last ack is young": (
        replace(ONE_BATCH, become_old_ack_record_seconds=1),
        "ack_batch 0 0; ack_batch 1 0; ack_batch 1 -; ack 5; persist; ack 7; persist; mark_delete 3; persist",
    ),
    "loses batches in a conversion": (PLAIN, "ack_batch 3 0; persist; turn PULSAR; ack 5; persist"),
    "writes cursor properties in the wrong format": (PLAIN, "turn PULSAR; set_cursor_properties; crash"),
    "forgets acks in the metadata store": (PLAIN, "break_ledgers; ack 3; persist"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "calls"), STORIES.values(), ids=STORIES)
def test_without_its_bug_each_story_ends_well(config, calls):
    machine = CursorMachine()
    machine.begin(config)
    machine.publish(10)
    for call in calls.split("; "):
        match call.split():
            case ["fault", number, ahead, kind, *count]:
                machine.persist_into_a_fault(int(number), int(ahead), FaultKind[kind], *map(int, count))
            case ["faults", count]:
                machine.schedule.script_faults(machine.side, FaultKind.FAIL_BEFORE, count=int(count))
            case ["turn", format_]:
                machine.crash(config=replace(PLAIN, format=Format[format_]))
            case ["ack_batch" | "mark_delete_into_a_batch" as name, number, unacked]:
                getattr(machine, name)(int(number), {int(each) for each in unacked.split(",") if each != "-"})
            case [name] if name in EVENTS and not hasattr(CursorMachine, name):
                machine.step(name)
            case [name, *numbers]:
                getattr(machine, name)(*map(int, numbers))
        machine.agrees_with_the_model()
