"""The index is wrong about a message: its time, that it is acked, or that it is there at all.

Each message's own time is looked at before it is sent, so nothing comes early; a message that the index has lost comes
when the reader meets it.
"""

import pytest

from ackstate import Position
from ackstate.delay import BucketedDelayIndex, DelayConfig
from ackstate.delay.bucket_storage import DropReason
from ackstate.dispatch import SubscriptionType
from ackstate.limits import GateLimits
from ackstate.stores.base import LedgerNotFoundError
from ackstate.topic.log import log_owner
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


@every_way
def test_what_the_index_has_too_late_and_the_reader_met_before_its_time_is_not_lost(make_trackers, mislead):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 120, 700)
    mislead(topic, {0: 10_000})
    assert topic.dispatch(now_ms=0) == []
    came = topic.drain(now_ms=0)
    assert 120 <= came[1] <= 129
    assert 700 <= came[2] <= 709
    assert 100 <= came[0] <= 10_009


@every_kind
@every_way
def test_what_the_index_has_and_is_acked_does_not_come(make_trackers, mislead, kind):
    topic = DelayedTopic(make_trackers(), kind=kind)
    topic.publish(100, 120, 140, 160)
    topic.ack(0, 2)
    topic.cursors["s"].persist(now_ms=0)
    mislead(topic, {0: 50, 1: 120, 2: 10_000})
    came = topic.drain(now_ms=0)
    assert sorted(came) == [1, 3]
    topic.dispatch(now_ms=20_000)
    assert topic.tracker["s"].delayed_message_count == 0
    assert len(topic.subscriptions["s"]._messages.waiting) == 0


@every_kind
@every_way
def test_what_the_index_has_and_the_log_has_no_more_holds_nobody_up(make_trackers, mislead, kind):
    """The first ledger was trimmed: all in it was acked."""
    topic = DelayedTopic(make_trackers(), kind=kind)
    topic.publish(*[50] * 5, 100, 110, 50)
    topic.ack(*range(5))
    topic.cursors["s"].persist(now_ms=0)
    mislead(topic, {0: 60, 4: 60, 5: 60})
    first, second = topic.positions[0].ledger_id, topic.positions[5].ledger_id
    topic.store.ledgers.delete(first)
    topic.log.ledgers.trim(second)
    assert topic.store.ledgers.owned_by(log_owner("t"))[0] == second
    came = topic.drain(now_ms=0)
    assert sorted(came) == [5, 6, 7]
    assert came[5] >= 100
    assert len(topic.subscriptions["s"]._messages.waiting) == 0
    assert topic.subscriptions["s"].next_wake_ms is None


@pytest.mark.parametrize("make_trackers", [InMemory, Views, Bucketed])
@pytest.mark.parametrize("strange", [Position(10**6, 3), Position(1, 400)], ids=["no such ledger", "beyond its end"])
def test_a_position_that_the_log_never_had_holds_nobody_up(make_trackers, strange):
    topic = DelayedTopic(make_trackers())
    topic.publish(100, 110, 300)
    assert topic.tracker["s"].add_message(strange, deliver_at_ms=50, now_ms=0)
    assert topic.dispatch(now_ms=0) == []
    assert topic.dispatch(now_ms=150) == [0, 1]
    topic.ack(0, 1, now_ms=150)
    assert topic.dispatch(now_ms=310) == [2]
    topic.ack(2, now_ms=310)
    assert topic.unacked() == []
    assert topic.dispatch(now_ms=10**6) == []
    assert len(topic.subscriptions["s"]._messages.waiting) == 0


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


def test_a_message_that_could_not_be_read_once_is_delayed_all_the_same(monkeypatch):
    topic = DelayedTopic(Views())
    topic.publish(3_600_000)

    def away(positions):
        raise LedgerNotFoundError("away")

    with monkeypatch.context() as patched:
        patched.setattr(topic.log, "read", away)
        assert topic.dispatch(now_ms=0) == []
    assert topic.dispatch(now_ms=60_000) == []
    assert topic.dispatch(now_ms=3_600_010) == [0]


def test_what_was_read_ahead_for_others_while_the_clock_ran_ahead_waits_for_its_time():
    topic = DelayedTopic(Views(), kind=SubscriptionType.KEY_SHARED)
    subscription = topic.subscriptions["s"]
    for name in ("a", "b"):
        subscription.consumer_opened(name)
    for number in range(8):
        topic.publish(1_000, key=b"k%d" % number)
    ahead = subscription.dispatch("a", 20, now_ms=5_000)
    assert 0 < len(ahead) < 8
    assert subscription.dispatch("b", 20, now_ms=10) == []
    assert len(subscription.dispatch("b", 20, now_ms=1_010)) == 8 - len(ahead)


def test_what_a_limit_keeps_back_wakes_nobody_by_the_clock():
    topic = DelayedTopic(Views(), limits=GateLimits(max_unacked_messages=2))
    topic.publish(*range(1_000, 1_020))
    assert topic.dispatch(now_ms=0) == []
    assert topic.dispatch(now_ms=5_000, count=10) == [0, 1]
    assert topic.dispatch(now_ms=5_000, count=10) == []
    wake_ms = topic.subscriptions["s"].next_wake_ms
    assert wake_ms is None or wake_ms > 5_000
    topic.ack(0, 1, now_ms=5_000)
    assert len(topic.dispatch(now_ms=5_000, count=10)) == 2
