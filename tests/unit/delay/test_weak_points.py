"""The index of a topic has none of the weak points of PIP-448's topic-wide tracker."""

import sys
from collections.abc import Callable

import pytest

from ackstate import Position
from ackstate.delay import TopicDelayIndex
from ackstate.position_set import PositionSet

TICK = 100
DUE = 2_000
NO_DELAY = -1
A, B, C, D = (Position(3, entry_id) for entry_id in range(4))


def nothing_acked(position):
    return False


def offer(view, position, deliver_at_ms, *, now_ms=1_000):
    return view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs: work that can be counted, whatever the machine."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


# An ack hole.


def given_to_a_subscription_with_a_hole(view, acked, *, poll_count, push_mark_delete):
    """1,000 messages are due at once. Of those handed out all are acked but the first: the mark-delete stays there."""
    for entry_id in range(1_000):
        assert offer(view, Position(3, entry_id), DUE)
    push_mark_delete(Position(3, -1))
    given = []
    for _ in range(poll_count):
        handed_out = view.scheduled_messages(10, now_ms=DUE)
        given += handed_out
        acked |= set(handed_out) - {Position(3, 0)}
    return given


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_hole_keeps_nothing_back(is_attached):
    acked = set()
    view = TopicDelayIndex(tick_time_ms=TICK).open_view(acked.__contains__)
    if is_attached:
        view.attach(AskingSubscription(acked))
    given = given_to_a_subscription_with_a_hole(view, acked, poll_count=100, push_mark_delete=lambda _: None)
    assert given == [Position(3, entry_id) for entry_id in range(1_000)]
    assert not view.has_message_available(now_ms=DUE)


class AskingSubscription:
    """The answers to a view, of a subscription whose reader has passed the log of ledger 3 up to an entry."""

    def __init__(self, acked, *, sent=(), read_end=0):
        self.acked, self.sent, self.read_end = acked, set(sent), read_end

    def discard_acked(self, ledger_id, entries):
        for entry_id in list(entries):
            if Position(ledger_id, entry_id) in self.acked:
                entries.remove(entry_id)

    def not_sent_between(self, first, end):
        found = PositionSet()
        for entry_id in range(self.read_end):
            position = Position(3, entry_id)
            if first <= position < end and position not in self.acked | self.sent:
                found.add(position)
        return found


# A subscription that never polls.


class OurTopic:
    """The same of our design."""

    def __init__(self, times, *, subscription_count, is_one_dead, is_attached=False, **settings):
        self.index = TopicDelayIndex(tick_time_ms=TICK, **settings)
        self.views = [self.index.open_view(nothing_acked) for _ in range(subscription_count)]
        self.index.learn((Position(3, number), time_ms) for number, time_ms in enumerate(times))
        if is_one_dead:
            self.dead = self.index.open_view(nothing_acked)
            if is_attached:
                self.dead.attach(AskingSubscription(set(), read_end=len(times)))
        for view in [*self.views, self.dead] if is_one_dead else self.views:
            assert all(view.skip(Position(3, number), now_ms=0) for number in (0, len(times) - 1))

    def poll(self, view, now_ms):
        return view.scheduled_messages(1_000, now_ms=now_ms)

    def held(self):
        return len(self.index), self.index.memory_bytes


def times_of(tick_count, *, messages_a_tick=1):
    """A fixed number of messages is due at each tick from the first on, in the order of the log."""
    return [tick * TICK for tick in range(1, tick_count + 1) for _ in range(messages_a_tick)]


def run_topic(topic, *, until_tick):
    """At each tick all but the dead one poll; return the result of each poll, and the held messages after each tick."""
    given, held = [], []
    for tick in range(1, until_tick + 1):
        given += [topic.poll(view, tick * TICK) for view in topic.views]
        held.append(topic.held())
    return given, held


