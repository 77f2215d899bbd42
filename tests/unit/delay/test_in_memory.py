"""What Pulsar's recorded calls (`test_tracker_vectors`) leave open: bounds, refusals, memory of the one in memory."""

import pytest

from ackstate import Position
from ackstate.delay import InMemoryDelayTracker

TIME_MAX = 2**63 - 1
A, B, C, D = (Position(3, entry_id) for entry_id in (0, 1, 2, 3))
LATER_LEDGER = Position(5, 0)


@pytest.fixture
def strict() -> InMemoryDelayTracker:
    return InMemoryDelayTracker(tick_time_ms=100, is_deliver_at_time_strict=True)


@pytest.fixture
def tracker() -> InMemoryDelayTracker:
    """With Pulsar's defaults: a tick of 1000 ms, so a precision of 512 ms, not strict."""
    return InMemoryDelayTracker()


def offer(tracker, position, deliver_at_ms, now_ms=0) -> bool:
    return tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def poll(tracker, now_ms, max_messages=100) -> list[Position]:
    return tracker.scheduled_messages(max_messages, now_ms=now_ms)


def fixed(count, lookahead=3) -> InMemoryDelayTracker:
    tracker = InMemoryDelayTracker(
        tick_time_ms=100, is_deliver_at_time_strict=True, fixed_delay_detection_lookahead=lookahead
    )
    for number in range(count):
        offer(tracker, Position(3, number), 10_000 + 10 * number)
    return tracker


@pytest.mark.parametrize(
    ("tick_time_ms", "precision_ms"), [(0, 1), (1, 1), (3, 2), (255, 128), (256, 256), (1_000, 512), (TIME_MAX, 2**62)]
)
def test_the_precision_is_the_greatest_power_of_two_up_to_the_tick(tick_time_ms, precision_ms):
    assert InMemoryDelayTracker(tick_time_ms=tick_time_ms).precision_ms == precision_ms


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
        lambda: strict.should_pause_all_deliveries(now_ms=0),
        lambda: strict.next_delivery_ms,
        lambda: strict.reset_tick_time(1),
        strict.clear,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


# A refused call changes nothing.


@pytest.mark.parametrize(
    ("call", "error", "saying"),
    [
        (lambda _: InMemoryDelayTracker(fixed_delay_detection_lookahead=-1), ValueError, "lookahead .* got -1"),
        (lambda _: InMemoryDelayTracker(is_deliver_at_time_strict=1), TypeError, "is_deliver_at_time_strict"),
        *(
            (call, error, f"tick_time_ms .*got {tick}")
            for tick, error in ((-1, ValueError), (2**63, ValueError), (1.5, TypeError))
            for call in (
                lambda _, tick=tick: InMemoryDelayTracker(tick_time_ms=tick),
                lambda tracker, tick=tick: tracker.reset_tick_time(tick),
            )
        ),
        (lambda tracker: offer(tracker, Position(-1, 0), 1_000), ValueError, "-1"),
        (lambda tracker: offer(tracker, Position(2**63, 0), 1_000), ValueError, "9223372036854775808"),
        (lambda tracker: offer(tracker, Position(3, -1), 1_000), ValueError, "-1"),
        (lambda tracker: offer(tracker, Position(3, 2**32), 1_000), ValueError, "4294967296"),
        (lambda tracker: offer(tracker, Position(3, "7"), 1_000), TypeError, "'7'"),
        (lambda tracker: offer(tracker, Position(3.0, 7), -1), TypeError, "3.0"),
        (lambda tracker: offer(tracker, A, 2**63), ValueError, "deliver_at_ms .* got 9223372036854775808"),
        (lambda tracker: offer(tracker, A, "soon"), TypeError, "deliver_at_ms must be an integer, got 'soon'"),
        (lambda tracker: offer(tracker, A, -1, -1), ValueError, "now_ms .* got -1"),
        (lambda tracker: offer(tracker, A, -1, 2**63), ValueError, "now_ms .* got 9223372036854775808"),
        (lambda tracker: offer(tracker, A, -1, None), TypeError, "now_ms must be an integer, got None"),
        (lambda tracker: poll(tracker, 50_000, 2.5), TypeError, r"max_messages must be an integer, got 2\.5"),
        (lambda tracker: poll(tracker, -1), ValueError, "now_ms .* got -1"),
    ],
)
def test_what_cannot_be_is_refused(call, error, saying):
    tracker = fixed(3)
    with pytest.raises(error, match=saying):
        call(tracker)
    assert tracker.should_pause_all_deliveries(now_ms=0)
    assert offer(tracker, LATER_LEDGER, 10_150, now_ms=10_000)
    assert len(poll(tracker, 50_000)) == 4
