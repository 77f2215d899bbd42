"""Messages that a view skips, since the log has reported them to the index."""

import pytest

from ackstate import Position
from ackstate.delay import TopicDelayIndex

TICK = 100
DUE = 2_000
TIME_MAX = 2**63 - 1
A, B, C = (Position(3, entry_id) for entry_id in range(3))


def nothing_acked(position):
    return False


@pytest.fixture
def index():
    return TopicDelayIndex(tick_time_ms=TICK)


def test_a_message_that_is_known_to_wait_can_be_skipped_unread(index):
    view = index.open_view(nothing_acked)
    index.learn([(A, DUE), (C, 2 * DUE)])
    assert view.skip(A, now_ms=1_000)
    assert not view.skip(B, now_ms=1_000), "to be read, and offered"
    assert view.delayed_message_count == 1
    assert view.skip(A, now_ms=DUE), "due, and not yet handed out"
    assert view.scheduled_messages(9, now_ms=DUE) == [A]
    assert not view.skip(A, now_ms=DUE)
    assert view.skip(C, now_ms=DUE)
    assert view.scheduled_messages(9, now_ms=2 * DUE) == [C]


@pytest.mark.parametrize("position", [Position(3, -1), Position(3, 2**32), Position(2**63, 0)])
def test_only_a_position_that_a_message_can_have_is_skipped(index, position):
    view = index.open_view(nothing_acked)
    with pytest.raises(ValueError, match="must be in"):
        view.skip(position, now_ms=1_000)
    with pytest.raises(ValueError, match="now_ms"):
        view.skip(A, now_ms=-1)


def test_a_view_that_offers_nothing_is_given_nothing(index):
    view = index.open_view(nothing_acked)
    index.learn([(A, DUE)])
    assert view.delayed_message_count == 0
    assert view.scheduled_messages(9, now_ms=DUE) == []


@pytest.mark.parametrize(
    ("first", "end", "count"),
    [
        (Position(0, 0), Position(9, 0), 3),
        (Position(3, -1), Position(4, -1), 2),
        (Position(3, -1), Position(3, -1), 0),
        (A, B, 1),
        (B, A, 0),
        (B, Position(4, 1), 2),
    ],
)
def test_what_waits_between_two_positions_is_counted(index, first, end, count):
    index.learn([(each, DUE) for each in (A, B, Position(4, 0))])
    assert index.open_view(nothing_acked).count_between(first, end) == count


def test_the_end_of_time_and_the_first_and_the_last_entry_there_can_be(index):
    view = index.open_view(nothing_acked)
    last, first = Position(2**63 - 1, 2**32 - 1), Position(0, 0)
    index.learn([(last, TIME_MAX), (first, TIME_MAX - 1)])
    assert view.skip(first, now_ms=0)
    assert view.skip(last, now_ms=0)
    assert view.scheduled_messages(9, now_ms=TIME_MAX - 1) == []
    assert view.scheduled_messages(9, now_ms=TIME_MAX) == [first, last]
