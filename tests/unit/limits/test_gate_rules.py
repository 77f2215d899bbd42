"""Ranges, consumers, batches, redeliveries, verdicts, and the estimate: one behaviour at a time."""

import pytest

from ackstate.limits import DispatchGate, GateLimits, Rule, Usage, Verdict

NOTHING_USED = Usage(0, 0, 0)


def gate_of(**limits) -> DispatchGate:
    """A gate with no limits but these."""
    off = {
        "max_unpersisted_ack_record_bytes": 0,
        "max_unacked_messages": 0,
        "max_unacked_messages_per_consumer": 0,
    }
    return DispatchGate(GateLimits(**{**off, **limits}))


def of_ranges(count, reserved=0) -> Usage:
    return Usage(0, 0, 0, count, reserved)


def of_consumer(unacked) -> Usage:
    return Usage(0, 0, unacked, consumer_unacked_messages=unacked)


def test_each_message_may_add_a_range_and_the_last_one_that_fits_goes_out():
    gate = gate_of(max_unacked_ranges=10)
    assert gate.request([17], usage=of_ranges(4, 5)).granted == 1
    verdict = gate.request([17] * 3, usage=of_ranges(4, 4))
    assert verdict == Verdict(2, Rule.UNACKED_RANGES, used=10, limit=10, released_at=8)
    assert gate.request([17], usage=of_ranges(4, 6)).rule is Rule.UNACKED_RANGES


def test_a_closed_range_rule_opens_at_its_mark():
    gate = gate_of(max_unacked_ranges=10)
    assert [gate.request([17], usage=of_ranges(count)).granted for count in (10, 9, 8)] == [0, 0, 1]


def test_a_consumer_at_its_limit_is_closed_until_it_is_at_half():
    gate = gate_of(max_unacked_messages_per_consumer=5)
    assert gate.request([17] * 9, usage=of_consumer(0), consumer="a").granted == 5
    closed = [gate.request([17], usage=of_consumer(used), consumer="a").granted for used in (5, 3, 2)]
    assert closed == [0, 0, 1]
    assert gate.blocked_count(Rule.CONSUMER_UNACKED_MESSAGES) == 1


def test_a_closed_consumer_blocks_no_other():
    gate = gate_of(max_unacked_messages_per_consumer=2)
    assert gate.request([17], usage=of_consumer(2), consumer="a").granted == 0
    assert gate.request([17], usage=of_consumer(1), consumer="b").granted == 1
    assert gate.closed_consumers == ("a",)
    assert gate.why_blocked(of_consumer(2), "b") == ()
    (verdict,) = gate.why_blocked(of_consumer(2), "a")
    assert (verdict.rule, verdict.used, verdict.limit) == (Rule.CONSUMER_UNACKED_MESSAGES, 2, 2)


def test_two_consumers_are_closed_each_for_itself():
    gate = gate_of(max_unacked_messages_per_consumer=2)
    for name in "ab":
        assert gate.request([17], usage=of_consumer(2), consumer=name).granted == 0
    gate.refresh(NOTHING_USED, {"a": 1, "b": 2}.get)
    assert gate.closed_consumers == ("b",)
    assert gate.blocked_count(Rule.CONSUMER_UNACKED_MESSAGES) == 2


def test_a_consumer_that_comes_back_under_its_name_is_not_closed():
    gate = gate_of(max_unacked_messages_per_consumer=4)
    gate.request([17], usage=of_consumer(4), consumer="a")
    gate.consumer_closed("a")
    gate.consumer_closed("never seen")
    assert not gate.is_closed
    assert gate.request([17], usage=of_consumer(3), consumer="a").granted == 1


def test_a_refresh_without_the_consumers_numbers_leaves_them_closed():
    gate = gate_of(max_unacked_messages_per_consumer=4)
    gate.request([17], usage=of_consumer(4), consumer="a")
    gate.refresh(NOTHING_USED)
    assert gate.closed_consumers == ("a",)
    gate.refresh(NOTHING_USED, {})
    assert gate.closed_consumers == ()


def test_a_batch_weighs_as_many_messages_as_it_holds():
    gate = gate_of(max_unacked_messages=10)
    verdict = gate.request([17] * 3, usage=Usage(0, 0, 2), weights=[3, 5, 1])
    assert verdict == Verdict(2, Rule.UNACKED_MESSAGES, used=10, limit=10, released_at=4)
    assert gate.request([17], usage=Usage(0, 0, 8), weights=[3]).granted == 0


@pytest.mark.parametrize("name", ["max_unacked_messages", "max_unacked_messages_per_consumer"])
def test_a_batch_larger_than_the_limit_goes_out_alone(name):
    gate = gate_of(**{name: 5})
    assert gate.request([17], usage=of_consumer(1), weights=[9]).granted == 0
    assert gate.request([17] * 2, usage=NOTHING_USED, weights=[9, 1]).granted == 1
    assert gate.request_redelivery([17] * 2, usage=NOTHING_USED, weights=[9, 1]).granted == 1
    assert gate.request_redelivery([17], usage=of_consumer(1), weights=[9]).granted == 0


