"""Bugs planted in each tracker, and the stories that find them: what `test_trackers_model` could do, without chance."""

from collections.abc import Callable
from heapq import heappop
from typing import NamedTuple

import pytest
from pyroaring import BitMap

from ackstate import Position
from ackstate.delay import BucketedDelayIndex, InMemoryDelayTracker, SubscriptionDelayView, TopicDelayIndex
from ackstate.delay.buckets.messages import BucketedMessages
from ackstate.delay.buckets.sealed import SealedBuckets
from ackstate.delay.buckets.snapshots import BucketSnapshots
from ackstate.delay.due_log import batches_from
from ackstate.delay.position_set import PositionSet
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes
from delay_driver import ALL, NO_DELAY, DelayBroker
from tracker_kinds import KINDS


def asks_every_ms(kind):
    """Both subscriptions poll at every moment at which something could come too early."""
    broker = DelayBroker(kind, tick_ms=100)
    broker.publish(1, 99, 100, 101, 163, 164, 199, 200, 228, 250)
    broker.feed()
    for _ in range(400):
        for dispatcher in broker.dispatchers:
            dispatcher.work()
        broker.clock_ms += 1
    broker.drain()


def asks_for_one_at_a_time(kind):
    broker = DelayBroker(kind)
    broker.publish(*[64] * 6, *range(20, 90, 9))
    broker.feed()
    for _ in range(40):
        for dispatcher in broker.dispatchers:
            dispatcher.read(2)
            dispatcher.poll(1)
            dispatcher.send_again()
        broker.clock_ms += 4
    broker.check()
    broker.drain()


def sleeps_until_woken(kind):
    """The topic is idle, and its tick is set below the broker's."""
    broker = DelayBroker(kind, tick_ms=1_000)
    for dispatcher in broker.dispatchers:
        dispatcher.set_tick(100)
    broker.publish(5_000, 5_500, 6_001, 7_777)
    broker.drain()


def reads_what_waits_again_when_it_is_due(kind):
    """The messages are in sealed buckets, where those are."""
    broker = DelayBroker(kind)
    messages = broker.publish(*range(50, 130, 10))
    broker.publish(500)
    dispatcher = broker.dispatchers[0]
    dispatcher.read()
    broker.clock_ms += 95
    dispatcher.rewind(ALL)
    dispatcher.read()
    broker.clock_ms += 5
    dispatcher.work()
    assert set(dispatcher.sent) >= set(messages[:5])
    broker.drain()


def acks_what_waits(kind):
    broker = DelayBroker(kind)
    first, second, third = broker.publish(50, 60, 70)
    dispatcher = broker.dispatchers[0]
    dispatcher.read()
    dispatcher.ack(second)
    broker.clock_ms += 200
    dispatcher.poll()
    dispatcher.send_again()
    assert dispatcher.sent == [first, third]
    broker.drain()


def seeks_back(kind):
    broker = DelayBroker(kind)
    messages = broker.publish(NO_DELAY, 50, 90, 900)
    dispatcher = broker.dispatchers[0]
    dispatcher.work()
    broker.clock_ms += 60
    dispatcher.work()
    assert dispatcher.sent == messages[:2]
    broker.clock_ms += 60
    dispatcher.poll(0)
    dispatcher.seek(1)
    assert dispatcher.poll() == []
    dispatcher.read()
    assert dispatcher.sent == messages[1:3]
    broker.check()
    broker.drain()


def crashes_while_most_wait(kind):
    broker = DelayBroker(kind)
    broker.publish(*range(30, 330, 10))
    broker.feed()
    for dispatcher in broker.dispatchers:
        dispatcher.read()
    broker.clock_ms += 100
    broker.dispatchers[0].work()
    broker.dispatchers[0].ack(broker.log[0])
    broker.crash()
    broker.check()
    broker.drain()