@pytest.mark.slow
@pytest.mark.parametrize("is_attached", [False, True])
def test_one_dead_subscription_of_1000_changes_nothing_for_the_others(is_attached):
    bytes_max = 4_096
    times = times_of(10, messages_a_tick=10)
    run = {}
    for is_one_dead in (False, True):
        topic = OurTopic(
            times,
            subscription_count=999,
            is_one_dead=is_one_dead,
            is_attached=is_attached,
            due_log_bytes_max=bytes_max,
        )
        run[is_one_dead] = run_topic(topic, until_tick=10)
    (given, held), (given_beside_dead, held_beside_dead) = run.values()
    assert given_beside_dead == given, "the same positions at the same polls"
    assert sum(map(len, given)) == 999 * len(times)
    for (count, size), (count_beside_dead, size_beside_dead) in zip(held, held_beside_dead, strict=True):
        assert count_beside_dead == count
        assert size <= size_beside_dead <= size + bytes_max


@pytest.mark.slow
@pytest.mark.parametrize("is_attached", [False, True])
def test_however_long_a_subscription_is_dead_its_topics_index_does_not_grow(is_attached):
    bytes_max, tick_count = 20_000, 1_000
    alone, beside_dead = (
        OurTopic(
            times_of(tick_count),
            subscription_count=2,
            is_one_dead=is_one_dead,
            is_attached=is_attached,
            due_log_bytes_max=bytes_max,
        )
        for is_one_dead in (False, True)
    )
    given, held = run_topic(alone, until_tick=tick_count)
    given_beside_dead, held_beside_dead = run_topic(beside_dead, until_tick=tick_count)
    assert given_beside_dead == given
    excess = [beside - size for (_, size), (_, beside) in zip(held, held_beside_dead, strict=True)]
    assert 0 < max(excess) <= bytes_max
    dead = beside_dead.dead
    missed_bytes = sum(missed.memory_bytes for missed in (dead._due, dead._caught_up) if missed)
    # An attached one asks its subscription, when it is asked; another has a bitmap of its own.
    assert missed_bytes == 0 if is_attached else 0 < missed_bytes <= 1_000 + 2 * tick_count
    assert len(beside_dead.poll(dead, tick_count * TICK)) == tick_count
    assert beside_dead.poll(dead, tick_count * TICK) == []


# The work of a wake-up.


def test_a_due_bucket_is_the_same_little_work_for_each_view_whatever_else_fell_due():
    def lines_of_a_wake_up(subscription_count, bucket_count):
        topic = OurTopic(times_of(bucket_count + 9), subscription_count=subscription_count, is_one_dead=True)
        run_topic(topic, until_tick=bucket_count)
        now_ms = (bucket_count + 1) * TICK
        moving = lines_run(lambda: topic.index.advance(now_ms))
        asking = {lines_run(lambda view=view: view.has_message_available(now_ms=now_ms)) for view in topic.views}
        assert all(view.has_message_available(now_ms=now_ms) for view in topic.views)
        return moving, asking

    moving, asking = lines_of_a_wake_up(5, 20)
    assert len(asking) == 1
    assert moving + max(asking) < 200
    assert lines_of_a_wake_up(50, 20) == lines_of_a_wake_up(5, 200) == (moving, asking)


# Counts.


def counted(one, other, acked, *, push_mark_delete):
    """One has read four messages and acked two; the other has read one."""
    for position in (A, B, C, D):
        offer(one, position, DUE)
    offer(other, A, DUE)
    acked |= {A, C}
    push_mark_delete(A)
    return one.delayed_message_count, other.delayed_message_count


def test_counts_are_each_subscriptions_own_and_exact():
    index, acked = TopicDelayIndex(tick_time_ms=TICK), set()
    one, other = index.open_view(acked.__contains__), index.open_view(nothing_acked)
    assert counted(one, other, acked, push_mark_delete=lambda _: None) == (2, 1)
    assert one.scheduled_messages(10, now_ms=DUE) == [B, D]
    assert (one.delayed_message_count, other.delayed_message_count) == (0, 1)


