"""One behaviour of the index, its views and the registry at a time."""

import threading

import pytest

from ackstate import Position
from ackstate.delay import DelayedDeliveryTracker, SubscriptionDelayView, TopicDelayIndex
from delay_driver import unread_batches

TICK = 100
NO_DELAY = -1
TIME_MAX = 2**63 - 1
A, B, C, D = (Position(3, entry_id) for entry_id in (0, 1, 2, 3))
NEXT_LEDGER = Position(5, 0)


def nothing_acked(position: Position) -> bool:
    return False


@pytest.fixture
def index() -> TopicDelayIndex:
    return TopicDelayIndex(tick_time_ms=TICK)


@pytest.fixture
def view(index: TopicDelayIndex) -> SubscriptionDelayView:
    return index.open_view(nothing_acked)


@pytest.fixture
def other(index: TopicDelayIndex, view: SubscriptionDelayView) -> SubscriptionDelayView:
    return index.open_view(nothing_acked)


def offer(view: SubscriptionDelayView, position: Position, deliver_at_ms: int, now_ms: int) -> bool:
    return view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def poll(view: SubscriptionDelayView, now_ms: int, max_messages: int = 100) -> list[Position]:
    return view.scheduled_messages(max_messages, now_ms=now_ms)


# When a message is due.


@pytest.mark.parametrize(("deliver_at_ms", "due_ms"), [(1001, 1100), (1099, 1100), (1100, 1100), (1101, 1200)])
def test_a_message_is_due_at_its_time_rounded_up_to_the_tick(view, deliver_at_ms, due_ms):
    assert offer(view, A, deliver_at_ms, now_ms=1000)
    assert view.next_delivery_ms == due_ms
    assert poll(view, due_ms - 1) == []
    assert poll(view, due_ms) == [A]


@pytest.mark.parametrize("deliver_at_ms", [NO_DELAY, -(2**70), 0, 999, 1000])
def test_a_message_without_delay_or_due_already_is_delivered_now(index, view, deliver_at_ms):
    assert not offer(view, A, deliver_at_ms, now_ms=1000)
    assert len(index) == 0
    assert view.delayed_message_count == 0
    assert view.next_delivery_ms is None


def test_a_message_due_at_the_end_of_time_is_due_then(view):
    assert offer(view, A, TIME_MAX, now_ms=0)
    assert poll(view, TIME_MAX - 1) == []
    assert poll(view, TIME_MAX) == [A]


def test_a_clock_that_jumps_back_changes_nothing(index, view):
    offer(view, A, 1500, now_ms=1000)
    assert poll(view, 1500) == [A]
    assert not offer(view, B, 1400, now_ms=200)
    assert offer(view, C, 1600, now_ms=200)
    assert index.now_ms == 1500
    assert poll(view, 300) == []
    assert poll(view, 1600) == [C]


# The index holds each message once.


def test_a_message_is_held_once_for_all_views_and_all_offers(index, view, other):
    for _ in range(2):
        assert offer(view, A, 1500, now_ms=1000)
        assert offer(other, A, 1500, now_ms=1000)
    assert len(index) == 1
    assert A in index
    assert B not in index
    assert Position(3, -1) not in index
    assert (view.delayed_message_count, other.delayed_message_count) == (1, 1)


def test_a_held_message_is_not_moved_by_another_time(index, view):
    offer(view, A, 1500, now_ms=1000)
    assert offer(view, A, 9000, now_ms=1000)
    assert offer(view, A, 1001, now_ms=1000)
    assert len(index) == 1
    assert poll(view, 1500) == [A]


def test_the_index_forgets_what_fell_due(index, view):
    offer(view, A, 1500, now_ms=1000)
    offer(view, B, 2500, now_ms=1000)
    index.advance(1500)
    assert len(index) == 1
    assert A not in index
    assert index.next_due_ms == 2500


def test_a_message_that_is_held_for_too_late_a_time_falls_due_when_its_own_time_is_over(index, view, other):
    for each in (view, other):
        offer(each, A, 9000, now_ms=1000)
    assert offer(view, A, 1500, now_ms=1500 + TICK - 1)
    assert poll(view, 1500 + TICK - 1) == []
    assert offer(view, A, 1500, now_ms=1500 + TICK)
    assert len(index) == 0
    assert poll(view, 1600) == [A]
    assert not offer(view, A, 1500, now_ms=1600)
    assert poll(other, 1600) == [A]
    assert poll(view, 9000) == poll(other, 9000) == []


