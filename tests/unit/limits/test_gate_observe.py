"""A look at the use that closes rules without room and opens those with room, and sends nothing."""

import pytest

from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Rule, Usage, Verdict

NOTHING_USED = Usage(0, 0, 0)


def gate_of(broker=None, **limits) -> DispatchGate:
    """A gate with no limits but these."""
    off = {"max_unpersisted_ack_record_bytes": 0, "max_unacked_messages": 0, "max_unacked_messages_per_consumer": 0}
    return DispatchGate(GateLimits(**{**off, **limits}), broker=broker)


def rules(gate, usage, consumer="") -> list[Rule]:
    return [verdict.rule for verdict in gate.why_blocked(usage, consumer)]


def test_limits_lowered_below_the_use_keep_new_messages_back_as_soon_as_it_is_looked_at():
    gate, calls = gate_of(max_unacked_messages=100), []
    gate.change_limits(GateLimits(0, 10))
    assert gate.observe(Usage(0, 0, 50), next_record_bytes=17, now_ms=7) is True
    assert gate.why_blocked(Usage(0, 0, 50)) == (Verdict(0, Rule.UNACKED_MESSAGES, 50, 10, 4, 7),)
    gate.when_open(lambda: calls.append(1))
    assert (gate.observe(Usage(0, 0, 5), next_record_bytes=17), calls) == (True, [])
    assert (gate.observe(Usage(0, 0, 4), next_record_bytes=17), calls) == (False, [1])
    assert (gate.is_closed, gate.blocked_count(Rule.UNACKED_MESSAGES)) == (False, 1)


def test_it_closes_each_rule_that_has_no_room_and_no_other():
    gate = gate_of(max_unpersisted_ack_record_bytes=1024, max_unacked_ranges=5, max_unacked_messages=4)
    usage = Usage(1000, 8, 3, range_count=4, reserved_ranges=1)
    assert gate.observe(usage, next_record_bytes=17)
    assert rules(gate, usage) == [Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES]
    assert gate.observe(usage._replace(unacked_messages=4), next_record_bytes=17)
    assert gate.blocked_count(Rule.UNACKED_MESSAGES) == 1


def test_one_more_message_that_just_fits_closes_nothing():
    gate = gate_of(max_unpersisted_ack_record_bytes=1024, max_unacked_ranges=5, max_unacked_messages=4)
    usage = Usage(1000, 7, 3, range_count=3, reserved_ranges=1)
    assert gate.observe(usage, next_record_bytes=17) is False
    assert gate.observe(usage, next_record_bytes=18) is True


def test_a_consumer_is_looked_at_where_it_is_named():
    gate = gate_of(max_unacked_messages_per_consumer=2)
    usage = Usage(0, 0, 2, consumer_unacked_messages=2)
    assert gate.observe(usage, next_record_bytes=17, consumer="a") is True
    assert gate.observe(NOTHING_USED, next_record_bytes=17, consumer="b") is False
    assert (gate.closed_consumers, rules(gate, usage, "a")) == (("a",), [Rule.CONSUMER_UNACKED_MESSAGES])


def sends(gate, count) -> None:
    assert gate.request([17] * count, usage=NOTHING_USED).granted == count
    gate.count_unacked(count)


def test_at_the_broker_nothing_is_counted():
    broker = BrokerLimit(10, 0.2)
    one = gate_of(broker)
    sends(one, 9)
    assert one.observe(Usage(0, 0, 9), next_record_bytes=17) is False
    assert (broker.unacked_messages, broker.is_blocked) == (9, False)


def test_a_full_broker_closes_who_has_its_share_and_no_other():
    broker = BrokerLimit(10, 0.2)
    large, small, idle = gate_of(broker), gate_of(broker), gate_of(broker)
    sends(large, 9)
    sends(small, 1)
    assert large.observe(Usage(0, 0, 9), next_record_bytes=17, now_ms=3) is True
    assert small.observe(Usage(0, 0, 1), next_record_bytes=17) is False
    assert idle.observe(NOTHING_USED, next_record_bytes=17) is False
    assert (broker.unacked_messages, broker.is_blocked) == (10, True)
    assert large.why_blocked(Usage(0, 0, 9)) == (Verdict(0, Rule.BROKER_UNACKED_MESSAGES, 10, 10, 4, 3),)
    large.count_unacked(-6)
    assert (large.is_closed, large.observe(Usage(0, 0, 3), next_record_bytes=17)) == (False, False)


def test_one_with_nothing_unacked_is_not_kept_back_where_its_share_is_none():
    broker = BrokerLimit(3, 0.16)
    full, idle = gate_of(broker), gate_of(broker)
    sends(full, 3)
    assert full.observe(Usage(0, 0, 3), next_record_bytes=17) is True
    assert idle.observe(NOTHING_USED, next_record_bytes=17) is False
    sends(idle, 1)
    assert idle.observe(Usage(0, 0, 1), next_record_bytes=17) is True


def test_a_worst_case_below_0_is_refused_and_changes_nothing():
    gate = gate_of(max_unacked_messages=1)
    with pytest.raises(ValueError, match="worst case in bytes of message 0 must be at least 0, got -1"):
        gate.observe(Usage(0, 0, 1), next_record_bytes=-1)
    assert not gate.is_closed