# Times are rounded up.


def first_given_ms(view, deliver_at_ms, candidates_ms):
    """Offer a message and return the first of some times at which it is handed out."""
    assert offer(view, A, deliver_at_ms, now_ms=0)
    return next(now_ms for now_ms in candidates_ms if view.scheduled_messages(1, now_ms=now_ms) == [A])


@pytest.mark.parametrize("tick_ms", [1, 2, 7, 100, 1_000, 1_024, 60_000])
def test_a_message_is_never_early_whatever_the_tick(tick_ms):
    for deliver_at_ms in (2 * tick_ms + 1, 3 * tick_ms - 1, 3 * tick_ms):
        view = TopicDelayIndex(tick_time_ms=tick_ms).open_view(nothing_acked)
        tick_end_ms = -(-deliver_at_ms // tick_ms) * tick_ms
        candidates_ms = sorted({2 * tick_ms, deliver_at_ms - 1, tick_end_ms - 1, tick_end_ms})
        given_ms = first_given_ms(view, deliver_at_ms, candidates_ms)
        assert deliver_at_ms <= given_ms == tick_end_ms < deliver_at_ms + tick_ms


def one_due_and_many_far(bucket_count):
    return [TICK, *(10**6 + number * TICK for number in range(bucket_count))]


def test_what_falls_due_is_taken_without_a_look_at_what_waits():
    def lines(bucket_count):
        topic = OurTopic(one_due_and_many_far(bucket_count), subscription_count=1, is_one_dead=False)
        topic.index.advance(TICK - 1)
        given = []
        count = lines_run(lambda: given.extend(topic.poll(topic.views[0], TICK)))
        assert given == [Position(3, 0)]
        assert len(topic.index) == bucket_count
        return count

    assert lines(10_000) == lines(20_000) < 300
    assert lines(100) < 300, "so few were only gathered: they are put in first"


# The messages that new and rewound subscriptions see.


@pytest.mark.parametrize("opened", ["before it is held", "before it is due", "after it is due"])
def test_a_new_subscription_sees_what_it_must(opened):
    """It begins at B: A lies before it, C was due at once."""
    index = TopicDelayIndex(tick_time_ms=TICK)
    new = index.open_view(nothing_acked) if opened == "before it is held" else None
    for position in (A, B):
        assert index.add(position, deliver_at_ms=DUE, now_ms=1_000)
    new = index.open_view(nothing_acked) if opened == "before it is due" else new
    must_wait = new is not None
    if must_wait:
        assert offer(new, B, DUE)
        assert not offer(new, C, NO_DELAY)
    index.advance(DUE)
    new = new or index.open_view(nothing_acked)
    assert new.scheduled_messages(10, now_ms=DUE) == ([B] if must_wait else [])
    assert not offer(new, B, DUE, now_ms=DUE), "delivered, or met when it is due"
    assert new.scheduled_messages(10, now_ms=2 * DUE) == []


def test_a_rewound_subscription_is_given_once_more_what_is_not_acked():
    acked = set()
    index = TopicDelayIndex(tick_time_ms=TICK)
    view, other = index.open_view(acked.__contains__), index.open_view(nothing_acked)
    times = {A: DUE, B: DUE, C: 2 * DUE, D: 2 * DUE}
    for position, deliver_at_ms in times.items():
        index.add(position, deliver_at_ms=deliver_at_ms, now_ms=1_000)
        assert offer(view, position, deliver_at_ms)
        assert offer(other, position, deliver_at_ms)
    assert view.scheduled_messages(1, now_ms=DUE) == [A]
    acked |= {B, D}
    view.clear()
    assert not offer(view, A, DUE, now_ms=DUE)
    assert offer(view, C, 2 * DUE, now_ms=DUE)
    assert view.delayed_message_count == 1
    assert view.scheduled_messages(10, now_ms=2 * DUE) == [C]
    assert other.scheduled_messages(10, now_ms=2 * DUE) == [A, B, C, D]
