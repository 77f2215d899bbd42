"""A subscription with any tracker of delayed messages: through a crash, a seek and an index that is wrong.

An index may be wrong about a message's time, that it is acked, or that it is there at all. Each message's own time is
looked at before it is sent, so nothing comes early; a message that the index has lost comes when the reader meets it.
"""

import pytest

from ackstate import Position
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)
from ackstate.dispatch import SubscriptionType
from topics import StoryTopic

TICK_MS = 10
FAR_MS = 10**9
LATER_LEDGER = Position(10**6, 0)
TRACKERS = ["in memory", "in memory, not strict", "view", "bucketed", "bucketed, not strict", "view of buckets"]
every_tracker = pytest.mark.parametrize("tracker", TRACKERS)


class DelayedTopic(StoryTopic):
    """A topic of small ledgers whose messages come in time and once, on a store that a crash leaves as it is."""

    entries_per_ledger_max = 5

    def __init__(self, tracker, *, kind=SubscriptionType.SHARED):
        self.tracker_kind, _, looseness = tracker.partition(", ")
        self.early_ms = TICK_MS if looseness else 0
        self.delays = DelayConfig(
            tick_time_ms=TICK_MS, is_deliver_at_time_strict=not looseness,
            min_index_count_per_bucket=2, max_indexes_per_segment=2,
        )  # fmt: skip
        self.deliver_at_ms, self.seen_ms = [], 0
        super().__init__(kind, tick_time_ms=TICK_MS)

    def open(self, store, **limits):
        self.index, self.subscribed, self.seen_ms = None, {}, self.now_ms
        super().open(store, **limits)

    def subscribe(self, name, **limits):
        self.name = name
        super().subscribe(name, **limits)
        self.subscribed[name] = self.cursor, self.tracker, self.subscription

    def open_tracker(self):
        if self.tracker_kind == "in memory":
            return InMemoryDelayTracker.from_config(self.delays)
        if self.tracker_kind == "bucketed":
            return self.recovered()
        if self.index is None:
            is_view = self.tracker_kind == "view"
            self.index = TopicDelayIndex(tick_time_ms=TICK_MS) if is_view else self.recovered()
        return self.index.open_view(self.cursor.is_acked)

    @property
    def storage(self):
        name = self.name if self.tracker_kind == "bucketed" else "s"
        registry = BucketRegistry(self.log.store.metadata, f"/delayed-buckets/{name}")
        return SnapshotStorage(self.log.store.ledgers, registry, f"delayed {name}")

    def recovered(self):
        index, self.report = BucketedDelayIndex.recover(self.delays, storage=self.storage, now_ms=self.now_ms)
        return index

    def do(self, verb, words):
        match verb:
            case "due":  # a message for each time
                for word in words:
                    self.publish(deliver_at_ms=-1 if word == "-" else int(word))
            case "on":  # another subscription
                if words[0] not in self.subscribed:
                    self.subscribe(words[0])
                self.cursor, self.tracker, self.subscription = self.subscribed[words[0]]
            case "waiting":
                return f"{self.subscription.stats().delayed_entries} {self.tracker.delayed_message_count}"
            case "drain":
                return " ".join(map(str, sorted(self.drain())))
            case _:
                return super().do(verb, words)
        return ""

    def publish(self, count=1, *, deliver_at_ms=-1, **more):
        self.deliver_at_ms += [deliver_at_ms] * count
        super().publish(count, deliver_at_ms=deliver_at_ms, **more)

    def deliveries(self, consumer="a", count=100, *, now_ms=0):
        sent = super().deliveries(consumer, count, now_ms=now_ms)
        self.seen_ms = max(self.seen_ms, now_ms)
        for number, _ in [] if self.kind.is_single_active else sent:
            assert self.deliver_at_ms[number] <= self.seen_ms + self.early_ms, f"{number} came at {now_ms} ms"
        return sent

    def drain(self, *, in_time=True):
        """Dispatch whenever the subscription requests it, ack all, and return the times of the messages, by number."""
        came, waits, from_ms = {}, 0, self.now_ms
        while self.now_ms < FAR_MS:
            numbers = self.dispatch(count=7, now_ms=self.now_ms)
            assert not came.keys() & set(numbers), "twice"
            came.update(dict.fromkeys(numbers, self.now_ms))
            self.ack(*numbers, now_ms=self.now_ms)
            if not numbers:
                wake_ms = self.subscription.next_wake_ms
                if wake_ms is None:
                    break
                waits += 1
                assert waits < 10 * len(self.positions), f"woken in vain, at {self.now_ms} ms for {wake_ms} ms"
                self.now_ms = max(self.now_ms, wake_ms)
        assert self.unacked() == [], "lost"
        for number, came_ms in came.items():
            due_ms = max(self.deliver_at_ms[number], 0)
            assert max(due_ms - self.early_ms, from_ms) <= came_ms <= max(due_ms + TICK_MS - 1, from_ms), number
        return came


