"""When does a tracker in memory pause deliveries? While all delays seem to be one; with Pulsar's values."""

import pytest

from ackstate import Position
from ackstate.delay import InMemoryDelayTracker

A, B, C, D = (Position(3, entry_id) for entry_id in (0, 1, 2, 3))
LATER_LEDGER = Position(5, 0)


def offer(tracker: InMemoryDelayTracker, position: Position, deliver_at_ms: int, now_ms: int = 0) -> bool:
    return tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def poll(tracker: InMemoryDelayTracker, now_ms: int, max_messages: int = 100) -> list[Position]:
    return tracker.scheduled_messages(max_messages, now_ms=now_ms)


def fixed(count: int, lookahead: int = 3) -> InMemoryDelayTracker:
    tracker = InMemoryDelayTracker(
        tick_time_ms=100, is_deliver_at_time_strict=True, fixed_delay_detection_lookahead=lookahead
    )
    for number in range(count):
        offer(tracker, Position(3, number), 10_000 + 10 * number)
    return tracker


@pytest.mark.parametrize(
    ("count", "lookahead", "is_paused"), [(2, 3, False), (3, 3, True), (9, 3, True), (9, 0, False)]
)
def test_deliveries_pause_once_the_lookahead_is_full(count, lookahead, is_paused):
    assert fixed(count, lookahead).should_pause_all_deliveries(now_ms=0) == is_paused


def test_the_lookahead_is_50_000_messages():
    tracker = InMemoryDelayTracker()
    for entry_id in range(49_999):
        offer(tracker, Position(3, entry_id), 10_000)
    assert not tracker.should_pause_all_deliveries(now_ms=0)
    offer(tracker, Position(3, 49_999), 10_000)
    assert tracker.should_pause_all_deliveries(now_ms=0)


def test_what_is_due_goes_out_first():
    tracker = fixed(3)
    assert tracker.should_pause_all_deliveries(now_ms=10_047)
    assert not tracker.should_pause_all_deliveries(now_ms=10_048)


@pytest.mark.parametrize("deliver_at_ms", [-1, 0, 500])
def test_a_message_that_is_not_held_has_another_delay(deliver_at_ms):
    tracker = fixed(3)
    assert not offer(tracker, LATER_LEDGER, deliver_at_ms, now_ms=500)
    assert not tracker.should_pause_all_deliveries(now_ms=500)


@pytest.mark.parametrize(("deliver_at_ms", "is_paused"), [(9_920, True), (9_919, False)])
def test_so_has_one_due_more_than_a_tick_before_the_latest(deliver_at_ms, is_paused):
    """By their times as they were given: 10020 and 9919 stand in neighbouring buckets."""
    tracker = fixed(3)
    assert offer(tracker, LATER_LEDGER, deliver_at_ms)
    assert tracker.should_pause_all_deliveries(now_ms=0) == is_paused


def test_the_tick_that_is_tolerated_is_the_one_in_force():
    tracker = fixed(3)
    tracker.reset_tick_time(50)
    assert offer(tracker, LATER_LEDGER, 9_969)
    assert not tracker.should_pause_all_deliveries(now_ms=0)


def test_once_nothing_waits_a_delay_may_be_fixed_again():
    tracker = fixed(3)
    offer(tracker, LATER_LEDGER, -1)
    assert poll(tracker, 10_048, 2) == [A, B]
    offer(tracker, D, 30_000)
    offer(tracker, LATER_LEDGER, 30_000)
    assert not tracker.should_pause_all_deliveries(now_ms=0)
    assert poll(tracker, 50_000) == [C, D, LATER_LEDGER]
    for position in (A, B, C):
        offer(tracker, position, 5_000)
    assert tracker.should_pause_all_deliveries(now_ms=0)


def test_a_poll_that_finds_nothing_also_begins_anew():
    tracker = fixed(0)
    offer(tracker, LATER_LEDGER, -1)
    assert poll(tracker, 0, 0) == []
    for position in (A, B, C):
        offer(tracker, position, 5_000)
    assert tracker.should_pause_all_deliveries(now_ms=0)
