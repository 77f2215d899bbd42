"""The index of a topic and its views, one behaviour at a time; none of the weak points of PIP-448's tracker.

Where the bucketed index promises the same, each test has both.
"""

import pytest

from ackstate import ManagedCursor, MemoryStore, Message, Position, Subscription
from ackstate.delay import BucketedDelayIndex, DelayConfig, TopicDelayIndex
from ackstate.position_set import PositionSet
from ackstate.topic import MessageLog
from delay_driver import unread_batches
from small_buckets import storage_of

TICK = 100
DUE = 2_000
FAR_MS = 10**9
NO_DELAY = -1
A, B, C, D = (Position(3, entry_id) for entry_id in (0, 1, 2, 3))
# The most for which a batch of one message counts in the due log.
BATCH_BYTES = 730


def nothing_acked(position: Position) -> bool:
    return False


def topic_index():
    return TopicDelayIndex(tick_time_ms=TICK)


def bucketed_index():
    """With a tick that its messages do not show."""
    few = {"min_index_count_per_bucket": 2, "max_indexes_per_segment": 1, "is_deliver_at_time_strict": True}
    return BucketedDelayIndex.recover(DelayConfig(**few), storage=storage_of(MemoryStore()), now_ms=0)[0]


@pytest.fixture(params=[topic_index, bucketed_index])
def any_index(request):
    return request.param()


@pytest.fixture
def index():
    return topic_index()


@pytest.fixture
def view(any_index):
    return any_index.open_view(nothing_acked)


@pytest.fixture
def other(any_index, view):
    return any_index.open_view(nothing_acked)


def offer(view, position, deliver_at_ms, *, now_ms=1_000):
    return view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def in_calendars(index):
    calendars = [index._calendar] if isinstance(index, TopicDelayIndex) else [index._mutable, index._shared]
    return sum(map(len, calendars))


def advance(index, now_ms):
    with index.lock:
        index.move_due(now_ms)


def poll(view, now_ms, max_messages=100_000):
    return view.scheduled_messages(max_messages, now_ms=now_ms)


# When a message is due.