STORIES = {
    "what is acked before it is due never comes": (
        "due 100 110 120 130 140 150 160; take a -> -; ack 0 2 6; drain -> 1 3 4 5"
    ),
    "what is acked takes the place of no other": (
        "due 100 100 100 100 100; take a -> -; ack 0 1 3; at 200; take a 2 -> 2 4"
    ),
    "a seek back delivers all again and none early": (
        "due - 100 200 300 400 500 600; take a -> 0; ack 0; at 250; take a -> 1 2; ack 1 2; unacked -> 3..6; seek 1; "
        "unacked -> 1..6; drain -> 1..6"
    ),
    "a cleared backlog stays clear": (
        "due 100 100 - 100 100 100 100; take a -> 2; clear; waiting -> 0 0; due 300; drain -> 7; waiting -> 0 0"
    ),
    "a new subscription gets what waits and what is over": (
        "due - 100 200 300 400 500 600; take a -> 0; ack 0; at 350; take a -> 1 2 3; ack 1 2 3; on late; "
        "drain -> 0..6; on s; at 350; drain -> 4 5 6"
    ),
}


def test_a_message_without_a_delay_among_others_ends_the_pause_for_a_fixed_delay(monkeypatch):
    tracker = InMemoryDelayTracker(fixed_delay_detection_lookahead=3)
    monkeypatch.setattr(StoryTopic, "open_tracker", lambda _: tracker)
    StoryTopic().tell("publish 3 @9000; take a -> -")
    assert tracker.should_pause_all_deliveries(now_ms=0)
    tracker.clear()
    StoryTopic().tell("publish 2 @9000; publish 1; publish 2 @9000; take a -> 2")
    assert not tracker.should_pause_all_deliveries(now_ms=0)


@every_tracker
@pytest.mark.parametrize("story", STORIES)
def test_a_story_of_delayed_messages(story, tracker):
    DelayedTopic(tracker).tell(STORIES[story])


@every_tracker
def test_when_the_clock_runs_back_nothing_comes_twice_and_nothing_is_lost(tracker):
    topic = DelayedTopic(tracker).tell("due 100 200 300; take a -> -; at 260; take a 1 -> 0; at 50")
    # By the clock of now message 1 is early, but its time has been.
    early = topic.dispatch(now_ms=50)
    assert early in ([], [1])
    topic.ack(0, *early)
    topic.tell(f"at 270; drain -> {'2' if early else '1 2'}")


@every_tracker
def test_a_subscription_that_was_closed_goes_on_where_it_was(tracker):
    topic = DelayedTopic(tracker).tell(f"due {' '.join(map(str, range(100, 800, 50)))}; take a -> -; at 200")
    topic.tell("take a -> 0..2; ack 0..2")
    topic.subscription.close(now_ms=200)
    with pytest.raises(ValueError, match="closed"):
        topic.tracker.add_message(topic.positions[0], deliver_at_ms=1, now_ms=0)
    topic.now_ms = 500
    topic.subscribe("s")
    topic.tell("drain -> 3..13")


