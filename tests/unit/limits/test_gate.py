"""One behaviour of the gate at a time."""

import pytest

from ackstate.limits import DispatchGate, GateLimits, Rule, Usage, Verdict

NOTHING_USED = Usage(0, 0, 0)


def bytes_gate(limit: int = 1024, *, release_ratio: float = 0.8) -> DispatchGate:
    return DispatchGate(
        GateLimits(
            max_unpersisted_ack_record_bytes=limit,
            max_unacked_messages=0,
            unpersisted_release_ratio=release_ratio,
        )
    )


def messages_gate(limit: int) -> DispatchGate:
    return DispatchGate(GateLimits(max_unpersisted_ack_record_bytes=0, max_unacked_messages=limit))


def test_the_defaults_are_pulsars():
    assert GateLimits() == GateLimits(5 * 1024 * 1024, 200_000, 0.8, 0.5, 0, 50_000)


@pytest.mark.parametrize("limit", [1, 1023])
def test_a_byte_limit_too_small_to_work_with_is_refused_by_name(limit):
    with pytest.raises(ValueError, match=rf"maxUnPersistAckRecordsBytes.* is {limit}: below 1024"):
        GateLimits(max_unpersisted_ack_record_bytes=limit)


def test_a_negative_message_limit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"max_unacked_messages .*must be at least 0, got -1"):
        GateLimits(max_unacked_messages=-1)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("max_unacked_ranges", "managedLedgerMaxUnackedRangesToPersist"),
        ("max_unacked_messages_per_consumer", "maxUnackedMessagesPerConsumer"),
    ],
)
def test_the_other_limits_refuse_a_negative_number_by_name(name, key):
    with pytest.raises(ValueError, match=rf"{name} \({key}\) must be at least 0, got -3"):
        GateLimits(**{name: -3})


@pytest.mark.parametrize("name", ["unpersisted_release_ratio", "unacked_release_ratio"])
@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_a_release_ratio_out_of_bounds_is_refused_by_name(name, ratio):
    with pytest.raises(ValueError, match=name):
        GateLimits(**{name: ratio})


@pytest.mark.parametrize("off", [0, -1])
def test_a_byte_limit_below_one_is_off(off):
    assert bytes_gate(off).request([10**9], usage=Usage(10**12, 10**12, 0)) == Verdict(1)


def test_a_message_limit_of_zero_is_off():
    assert messages_gate(0).request([17] * 3, usage=Usage(0, 0, 10**9)) == Verdict(3)


def test_a_grant_fills_the_byte_limit_to_the_last_byte_and_not_beyond():
    gate = bytes_gate(1024)
    assert gate.request([24], usage=Usage(600, 400, 9)) == Verdict(1)
    assert gate.request([25], usage=Usage(600, 400, 9)).granted == 0


def test_the_longest_prefix_that_fits_is_granted_and_the_verdict_says_what_stopped_it():
    verdict = bytes_gate(1024).request([20, 20, 20, 1], usage=Usage(480, 500, 9))
    assert verdict == Verdict(2, Rule.UNPERSISTED_ACK_RECORD_BYTES, used=1020, limit=1024, released_at=819)


def test_a_message_that_would_fit_behind_one_that_does_not_waits_its_turn():
    assert bytes_gate(1024).request([30, 1], usage=Usage(1000, 0, 0)).granted == 0


def test_the_message_limit_cuts_a_request_short():
    verdict = messages_gate(4).request([17] * 3, usage=Usage(0, 34, 2))
    assert verdict == Verdict(2, Rule.UNACKED_MESSAGES, used=4, limit=4, released_at=1)


def test_with_both_limits_reached_the_bytes_are_named():
    gate = DispatchGate(GateLimits(max_unpersisted_ack_record_bytes=1024, max_unacked_messages=1))
    usage = Usage(0, 1024, 1)
    assert gate.request([17], usage=usage).rule is Rule.UNPERSISTED_ACK_RECORD_BYTES
    assert [verdict.rule for verdict in gate.why_blocked(usage)] == [
        Rule.UNPERSISTED_ACK_RECORD_BYTES,
        Rule.UNACKED_MESSAGES,
    ]
    assert [gate.blocked_count(rule) for rule in Rule] == [1, 0, 1, 0, 0]


def test_a_request_for_nothing_is_granted_and_closes_nothing():
    gate = bytes_gate(1024)
    assert gate.request([], usage=Usage(5000, 0, 0)) == Verdict(0)
    assert gate.why_blocked(Usage(5000, 0, 0)) == ()


def test_a_closed_byte_rule_opens_at_its_mark_and_not_a_byte_above():
    gate = bytes_gate(1024)
    assert gate.request([17], usage=Usage(1020, 0, 0)).granted == 0
    assert gate.request([17], usage=Usage(820, 0, 0)).granted == 0
    assert gate.request([17], usage=Usage(819, 0, 0)).granted == 1
    assert gate.request([17], usage=Usage(836, 0, 0)).granted == 1