@pytest.mark.parametrize("tick_ms", [1, 7, 100, 1_024, 60_000])
def test_a_message_is_due_at_its_time_rounded_up_to_the_tick(tick_ms):
    for deliver_at_ms in (1, 2 * tick_ms + 1, 3 * tick_ms - 1, 3 * tick_ms):
        view = TopicDelayIndex(tick_time_ms=tick_ms).open_view(nothing_acked)
        due_ms = -(-deliver_at_ms // tick_ms) * tick_ms
        assert offer(view, A, deliver_at_ms, now_ms=0)
        assert view.next_delivery_ms == due_ms
        assert poll(view, due_ms - 1) == []
        assert poll(view, due_ms) == [A]


@pytest.mark.parametrize("deliver_at_ms", [NO_DELAY, -(2**70), 0, 999, 1_000])
def test_a_message_without_delay_or_due_already_is_delivered_now(any_index, view, deliver_at_ms):
    assert not offer(view, A, deliver_at_ms)
    assert (len(any_index), view.delayed_message_count, view.next_delivery_ms) == (0, 0, None)


def test_a_clock_that_jumps_back_changes_nothing(any_index, view):
    offer(view, A, 1_500)
    assert poll(view, 1_500) == [A]
    assert not offer(view, B, 1_400, now_ms=200)
    assert offer(view, C, 1_600, now_ms=200)
    assert any_index.now_ms == 1_500
    assert poll(view, 300) == []
    assert poll(view, 1_600) == [C]


@pytest.mark.parametrize("kind", [topic_index, bucketed_index])
def test_a_clock_that_ran_ahead_once_delivers_nothing_early_after(kind):
    store, index = MemoryStore(), kind()
    log = MessageLog.open(store, topic="t")

    def subscribe(name):
        cursor = ManagedCursor.open(store, topic="t", subscription=name, ledgers=log.ledgers, now_ms=0)
        return Subscription(log, cursor, delays=index.open_view(cursor.is_acked))

    first, second = subscribe("first"), subscribe("second")
    log.publish([Message(b"", deliver_at_ms=FAR_MS)] * 3)
    assert second.dispatch("c", 10, now_ms=100) == []
    # Its clock says that they are due.
    assert len(first.dispatch("c", 10, now_ms=10**12)) == 3
    log.publish([Message(b"", deliver_at_ms=FAR_MS), Message(b"", deliver_at_ms=150)])
    assert [each.position.entry_id for each in second.dispatch("d", 10, now_ms=200)] == [4]
    assert second.next_wake_ms is not None
    assert [each.position.entry_id for each in second.dispatch("d", 10, now_ms=FAR_MS)] == [0, 1, 2, 3]


# The index holds each message once.


def test_a_message_is_held_once_for_all_views_and_all_offers(any_index, view, other):
    for _ in range(2):
        assert offer(view, A, 1_500)
        assert offer(other, A, 1_500)
    assert offer(view, A, 9_000), "it keeps its time"
    assert offer(view, A, 1_001)
    assert len(any_index) == 1
    assert A in any_index
    assert B not in any_index
    assert Position(3, -1) not in any_index
    assert Position(3, 2**32) not in any_index
    assert (view.delayed_message_count, other.delayed_message_count) == (1, 1)
    assert poll(view, 1_500) == [A]
    assert A not in any_index


def test_a_message_that_is_due_earlier_than_the_index_says_comes_to_every_view(any_index, view, other):
    offer(view, A, 9_000)
    assert not offer(other, A, 1_500, now_ms=1_500 + TICK), "the one that meets it delivers it"
    assert len(any_index) == 0
    assert poll(view, 1_600) == [A]
    assert not offer(view, A, 1_500, now_ms=1_600)
    assert poll(view, 9_000) == poll(other, 9_000) == []


def test_memory_grows_with_messages_and_not_with_views(index):
    for _ in range(11):
        view = index.open_view(nothing_acked)
        for entry_id in range(1_000):
            assert offer(view, Position(3, entry_id), 1_001 + 37 * entry_id)
        assert in_calendars(index) == len(index) == 1_000


# The messages of a subscription.


@pytest.mark.parametrize("is_attached", [False, True])
def test_what_was_acked_while_it_waited_is_never_handed_out_and_a_hole_keeps_nothing_back(any_index, is_attached):
    """1,000 messages are due at once. Of those handed out all are acked but the first: the mark-delete stays there."""
    reader = Reader(any_index, is_attached=is_attached)
    reader.read(DUE, now_ms=1_000, count=1_000)
    reader.acked |= {B, Position(3, 999)}
    assert reader.view.delayed_message_count == 998
    given = []
    for _ in range(100):
        handed_out = reader.poll(DUE, 10)
        given += handed_out
        reader.acked |= set(handed_out) - {A}
    assert given == [A, *(Position(3, entry_id) for entry_id in range(2, 999))]
    assert reader.poll(DUE) == []
    assert reader.view.next_delivery_ms is None


def test_an_error_of_the_ack_state_or_of_the_subscription_loses_nothing(index):
    answers = iter([False, OSError(), OSError()])

    def is_acked(position):
        answer = next(answers, False)
        if isinstance(answer, OSError):
            raise answer
        return answer

    view = index.open_view(is_acked)
    offer(view, A, 1_500)
    offer(view, B, 1_500)
    for _ in range(2):
        with pytest.raises(OSError):
            poll(view, 1_500)
    assert poll(view, 1_500) == [A, B]

    def failing(first, end):
        raise OSError("scripted")

    index = TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=0)
    reader = Reader(index, is_attached=True)
    reader.read(DUE, now_ms=1_000)
    advance(index, DUE)
    answer, reader.not_sent_between = reader.not_sent_between, failing
    with pytest.raises(OSError, match="scripted"):
        reader.poll(DUE)
    reader.not_sent_between = answer
    assert reader.poll(DUE) == [A]
    assert reader.poll(DUE) == []