@every_tracker
def test_a_key_stays_with_one_consumer_while_its_delayed_messages_fall_due(tracker):
    topic = DelayedTopic(tracker, kind=SubscriptionType.KEY_SHARED).tell("join a; join b")
    for number in range(24):
        topic.publish(deliver_at_ms=(-1, 100, 200, 300)[number % 4], key=b"%d" % (number // 4))
    owner, came = {}, []
    for now_ms in (0, 120, 220, 320):
        for consumer in "ab":
            numbers = topic.dispatch(consumer, now_ms=now_ms)
            for number in numbers:
                assert owner.setdefault(number // 4, consumer) == consumer, f"key {number // 4} has two consumers"
            came += numbers
        assert sorted(came) == [number for number in range(24) if number % 4 <= now_ms // 100]
    assert sorted(set(owner.values())) == ["a", "b"]
    topic.ack(*came)
    assert topic.unacked() == []


@every_tracker
@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_types_that_keep_the_order_do_not_delay(tracker, kind):
    DelayedTopic(tracker, kind=kind).tell("due 100 -; take a -> 0 1")


# An index that is wrong.


def mislead_tracker(topic, times_ms):
    """After a restart the tracker was told other times than the messages have."""
    topic.restart()
    for number, time_ms in times_ms.items():
        assert topic.tracker.add_message(topic.positions[number], deliver_at_ms=time_ms, now_ms=0)


def mislead_feed(topic, times_ms):
    topic.restart()
    topic.index.learn([(topic.positions[number], time_ms) for number, time_ms in times_ms.items()])


def mislead_snapshot(topic, times_ms):
    """A crash ago, another owner stored other times."""
    config = DelayConfig(is_deliver_at_time_strict=True, min_index_count_per_bucket=1)
    index = BucketedDelayIndex(config, storage=topic.storage)
    for number, time_ms in sorted(times_ms.items()):
        assert index.add_message(topic.positions[number], deliver_at_ms=time_ms, now_ms=0)
    assert index.add_message(LATER_LEDGER, deliver_at_ms=1, now_ms=0)
    assert index.stats().bucket_count > 0
    topic.restart()
    assert topic.report.message_count == len(times_ms)


WAYS = {
    "in memory": ("in memory", mislead_tracker),
    "view": ("view", mislead_tracker),
    "fed view": ("view", mislead_feed),
    "bucketed": ("bucketed", mislead_tracker),
    "recovered": ("bucketed", mislead_snapshot),
    "view of recovered": ("view of buckets", mislead_snapshot),
}


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
@pytest.mark.parametrize(("tracker", "mislead"), WAYS.values(), ids=WAYS)
def test_what_the_index_has_too_early_comes_at_its_own_time(tracker, mislead, kind):
    topic = DelayedTopic(tracker, kind=kind).tell("due 500 100 700 300")
    mislead(topic, {0: 50, 2: 100})
    topic.tell("drain -> 0..3")


def damage_snapshots(topic):
    for ledger in snapshots_of(topic):
        ledger.entries[:] = [entry[:-1] + bytes([entry[-1] ^ 0x55]) for entry in ledger.entries]


def cut_snapshots(topic):
    for ledger in snapshots_of(topic):
        del ledger.entries[1:]


def delete_snapshots(topic):
    for bucket_id in topic.log.store.ledgers.owned_by("delayed s"):
        topic.log.store.ledgers.delete(bucket_id)


def deregister(topic):
    for name in dict(topic.storage.registry.get_all()):
        topic.storage.registry.remove(name)


def snapshots_of(topic):
    store = topic.log.store
    return [store.disk.ledgers[bucket_id] for bucket_id in store.ledgers.owned_by("delayed s")]


DAMAGES = {
    delete_snapshots: "missing",
    damage_snapshots: "delay snapshot",
    cut_snapshots: "segments, found",
    deregister: None,
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_lost_index_is_rebuilt_from_the_log_and_reported(damage, reason):
    """Twelve messages in three ledgers; all but those of the last are in two buckets, most of them on disk only."""
    topic = DelayedTopic("bucketed").tell(f"due {' '.join(map(str, range(200, 1_400, 100)))}; take a -> -")
    assert topic.tracker.stats().bucket_count == 2
    damage(topic)
    topic.restart()
    report = topic.report
    assert (report.bucket_count, report.message_count, report.fell_back) == (0, 0, "")
    assert [reason in each.reason for each in report.dropped] == ([True] * 2 if reason else [])
    assert report.orphan_count == (0 if reason else 2)
    assert topic.drain() == {number: 200 + 100 * number for number in range(12)}
