"""The index is wrong about a message: its time, that it is acked, or that it is there at all.

Each message's own time is looked at before it is sent, so nothing comes early; a message that the index has lost comes
when the reader meets it.
"""

import pytest

from ackstate import Position
from ackstate.delay import BucketedDelayIndex, DelayConfig
from ackstate.delay.bucket_storage import DropReason
from ackstate.dispatch import SubscriptionType
from delayed_topic import Bucketed, BucketedViews, DelayedTopic, InMemory, Views

LATER_LEDGER = Position(10**6, 0)


def misled_tracker(topic, times_ms):
    """After a restart the tracker was told other times than the messages have."""
    topic.crash(now_ms=0)
    for number, time_ms in times_ms.items():
        assert topic.tracker["s"].add_message(topic.positions[number], deliver_at_ms=time_ms, now_ms=0)


def misled_feed(topic, times_ms):
    topic.crash(now_ms=0)
    for number, time_ms in times_ms.items():
        topic.trackers.index.learn([(topic.positions[number], time_ms)])


def misled_snapshot(topic, times_ms):
    """A crash ago, another owner stored other times."""
    config = DelayConfig(is_deliver_at_time_strict=True, min_index_count_per_bucket=1)
    index = BucketedDelayIndex(config, storage=topic.trackers.storage(topic, "s"))
    for number, time_ms in sorted(times_ms.items()):
        assert index.add_message(topic.positions[number], deliver_at_ms=time_ms, now_ms=0)
    assert index.add_message(LATER_LEDGER, deliver_at_ms=1, now_ms=0)
    assert index.stats().bucket_count > 0
    topic.crash(now_ms=0)
    assert topic.trackers.reports[-1].message_count == len(times_ms)


WAYS = {
    "in memory": (InMemory, misled_tracker),
    "view": (Views, misled_tracker),
    "fed view": (Views, misled_feed),
    "bucketed": (Bucketed, misled_tracker),
    "recovered": (Bucketed, misled_snapshot),
    "view of recovered": (BucketedViews, misled_snapshot),
}
every_way = pytest.mark.parametrize(("make_trackers", "mislead"), WAYS.values(), ids=WAYS)
every_kind = pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])


@every_kind
@every_way
def test_what_the_index_has_too_early_comes_at_its_own_time(make_trackers, mislead, kind):
    topic = DelayedTopic(make_trackers(), kind=kind)
    topic.publish(500, 100, 700, 300)
    mislead(topic, {0: 50, 2: 100})
    came = topic.drain(now_ms=0)
    assert 500 <= came[0] <= 509
    assert 100 <= came[1] <= 109
    assert 700 <= came[2] <= 709
    assert 300 <= came[3] <= 309


def sealed_topic():
    """Twelve messages in three ledgers; all but those of the last are in two buckets, most of them on disk only."""
    topic = DelayedTopic(Bucketed())
    topic.publish(*range(200, 1_400, 100))
    assert topic.dispatch(now_ms=0) == []
    assert topic.tracker["s"].stats().bucket_count == 2
    return topic


def delete_snapshots(topic):
    for bucket_id in topic.store.ledgers.owned_by("delayed s"):
        topic.store.ledgers.delete(bucket_id)


def damage_snapshots(topic):
    for bucket_id in topic.store.ledgers.owned_by("delayed s"):
        entries = topic.store.disk.ledgers[bucket_id].entries
        entries[:] = [entry[:-1] + bytes([entry[-1] ^ 0x55]) for entry in entries]


def cut_snapshots(topic):
    for bucket_id in topic.store.ledgers.owned_by("delayed s"):
        del topic.store.disk.ledgers[bucket_id].entries[1:]


def deregister(topic):
    registry = topic.trackers.storage(topic, "s").registry
    for name in dict(registry.get_all()):
        registry.remove(name)


DAMAGES = {
    delete_snapshots: DropReason.MISSING,
    damage_snapshots: DropReason.DAMAGED,
    cut_snapshots: DropReason.DAMAGED,
    deregister: None,
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_lost_index_is_rebuilt_from_the_log_and_reported(damage, reason):
    topic = sealed_topic()
    damage(topic)
    topic.crash(now_ms=0)
    report = topic.trackers.reports[-1]
    assert (report.bucket_count, report.message_count, report.fell_back) == (0, 0, "")
    assert [each.reason for each in report.dropped] == ([reason] * 2 if reason else [])
    assert report.orphan_count == (0 if reason else 2)
    came = topic.drain(now_ms=0)
    assert came == {number: 200 + 100 * number for number in range(12)}


# Neither a failed read nor a clock that ran ahead makes a message go out before its own time.
