"""Whatever is sent, acked, taken back and persisted, in whatever order: no limit is passed, none sticks.

The model recounts everything each time, and decides for each rule of three gates of one broker whether it is closed.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import DeletedRanges, Position
from ackstate.deleted_ranges import isolated_range_bytes
from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Rule, Usage, Verdict

BYTES, RANGES, MESSAGES, CONSUMER, BROKER = Rule
# Ids whose ranges differ much in size, with neighbours among them: acks join ranges as well as open them.
ENTRY_IDS = [*range(4), *range(126, 131), *range(2**31, 2**31 + 20)]
POSITIONS = [Position(ledger_id, entry_id) for ledger_id in (0, 300, 2**62) for entry_id in ENTRY_IDS]
CONSUMERS = ("a", "b")
UNLIMITED = float("inf")


@cache
def cost(position: Position) -> int:
    return isolated_range_bytes(*position)


def weight(position: Position) -> int:
    """One entry in ten is a batch, of which some are larger than the smaller limits."""
    return (3, 9)[position.entry_id % 2] if position.entry_id % 10 > 7 else 1


class SentBytes(NamedTuple):
    position: Position
    consumer: str
    range_cost: int


class ModelWaiter:
    """Counts its calls; `is_due` is the model's answer."""

    def __init__(self, consumer):
        self.consumer, self.calls, self.is_due = consumer, 0, False

    def __call__(self):
        self.calls += 1


class RecountingDispatcher:
    """A subscription that sends few messages, and its numbers by a plain recount."""

    def __init__(self, gate):
        self.gate = gate
        self.waiting = list(reversed(POSITIONS))
        self.nacked: list[Position] = []
        self.sent: list[SentBytes] = []
        self.unpersisted, self.acked = DeletedRanges(), DeletedRanges()
        self.closed: dict[tuple[Rule, str], int] = {}  # until the use is down at this
        self.closings = dict.fromkeys(Rule, 0)
        self.waiters: list[ModelWaiter] = []

    def unacked(self, consumer=None) -> int:
        return sum(weight(sent.position) for sent in self.sent if consumer in {None, sent.consumer})

    def usage(self, consumer="") -> Usage:
        return Usage(
            self.unpersisted.record_bytes,
            sum(cost(sent.position) for sent in self.sent),
            self.unacked(),
            self.acked.range_count,
            sum(sent.range_cost for sent in self.sent),
            self.unacked(consumer),
        )

    def used(self, rule, consumer) -> int:
        usage = self.usage(consumer)
        return {
            BYTES: usage.unpersisted_record_bytes + usage.reserved_bytes,
            RANGES: usage.range_count + usage.reserved_ranges,
            MESSAGES: usage.unacked_messages,
            CONSUMER: usage.consumer_unacked_messages,
        }[rule]

    def range_cost(self, position) -> int:
        ledger_id, entry_id = position
        return int(not any(Position(ledger_id, near) in self.acked for near in (entry_id - 1, entry_id + 1)))

    def keys(self, consumer):
        return [(BYTES, ""), (RANGES, ""), (MESSAGES, ""), (CONSUMER, consumer)]

    def give_up(self, picks) -> list[SentBytes]:
        return [self.sent.pop(pick % len(self.sent)) for pick in picks[: len(self.sent)]]


