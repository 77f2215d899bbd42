"""A policy with the timing of Pulsar: when it writes, and what a crash then redelivers."""

from __future__ import annotations

import pytest

from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind
from montecarlo import replayed

ACK, MARK_DELETE, RECOVER, CRASH = EventKind.ACK, EventKind.MARK_DELETE, EventKind.RECOVER, EventKind.CRASH
BATCH, COMMAND, DELIVER = EventKind.BATCH, EventKind.COMMAND, EventKind.DELIVER
PULSAR = {
    "format": "PULSAR", "range_limit_rule": "PULSAR_4_2", "timing": "PULSAR", "mark_delete_rate_limit": 1,
    "flush_interval_ms": 60_000,
}  # fmt: skip


def acks(*times_ms, begin=1):
    """An ack of every other entry, at some times."""
    return [Event(ts_ms, ACK, 3, begin + 2 * number, begin + 2 * number) for number, ts_ms in enumerate(times_ms)]


def curve_of(*events, end_ms=5_000, sizes=(), **settings):
    """Return the redelivery at the end of each millisecond; the cursor is opened at 0."""
    opened = Event(0, DELIVER, 3, 0, 0)
    policy = Policy.from_mapping(PULSAR | settings)
    (curve,), replay = replayed([opened, *events], [policy], {3: 200}, sizes=list(sizes), end_ms=end_ms)
    assert replay.curves[0].sum.peak >= max(curve.values())
    return curve


@pytest.mark.parametrize("sizes", [(), (2,), (1, 2, 3)])
def test_a_limiter_stores_a_second_and_gives_one_on_credit(sizes):
    curve = curve_of(*acks(1_500, 1_510, 1_520, 2_499, 2_500, 2_600), sizes=sizes)
    at = (1_500, 1_510, 1_520, 2_499, 2_500, 2_600, 5_000)
    assert [curve[ts_ms] for ts_ms in at] == [0, 0, 1, 2, 0, 1, 1]


def test_the_timer_flushes_what_was_refused_at_a_fixed_rate():
    found = {"flush_interval_ms": 1_000, "flush_phase_ms": 300}
    curve = curve_of(*acks(0, 10, 2_290), mark_delete_rate_limit=0.5, end_ms=9_000, **found)
    # Paid for at 2,000: the ticks at 300 and 1,300 are refused, that at 2,300 is too late for the command at 2,290.
    assert [curve[ts_ms] for ts_ms in (0, 10, 2_289, 2_290, 4_299, 4_300)] == [0, 1, 1, 0, 0, 0]
    curve = curve_of(*acks(0, 10), mark_delete_rate_limit=0.5, **found)
    assert [curve[ts_ms] for ts_ms in (10, 1_300, 2_299, 2_300)] == [1, 1, 1, 0]


def test_silence_alone_flushes_nothing():
    curve = curve_of(*acks(0, 10), end_ms=60_000)
    assert (curve[59_999], curve[60_000]) == (1, 0)


def test_without_a_limiter_each_command_is_written():
    curve = curve_of(*acks(0, 10, 11, 12), mark_delete_rate_limit=0, flush_interval_ms=0)
    assert not any(curve.values())


def test_each_command_of_a_millisecond_asks():
    first, second, third = acks(1_500, 1_500, 2_000)
    assert curve_of(first, second, third)[2_000] == 0
    curve = curve_of(first, Event(1_500, COMMAND), second, third)
    assert (curve[1_500], curve[2_000]) == (0, 1)
    # The one permit is that of the first.
    for later in ([], acks(700, begin=41)):
        for sizes in ([], [2], [3]):
            curve = curve_of(*acks(0), Event(0, COMMAND), *acks(0, begin=21), *later, sizes=sizes)
            assert (curve[0], curve[700]) == (1, 1 + len(later))


def test_the_first_write_has_the_position_that_was_granted_and_the_ranges_of_its_end():
    events = [Event(0, ACK, 3, 0, 3), Event(50, ACK, 3, 4, 5), Event(60, ACK, 3, 8, 8), Event(200, ACK, 3, 9, 9)]
    curve = curve_of(*events, Event(300, CRASH), Event(310, RECOVER), ledger_creation_ms=100, end_ms=400)
    # Entries 4 and 5 are acked, and in neither.
    assert [curve[ts_ms] for ts_ms in (0, 50, 99, 100, 200, 300)] == [4, 6, 7, 2, 3, 0]
    # What the recording has and the cursor has not is acked again at once.
    assert [curve[ts_ms] for ts_ms in (310, 399)] == [3, 3]


def test_a_batch_passed_by_a_cumulative_ack_stays_in_the_first_record():
    events = [
        Event(0, BATCH, 3, 0, 9), Event(0, MARK_DELETE, 3, 0, 4), Event(50, BATCH, 3, 10, 19),
        Event(50, MARK_DELETE, 3, 5, 17),
    ]  # fmt: skip
    curve = curve_of(*events, ledger_creation_ms=100)
    assert [curve[ts_ms] for ts_ms in (0, 50, 100)] == [5, 18, 5]


def test_lone_parts_of_batches_are_neither_written_nor_due():
    parts = [Event(0, BATCH, 3, 20, 29), Event(0, ACK, 3, 20, 24), Event(10, ACK, 3, 26, 26)]
    curve = curve_of(*parts, Event(70_000, ACK, 3, 3, 3), end_ms=80_000)
    assert [curve[ts_ms] for ts_ms in (0, 10, 69_999, 70_000)] == [5, 6, 6, 0]
    # The last message of a batch acks its entry.
    curve = curve_of(*parts, Event(20, ACK, 3, 25, 25), Event(30, ACK, 3, 27, 29))
    assert [curve[ts_ms] for ts_ms in (20, 30)] == [7, 0]


def test_a_record_has_the_lowest_batches_and_only_if_parts_count():
    events = [Event(0, ACK, 3, 3, 3), Event(0, BATCH, 3, 20, 29), Event(0, BATCH, 3, 40, 49),
              Event(0, ACK, 3, 20, 24), Event(0, ACK, 3, 40, 47)]  # fmt: skip
    assert curve_of(*events)[0] == 0
    assert curve_of(*events, batch_count_max=1)[0] == 8
    assert curve_of(*events, batch_index_acks="false")[0] == 13


def test_a_recovered_cursor_has_the_parts_that_were_written():
    events = [Event(0, ACK, 3, 3, 3), Event(0, BATCH, 3, 20, 29), Event(0, ACK, 3, 20, 24), Event(100, CRASH),
              Event(200, RECOVER), Event(250, ACK, 3, 25, 28)]  # fmt: skip
    curve = curve_of(*events)
    assert [curve[ts_ms] for ts_ms in (0, 199, 200, 250)] == [0, 0, 0, 0]


def test_a_policy_that_pulsar_cannot_have_is_paced_by_intervals():
    assert Policy.from_mapping(PULSAR).is_paced_by_pulsar
    for own in ({"tick_ms": 5}, {"become_old_ack_record_seconds": 1}, {"max_unpersisted_ack_record_bytes": 5_000}):
        assert not Policy.from_mapping(PULSAR | own).is_paced_by_pulsar