def test_a_batch_that_did_not_fit_opens_the_rule_when_there_is_room_for_it():
    gate = gate_of(max_unacked_messages=10)
    assert gate.request([17], usage=Usage(0, 0, 4), weights=[8]).released_at == 2
    assert gate.request([17], usage=Usage(0, 0, 3), weights=[8]).granted == 0
    assert gate.request([17], usage=Usage(0, 0, 2), weights=[8]).granted == 1


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"weights": [1]}, "2 messages and 1 of weight"),
        ({"weights": [1, 0]}, "weight of message 1 must be at least 1, got 0"),
        ({"range_costs": [-1, 0]}, "range cost of message 0 must be at least 0, got -1"),
        ({"range_costs": [1, 0, 0]}, "2 messages and 3 of range cost"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        gate_of().request_redelivery([17, 17], usage=NOTHING_USED, **costs)


def test_a_closed_gate_refuses_senseless_weights_too():
    gate = gate_of(max_unacked_messages=1)
    gate.request([17], usage=Usage(0, 0, 1))
    with pytest.raises(ValueError, match="weight of message 0 must be at least 1, got 0"):
        gate.request([17], usage=Usage(0, 0, 1), weights=[0])


def test_a_redelivery_that_adds_no_range_passes_a_full_range_limit():
    gate = gate_of(max_unacked_ranges=10)
    assert gate.request_redelivery([17] * 3, usage=of_ranges(10), range_costs=[0, 0, 1]).granted == 2
    assert gate.request_redelivery([17], usage=of_ranges(10)).rule is Rule.UNACKED_RANGES


def test_above_the_limits_redeliveries_that_cost_nothing_pass_and_no_others():
    gate = gate_of(max_unacked_ranges=10, max_unpersisted_ack_record_bytes=1024)
    usage = Usage(2000, 0, 0, 15)
    assert gate.request_redelivery([0, 0], usage=usage, range_costs=[0, 0]) == Verdict(2)
    assert gate.request_redelivery([0], usage=usage, range_costs=[1]).rule is Rule.UNACKED_RANGES
    assert gate.request_redelivery([1], usage=usage, range_costs=[0]).rule is Rule.UNPERSISTED_ACK_RECORD_BYTES


def test_redeliveries_pass_no_limit_on_messages_but_closed_rules():
    gate = gate_of(max_unacked_messages=10, max_unacked_messages_per_consumer=6)
    gate.request([17], usage=of_consumer(10), consumer="a")
    assert gate.why_blocked(of_consumer(5), "a") != ()
    verdict = gate.request_redelivery([17] * 3, usage=of_consumer(5), consumer="a")
    assert (verdict.granted, verdict.rule, verdict.used) == (1, Rule.CONSUMER_UNACKED_MESSAGES, 6)


def test_a_verdict_says_since_when_its_rule_is_closed():
    gate = gate_of(max_unacked_messages=4)
    assert gate.request([17] * 5, usage=NOTHING_USED, now_ms=5).since_ms is None
    assert gate.request([17], usage=Usage(0, 0, 4), now_ms=7).since_ms == 7
    assert gate.request([17], usage=Usage(0, 0, 3), now_ms=8).since_ms == 7
    assert gate.why_blocked(Usage(0, 0, 3))[0].since_ms == 7
    assert gate.request([17], usage=Usage(0, 0, 1), now_ms=9) == Verdict(1)
    assert gate.request([17], usage=Usage(0, 0, 4), now_ms=10).since_ms == 10


def test_while_one_rule_is_closed_the_others_are_not_asked():
    gate = gate_of(max_unacked_messages=4, max_unpersisted_ack_record_bytes=1024)
    gate.request([17], usage=Usage(0, 0, 4))
    gate.request([17], usage=Usage(1024, 0, 4))
    assert gate.blocked_count(Rule.UNPERSISTED_ACK_RECORD_BYTES) == 0


def test_limits_of_ranges_and_consumers_can_be_changed_too():
    gate = gate_of(max_unacked_ranges=10, max_unacked_messages_per_consumer=10)
    gate.request([17], usage=of_consumer(10), consumer="a")
    gate.change_limits(GateLimits(max_unacked_ranges=4, max_unacked_messages_per_consumer=20))
    assert gate.request([17], usage=of_consumer(11), consumer="a").granted == 0
    assert gate.request([17], usage=of_consumer(10), consumer="a").granted == 1
    assert gate.request([17], usage=of_ranges(4)).granted == 0
    gate.change_limits(GateLimits(max_unacked_messages_per_consumer=0))
    assert gate.request([17], usage=Usage(0, 0, 0, 99, 99, 10**6)).granted == 1