@pytest.mark.parametrize(("limit", "opens_at"), [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (50_000, 24_999)])
def test_a_closed_message_rule_opens_below_half_as_pulsar_does(limit, opens_at):
    gate = messages_gate(limit)
    assert gate.request([17], usage=Usage(0, 0, limit)).granted == 0
    assert gate.request([17], usage=Usage(0, 0, opens_at + 1)).granted == 0
    assert gate.request([17], usage=Usage(0, 0, opens_at)).granted == 1


def test_a_partly_granted_request_leaves_the_rule_open():
    gate = messages_gate(4)
    assert gate.request([17] * 5, usage=NOTHING_USED).granted == 4
    assert gate.request([17], usage=Usage(0, 0, 3)).granted == 1
    assert gate.blocked_count(Rule.UNACKED_MESSAGES) == 0


def test_a_rule_counts_its_closings_and_not_the_requests_it_refuses():
    gate = messages_gate(1)
    for _ in range(2):
        for _ in range(3):
            assert gate.request([17], usage=Usage(0, 0, 1)).granted == 0
        assert gate.request([17], usage=NOTHING_USED).granted == 1
    assert gate.blocked_count(Rule.UNACKED_MESSAGES) == 2
    assert gate.blocked_count(Rule.UNPERSISTED_ACK_RECORD_BYTES) == 0


def test_with_a_ratio_of_one_a_closed_rule_waits_for_room_and_closes_once():
    gate = bytes_gate(1024, release_ratio=1.0)
    for used in (1020, 1015, 1008):
        verdict = gate.request([17], usage=Usage(used, 0, 0))
        assert (verdict.granted, verdict.released_at) == (0, 1007)
        assert gate.why_blocked(Usage(used, 0, 0)) == (verdict,)
    assert gate.request([17], usage=Usage(1007, 0, 0)).granted == 1
    assert gate.blocked_count(Rule.UNPERSISTED_ACK_RECORD_BYTES) == 1


def test_a_message_larger_than_the_limit_does_not_shut_out_the_others_for_good():
    gate = bytes_gate(1024)
    assert gate.request([2000], usage=NOTHING_USED).granted == 0
    assert gate.request([17], usage=NOTHING_USED).granted == 1


def test_a_redelivery_passes_a_closed_rule_but_not_the_limit():
    gate = bytes_gate(1024)
    gate.request([17], usage=Usage(1010, 0, 0))
    assert gate.request([17], usage=Usage(900, 0, 0)).granted == 0
    assert gate.request_redelivery([62, 62, 1], usage=Usage(900, 0, 0)).granted == 2
    assert gate.request_redelivery([1], usage=Usage(900, 124, 2)).granted == 0
    assert gate.why_blocked(Usage(900, 124, 2))[0].used == 1024


def test_a_refused_redelivery_closes_nothing():
    gate = messages_gate(2)
    assert gate.request_redelivery([17], usage=Usage(0, 0, 2)).rule is Rule.UNACKED_MESSAGES
    assert gate.request([17], usage=Usage(0, 0, 1)).granted == 1


def test_why_blocked_follows_the_use_without_a_request():
    gate = messages_gate(10)
    gate.request([17], usage=Usage(0, 0, 10))
    assert gate.why_blocked(Usage(0, 0, 5)) == (Verdict(0, Rule.UNACKED_MESSAGES, 5, 10, 4, 0),)
    assert gate.why_blocked(Usage(0, 0, 4)) == ()


def test_limits_lowered_below_the_use_block_until_it_has_fallen():
    gate = messages_gate(100)
    assert gate.request([17] * 100, usage=NOTHING_USED).granted == 100
    gate.change_limits(GateLimits(max_unpersisted_ack_record_bytes=0, max_unacked_messages=10))
    assert gate.request([17], usage=Usage(0, 0, 100)) == Verdict(0, Rule.UNACKED_MESSAGES, 100, 10, 4, 0)
    assert gate.request_redelivery([17], usage=Usage(0, 0, 99)).granted == 0
    assert gate.request([17], usage=Usage(0, 0, 4)).granted == 1


def test_limits_raised_or_switched_off_free_a_closed_rule():
    gate = messages_gate(10)
    gate.request([17], usage=Usage(0, 0, 10))
    gate.change_limits(GateLimits(0, 30))
    assert gate.request([17], usage=Usage(0, 0, 15)).granted == 0
    assert gate.request([17], usage=Usage(0, 0, 14)).granted == 1
    gate.request([17], usage=Usage(0, 0, 30))
    gate.change_limits(GateLimits(0, 0))
    assert gate.request([17], usage=Usage(0, 0, 30)).granted == 1
    assert gate.limits == GateLimits(0, 0)


def test_a_negative_worst_case_is_refused():
    with pytest.raises(ValueError, match="worst case in bytes of message 1 must be at least 0, got -1"):
        bytes_gate().request([17, -1], usage=NOTHING_USED)
