"""Whatever is sent, acked, taken back and persisted, in whatever order: no limit is passed, none sticks."""

from functools import cache

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import DeletedRanges, Position
from ackstate.record_size import isolated_range_bytes
from limits import DispatchGate, GateLimits, Rule, Usage, Verdict
from planted import assert_caught

# Ids whose ranges differ much in size, with neighbours among them: acks join ranges as well as open them.
ENTRY_IDS = [*range(4), *range(126, 131), *range(2**31, 2**31 + 20)]
MESSAGES = [Position(ledger_id, entry_id) for ledger_id in (0, 300, 2**62) for entry_id in ENTRY_IDS]


@cache
def cost(position: Position) -> int:
    return isolated_range_bytes(*position)


class GateMachine(RuleBasedStateMachine):
    """A dispatcher over few messages; acked ones are persisted now and then, and may come again then."""

    make_gate = DispatchGate

    # Two limits lie one byte around what 27 of the largest ranges take.
    @initialize(
        bytes_limit=st.sampled_from([0, 1024, 1025, 1026, 1200]),
        messages_limit=st.sampled_from([0, 1, 7, 40]),
    )
    def open(self, bytes_limit, messages_limit):
        self.limits = GateLimits(bytes_limit, messages_limit)
        self.gate = self.make_gate(self.limits)
        self.waiting = list(reversed(MESSAGES))
        self.nacked: list[Position] = []
        self.sent: list[Position] = []
        self.unpersisted = DeletedRanges()
        self.closed: dict[Rule, bool] = dict.fromkeys(Rule, False)
        self.closings = 0
        self.used_before = self.used()

    def usage(self) -> Usage:
        return Usage(self.unpersisted.record_bytes, sum(map(cost, self.sent)), len(self.sent))

    def used(self) -> dict[Rule, int]:
        unpersisted, reserved, unacked = self.usage()
        return {Rule.UNPERSISTED_ACK_RECORD_BYTES: unpersisted + reserved, Rule.UNACKED_MESSAGES: unacked}

    def limit_of(self, rule: Rule) -> float:
        limits = self.limits
        limit = (
            limits.max_unpersisted_ack_record_bytes
            if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES
            else limits.max_unacked_messages
        )
        return limit or float("inf")

    def may_open(self, rule: Rule) -> bool:
        if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
            return self.used()[rule] <= self.limit_of(rule) * 0.8
        return self.used()[rule] <= max(self.limit_of(rule) // 2 - 1, 0)

    def fits(self, wanted: list[Position]) -> dict[Rule, bool]:
        taken = {
            Rule.UNPERSISTED_ACK_RECORD_BYTES: sum(map(cost, wanted)),
            Rule.UNACKED_MESSAGES: len(wanted),
        }
        return {rule: self.used()[rule] + taken[rule] <= self.limit_of(rule) for rule in Rule}

    def longest_prefix(self, wanted: list[Position]) -> int:
        lengths = range(len(wanted), 0, -1)
        return next((n for n in lengths if all(self.fits(wanted[:n]).values())), 0)

    def send(self, wanted: list[Position], verdict: Verdict) -> None:
        assert (verdict.rule is None) == (verdict.granted == len(wanted))
        self.sent += wanted[: verdict.granted]
        if verdict.rule is not None:
            assert verdict.used == self.used()[verdict.rule]
            assert verdict.limit == self.limit_of(verdict.rule)

    @rule(count=st.integers(1, 20))
    def dispatch(self, count):
        wanted = self.waiting[-count:][::-1]
        if not wanted:
            return
        for r in Rule:
            if not self.closed[r] or self.may_open(r):
                fits = self.fits(wanted[:1])[r]
                self.closings += not fits and not self.closed[r]
                self.closed[r] = not fits
        expected = 0 if any(self.closed.values()) else self.longest_prefix(wanted)
        verdict = self.gate.request([cost(position) for position in wanted], usage=self.usage())
        assert verdict.granted == expected
        del self.waiting[len(self.waiting) - verdict.granted :]
        self.send(wanted, verdict)

    @rule(count=st.integers(1, 20))
    def redeliver(self, count):
        wanted = self.nacked[:count]
        verdict = self.gate.request_redelivery([cost(position) for position in wanted], usage=self.usage())
        assert verdict.granted == self.longest_prefix(wanted)
        del self.nacked[: verdict.granted]
        self.send(wanted, verdict)

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=20))
    def ack(self, picks):
        for pick in picks[: len(self.sent)]:
            self.unpersisted.add(self.sent.pop(pick % len(self.sent)))

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=20))
    def nack(self, picks):
        for pick in picks[: len(self.sent)]:
            self.nacked.append(self.sent.pop(pick % len(self.sent)))

    @rule()
    def persist(self):
        self.unpersisted = DeletedRanges()
        self.waiting = [position for position in reversed(MESSAGES) if position not in self.nacked + self.sent]

    @rule(bytes_limit=st.sampled_from([0, 1024, 1200]), messages_limit=st.sampled_from([0, 3, 40]))
    def change_limits(self, bytes_limit, messages_limit):
        self.limits = GateLimits(bytes_limit, messages_limit)
        self.gate.change_limits(self.limits)
        self.closed = {r: self.closed[r] and self.limit_of(r) != float("inf") for r in Rule}

    @invariant()
    def no_limit_is_passed(self):
        """By a byte neither; use that a lowered limit has left above it does not grow."""
        for r, used in self.used().items():
            assert used <= max(self.limit_of(r), self.used_before[r])
        self.used_before = self.used()

    @invariant()
    def a_rule_is_named_as_long_as_it_is_closed(self):
        blocked = [verdict.rule for verdict in self.gate.why_blocked(self.usage())]
        assert blocked == [r for r in Rule if self.closed[r] and not self.may_open(r)]
        assert sum(map(self.gate.blocked_count, Rule)) == self.closings

    def teardown(self):
        if not hasattr(self, "gate"):
            return
        # Everything acked and persisted: a gate that still says no would say so for ever.
        assert self.gate.request([cost(MESSAGES[-1])], usage=Usage(0, 0, 0)).granted == 1