def test_what_fell_due_ahead_of_a_reader_comes_by_its_reading_only(view, other):
    for each in (view, other):
        assert not offer(each, A, NO_DELAY)
    offer(view, B, 1_500)
    offer(view, C, 1_600)
    assert poll(view, 1_500) == [B]
    assert not offer(other, B, 1_500, now_ms=1_500), "met when due: deliver it now"
    assert not offer(other, C, 1_600, now_ms=1_600), "the offer itself moves the clock on"
    assert poll(other, 2_000) == []
    assert poll(view, 2_000) == [C]


def test_one_whose_time_has_come_but_whose_tick_has_not_waits_for_its_tick(index):
    view, other = index.open_view(nothing_acked), index.open_view(nothing_acked)
    offer(view, A, 1_401)
    assert offer(other, A, 1_401, now_ms=1_450), "else it came now and with the tick at 1500"
    assert poll(other, 1_500) == poll(view, 1_500) == [A]
    offer(view, B, 9_000)
    assert offer(view, B, 1_501, now_ms=1_501 + TICK - 1), "also if it is held for too late a time"
    assert poll(view, 1_600) == []


def test_counts_are_each_subscriptions_own_and_exact(any_index):
    acked = {A, C}
    one, other = any_index.open_view(acked.__contains__), any_index.open_view(nothing_acked)
    for position in (A, B, C, D):
        offer(one, position, DUE)
    offer(other, A, DUE)
    assert (one.delayed_message_count, other.delayed_message_count) == (2, 1)
    assert poll(one, DUE) == [B, D]
    assert (one.delayed_message_count, other.delayed_message_count) == (0, 1)
    assert poll(other, DUE) == [A]
    assert other.delayed_message_count == 0


# A reader that restarts.


def test_after_clear_everything_is_offered_and_judged_anew(any_index, view, other):
    for position, deliver_at_ms in ((A, 1_100), (B, 1_500), (C, 2_500), (D, 2_500)):
        offer(view, position, deliver_at_ms)
        offer(other, position, deliver_at_ms)
    offer(other, Position(0, 0), 2_500)
    assert poll(view, 1_100) == [A]
    advance(any_index, 1_500)
    view.clear()
    assert (view.delayed_message_count, poll(view, 1_500)) == (0, [])
    assert not offer(view, A, 1_100, now_ms=1_500)
    assert not offer(view, B, 1_500, now_ms=1_500), "it fell due before the reader came again"
    assert offer(view, C, 2_500, now_ms=1_500)
    assert poll(view, 2_500) == [C], "the reader has not come to D again"
    assert not offer(view, D, 2_500, now_ms=2_500)
    assert poll(view, 9_000) == []
    assert poll(other, 9_000) == [Position(0, 0), A, B, C, D]


def test_what_is_offered_is_dropped_once_all_have_acked_it_and_may_come_again(any_index, view, other):
    views = [view, other]
    for each in views:
        for entry_id in range(6_000):
            assert offer(each, Position(1, entry_id), FAR_MS + entry_id, now_ms=0)
    view.advance_mark_delete(Position(2, -1))
    assert len(any_index) == 6_000
    for _ in range(3):
        other.advance_mark_delete(Position(2, -1))
        assert len(any_index) == in_calendars(any_index) == 0
        other.clear()
        for entry_id in range(6_000):
            assert offer(other, Position(1, entry_id), FAR_MS + entry_id, now_ms=0)
        assert in_calendars(any_index) == 6_000
    assert len(poll(other, 2 * FAR_MS)) == 6_000


# A view that lags behind the due log is cut off from it: nothing is lost, nothing comes twice, memory is bounded.


