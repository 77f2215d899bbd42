"""The bucketed index against a dict, with storage that fails, crashes, seeks and a clock that jumps.

One subscription reads a log of ledgers with three messages each, acks some of its deliveries at random, and is
restarted. Undelivered messages are delivered again; nothing early, nothing twice while it lives, nothing lost.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import MemoryStore, Position
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage
from ackstate.stores.base import StoreError
from ackstate.stores.memory import Fault, FaultKind

LEDGER_ENTRIES = 3
FAR = 10_000_000
NO_DELAY = -1

delays = st.sampled_from([NO_DELAY, 0, 9, 64, 64]) | st.integers(1, 200)
settings = st.builds(
    DelayConfig,
    tick_time_ms=st.sampled_from([1, 20]),
    is_deliver_at_time_strict=st.booleans(),
    min_index_count_per_bucket=st.integers(1, 4),
    max_time_step_per_segment_ms=st.sampled_from([1, 30, 1000]),
    max_indexes_per_segment=st.sampled_from([None, 1, 2]),
    max_bucket_count=st.sampled_from([None, 1, 2, 3]),
    ledger_step_per_bucket=st.sampled_from([None, 2]),
)


class BucketedMachine(RuleBasedStateMachine):
    """`held` are the messages that must wait; `given` those that the subscription got since its reader began."""

    @initialize(config=settings)
    def open(self, config):
        self.config = config
        self.early_ms = 0 if config.is_deliver_at_time_strict else config.tick_time_ms
        self.store = MemoryStore()
        self.log: list[Position] = []
        self.deliver_at_ms: dict[Position, int] = {}
        self.acked: set[Position] = set()
        self.clock_ms = 1000
        self.begin_life(BucketedDelayIndex(config, storage=self.storage()), seen_ms=0)

    def storage(self) -> SnapshotStorage:
        return SnapshotStorage(self.store.ledgers, BucketRegistry(self.store.metadata, "/b"), "delayed")

    def begin_life(self, index, *, seen_ms) -> None:
        self.index = index
        self.seen_ms = seen_ms
        self.begin_pass()
        self.held = {position for position in self.log if position in index}

    def begin_pass(self) -> None:
        self.next_read = next((at for at, each in enumerate(self.log) if each not in self.acked), len(self.log))
        self.held: set[Position] = set()
        self.given: set[Position] = set()

    def cutoff_ms(self) -> int:
        self.seen_ms = max(self.seen_ms, self.clock_ms)
        return self.seen_ms + self.early_ms

    def give(self, position: Position) -> None:
        assert self.deliver_at_ms[position] <= self.cutoff_ms(), "early"
        assert position not in self.given, "given twice"
        self.held.discard(position)
        self.given.add(position)

    def offer(self, position: Position) -> None:
        deliver_at_ms = self.deliver_at_ms[position]
        must_wait = self.index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=self.clock_ms)
        assert must_wait == (deliver_at_ms > self.cutoff_ms())
        if must_wait:
            self.held.add(position)
        elif position not in self.given:
            self.give(position)

    @rule(more=st.lists(delays, min_size=1, max_size=8))
    def publish_and_read(self, more):
        for delay in more:
            ledger, entry_id = divmod(len(self.log), LEDGER_ENTRIES)
            position = Position(3 + 2 * ledger, entry_id)
            self.log.append(position)
            self.deliver_at_ms[position] = NO_DELAY if delay == NO_DELAY else self.clock_ms + delay
        self.read(len(more))

    @rule(count=st.integers(1, 9))
    def read(self, count):
        for position in self.log[self.next_read : self.next_read + count]:
            if position not in self.acked and position not in self.index:
                self.offer(position)
        self.next_read = min(self.next_read + count, len(self.log))

    @rule(pick=st.integers(0, 99))
    def offer_again(self, pick):
        again = [each for each in self.log[: self.next_read] if each not in self.acked]
        if again:
            self.offer(again[pick % len(again)])

    @rule(max_messages=st.sampled_from([0, 1, 2, 3, 50]))
    def poll(self, max_messages):
        cutoff_ms = self.cutoff_ms()
        due = sorted((self.deliver_at_ms[each], each) for each in self.held if self.deliver_at_ms[each] <= cutoff_ms)
        if due:
            assert self.index.has_message_available(now_ms=self.clock_ms)
        given = self.index.scheduled_messages(max_messages, now_ms=self.clock_ms)
        for position in given:
            self.give(position)
        assert given == sorted(position for _, position in due[:max_messages])

    @rule(pick=st.integers(0, 99))
    def ack(self, pick):
        given = sorted(self.given - self.acked)
        if given:
            self.acked.add(given[pick % len(given)])

    @rule()
    def ack_all_and_advance_the_mark_delete(self):
        self.acked |= self.given
        first = next((each for each in self.log if each not in self.acked), None)
        if first is not None and self.log[0] < first:
            self.index.advance_mark_delete(self.log[self.log.index(first) - 1])

    @rule(forward_ms=st.sampled_from([1, 10, 40, 100]))
    def time_passes(self, forward_ms):
        self.clock_ms += forward_ms

    @rule(back_ms=st.sampled_from([1, 30, 500]))
    def clock_jumps_back(self, back_ms):
        self.clock_ms = max(0, self.clock_ms - back_ms)

    @rule(
        after=st.integers(0, 6),
        times=st.integers(1, 5),
        kind=st.sampled_from([FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER]),
    )
    def storage_fails(self, after, times, kind):
        for at in range(after, after + times):
            self.store.inject(Fault(self.store.mutation_count + at, kind))

    @rule()
    def restart(self):
        self.store = MemoryStore(self.store.disk)
        index, report = BucketedDelayIndex.recover(self.config, storage=self.storage(), now_ms=self.clock_ms)
        assert report.fell_back == ""
        assert report.message_count == len(index)
        self.begin_life(index, seen_ms=self.clock_ms)

    @rule()
    def seek_back(self):
        while not self.is_cleared():
            assert len(self.index) == 0
        self.acked.clear()
        self.begin_pass()
        assert self.store.ledgers.owned_by("delayed") == []
        assert self.store.metadata.children("/b") == []

    def is_cleared(self) -> bool:
        try:
            self.index.clear()
        except StoreError:
            return False
        return True

    @invariant()
    def what_waits_is_exact(self):
        self.index._check()
        assert len(self.index) == len(self.held)
        assert all(position in self.index for position in self.held)
        earliest = min((self.deliver_at_ms[each] for each in self.held), default=None)
        next_ms = self.index.next_delivery_ms
        assert (next_ms is None) == (earliest is None)
        assert next_ms is None or next_ms <= max(earliest - self.early_ms, 0)

    @invariant()
    def what_is_registered_is_in_use_or_will_be_dropped(self):
        sealed = self.index._sealed
        in_use = {str(bucket.bucket_id) for bucket in sealed} | {str(each) for each in sealed.snapshots.retired}
        assert set(self.storage().registry.get_all().values()) <= in_use
        for bucket in sealed:
            if bucket.is_registered:
                assert self.storage().registry.get_all()[str(bucket.key)] == str(bucket.bucket_id)
                assert bucket.bucket_id in self.store.ledgers.owned_by("delayed")

    def teardown(self):
        if not hasattr(self, "index"):
            return
        self.clock_ms = FAR
        self.read(len(self.log))
        while self.index.has_message_available(now_ms=self.clock_ms):
            self.poll(2)
        assert set(self.log) - self.acked <= self.given, "lost"
        self.seek_back()


TestBucketed = BucketedMachine.TestCase


STRICT = DelayConfig(min_index_count_per_bucket=2, max_indexes_per_segment=1, is_deliver_at_time_strict=True)


def tell(*steps) -> None:
    """Tell the machine a story: a rule and its arguments, step by step."""
    machine = BucketedMachine()
    machine.open(config=STRICT)
    for name, arguments in steps:
        getattr(machine, name)(**arguments)
        machine.what_waits_is_exact()
        machine.what_is_registered_is_in_use_or_will_be_dropped()
    machine.teardown()


def tell_all() -> None:
    # Ledgers 3, 5, 7: the bucket of 3 cannot be written, that of 5 is sealed.
    tell(
        ("storage_fails", {"after": 0, "times": 4, "kind": FaultKind.FAIL_BEFORE}),
        ("publish_and_read", {"more": [10, 20, 30, 40, 41, 60, 70]}),
        ("time_passes", {"forward_ms": 40}),
        ("poll", {"max_messages": 50}),
        ("time_passes", {"forward_ms": 100}),
        ("poll", {"max_messages": 50}),
    )
    # A message is offered again when its time has come. The bucket of ledger 3 is in its second segment then, and so it
    # is again after a restart.
    tell(
        ("publish_and_read", {"more": [10, 20, 30, 40]}),
        ("time_passes", {"forward_ms": 10}),
        ("offer_again", {"pick": 0}),
        ("poll", {"max_messages": 50}),
        ("ack", {"pick": 0}),
        ("restart", {}),
        ("read", {"count": 9}),
    )
    # The mark-delete stands in ledger 3, whose bucket has a segment to come.
    tell(
        ("publish_and_read", {"more": [10, 200, 200, 40]}),
        ("time_passes", {"forward_ms": 10}),
        ("poll", {"max_messages": 50}),
        ("ack_all_and_advance_the_mark_delete", {}),
        ("offer_again", {"pick": 0}),
    )


def test_the_stories_are_true():
    tell_all()
