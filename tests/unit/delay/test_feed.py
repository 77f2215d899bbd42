"""One reader feeds the index for all subscriptions, and no dispatcher has to add."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def feed_many(index, entry_ids, times, *, now_ms=1_000, ledger_id=3):
    return index.feed_many(ledger_id, entry_ids, times, now_ms=now_ms)


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


def test_a_view_that_says_how_far_it_is_is_given_what_lies_before_that(index):
    view = index.open_view(nothing_acked)
    feed_many(index, range(4), [DUE, DUE, 2 * DUE, 2 * DUE])
    view.passed(B)
    assert view.delayed_message_count == 1
    assert poll(view, DUE) == [A], "the reader has yet to come to B, and will meet it as one that is due"
    view.passed(D)
    assert view.delayed_message_count == 1
    view.passed(B)
    assert view.delayed_message_count == 1, "a reader that goes back calls clear"
    assert poll(view, 2 * DUE) == [C]


def test_what_falls_due_is_judged_by_where_the_reader_was_then(index):
    view = index.open_view(nothing_acked)
    feed(index, A)
    view.passed(A)
    index.advance(DUE)
    view.passed(D)
    assert poll(view, DUE) == []


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


def test_passed_takes_the_end_of_a_ledger_and_no_other_end(index):
    view = index.open_view(nothing_acked)
    feed(index, A)
    view.passed(Position(3, -1))
    assert view.delayed_message_count == 0
    with pytest.raises(ValueError, match="must be in"):
        view.passed(Position(-1, 0))
    view.passed(Position(4, -1))
    assert poll(view, DUE) == [A]


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
    view.passed(D)
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


# Many at a time.

INPUTS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda numbers: (number for number in numbers),
    "int32": lambda numbers: np.array(numbers, dtype=np.int32),
    "int64, big-endian": lambda numbers: np.array(numbers, dtype=">i8"),
    "every other one": lambda numbers: np.repeat(np.array(numbers, dtype=np.int64), 2)[::2],
    "objects": lambda numbers: np.array(numbers, dtype=object),
    "numpy integers": lambda numbers: list(np.array(numbers, dtype=np.int16)),
}
UNSIGNED = {
    "uint64": lambda numbers: np.array(numbers, dtype=np.uint64),
    "uint32": lambda numbers: np.array(numbers, dtype=np.uint32),
    "range": lambda numbers: range(numbers[0], numbers[-1] + 1),
}


@pytest.mark.parametrize("times_as", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("entries_as", (INPUTS | UNSIGNED).values(), ids=INPUTS | UNSIGNED)
def test_entries_and_times_come_in_whatever_holds_integers(index, entries_as, times_as):
    view = index.open_view(nothing_acked)
    assert feed_many(index, entries_as([0, 1, 2, 3]), times_as([1_900, NO_DELAY, 2_000, 900])) == 2
    index._check()
    assert poll(view, 1_900) == [A]
    assert poll(view, 2_000) == [C]


def test_of_an_entry_that_comes_twice_in_one_call_the_first_time_counts(index):
    view = index.open_view(nothing_acked)
    assert feed_many(index, [0, 1, 0, 1], [4_000, 2_000, 2_000, 4_000]) == 2
    assert poll(view, 2_000) == [B]
    assert poll(view, 4_000) == [A]


def test_one_that_is_held_stays_where_it_is(index):
    view = index.open_view(nothing_acked)
    feed(index, B, 4_000)
    assert feed_many(index, range(3), [DUE] * 3) == 2
    assert len(index) == 3
    assert poll(view, DUE) == [A, C]
    assert poll(view, 4_000) == [B]


def test_one_that_is_held_for_too_late_a_time_falls_due_when_its_own_time_is_over(index):
    view = index.open_view(nothing_acked)
    feed_many(index, range(4), [9_000] * 4)
    assert feed_many(index, range(3), [1_500, 1_500 + 1, NO_DELAY], now_ms=1_500 + TICK) == 0
    index._check()
    assert len(index) == 2
    assert poll(view, 1_600) == [A, C], "the tick of B, if it was 100 ms, is not over"
    assert poll(view, 9_000) == [B, D]


def test_the_end_of_time_and_the_last_entry_of_the_last_ledger(index):
    view = index.open_view(nothing_acked)
    last = 2**32 - 1
    assert feed_many(index, [last, 0], [TIME_MAX, TIME_MAX - 1], ledger_id=2**63 - 1) == 2
    assert poll(view, TIME_MAX - 1) == []
    assert poll(view, TIME_MAX) == [Position(2**63 - 1, 0), Position(2**63 - 1, last)]


def test_nothing_may_be_fed(index):
    view = index.open_view(nothing_acked)
    assert feed_many(index, [], []) == feed_many(index, np.array([], dtype=np.int64), ()) == 0
    assert (len(index), view.next_delivery_ms) == (0, None)


@pytest.mark.parametrize(
    ("entry_ids", "times", "error", "saying"),
    [
        ([0, 1], [DUE], ValueError, "2 entries and 1 times"),
        ([0, -1], [DUE, DUE], ValueError, "entry_ids must be in .* got -1 to 0"),
        ([0, 2**32], [DUE, DUE], ValueError, "entry_ids must be in"),
        ([0, 2**70], [DUE, DUE], ValueError, "entry_ids must be in"),
        ([0, 1], [DUE, 2**63], ValueError, "deliver_at_ms must be in"),
        ([0, 1], np.array([DUE, 2**63], dtype=np.uint64), ValueError, "deliver_at_ms must be in"),
        ([0, 1.0], [DUE, DUE], TypeError, "entry_ids must be an integer, got 1.0"),
        ([0, "1"], [DUE, DUE], TypeError, "entry_ids must be an integer, got '1'"),
        (np.array([0.0, 1.0]), [DUE, DUE], TypeError, "entry_ids must be integers, got float64"),
        (np.array([0, 1.5], dtype=object), [DUE, DUE], TypeError, "entry_ids must be an integer, got 1.5"),
        ([0, 1], np.array([DUE, None], dtype=object), TypeError, "deliver_at_ms must be an integer, got None"),
        ([0, 1], np.array([True, False]), TypeError, "deliver_at_ms must be integers, got bool"),
        ([0, 1], np.array([DUE, DUE], dtype="M8[ms]"), TypeError, "deliver_at_ms must be integers, got datetime64"),
        (np.array([[0, 1]]), np.array([[DUE, DUE]]), ValueError, r"entry_ids must be a sequence, .* \(1, 2\)"),
        (np.array(7), [DUE], ValueError, "entry_ids must be a sequence"),
    ],
)
def test_bad_input_is_refused_whole(index, entry_ids, times, error, saying):
    view = index.open_view(nothing_acked)
    with pytest.raises(error, match=saying):
        feed_many(index, entry_ids, times)
    assert (len(index), index.now_ms, index.is_fed, index.next_due_ms) == (0, 0, False, None)
    assert poll(view, TIME_MAX) == []


@pytest.mark.parametrize(("ledger_id", "now_ms"), [(-1, 1_000), (2**63, 1_000), (3, -1), (3, 2**63)])
def test_a_bad_ledger_or_time_is_refused(index, ledger_id, now_ms):
    with pytest.raises(ValueError):
        feed_many(index, [0], [DUE], ledger_id=ledger_id, now_ms=now_ms)
    assert (len(index), index.now_ms, index.is_fed) == (0, 0, False)


@pytest.mark.parametrize(("ledger_id", "now_ms"), [(3.0, 1_000), (3, 1_000.0), (None, 1_000)])
def test_a_ledger_or_time_that_is_no_integer_is_refused(index, ledger_id, now_ms):
    with pytest.raises(TypeError):
        feed_many(index, [0], [DUE], ledger_id=ledger_id, now_ms=now_ms)
    assert (len(index), index.now_ms, index.is_fed) == (0, 0, False)


@pytest.mark.parametrize(("position", "deliver_at_ms"), [(Position(3, -1), DUE), (A, 2**63)])
def test_what_feed_refuses_does_not_make_a_fed_index(index, position, deliver_at_ms):
    with pytest.raises(ValueError):
        feed(index, position, deliver_at_ms)
    assert (len(index), index.is_fed) == (0, False)


# Without delay come others than those with one: a message has one time, or one that is not yet over.
with_delay = st.tuples(st.integers(0, 6), st.sampled_from([1_001, 1_100, 1_101, 1_250, 5_000, TIME_MAX]))
without_delay = st.tuples(st.integers(7, 9), st.sampled_from([NO_DELAY, 0, 1_000]))


@given(
    held=st.lists(with_delay, max_size=5),
    fed=st.lists(with_delay | without_delay, min_size=1, max_size=20),
    tick_ms=st.sampled_from([1, 100, 1_000, TIME_MAX]),
    again_ms=st.sampled_from([1_000, 1_100, 1_250, 6_000]),
)
def test_many_at_a_time_are_as_one_by_one(held, fed, tick_ms, again_ms):
    """Fed after some are held; and once more, as messages whose time is over."""
    together, one_by_one = indexes = [TopicDelayIndex(tick_time_ms=tick_ms) for _ in range(2)]
    views = [each.open_view(nothing_acked) for each in indexes]
    for entry_id, deliver_at_ms in held:
        for each in indexes:
            each.add(Position(3, entry_id), deliver_at_ms=deliver_at_ms, now_ms=1_000)
    feed_both(together, one_by_one, fed, now_ms=1_000)
    for now_ms in (1_001, 1_100, 1_101, 1_200, 1_300, 5_000, TIME_MAX):
        if now_ms > again_ms:
            feed_both(together, one_by_one, [(entry_id, NO_DELAY) for entry_id in range(10)], now_ms=again_ms)
        assert poll(views[0], now_ms) == poll(views[1], now_ms)
        assert len(together) == len(one_by_one)
        assert together.next_due_ms == one_by_one.next_due_ms


def feed_both(together, one_by_one, messages, *, now_ms):
    one_by_one.advance(now_ms)
    before = len(one_by_one)
    is_held = [feed(one_by_one, Position(3, entry_id), each, now_ms=now_ms) for entry_id, each in messages]
    held_count = feed_many(together, [each for each, _ in messages], [each for _, each in messages], now_ms=now_ms)
    assert held_count == max(0, len(one_by_one) - before)
    assert sum(is_held) >= held_count
    together._check()


def test_the_very_first_message_of_a_log_is_handed_out():
    index = TopicDelayIndex(tick_time_ms=100)
    view, told = index.open_view(nothing_acked), index.open_view(nothing_acked)
    told.passed(Position(0, 1))
    index.feed(Position(0, 0), deliver_at_ms=2_000, now_ms=1_000)
    index.feed(Position(0, 1), deliver_at_ms=2_000, now_ms=1_000)
    assert view.scheduled_messages(10, now_ms=2_000) == [Position(0, 0), Position(0, 1)]
    assert told.scheduled_messages(10, now_ms=2_000) == [Position(0, 0)]
