"""One rule of the tracker in memory at a time, with Pulsar's values."""

import numpy as np
import pytest

from ackstate import Position
from ackstate.delay import DelayConfig, InMemoryDelayTracker

TIME_MAX = 2**63 - 1
A, B, C, D = (Position(3, entry_id) for entry_id in (0, 1, 2, 3))
EARLIER_LEDGER, LATER_LEDGER = Position(2, 9), Position(5, 0)


@pytest.fixture
def strict() -> InMemoryDelayTracker:
    return InMemoryDelayTracker(tick_time_ms=100, is_deliver_at_time_strict=True)


@pytest.fixture
def tracker() -> InMemoryDelayTracker:
    """With Pulsar's defaults: a tick of 1000 ms, so a precision of 512 ms, not strict."""
    return InMemoryDelayTracker()


def offer(tracker: InMemoryDelayTracker, position: Position, deliver_at_ms: int, now_ms: int = 0) -> bool:
    return tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def poll(tracker: InMemoryDelayTracker, now_ms: int, max_messages: int = 100) -> list[Position]:
    return tracker.scheduled_messages(max_messages, now_ms=now_ms)


# Held messages.


@pytest.mark.parametrize("deliver_at_ms", [-1, -(2**70), 0, 5_000, 6_000])
def test_up_to_a_tick_ahead_is_now(tracker, deliver_at_ms):
    assert not offer(tracker, A, deliver_at_ms, now_ms=5_000)
    assert tracker.delayed_message_count == 0


def test_more_than_a_tick_ahead_waits(tracker):
    assert offer(tracker, A, 6_001, now_ms=5_000)
    assert tracker.delayed_message_count == 1


def test_strict_holds_all_that_is_not_yet_due(strict):
    assert not offer(strict, A, 5_000, now_ms=5_000)
    assert offer(strict, B, 5_001, now_ms=5_000)
    assert strict.delayed_message_count == 1


# Precision.


@pytest.mark.parametrize(
    ("tick_time_ms", "precision_ms"),
    [(0, 1), (1, 1), (2, 2), (3, 2), (8, 8), (100, 64), (255, 128), (256, 256), (511, 256), (512, 512), (1_000, 512),
     (1_023, 512), (1_024, 1_024), (60_000, 32_768), (100_000, 65_536), (TIME_MAX, 2**62)],
)  # fmt: skip
def test_the_precision_is_the_greatest_power_of_two_up_to_the_tick(tick_time_ms, precision_ms):
    assert InMemoryDelayTracker(tick_time_ms=tick_time_ms).precision_ms == precision_ms


def test_the_precision_does_not_follow_a_reset_tick(strict):
    strict.reset_tick_time(1)
    assert strict.precision_ms == 64
    assert offer(strict, A, 1_025)
    assert strict.next_delivery_ms == 1_088


# When held messages are due.


@pytest.mark.parametrize(
    ("deliver_at_ms", "due_ms"),
    [(10_000, 9_239), (9_728, 9_239), (9_727, 8_727), (10_239, 9_239), (10_240, 9_751)],
)
def test_rounded_down_and_due_up_to_a_tick_before(tracker, deliver_at_ms, due_ms):
    offer(tracker, A, deliver_at_ms)
    assert tracker.next_delivery_ms == due_ms
    assert not tracker.has_message_available(now_ms=due_ms - 1)
    assert poll(tracker, due_ms - 1) == []
    assert tracker.has_message_available(now_ms=due_ms)
    assert poll(tracker, due_ms) == [A]


@pytest.mark.parametrize(("deliver_at_ms", "due_ms"), [(1_025, 1_088), (1_087, 1_088), (1_088, 1_088), (1_089, 1_152)])
def test_strict_rounds_up(strict, deliver_at_ms, due_ms):
    offer(strict, A, deliver_at_ms)
    assert strict.next_delivery_ms == due_ms
    assert poll(strict, due_ms - 1) == []
    assert poll(strict, due_ms) == [A]


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_tick_of_one_is_exact(is_strict):
    tracker = InMemoryDelayTracker(tick_time_ms=1, is_deliver_at_time_strict=is_strict)
    offer(tracker, A, 1_003)
    due_ms = 1_003 if is_strict else 1_002
    assert poll(tracker, due_ms - 1) == []
    assert poll(tracker, due_ms) == [A]


def test_the_end_of_time_falls_due():
    tracker = InMemoryDelayTracker(is_deliver_at_time_strict=True)
    assert offer(tracker, A, TIME_MAX)
    assert tracker.next_delivery_ms == 9223372036854775296
    assert poll(tracker, 9223372036854775295) == []
    assert poll(tracker, TIME_MAX) == [A]


def test_the_last_ids_there_are(tracker):
    last = Position(2**63 - 1, 2**32 - 1)
    assert offer(tracker, last, TIME_MAX)
    assert offer(tracker, Position(0, 0), TIME_MAX)
    assert poll(tracker, TIME_MAX) == [Position(0, 0), last]