def crashes_when_a_message_falls_due(kind):
    """The message is in a sealed bucket, where those are, in one segment with a message that is due later."""
    broker = DelayBroker(kind, tick_ms=1)
    broker.publish(NO_DELAY, 9, 64, 64, 9)
    broker.dispatchers[0].read()
    broker.clock_ms += 9
    broker.crash()
    broker.check()
    broker.drain()


def waits_for_what_is_due_last(kind):
    """Four ledgers in which the later messages are due earlier: whichever segment comes first, none is left out."""
    broker = DelayBroker(kind)
    broker.publish(*range(400, 80, -20), 500)
    broker.dispatchers[0].read()
    broker.check()
    for _ in range(50):
        broker.dispatchers[0].work()
        broker.clock_ms += 10
    broker.drain()


def the_clock_runs_back(kind):
    broker = DelayBroker(kind, tick_ms=64)
    broker.publish(30, 60, 90, 128, 300)
    for ahead_ms in (0, 70, -50, 20, 200, -300, 100):
        broker.clock_ms += ahead_ms
        broker.dispatchers[0].work()
        broker.check()
    broker.drain()


STORIES = [
    asks_every_ms,
    asks_for_one_at_a_time,
    sleeps_until_woken,
    reads_what_waits_again_when_it_is_due,
    acks_what_waits,
    seeks_back,
    crashes_while_most_wait,
    crashes_when_a_message_falls_due,
    waits_for_what_is_due_last,
    the_clock_runs_back,
]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_stories_that_find_planted_bugs_end_well(story, kind):
    story(kind)


# Planted bugs: each replaces one method of a tracker.


def takes_a_bucket_for_due_when_its_first_message_is(tracker, tick_time_ms):
    set_tick(tracker, tick_time_ms)
    tracker._lead_ms = tracker._early_ms


def takes_a_whole_bucket_and_returns_a_part(tracker, count_max):
    entries = tracker._bitmaps.pop(heappop(tracker._keys))
    tracker._count -= max(0, len(entries) - count_max)
    return BitMap(list(entries)[:count_max])


def wakes_at_the_time_of_a_bucket(tracker):
    return tracker._keys[0] >> 63 if tracker._keys else None


def hands_out_and_keeps(tracker, max_messages, *, now_ms):
    handed_out = scheduled_messages(tracker, max_messages, now_ms=now_ms)
    for position in handed_out[:1]:
        tracker.add_message(position, deliver_at_ms=now_ms + 2 * tracker._tick_time_ms, now_ms=now_ms)
    return handed_out