# The messages of a subscription.


def test_due_positions_come_in_position_order_and_at_most_so_many(view):
    times = {NEXT_LEDGER: 1100, C: 1200, A: 1300, B: 1100, D: 9000}
    for position in sorted(times):
        assert offer(view, position, times[position], now_ms=1000)
    assert poll(view, 1300, max_messages=0) == []
    assert poll(view, 1300, max_messages=2) == [A, B]
    assert poll(view, 1300, max_messages=2) == [C, NEXT_LEDGER]
    assert poll(view, 1300, max_messages=2) == []
    assert view.delayed_message_count == 1


def test_something_is_available_exactly_when_a_poll_gives_something(view):
    offer(view, A, 1500, now_ms=1000)
    assert not view.has_message_available(now_ms=1499)
    assert view.has_message_available(now_ms=1500)
    assert poll(view, 1500) == [A]
    assert not view.has_message_available(now_ms=1500)


def test_what_was_acked_while_it_waited_is_never_handed_out(index):
    acked = {A}
    view = index.open_view(acked.__contains__)
    for position in (A, B, C):
        offer(view, position, 1500, now_ms=1000)
    assert poll(view, 1500, max_messages=1) == [B]
    assert view.delayed_message_count == 1
    acked.add(C)
    assert view.delayed_message_count == 0
    assert not view.has_message_available(now_ms=1500)
    assert view.delayed_message_count == 0
    assert view.next_delivery_ms is None


def test_an_error_from_the_ack_state_loses_nothing(index):
    answers = iter([False, OSError()])

    def is_acked(position: Position) -> bool:
        answer = next(answers, False)
        if isinstance(answer, OSError):
            raise answer
        return answer

    view = index.open_view(is_acked)
    offer(view, A, 1500, now_ms=1000)
    offer(view, B, 1500, now_ms=1000)
    with pytest.raises(OSError):
        poll(view, 1500)
    assert poll(view, 1500) == [A, B]


def test_views_at_different_pace_each_get_everything_once(view, other):
    for position in (A, B):
        offer(view, position, 1500, now_ms=1000)
        offer(other, position, 1500, now_ms=1000)
    assert poll(view, 1500, max_messages=1) == [A]
    assert poll(other, 1500) == [A, B]
    assert poll(view, 1500) == [B]
    assert poll(other, 1500) == []


def test_what_fell_due_ahead_of_a_reader_comes_by_its_reading_only(view, other):
    offer(view, A, NO_DELAY, now_ms=1000)
    offer(view, B, 1500, now_ms=1000)
    offer(other, A, NO_DELAY, now_ms=1000)
    assert poll(view, 1500) == [B]
    assert not offer(other, B, 1500, now_ms=1500), "met when due: deliver it now"
    assert poll(other, 2000) == []


def test_what_falls_due_with_the_offer_itself_is_delivered_once(view, other):
    offer(view, B, 1500, now_ms=1000)
    offer(other, A, NO_DELAY, now_ms=1000)
    assert not offer(other, B, 1500, now_ms=1500), "the offer moves the clock on"
    assert poll(other, 2000) == []
    assert poll(view, 2000) == [B]


def test_one_whose_time_has_come_but_whose_bucket_has_not_waits_for_its_bucket(view, other):
    offer(view, A, 1401, now_ms=1000)
    assert offer(other, A, 1401, now_ms=1450), "else it came now and with the bucket at 1500"
    assert poll(other, 1500) == [A]
    assert poll(view, 1500) == [A]


def test_a_message_read_again_while_it_waits_is_handed_out_once(view):
    assert offer(view, A, 1500, now_ms=1000)
    assert offer(view, A, 1500, now_ms=1000)
    assert offer(view, A, 1500, now_ms=1500), "due, waiting for a poll"
    assert view.delayed_message_count == 1
    assert poll(view, 1500) == [A]
    assert not offer(view, A, 1500, now_ms=1500), "handed out: this is its replay"
    assert poll(view, 9000) == []