def test_the_clock_may_run_back(tracker):
    offer(tracker, A, 10_000)
    assert tracker.has_message_available(now_ms=10_000)
    assert not tracker.has_message_available(now_ms=9_000)
    assert poll(tracker, 9_000) == []
    assert offer(tracker, B, 9_500, now_ms=8_000)
    assert poll(tracker, 10_000) == [A, B]


# A tick that is reset.


def test_a_reset_tick_changes_what_is_held_and_when_it_is_due(tracker):
    offer(tracker, A, 10_000)
    tracker.reset_tick_time(2_000)
    assert not offer(tracker, B, 7_000, now_ms=5_000)
    assert tracker.next_delivery_ms == 8_239
    assert poll(tracker, 8_238) == []
    assert poll(tracker, 8_239) == [A]


def test_below_the_precision_the_next_delivery_is_when_the_bucket_is_due_and_not_the_buckets_time(tracker):
    """Pulsar's timer runs at 9728, when nothing is due, and is not armed again."""
    tracker.reset_tick_time(10)
    offer(tracker, A, 10_000)
    assert tracker.next_delivery_ms == 10_229
    assert poll(tracker, 9_728) == []
    assert tracker.next_delivery_ms == 10_229
    assert poll(tracker, 10_229) == [A]


def test_a_tick_reset_to_zero(tracker):
    tracker.reset_tick_time(0)
    assert not offer(tracker, A, 0)
    assert offer(tracker, A, 1)
    assert offer(tracker, B, 600)
    assert tracker.next_delivery_ms == 511
    assert poll(tracker, 510) == []
    assert poll(tracker, 511) == [A]
    assert poll(tracker, 1_023) == [B]


def test_a_bucket_that_was_due_before_time_began_is_due_from_the_beginning(tracker):
    tracker.reset_tick_time(0)
    offer(tracker, A, 1)
    tracker.reset_tick_time(10_000)
    assert tracker.next_delivery_ms == 0
    assert poll(tracker, 0) == [A]


@pytest.mark.parametrize("is_strict", [False, True])
def test_integers_of_numpy_are_integers(is_strict):
    tracker = InMemoryDelayTracker(tick_time_ms=np.int32(100), is_deliver_at_time_strict=is_strict)
    largest = np.int64(TIME_MAX)
    assert tracker.add_message(Position(largest, np.uint32(7)), deliver_at_ms=largest, now_ms=np.int64(0))
    assert poll(tracker, largest, np.int16(5)) == [Position(TIME_MAX, 7)]


# The messages that are handed out, and their order.


def test_the_earliest_bucket_first_and_in_a_bucket_the_lowest_positions(strict):
    offer(strict, A, 2_000)
    for position in (LATER_LEDGER, D, EARLIER_LEDGER, C):
        offer(strict, position, 1_000)
    assert poll(strict, 1_024, 3) == [EARLIER_LEDGER, C, D]
    assert strict.delayed_message_count == 2
    assert poll(strict, 3_000, 1) == [LATER_LEDGER]
    assert poll(strict, 3_000, 1) == [A]


def test_one_answer_is_in_position_order_whatever_the_times(strict):
    offer(strict, A, 3_000)
    offer(strict, LATER_LEDGER, 1_000)
    offer(strict, B, 2_000)
    offer(strict, EARLIER_LEDGER, 2_500)
    assert poll(strict, 5_000) == [EARLIER_LEDGER, A, B, LATER_LEDGER]
    assert strict.delayed_message_count == 0
    assert strict.next_delivery_ms is None


@pytest.mark.parametrize("max_messages", [0, -1])
def test_none_wanted_none_taken(strict, max_messages):
    offer(strict, A, 1_000)
    assert poll(strict, 5_000, max_messages) == []
    assert poll(strict, 5_000, 1) == [A]


# The same position again.


def test_the_same_bucket_holds_a_position_once(strict):
    assert offer(strict, A, 1_000)
    assert offer(strict, A, 1_001)
    assert strict.delayed_message_count == 1
    assert poll(strict, 5_000) == [A]


def test_two_buckets_hold_it_twice(strict):
    assert offer(strict, A, 1_000)
    assert offer(strict, A, 2_000)
    assert strict.delayed_message_count == 2
    assert poll(strict, 1_500) == [A]
    assert strict.delayed_message_count == 1
    assert poll(strict, 2_500) == [A]


def test_both_due_it_counts_twice_and_stands_in_the_answer_once(strict):
    offer(strict, A, 1_000)
    offer(strict, A, 2_000)
    offer(strict, B, 3_000)
    assert poll(strict, 5_000, 2) == [A]
    assert strict.delayed_message_count == 1


def fixed(count: int, lookahead: int = 3) -> InMemoryDelayTracker:
    tracker = InMemoryDelayTracker(
        tick_time_ms=100, is_deliver_at_time_strict=True, fixed_delay_detection_lookahead=lookahead
    )
    for number in range(count):
        offer(tracker, Position(3, number), 10_000 + 10 * number)
    return tracker


# Clear, close, memory.