def rounds_down(index, position, deliver_at_ms):
    if deliver_at_ms > index.now_ms:
        deliver_at_ms = max(deliver_at_ms // index._tick_time_ms * index._tick_time_ms, index.now_ms + 1)
    return hold(index, position, deliver_at_ms)


def empties_a_batch_once_one_view_has_read_it(view, due):
    first, end = view._window()
    for batch in batches_from(view.unread):
        due.update_between(batch.positions, first=first, end=end)
        batch.positions.clear()
    view.unread = view._index.due_log.end


def hands_out_what_is_acked(view, ledger_id, entries):
    pass


def keeps_what_is_due_when_cleared(view):
    due = PositionSet()
    due.update(view._due)
    clear_view(view)
    view._due.update(due)


def follows_the_clock_back(index, now_ms):
    move_due(index, now_ms)
    index._now_ms = now_ms


def is_always_a_tick_early(index):
    return index._now_ms + index._config.tick_time_ms


def forgets_the_next_segment(buckets, bucket):
    loaded = load_next(buckets, bucket)
    return None if loaded is None else DelayedIndexes(*(column[:0] for column in loaded))


def merges_only_the_first_segments(stored, bucket):
    return read_all(stored, bucket)[:1]


def releases_what_is_held_no_more(index, due, taken):
    for ledger_id, entry_id in zip(due.ledger_ids.tolist(), due.entry_ids.tolist(), strict=True):
        taken.add(Position(ledger_id, entry_id))
    index.held.difference_update(taken)


def recovers_what_waits_and_no_segment(buckets, bucket):
    buckets._tree.clear()


def assumes_that_nothing_recovered_is_due(messages, *, cutoff_ms, is_late):
    taken_until_ms = messages._taken_until_ms
    report = recover(messages, cutoff_ms=cutoff_ms, is_late=is_late)
    messages._taken_until_ms = taken_until_ms
    return report


set_tick = InMemoryDelayTracker._set_tick
scheduled_messages = InMemoryDelayTracker.scheduled_messages
hold = TopicDelayIndex.hold
move_due = TopicDelayIndex.move_due
clear_view = SubscriptionDelayView.clear
load_next = SealedBuckets.load_next
read_all = BucketSnapshots.read_all
recover = BucketedMessages.recover


class PlantedBug(NamedTuple):
    """A method of a tracker replaced, and the story that finds it."""

    kind: str
    owner: type
    name: str
    replacement: object
    story: Callable[[object], None]
    saying: str | None


MEMORY, STRICT, VIEW, BUCKETS, MERGED = "in memory", "in memory, strict", "view", "bucketed, strict", "bucketed, merged"

PLANTED = [
    PlantedBug(
        MEMORY,
        InMemoryDelayTracker,
        "_set_tick",
        takes_a_bucket_for_due_when_its_first_message_is,
        asks_every_ms,
        "early",
    ),
    PlantedBug(
        STRICT,
        InMemoryDelayTracker,
        "_take_first",
        takes_a_whole_bucket_and_returns_a_part,
        asks_for_one_at_a_time,
        "not h",
    ),
    PlantedBug(
        MEMORY,
        InMemoryDelayTracker,
        "next_delivery_ms",
        property(wakes_at_the_time_of_a_bucket),
        sleeps_until_woken,
        "stal",
    ),
    PlantedBug(
        STRICT,
        InMemoryDelayTracker,
        "scheduled_messages",
        hands_out_and_keeps,
        asks_for_one_at_a_time,
        "handed out twice",
    ),
    PlantedBug(VIEW, TopicDelayIndex, "hold", rounds_down, asks_every_ms, " early"),
    PlantedBug(
        VIEW,
        SubscriptionDelayView,
        "_read_into",
        empties_a_batch_once_one_view_has_read_it,
        asks_every_ms,
        "handed out",
    ),
    PlantedBug(VIEW, SubscriptionDelayView, "_discard_acked", hands_out_what_is_acked, acks_what_waits, "is acked"),
    PlantedBug(VIEW, SubscriptionDelayView, "clear", keeps_what_is_due_when_cleared, seeks_back, "handed out twice"),
    PlantedBug(VIEW, TopicDelayIndex, "move_due", follows_the_clock_back, the_clock_runs_back, None),
    PlantedBug(BUCKETS, BucketedDelayIndex, "cutoff_ms", property(is_always_a_tick_early), asks_every_ms, " early"),
    PlantedBug(BUCKETS, SealedBuckets, "load_next", forgets_the_next_segment, waits_for_what_is_due_last, "handed out"),
    PlantedBug(
        MERGED,
        BucketSnapshots,
        "read_all",
        merges_only_the_first_segments,
        waits_for_what_is_due_last,
        "handed out",
    ),
    PlantedBug(
        BUCKETS,
        BucketedMessages,
        "_release",
        releases_what_is_held_no_more,
        reads_what_waits_again_when_it_is_due,
        "twice",
    ),
    PlantedBug(BUCKETS, SealedBuckets, "adopt", recovers_what_waits_and_no_segment, crashes_while_most_wait, None),
    PlantedBug(
        "view of buckets",
        BucketedMessages,
        "recover",
        assumes_that_nothing_recovered_is_due,
        crashes_when_a_message_falls_due,
        None,
    ),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.kind}-{planted.name}")
def test_a_story_finds_a_planted_bug(monkeypatch, planted):
    kind = KINDS[planted.kind]
    planted.story(kind)
    monkeypatch.setattr(planted.owner, planted.name, planted.replacement)
    with pytest.raises(AssertionError, match=planted.saying):
        planted.story(kind)