def test_a_view_opened_late_skips_what_still_waits_and_no_more(index, view):
    offer(view, A, 1500, now_ms=1000)
    offer(view, B, 2500, now_ms=1000)
    index.advance(1500)
    late = index.open_view(nothing_acked)
    assert poll(late, 1500) == []
    assert not offer(late, A, 1500, now_ms=1500)
    assert offer(late, B, 2500, now_ms=1500)
    assert poll(late, 2500) == [B]


def test_a_view_that_begins_in_the_middle_is_not_given_what_lies_before(view, other):
    for position in (A, B, C):
        offer(view, position, 1500, now_ms=1000)
    assert offer(other, C, 1500, now_ms=1000)
    assert other.delayed_message_count == 1
    assert poll(other, 1500) == [C]


def test_the_count_is_of_what_this_reader_has_passed(index, view, other):
    for position in (A, B, C):
        offer(view, position, 1500, now_ms=1000)
    offer(other, A, 1500, now_ms=1000)
    assert (view.delayed_message_count, other.delayed_message_count) == (3, 1)
    index.advance(1500)
    assert (view.delayed_message_count, other.delayed_message_count) == (3, 1)
    assert poll(other, 1500) == [A]
    assert (view.delayed_message_count, other.delayed_message_count) == (3, 0)


def test_the_next_delivery_is_now_when_something_due_waits(view):
    offer(view, A, 1500, now_ms=1000)
    offer(view, B, 2500, now_ms=1000)
    assert view.next_delivery_ms == 1500
    assert poll(view, 1700, max_messages=0) == []
    assert view.next_delivery_ms == 1700
    poll(view, 1700)
    assert view.next_delivery_ms == 2500


# A reader that restarts.


def test_after_clear_everything_is_offered_and_judged_anew(index, view, other):
    for position, deliver_at_ms in ((A, 1100), (B, 1500), (C, 2500)):
        offer(view, position, deliver_at_ms, now_ms=1000)
    assert poll(view, 1100) == [A]
    index.advance(1500)
    view.clear()
    assert (view.delayed_message_count, view.has_message_available(now_ms=1500)) == (0, False)
    assert not offer(view, A, 1100, now_ms=1500)
    assert not offer(view, B, 1500, now_ms=1500), "it fell due before the reader came again"
    assert offer(view, C, 2500, now_ms=1500)
    assert poll(view, 2500) == [C]


def test_what_falls_due_between_clear_and_the_readers_return_comes_once(view):
    offer(view, A, 1500, now_ms=1000)
    offer(view, B, 1600, now_ms=1000)
    view.clear()
    assert offer(view, A, 1500, now_ms=1000)
    assert poll(view, 1600) == [A], "the reader has not come to B again"
    assert not offer(view, B, 1600, now_ms=1600)
    assert poll(view, 9000) == []


def test_clear_of_one_view_takes_nothing_from_another(view, other):
    offer(view, A, 1500, now_ms=1000)
    offer(other, A, 1500, now_ms=1000)
    view.clear()
    assert poll(other, 1500) == [A]


# Who waits for whom.


def test_a_batch_of_the_due_log_lives_until_the_last_view_has_read_it(index, view, other):
    offer(view, A, 1500, now_ms=1000)
    held = index.memory_bytes
    index.advance(1500)
    assert unread_batches(index) == 1
    poll(view, 1500)
    assert unread_batches(index) == 1
    pinned = index.memory_bytes
    assert not other.has_message_available(now_ms=1500)
    assert unread_batches(index) == 0
    assert index.memory_bytes < pinned
    assert index.memory_bytes < held


def test_a_closed_view_holds_nothing_back(index, view, other):
    offer(view, A, 1500, now_ms=1000)
    poll(view, 1500)
    other.close()
    assert unread_batches(index) == 0


def test_without_a_view_what_falls_due_is_dropped(index):
    assert index.add(A, deliver_at_ms=1500, now_ms=1000)
    empty = TopicDelayIndex(tick_time_ms=TICK).memory_bytes
    assert index.memory_bytes > empty
    index.advance(1500)
    assert (len(index), unread_batches(index), index.memory_bytes) == (0, 0, empty)


