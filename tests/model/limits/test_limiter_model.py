"""The limiter beside plain sets: no order of acks exceeds a limit, a crash redelivers what was said, nothing sticks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackstate import LedgerMap, Position
from ackstate.deleted_ranges import DeletedRanges, isolated_range_bytes
from ackstate.limits import AckLimiter, GateLimits

COUNTS = {3: 10, 9: 131, 10: 5}
POSITIONS = [Position(ledger_id, entry_id) for ledger_id, count in COUNTS.items() for entry_id in range(count)]
some = st.lists(st.integers(0, len(POSITIONS) - 1), min_size=1, max_size=30)
BYTES = 1_100


def size(positions):
    ranges = DeletedRanges()
    for position in positions:
        ranges.add(position)
    return ranges.record_bytes


class Limiter(RuleBasedStateMachine):
    """A broker that sends, receives acks in any order, repeated and late ones too, persists, fails to, and crashes."""

    @initialize(
        limits_bytes=st.sampled_from((0, BYTES)), ranges=st.sampled_from((0, 1, 5)),
        unacked=st.sampled_from((0, 1, 60)), of_consumer=st.sampled_from((0, 3)),
    )  # fmt: skip
    def begin(self, limits_bytes, ranges, unacked, of_consumer):
        self.limits = GateLimits(
            limits_bytes, unacked, max_unacked_ranges=ranges, max_unacked_messages_per_consumer=of_consumer
        )
        self.ledgers = LedgerMap.from_counts(COUNTS)
        self.stored, self.durable, self.written = None, set(), None
        self.restart()

    def restart(self):
        self.limiter = AckLimiter(self.ledgers, self.limits, stored=self.stored)
        self.acked, self.sent, self.written = set(self.durable), {}, None
        # A restart begins with the durable ranges, which later acks may only make fewer if they are above the limit.
        self.ranges_max = max(self.limits.max_unacked_ranges, self.limiter.deleted.range_count)

    @rule(numbers=some, consumer=st.sampled_from("ab"), is_picky=st.booleans())
    def send(self, numbers, consumer, is_picky):
        wanted = [POSITIONS[number] for number in numbers] if is_picky else POSITIONS
        admitted = self.limiter.admit(wanted, consumer=consumer)
        assert len(set(admitted)) == len(admitted)
        assert not (self.acked | self.sent.keys()) & set(admitted)
        self.sent |= dict.fromkeys(admitted, consumer)

    @rule(numbers=some)
    def ack(self, numbers):
        positions = [POSITIONS[number] for number in numbers]
        self.take(positions, self.limiter.ack(positions))

    @rule(numbers=some)
    def ack_what_was_sent(self, numbers):
        sent = list(self.sent)
        positions = [sent[number % len(sent)] for number in numbers if sent]
        self.take(positions, self.limiter.ack(positions))

    def take(self, positions, refused):
        self.acked.update(set(positions) - set(refused))
        for position in set(positions) - set(refused):
            self.sent.pop(position, None)

    @rule(numbers=some)
    def give_back(self, numbers):
        positions = {POSITIONS[number] for number in numbers}
        assert self.limiter.give_back(positions) == len(positions & self.sent.keys())
        self.sent = {position: consumer for position, consumer in self.sent.items() if position not in positions}

    @rule(consumer=st.sampled_from("ab"))
    def consumer_leaves(self, consumer):
        gone = [position for position, holder in self.sent.items() if holder == consumer]
        assert self.limiter.consumer_closed(consumer) == gone
        self.sent = {position: holder for position, holder in self.sent.items() if holder != consumer}

    @precondition(lambda self: self.written is None)
    @rule()
    def begin_persist(self):
        self.written = self.limiter.begin_persist(), set(self.acked)

    @precondition(lambda self: self.written is not None)
    @rule(succeeds=st.booleans())
    def end_persist(self, succeeds):
        self.limiter.end_persist(written=succeeds)
        if succeeds:
            self.stored, self.durable = self.written
        self.written = None

    @rule(is_written=st.booleans())
    def crash(self, is_written):
        assert self.limiter.redelivery_if_crashed == len(self.acked - self.durable)
        if is_written and self.written is not None:
            self.stored, self.durable = self.written
        self.restart()

    @invariant()
    def holds_together(self):
        if not hasattr(self, "limiter"):
            return
        limiter, limits = self.limiter, self.limits
        assert {position for position in POSITIONS if limiter.is_acked(position)} == self.acked
        above = [position for position in self.acked if position > limiter.mark_delete]
        assert size(above) == limiter.deleted.record_bytes
        usage = limiter.usage("a")
        assert usage.unacked_messages == len(self.sent)
        assert usage.consumer_unacked_messages == [*self.sent.values()].count("a")
        assert usage.unpersisted_record_bytes >= size(set(above) - self.durable)
        assert usage.reserved_bytes <= sum(isolated_range_bytes(*position) for position in self.sent)
        if limits.max_unpersisted_ack_record_bytes:
            assert usage.unpersisted_record_bytes + usage.reserved_bytes <= limits.max_unpersisted_ack_record_bytes
        if limits.max_unacked_ranges:
            assert usage.range_count + usage.reserved_ranges <= self.ranges_max
            self.ranges_max = max(limits.max_unacked_ranges, min(self.ranges_max, usage.range_count))
        assert not limits.max_unacked_messages or usage.unacked_messages <= limits.max_unacked_messages

    def teardown(self):
        """Acked or given back, and persisted, whatever is left is sent and acked in the end."""
        if not hasattr(self, "limiter"):
            return
        if self.written is not None:
            self.end_persist(succeeds=False)
        self.give_back(range(len(POSITIONS)))
        for _ in range(2 * len(POSITIONS)):
            if len(self.acked) == len(POSITIONS):
                break
            self.begin_persist()
            self.end_persist(succeeds=True)
            before = len(self.acked)
            self.send([], "a", is_picky=False)
            sent = list(self.sent)[::-1]  # from the end: each ack makes a hole
            self.take(sent, self.limiter.ack(sent))
            self.give_back(range(len(POSITIONS)))
            assert len(self.acked) > before, "stuck"
            self.holds_together()
        assert len(self.acked) == len(POSITIONS)
        assert str(self.limiter.deleted) == "[]"
        assert self.limiter.mark_delete == POSITIONS[-1]


Limiter.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestLimiter = Limiter.TestCase