TestGate = GateMachine.TestCase


class CountsNoReservations(DispatchGate):
    def request(self, worst_case_bytes, *, usage):
        return super().request(worst_case_bytes, usage=usage._replace(reserved_bytes=0))


class AllowsOneByteMore(DispatchGate):
    def request(self, worst_case_bytes, *, usage):
        return super().request([worst_case_bytes[0] - 1, *worst_case_bytes[1:]], usage=usage)


class AllowsOneMessageMore(DispatchGate):
    def request(self, worst_case_bytes, *, usage):
        return super().request(worst_case_bytes, usage=usage._replace(unacked_messages=usage.unacked_messages - 1))


class RedeliversPastTheLimit(DispatchGate):
    def request_redelivery(self, worst_case_bytes, *, usage):
        return Verdict(len(worst_case_bytes))


class OpensTooSoon(DispatchGate):
    def request(self, worst_case_bytes, *, usage):
        return self.request_redelivery(worst_case_bytes, usage=usage)


class NeverOpens(DispatchGate):
    refusal = None

    def request(self, worst_case_bytes, *, usage):
        verdict = self.refusal or super().request(worst_case_bytes, usage=usage)
        if not verdict.granted:
            self.refusal = verdict
        return verdict


class OpensAtTheLimitOnly(DispatchGate):
    def change_limits(self, limits):
        super().change_limits(GateLimits(limits.max_unpersisted_ack_record_bytes, limits.max_unacked_messages, 1, 1))


PLANTED = [
    CountsNoReservations,
    AllowsOneByteMore,
    AllowsOneMessageMore,
    RedeliversPastTheLimit,
    OpensTooSoon,
    OpensAtTheLimitOnly,
    NeverOpens,
]


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_the_model_sees_a_planted_bug(planted):
    assert_caught(type("Planted", (GateMachine,), {"make_gate": planted}), by=AssertionError)