class GateMachine(RuleBasedStateMachine):
    """Three dispatchers of one broker; acked messages are persisted now and then, and may come again then."""

    make_gate = DispatchGate
    make_broker = BrokerLimit

    # Two limits on bytes lie one byte around the size of 27 of the largest ranges.
    @initialize(
        bytes_limit=st.sampled_from([0, 1024, 1025, 1026, 1200]),
        ranges=st.sampled_from([0, 5, 30]),
        messages=st.sampled_from([0, 1, 7, 40]),
        consumer=st.sampled_from([0, 1, 8, 20]),
        broker=st.sampled_from([0, 5, 20, 60]),
    )
    def open(self, bytes_limit=0, ranges=0, messages=0, consumer=0, broker=0):
        self.set_limits(bytes_limit, ranges, messages, consumer)
        self.broker_max = broker
        self.broker = self.make_broker(broker, 0.3)
        self.is_broker_blocked = False
        self.broker_closed: dict[RecountingDispatcher, tuple[int, int]] = {}
        self.dispatchers = [RecountingDispatcher(self.make_gate(self.limits, broker=self.broker)) for _ in range(3)]

    def set_limits(self, bytes_limit, ranges, messages, consumer):
        self.limits = GateLimits(bytes_limit, messages, 0.8, 0.5, ranges, consumer)
        self.limit = {BYTES: bytes_limit, RANGES: ranges, MESSAGES: messages, CONSUMER: consumer}
        self.mark = {
            BYTES: int(bytes_limit * 0.8),
            RANGES: int(ranges * 0.8),
            MESSAGES: max(messages // 2 - 1, 0),
            CONSUMER: consumer // 2,
        }

    def max_of(self, rule) -> float:
        return self.limit[rule] or UNLIMITED

    def longest(self, used, costs, limit, *, lone=False) -> int:
        """How many fit: nothing is added above the limit, a first one passes if it is alone."""
        fitting = sum(used + total <= max(limit, used) for total in accumulate(costs))
        return max(fitting, 1) if lone and not used else fitting

    def longest_prefix(self, it, wanted, consumer, range_costs) -> int:
        weights = [weight(position) for position in wanted]
        costs = {
            BYTES: [cost(position) for position in wanted],
            RANGES: range_costs,
            MESSAGES: weights,
            CONSUMER: weights,
        }
        return min(
            self.longest(it.used(r, consumer), costs[r], self.max_of(r), lone=r in {MESSAGES, CONSUMER}) for r in costs
        )

    def total(self) -> int:
        return sum(it.unacked() for it in self.dispatchers)

    def share(self) -> float:
        return int(self.broker_max * 0.3) if self.broker_max else UNLIMITED

    def close_broker(self, it, needed) -> None:
        it.closings[BROKER] += 1
        limit = self.broker_max or UNLIMITED
        by_total = min(limit // 2 - 1, limit - needed)
        by_share = min(self.share() // 2 - 1, self.share() - needed)
        self.broker_closed[it] = (max(0, by_total), max(0, by_share))

    def broker_prefix(self, it, weights) -> int:
        """The new messages that the broker admits; closes for one that it refuses."""
        limit = self.broker_max or UNLIMITED
        if not self.is_broker_blocked and (fitting := self.longest(self.total(), weights, limit)):
            return fitting
        self.is_broker_blocked = True
        granted = self.longest(it.unacked(), weights, self.share(), lone=True)
        if not granted:
            self.close_broker(it, weights[0])
        return granted

    def ask(self, it, consumer, needed) -> None:
        """Each rule that does not stay closed opens and closes by the needed room."""
        for r, name in it.keys(consumer):
            used = it.used(r, consumer)
            if used > it.closed.get((r, name), UNLIMITED):
                continue
            fits = self.longest(used, [needed[r]], self.max_of(r), lone=r in {MESSAGES, CONSUMER})
            if fits and used <= self.max_of(r):
                it.closed.pop((r, name), None)
            else:
                it.closings[r] += (r, name) not in it.closed
                it.closed[r, name] = max(0, min(self.mark[r], self.limit[r] - needed[r]))

    def expected_grant(self, it, wanted, consumer) -> int:
        keys = it.keys(consumer)
        if self.standing(it, consumer):
            return 0
        needed = {BYTES: cost(wanted[0]), RANGES: 1, MESSAGES: weight(wanted[0]), CONSUMER: weight(wanted[0])}
        self.ask(it, consumer, needed)
        if any(key in it.closed for key in keys):
            return 0
        prefix = self.longest_prefix(it, wanted, consumer, [1] * len(wanted))
        return self.broker_prefix(it, [weight(position) for position in wanted[:prefix]])

    def standing(self, it, consumer) -> list[Rule]:
        closed = [r for r, name in it.keys(consumer) if it.used(r, consumer) > it.closed.get((r, name), UNLIMITED)]
        return closed + [BROKER] * (it in self.broker_closed)

    def is_closed_for(self, it, consumer) -> bool:
        return it in self.broker_closed or any(key in it.closed for key in it.keys(consumer))

    def send(self, it, wanted, consumer, range_costs, verdict: Verdict) -> None:
        assert (verdict.rule is None) == (verdict.granted == len(wanted))
        before = {r: it.used(r, consumer) for r in self.limit}, self.total()
        granted = [SentBytes(*sent) for sent in zip(wanted, [consumer] * len(wanted), range_costs, strict=True)]
        it.sent += granted[: verdict.granted]
        it.gate.count_unacked(sum(weight(position) for position in wanted[: verdict.granted]))
        if verdict.rule not in {None, BROKER}:
            assert (verdict.used, verdict.limit) == (it.used(verdict.rule, consumer), self.max_of(verdict.rule))
        self.check_limits(it, consumer, *before)

    def check_limits(self, it, consumer, before, total_before):
        """By nothing is a limit passed; only use that a lowered limit left above it may be there, or a lone batch."""
        for r, used in before.items():
            is_lone = r in {MESSAGES, CONSUMER} and not used and len(it.sent) <= 1 + (r is CONSUMER) * len(it.sent)
            assert it.used(r, consumer) <= max(self.max_of(r), used) or is_lone
        is_below_share = it.unacked() <= self.share() or len(it.sent) == 1
        assert self.total() <= max(self.broker_max or UNLIMITED, total_before) or is_below_share

    @rule(at=st.integers(0, 2), consumer=st.sampled_from(CONSUMERS), count=st.sampled_from([1, 1, 1, 2, 5, 20]))
    def dispatch(self, at=0, consumer="a", count=1):
        it = self.dispatchers[at]
        wanted = it.waiting[-count:][::-1]
        if not wanted:
            return
        usage, weights = it.usage(consumer), [weight(position) for position in wanted]
        expected = self.expected_grant(it, wanted, consumer)
        verdict = it.gate.request(
            [cost(position) for position in wanted],
            usage=usage,
            consumer=consumer,
            weights=weights if max(weights) > 1 else None,
        )
        assert verdict.granted == expected
        del it.waiting[len(it.waiting) - verdict.granted :]
        self.send(it, wanted, consumer, [1] * len(wanted), verdict)

    @rule(at=st.integers(0, 2), consumer=st.sampled_from(CONSUMERS), position=st.sampled_from(POSITIONS))
    def observe(self, at=0, consumer="a", position=POSITIONS[0]):
        it = self.dispatchers[at]
        self.ask(it, consumer, {BYTES: cost(position), RANGES: 1, MESSAGES: 1, CONSUMER: 1})
        if it not in self.broker_closed and (self.is_broker_blocked or self.total() >= (self.broker_max or UNLIMITED)):
            self.is_broker_blocked = True
            if it.unacked() >= max(1, self.share()):
                self.close_broker(it, 1)
        is_kept_back = it.gate.observe(it.usage(consumer), next_record_bytes=cost(position), consumer=consumer)
        assert is_kept_back == self.is_closed_for(it, consumer)

    @rule(at=st.integers(0, 2), consumer=st.sampled_from(CONSUMERS), count=st.integers(1, 20))
    def redeliver(self, at=0, consumer="a", count=1):
        it = self.dispatchers[at]
        wanted = it.nacked[:count]
        range_costs = [it.range_cost(position) for position in wanted]
        weights = [weight(position) for position in wanted]
        expected = self.longest_prefix(it, wanted, consumer, range_costs)
        limit = max((self.broker_max or UNLIMITED) - self.total() + it.unacked(), self.share())
        expected = min(expected, self.longest(it.unacked(), weights, limit, lone=True))
        verdict = it.gate.request_redelivery(
            [cost(position) for position in wanted],
            usage=it.usage(consumer),
            consumer=consumer,
            weights=weights,
            range_costs=range_costs,
        )
        assert verdict.granted == expected
        del it.nacked[: verdict.granted]
        self.send(it, wanted, consumer, range_costs, verdict)

    def take_off(self, it, gone: list[SentBytes]) -> None:
        it.gate.count_unacked(-sum(weight(sent.position) for sent in gone))
        if not gone:
            return
        if self.total() <= max((self.broker_max or UNLIMITED) // 2 - 1, 0):
            self.is_broker_blocked = False
        self.broker_closed = {
            closed: (by_total, by_share)
            for closed, (by_total, by_share) in self.broker_closed.items()
            if self.total() > by_total and (closed is not it or it.unacked() > by_share)
        }

    @rule(at=st.integers(0, 2), picks=st.lists(st.integers(0, 99), min_size=1, max_size=20))
    def ack(self, at=0, picks=(0,)):
        it = self.dispatchers[at]
        gone = it.give_up(picks)
        for sent in gone:
            it.unpersisted.add(sent.position)
            it.acked.add(sent.position)
        self.take_off(it, gone)

    @rule(at=st.integers(0, 2), picks=st.lists(st.integers(0, 99), min_size=1, max_size=20))
    def nack(self, at=0, picks=(0,)):
        it = self.dispatchers[at]
        gone = it.give_up(picks)
        it.nacked += [sent.position for sent in gone]
        self.take_off(it, gone)

    @rule(at=st.integers(0, 2), name=st.sampled_from(CONSUMERS))
    def close_consumer(self, at=0, name="a"):
        it = self.dispatchers[at]
        gone = [sent for sent in it.sent if sent.consumer == name]
        it.sent = [sent for sent in it.sent if sent.consumer != name]
        it.nacked += [sent.position for sent in gone]
        self.take_off(it, gone)
        it.gate.consumer_closed(name)
        it.closed.pop((CONSUMER, name), None)

    @rule(at=st.integers(0, 2))
    def persist(self, at=0):
        it = self.dispatchers[at]
        it.unpersisted = DeletedRanges()
        busy = {*it.nacked, *(sent.position for sent in it.sent)}
        it.waiting = [position for position in reversed(POSITIONS) if position not in busy]
        if not it.sent:  # the mark-delete moves past everything acked
            it.acked = DeletedRanges()

    @rule(at=st.integers(0, 2), only=st.sampled_from(["", *CONSUMERS]))
    def refresh(self, at=0, only=""):
        """Of one consumer, or of all."""
        it = self.dispatchers[at]
        it.closed = {
            (r, name): released_at
            for (r, name), released_at in it.closed.items()
            if it.used(r, name) > released_at or (only and name not in {"", only})
        }
        it.gate.refresh(it.usage(), it.unacked, only)

    @rule(at=st.integers(0, 2), consumer=st.sampled_from(CONSUMERS))
    def wait(self, at=0, consumer="a"):
        waiter = ModelWaiter(consumer)
        self.dispatchers[at].waiters.append(waiter)
        self.dispatchers[at].gate.when_open(waiter, consumer)

    @rule(
        bytes_limit=st.sampled_from([0, 1024, 1200]),
        ranges=st.sampled_from([0, 3, 30]),
        messages=st.sampled_from([0, 3, 40]),
        consumer=st.sampled_from([0, 2, 20]),
    )
    def change_limits(self, bytes_limit, ranges, messages, consumer):
        self.set_limits(bytes_limit, ranges, messages, consumer)
        for it in self.dispatchers:
            it.gate.change_limits(self.limits)
            it.closed = {(r, name): self.mark[r] for r, name in it.closed if self.limit[r]}

    @invariant()
    def a_rule_is_named_as_long_as_it_is_closed(self):
        for it in self.dispatchers:
            for consumer in CONSUMERS:
                blocked = [verdict.rule for verdict in it.gate.why_blocked(it.usage(consumer), consumer)]
                assert blocked == self.standing(it, consumer)
            assert {r: it.gate.blocked_count(r) for r in Rule} == it.closings
            assert it.gate.is_closed == (bool(it.closed) or it in self.broker_closed)
        assert (self.broker.unacked_messages, self.broker.is_blocked) == (self.total(), self.is_broker_blocked)

    @invariant()
    def each_waiter_is_called_once_and_when_nothing_is_closed(self):
        for it in self.dispatchers:
            for waiter in it.waiters:
                waiter.is_due = waiter.is_due or not self.is_closed_for(it, waiter.consumer)
                assert waiter.calls == waiter.is_due

    def teardown(self):
        if not hasattr(self, "dispatchers"):
            return
        # Everything acked and persisted: a gate that still says no would say so for ever.
        for at, it in enumerate(self.dispatchers):
            self.ack(at, [0] * len(it.sent))
            self.persist(at)
            self.refresh(at)
        for it in self.dispatchers:
            assert not it.gate.is_closed
            assert all(waiter.calls == 1 for waiter in it.waiters)
            assert it.gate.request([cost(POSITIONS[-1])], usage=Usage(0, 0, 0)).granted == 1


TestGate = GateMachine.TestCase