def test_a_long_due_log_is_let_go_without_deep_recursion():
    index = TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=1 << 30)
    view, other = index.open_view(nothing_acked), index.open_view(nothing_acked)
    for tick in range(10_000):
        index.add(Position(3, tick), deliver_at_ms=tick * TICK + 1, now_ms=tick * TICK)
    assert unread_batches(index) == 9_999
    view.close()
    other.close()
    assert unread_batches(index) == 0


def test_memory_grows_with_messages_and_not_with_views(index, view):
    for entry_id in range(1000):
        offer(view, Position(3, entry_id), 1001 + 37 * entry_id, now_ms=1000)
    alone = index.memory_bytes
    views = [index.open_view(nothing_acked) for _ in range(10)]
    for late in views:
        for entry_id in range(1000):
            assert offer(late, Position(3, entry_id), 1001 + 37 * entry_id, now_ms=1000)
    assert index.memory_bytes == alone
    assert view.memory_bytes >= alone


# Refusals.


@pytest.mark.parametrize("position", [Position(3, -1), Position(-1, 0), Position(3, 2**32), Position(2**63, 0)])
def test_a_position_that_no_message_has_is_refused(index, view, position):
    with pytest.raises(ValueError, match="must be in"):
        offer(view, position, 1500, now_ms=1000)
    assert len(index) == 0
    assert view.delayed_message_count == 0


@pytest.mark.parametrize(
    ("deliver_at_ms", "now_ms", "name"),
    [(2**63, 1000, "deliver_at_ms"), (1500, 2**63, "now_ms"), (1500, -1, "now_ms")],
)
def test_a_time_out_of_range_is_refused(index, view, deliver_at_ms, now_ms, name):
    with pytest.raises(ValueError, match=name):
        offer(view, A, deliver_at_ms, now_ms)
    assert len(index) == 0
    assert view.delayed_message_count == 0


@pytest.mark.parametrize("deliver_at_ms", [1500.0, float("nan")])
def test_a_time_that_is_no_integer_is_refused(view, deliver_at_ms):
    with pytest.raises(TypeError, match="deliver_at_ms"):
        offer(view, A, deliver_at_ms, now_ms=1000)


@pytest.mark.parametrize("tick_time_ms", [0, -1])
def test_a_tick_below_a_millisecond_is_refused(tick_time_ms):
    with pytest.raises(ValueError, match="tick_time_ms"):
        TopicDelayIndex(tick_time_ms=tick_time_ms)


def test_a_poll_for_fewer_than_no_messages_is_refused(view):
    with pytest.raises(ValueError, match="max_messages must be at least 0, got -1"):
        poll(view, 1000, max_messages=-1)


@pytest.mark.parametrize(
    "use",
    [
        lambda view: offer(view, A, 1500, now_ms=1000),
        lambda view: view.has_message_available(now_ms=1000),
        lambda view: poll(view, 1000),
        lambda view: view.delayed_message_count,
        lambda view: view.memory_bytes,
        lambda view: view.next_delivery_ms,
        lambda view: view.clear(),
    ],
)
def test_a_closed_view_refuses_use(view, use):
    view.close()
    view.close()
    with pytest.raises(ValueError, match="closed"):
        use(view)


def test_a_view_is_a_delayed_delivery_tracker(view):
    asked = {name for name in vars(DelayedDeliveryTracker) if not name.startswith("_")}
    assert asked <= set(vars(SubscriptionDelayView))


def test_threads_that_open_and_close_views_of_one_index_see_what_the_others_offer():
    index = TopicDelayIndex(tick_time_ms=TICK)
    others_unseen = []
    all_there = threading.Barrier(4, timeout=60)
    topic_lock = threading.Lock()

    def open_and_close(worker: int) -> None:
        for turn in range(100):
            view = index.open_view(nothing_acked)
            all_there.wait()
            with topic_lock:
                offer(view, Position(turn, worker), 1500, now_ms=1000)
            all_there.wait()
            with topic_lock:
                offer(view, Position(turn, 9), 1500, now_ms=1000)
                if view.delayed_message_count != 5 - worker:
                    others_unseen.append((turn, worker))
            all_there.wait()
            view.close()

    workers = [threading.Thread(target=open_and_close, args=(worker,)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert others_unseen == []