def test_clear_forgets_the_messages_and_what_they_told():
    """Pulsar 5.0.1; 4.2.4 remembers the latest time, and does not pause here."""
    tracker = fixed(3)
    offer(tracker, LATER_LEDGER, -1)
    tracker.clear()
    assert tracker.delayed_message_count == 0
    assert tracker.next_delivery_ms is None
    assert poll(tracker, TIME_MAX) == []
    for position in (A, B, C):
        offer(tracker, position, 5_000)
    assert tracker.should_pause_all_deliveries(now_ms=0)


def test_clear_keeps_the_tick_that_was_reset(tracker):
    tracker.reset_tick_time(10)
    tracker.clear()
    assert offer(tracker, A, 11)


def test_closed_is_closed(strict):
    offer(strict, A, 1_000)
    strict.close()
    strict.close()
    calls = [
        lambda: offer(strict, A, 1_000),
        lambda: offer(strict, A, -1),
        lambda: strict.has_message_available(now_ms=0),
        lambda: poll(strict, 5_000),
        lambda: strict.delayed_message_count,
        lambda: strict.memory_bytes,
        lambda: strict.should_pause_all_deliveries(now_ms=0),
        lambda: strict.next_delivery_ms,
        lambda: strict.reset_tick_time(1),
        strict.clear,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


def test_memory_is_what_the_messages_take(strict):
    assert strict.memory_bytes == 0
    offer(strict, A, 1_000)
    one = strict.memory_bytes
    assert 200 < one < 700
    for number in range(1, 1_001):
        offer(strict, Position(3, number), 1_000)
    assert 2_000 <= strict.memory_bytes - one < 2_100
    offer(strict, LATER_LEDGER, 9_000)
    assert 200 < strict.memory_bytes - one - 2_000 < 500
    assert len(poll(strict, 10_000, 2_000)) == 1_002
    assert strict.memory_bytes == 0


# A refused call changes nothing.


@pytest.mark.parametrize(
    ("position", "deliver_at_ms", "now_ms", "error", "saying"),
    [
        (Position(-1, 0), 1_000, 0, ValueError, "-1"),
        (Position(2**63, 0), 1_000, 0, ValueError, "9223372036854775808"),
        (Position(3, -1), 1_000, 0, ValueError, "-1"),
        (Position(3, 2**32), 1_000, 0, ValueError, "4294967296"),
        (Position(3, "7"), 1_000, 0, TypeError, "'7'"),
        (Position(3.0, 7), -1, 0, TypeError, "3.0"),
        (A, 2**63, 0, ValueError, "deliver_at_ms .* got 9223372036854775808"),
        (A, 1.5, 0, TypeError, "deliver_at_ms must be an integer, got 1.5"),
        (A, "soon", 0, TypeError, "deliver_at_ms must be an integer, got 'soon'"),
        (A, -1, -1, ValueError, "now_ms .* got -1"),
        (A, -1, 2**63, ValueError, "now_ms .* got 9223372036854775808"),
        (A, -1, None, TypeError, "now_ms must be an integer, got None"),
    ],
)
def test_a_message_that_no_log_has_is_refused(position, deliver_at_ms, now_ms, error, saying):
    tracker = fixed(3)
    with pytest.raises(error, match=saying):
        offer(tracker, position, deliver_at_ms, now_ms)
    assert tracker.delayed_message_count == 3
    assert tracker.should_pause_all_deliveries(now_ms=0)


def test_a_poll_that_is_refused_takes_nothing():
    tracker = fixed(3)
    with pytest.raises(TypeError, match=r"max_messages must be an integer, got 2\.5"):
        tracker.scheduled_messages(2.5, now_ms=50_000)
    with pytest.raises(ValueError, match=r"now_ms .* got -1"):
        poll(tracker, -1)
    assert len(poll(tracker, 50_000)) == 3


@pytest.mark.parametrize(
    ("tick_time_ms", "error", "saying"),
    [
        (-1, ValueError, ".* got -1"),
        (2**63, ValueError, f".* got {2**63}"),
        (1.5, TypeError, r"must be an integer, got 1\.5"),
    ],
)
def test_a_tick_that_is_none_is_refused(tracker, tick_time_ms, error, saying):
    with pytest.raises(error, match=f"tick_time_ms {saying}"):
        InMemoryDelayTracker(tick_time_ms=tick_time_ms)
    with pytest.raises(error, match=f"tick_time_ms {saying}"):
        tracker.reset_tick_time(tick_time_ms)
    assert not offer(tracker, A, 1_000)


def test_a_lookahead_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"fixed_delay_detection_lookahead .* got -1"):
        InMemoryDelayTracker(fixed_delay_detection_lookahead=-1)


# Where its settings come from.


def test_settings_of_a_broker():
    properties = {
        "delayedDeliveryTickTimeMillis": "100",
        "isDelayedDeliveryDeliverAtTimeStrict": "true",
        "delayedDeliveryFixedDelayDetectionLookahead": "1",
    }
    tracker = InMemoryDelayTracker.from_config(DelayConfig.from_pulsar_conf(properties))
    assert offer(tracker, A, 1_025)
    assert tracker.next_delivery_ms == 1_088
    assert tracker.should_pause_all_deliveries(now_ms=0)
