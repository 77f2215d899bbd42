"""One reader feeds the index for all subscriptions, and no dispatcher has to add."""

import pytest

from ackstate import Position
from ackstate.delay import TopicDelayIndex

TICK = 100
DUE = 2_000
NO_DELAY = -1
TIME_MAX = 2**63 - 1
A, B, C, D = (Position(3, entry_id) for entry_id in range(4))


def nothing_acked(position):
    return False


@pytest.fixture
def index():
    return TopicDelayIndex(tick_time_ms=TICK)


def feed(index, position, deliver_at_ms=DUE, *, now_ms=1_000):
    return index.feed(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def feed_many(index, entry_ids, times, *, now_ms=1_000):
    for entry_id, time_ms in zip(entry_ids, times, strict=True):
        feed(index, Position(3, entry_id), time_ms, now_ms=now_ms)


def poll(view, now_ms, max_messages=100):
    return view.scheduled_messages(max_messages, now_ms=now_ms)


# Who is given what.


def test_views_whose_dispatchers_offer_nothing_are_each_given_all_that_falls_due_once(index):
    acked = {B}
    one, other = index.open_view(acked.__contains__), index.open_view(nothing_acked)
    assert [feed(index, position) for position in (A, B, C)] == [True] * 3
    assert not feed(index, D, NO_DELAY)
    assert len(index) == 3
    assert (one.delayed_message_count, other.delayed_message_count) == (2, 3)
    assert one.next_delivery_ms == other.next_delivery_ms == DUE
    assert poll(one, DUE - 1) == poll(other, DUE - 1) == []
    assert poll(one, DUE, 1) == [A]
    assert poll(one, DUE) == [C]
    assert poll(other, DUE) == [A, B, C]
    assert poll(one, 2 * DUE) == poll(other, 2 * DUE) == []


def test_a_view_that_offers_is_given_what_it_was_told_to_skip(index):
    view = index.open_view(nothing_acked)
    feed_many(index, range(3), [DUE] * 3)
    assert view.add_message(B, deliver_at_ms=DUE, now_ms=1_000)
    assert view.delayed_message_count == 1
    assert poll(view, DUE) == [B]


def test_a_message_that_is_known_to_wait_can_be_skipped_unread(index):
    view = index.open_view(nothing_acked)
    feed_many(index, [0, 2], [DUE, 2 * DUE])
    assert view.skip(A, now_ms=1_000)
    assert not view.skip(B, now_ms=1_000), "to be read, and offered"
    assert view.delayed_message_count == 1
    assert view.skip(A, now_ms=DUE), "due, and not yet handed out"
    assert poll(view, DUE) == [A]
    assert not view.skip(A, now_ms=DUE)
    assert view.skip(C, now_ms=DUE)
    assert poll(view, 2 * DUE) == [C]


@pytest.mark.parametrize("position", [Position(3, -1), Position(3, 2**32), Position(2**63, 0)])
def test_only_a_position_that_a_message_can_have_is_skipped(index, position):
    view = index.open_view(nothing_acked)
    with pytest.raises(ValueError, match="must be in"):
        view.skip(position, now_ms=1_000)
    with pytest.raises(ValueError, match="now_ms"):
        view.skip(A, now_ms=-1)


def test_a_view_that_is_opened_later_is_given_what_falls_due_from_then_on(index):
    feed_many(index, range(3), [DUE, DUE, 2 * DUE])
    before_due = index.open_view(nothing_acked)
    index.advance(DUE)
    after_due = index.open_view(nothing_acked)
    assert poll(before_due, DUE) == [A, B]
    assert poll(after_due, DUE) == [], "its reader meets them, and delivers them at once"
    assert poll(before_due, 2 * DUE) == poll(after_due, 2 * DUE) == [C]


def test_a_view_that_is_cleared_is_given_what_falls_due_from_then_on(index):
    view = index.open_view(nothing_acked)
    feed_many(index, range(2), [DUE, 2 * DUE])
    index.advance(DUE)
    view.clear()
    assert poll(view, DUE) == []
    assert poll(view, 2 * DUE) == [B]


def test_an_index_that_is_not_fed_gives_nothing_to_a_view_that_offers_nothing(index):
    view = index.open_view(nothing_acked)
    index.add(A, deliver_at_ms=DUE, now_ms=1_000)
    assert view.delayed_message_count == 0
    assert poll(view, DUE) == []


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
    feed_many(index, range(2), [DUE] * 2)
    feed(index, Position(4, 0))
    assert index.count_between(first, end) == count


@pytest.mark.parametrize(("position", "deliver_at_ms"), [(Position(3, -1), DUE), (A, 2**63)])
def test_what_feed_refuses_does_not_make_a_fed_index(index, position, deliver_at_ms):
    with pytest.raises(ValueError):
        feed(index, position, deliver_at_ms)
    assert (len(index), index.is_fed) == (0, False)


def test_one_that_is_held_for_too_late_a_time_falls_due_when_its_own_time_is_over(index):
    view = index.open_view(nothing_acked)
    feed_many(index, range(4), [9_000] * 4)
    feed_many(index, range(3), [1_500, 1_500 + 1, NO_DELAY], now_ms=1_500 + TICK)
    index._check()
    assert len(index) == 2
    assert poll(view, 1_600) == [A, C], "the tick of B, if it was 100 ms, is not over"
    assert poll(view, 9_000) == [B, D]


def test_the_end_of_time_and_the_last_entry_of_the_last_ledger(index):
    view = index.open_view(nothing_acked)
    last, first = Position(2**63 - 1, 2**32 - 1), Position(2**63 - 1, 0)
    assert feed(index, last, TIME_MAX)
    assert feed(index, first, TIME_MAX - 1)
    assert poll(view, TIME_MAX - 1) == []
    assert poll(view, TIME_MAX) == [first, last]


def test_the_very_first_message_of_a_log_is_handed_out():
    index = TopicDelayIndex(tick_time_ms=100)
    view = index.open_view(nothing_acked)
    index.feed(Position(0, 0), deliver_at_ms=2_000, now_ms=1_000)
    index.feed(Position(0, 1), deliver_at_ms=2_000, now_ms=1_000)
    assert view.scheduled_messages(10, now_ms=2_000) == [Position(0, 0), Position(0, 1)]