class Reader:
    """Reads the log of ledger 3 in order, acks some, and may have told its view how to ask it."""

    def __init__(self, index, *, is_attached):
        self.acked, self.sent, self.read_end = set(), set(), 0
        self.calls = 0
        self.view = index.open_view(self.acked.__contains__)
        if is_attached:
            self.view.attach(self)

    def read(self, deliver_at_ms, *, now_ms, count=1):
        """Read on; messages that need not wait are sent."""
        for _ in range(count):
            position = Position(3, self.read_end)
            if not offer(self.view, position, deliver_at_ms, now_ms=now_ms):
                self.sent.add(position)
            self.read_end += 1

    def poll(self, now_ms, max_messages=100_000):
        given = poll(self.view, now_ms, max_messages)
        assert not self.sent & set(given), "in flight"
        self.sent |= set(given)
        return given

    def discard_acked(self, ledger_id, entries):
        for entry_id in list(entries):
            if Position(ledger_id, entry_id) in self.acked:
                entries.remove(entry_id)

    def not_sent_between(self, first, end):
        self.calls += 1
        found = PositionSet()
        for entry_id in range(self.read_end):
            position = Position(3, entry_id)
            if first <= position < end and position not in self.acked and position not in self.sent:
                found.add(position)
        return found


def both_kinds(**settings):
    index = TopicDelayIndex(tick_time_ms=TICK, **settings)
    return index, [Reader(index, is_attached=is_attached) for is_attached in (False, True)]


bounds = pytest.mark.parametrize("bytes_max", [0, BATCH_BYTES, 5 * BATCH_BYTES])


def numbered(*ranges):
    return [Position(3, entry_id) for each in ranges for entry_id in each]


@bounds
def test_views_that_were_cut_off_are_given_what_fell_due_since_and_nothing_else(bytes_max):
    index, readers = both_kinds(due_log_bytes_max=bytes_max)
    for reader in readers:
        for tick in range(1, 11):
            reader.read(DUE + tick * TICK, now_ms=1_000)
        reader.read(NO_DELAY, now_ms=1_000, count=2)
        reader.read(9_000, now_ms=1_000)
        reader.acked |= {B, Position(3, 10)}
    for tick in range(1, 11):
        advance(index, DUE + tick * TICK)
    assert unread_batches(index) <= 5
    for reader in readers:
        assert reader.view.delayed_message_count == 10
        assert reader.poll(DUE + 10 * TICK, 4) == [A, C, D, Position(3, 4)]
        assert reader.poll(DUE + 10 * TICK) == numbered(range(5, 10))
        assert reader.poll(DUE + 10 * TICK) == []
    for reader in readers:
        assert reader.poll(9_000) == [Position(3, 12)]
    assert readers[0].calls == 0
    assert readers[1].calls > 0


def lagging(count):
    """An index, and an attached reader of so many messages that has polled none of the first eight, which are due."""
    index, (_, reader) = both_kinds(due_log_bytes_max=5 * BATCH_BYTES)
    for tick in range(count):
        reader.read(DUE + tick * TICK, now_ms=1_000)
    for tick in range(8):
        advance(index, DUE + tick * TICK)
    return index, reader


def test_what_falls_due_while_the_subscription_is_asked_comes_once():
    """Another view moves it to the due log meanwhile."""
    index, reader = lagging(9)
    answer = reader.not_sent_between

    def while_time_passes(first, end):
        found = answer(first, end)
        advance(index, DUE + 8 * TICK)
        return found

    reader.not_sent_between = while_time_passes
    assert reader.poll(DUE + 7 * TICK) == numbered(range(9))
    assert reader.calls == 1
    assert reader.poll(9_000) == []


def test_a_subscription_is_asked_once_each_time_that_its_view_lags_too_far():
    _, reader = lagging(10)
    given = [reader.poll(DUE + tick * TICK) for tick in (7, 8, 9)]
    assert (given, reader.calls) == ([numbered(range(8)), [Position(3, 8)], [Position(3, 9)]], 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("bytes_max", [0, 20 * BATCH_BYTES])
def test_one_of_two_views_lags_for_10_000_ticks(bytes_max, is_attached):
    index = TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=bytes_max)
    swift, lagging = Reader(index, is_attached=False), Reader(index, is_attached=is_attached)
    for reader in (swift, lagging):
        for tick in range(1, 10_001):
            reader.read(tick * TICK, now_ms=0, count=2)
    unread_batches_max = 0
    for tick in range(10_000):
        assert swift.poll((tick + 1) * TICK) == numbered(range(2 * tick, 2 * tick + 2))
        unread_batches_max = max(unread_batches_max, unread_batches(index))
    assert unread_batches_max <= bytes_max // 500
    assert len(index) == 0
    lagging.acked |= {A, Position(3, 19_999)}
    assert lagging.view.delayed_message_count == 19_998
    assert lagging.poll(10_000 * TICK, 7) == numbered(range(1, 8))
    assert lagging.poll(10_000 * TICK) == numbered(range(8, 19_999))
    assert lagging.poll(10_001 * TICK) == []


# One dead subscription, and the work of a wake-up.


class SharedTopic:
    """Messages that are due one after another, and views of them, one of which may never poll."""

    def __init__(self, times, *, subscription_count, is_one_dead=False, is_attached=False, **settings):
        self.index = TopicDelayIndex(tick_time_ms=TICK, **settings)
        self.views = [self.index.open_view(nothing_acked) for _ in range(subscription_count)]
        self.index.learn((Position(3, number), time_ms) for number, time_ms in enumerate(times))
        all_views = self.views
        if is_one_dead:
            dead = Reader(self.index, is_attached=is_attached)
            dead.read_end = len(times)
            all_views = [*self.views, dead.view]
        for view in all_views:
            assert view.unknown([Position(3, 0), Position(3, len(times) - 1)], now_ms=0) == []

    def run(self, until_tick):
        """At each tick all but the dead one poll; return the results, and what is held and unread after each tick."""
        given, held = [], []
        for tick in range(1, until_tick + 1):
            given += [poll(view, tick * TICK) for view in self.views]
            held.append((len(self.index), unread_batches(self.index)))
        return given, held


@pytest.mark.slow
@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize(
    ("subscription_count", "tick_count", "messages_a_tick", "bytes_max"), [(999, 10, 10, 4_096), (2, 1_000, 1, 20_000)]
)
def test_one_dead_subscription_of_1000_changes_nothing_for_the_others(
    subscription_count, tick_count, messages_a_tick, bytes_max, is_attached
):
    times = [tick * TICK for tick in range(1, tick_count + 1) for _ in range(messages_a_tick)]
    (given, held), (given_beside_dead, held_beside_dead) = (
        SharedTopic(
            times, subscription_count=subscription_count, is_one_dead=is_one_dead, is_attached=is_attached,
            due_log_bytes_max=bytes_max,
        ).run(tick_count)
        for is_one_dead in (False, True)
    )  # fmt: skip
    assert given_beside_dead == given, "the same positions at the same polls"
    assert sum(map(len, given)) == subscription_count * len(times)
    for (count, unread), (count_beside_dead, unread_beside_dead) in zip(held, held_beside_dead, strict=True):
        assert count_beside_dead == count
        assert unread == 0
        assert unread_beside_dead <= bytes_max // 500


def test_one_reader_at_a_time_reads_messages_that_no_log_reports(any_index, view):
    with view.reading(A):
        assert any_index.being_read.locked()
    any_index.complete_from = B
    with view.reading(B):
        assert not any_index.being_read.locked()


# Refusals: nothing is changed.


def test_a_tick_below_a_millisecond_and_a_poll_for_fewer_than_no_messages_are_refused(any_index, view):
    for tick_time_ms in (0, -1):
        with pytest.raises(ValueError, match="tick_time_ms"):
            TopicDelayIndex(tick_time_ms=tick_time_ms)
    with pytest.raises(ValueError, match="max_messages must be at least 0, got -1"):
        poll(view, 1_000, max_messages=-1)
