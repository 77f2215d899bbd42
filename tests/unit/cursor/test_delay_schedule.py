"""A delayed message is cancelled or rescheduled for all subscriptions at once, in one record, or not at all."""

from __future__ import annotations

from functools import partial

import pytest

from ackstate import (
    GateLimits,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Start,
    SubscriptionType,
    Topic,
    TopicSettings,
)
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.delay import DelayConfig, TrackerKind
from ackstate.errors import AckStateError, CursorFencedError, InvalidPositionError, RescheduleRefusedError
from ackstate.inspect import inspect_store
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog, delete_topic
from ackstate.topic.subscriptions import SCHEDULE

BUCKETS = DelayConfig(
    tracker=TrackerKind.BUCKETED, is_deliver_at_time_strict=True, min_index_count_per_bucket=2,
    max_indexes_per_segment=2, max_bucket_count=2,
)  # fmt: skip
SETTINGS = {
    "in memory": TopicSettings(entries_per_ledger_max=4, delay_index=DelayConfig(tick_time_ms=10)),
    "bucketed": TopicSettings(entries_per_ledger_max=4, delay_index=BUCKETS),
}
both = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


class Delayed:
    """A topic whose message `n` is due at 1,000 + 100 n, and its subscriptions `a` and `b`, which have read all."""

    def __init__(self, settings, *, count=12, subscriptions="ab", **wanted):
        self.store, self.settings, self.names, self.wanted = MemoryStore(), settings, subscriptions, wanted
        self.open()
        messages = [Message(b"%d" % number, deliver_at_ms=1_000 + 100 * number) for number in range(count)]
        self.positions = [each for message in messages for each in self.topic.publish([message], now_ms=0)]
        assert self.due(0) == {name: [] for name in subscriptions}

    def open(self):
        self.topic = Topic.open(self.store, "t", settings=self.settings, now_ms=0)
        for name in self.names:
            self.topic.subscribe(name, start=Start.EARLIEST, now_ms=0, **self.wanted)

    def crash(self):
        self.store = MemoryStore(self.store.disk)
        self.open()

    def cancel(self, number):
        self.topic.cancel(self.positions[number], now_ms=0)

    def reschedule(self, number, deliver_at_ms):
        self.topic.reschedule(self.positions[number], deliver_at_ms=deliver_at_ms, now_ms=0)

    def due(self, now_ms, names=None):
        """Send what is due and ack it; return the numbers of the messages by subscription."""
        found = {}
        for name in names or self.names:
            subscription = self.topic.subscriptions[name]
            sent = subscription.dispatch("ann", 100, now_ms=now_ms)
            subscription.ack_many([each.position for each in sent], now_ms=now_ms)
            found[name] = sorted(int(each.message.payload) for each in sent)
        return found

    def refuses(self, why, number=0, position=None, now_ms=0):
        before = self.store.mutation_count
        position = position or self.positions[number]
        for change in (self.topic.cancel, partial(self.topic.reschedule, deliver_at_ms=9_000)):
            with pytest.raises(RescheduleRefusedError, match=why):
                change(position, now_ms=now_ms)
        assert self.store.mutation_count == before


@both
@pytest.mark.parametrize("restarts", ["never", "after the change", "before the change"])
def test_no_subscription_receives_a_cancelled_message_and_all_receive_a_rescheduled_one_at_its_new_time(
    settings, restarts
):
    topic = Delayed(settings)
    if restarts == "before the change":
        topic.crash()
    for number in (0, 5, 11):
        topic.cancel(number)
    topic.reschedule(1, 1_500)  # later
    topic.reschedule(8, 1_010)  # earlier
    topic.topic.publish([Message(b"12", deliver_at_ms=8_000)], now_ms=0)  # seals the bucket that has it
    topic.reschedule(2, 5_000)
    topic.reschedule(2, 1_450)  # twice
    topic.reschedule(3, 0)  # at once
    if restarts == "after the change":
        topic.crash()
    expected = {0: [3], 1_009: [], 1_010: [8], 1_449: [4], 1_450: [2], 1_499: [], 1_500: [1], 9_000: [6, 7, 9, 10, 12]}
    for now_ms, numbers in expected.items():
        assert topic.due(now_ms) == {"a": numbers, "b": numbers}, now_ms
    assert {each.cursor.backlog for each in topic.topic.subscriptions.values()} == {0}
    topic.topic.delays._check()
    topic.topic.subscribe("later", start=Start.EARLIEST, now_ms=9_000)
    topic.topic.subscriptions["a"].seek(Start.EARLIEST, now_ms=9_000)
    left = [number for number in range(13) if number not in (0, 5, 11)]
    assert topic.due(9_000, ["a", "later"]) == {"a": left, "later": left}


@both
def test_what_cannot_be_changed_is_refused_by_name_and_nothing_is_written(settings):
    topic = Delayed(settings)
    (plain,) = topic.topic.publish([Message(b"12")], now_ms=0)
    topic.refuses("message .* of topic 't' is not delayed", position=plain)
    topic.cancel(4)
    topic.refuses("was cancelled before", 4)
    topic.topic.subscriptions["b"].ack(topic.positions[3], now_ms=0)
    topic.refuses("was acked by subscription 'b'", 3)
    topic.reschedule(1, 0)
    topic.refuses("is due since 0 ms", 1)
    topic.topic.subscriptions["a"].dispatch("ann", 1, now_ms=999)
    topic.refuses("was handed out to consumer 'ann' of subscription 'a'", 1)
    topic.refuses("is due since 1000 ms", 0, now_ms=1_000)
    for unknown in (Position(99, 0), topic.positions[-1]._replace(entry_id=9)):
        with pytest.raises(InvalidPositionError):
            topic.topic.cancel(unknown, now_ms=0)
    for position, deliver_at_ms, error in (
        ("x", 5, (TypeError, ValueError)),
        (plain, -1, ValueError),
        (plain, "x", TypeError),
    ):
        with pytest.raises(error):
            topic.topic.reschedule(position, deliver_at_ms=deliver_at_ms, now_ms=0)


def test_a_topic_without_delays_and_one_whose_consumer_ignores_them_refuse():
    with pytest.raises(RescheduleRefusedError, match="no delay index"):
        Topic.open(MemoryStore(), "t", settings=TopicSettings(delay_index=None), now_ms=0).cancel(
            Position(1, 0), now_ms=0
        )
    topic = Delayed(SETTINGS["in memory"], subscriptions="")
    exclusive = topic.topic.subscribe("x", kind=SubscriptionType.EXCLUSIVE, start=Start.EARLIEST, now_ms=0)
    exclusive.dispatch("ann", 1, now_ms=0)
    topic.refuses("consumer 'ann' of subscription 'x'")
    topic.cancel(1)
    assert [each.message.payload for each in exclusive.dispatch("ann", 2, now_ms=0)] == [b"2", b"3"]


@both
def test_a_crash_at_any_write_leaves_a_change_whole_or_not_at_all(settings):
    for writes in range(6):
        for kind in (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER, FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER):
            topic = Delayed(settings)
            topic.store.inject(Fault(topic.store.mutation_count + writes, kind))
            happened = True
            try:
                topic.cancel(2)
                topic.reschedule(3, 8_000)
            except AckStateError:
                happened = False
            topic.crash()
            found = topic.due(7_000)
            assert found["a"] == found["b"]
            assert not happened or not {2, 3} & set(found["a"])
            assert set(found["a"]) | {2, 3} == set(range(12))


def test_a_former_owner_changes_nothing():
    for had_changes in (False, True):
        former = Delayed(SETTINGS["in memory"])
        if had_changes:
            former.cancel(0)
        topic, former.topic = former.topic, None
        former.open()
        with pytest.raises(CursorFencedError):
            topic.cancel(former.positions[1], now_ms=0)
        assert 1 in former.due(2_000)["a"]


def test_changes_that_cannot_be_read_name_themselves_and_are_repaired_as_a_cursor():
    topic = Delayed(SETTINGS["in memory"])
    topic.cancel(0)
    topic.reschedule(1, 8_000)
    path = cursor_path("t", SCHEDULE)
    version = topic.store.metadata.get(path).version
    topic.store.metadata.put(path, b"damaged", expected_version=version)
    with pytest.raises(
        UnreadableCursorError, match=f"rescheduled messages of topic 't', cursor '{SCHEDULE}'"
    ) as refused:
        topic.crash()
    found = {each.name.subscription: each for each in inspect_store(topic.store)}[SCHEDULE]
    assert "no subscription: the cancelled and rescheduled" in str(found.notes[0])
    assert tuple(each.repair for each in found.problems[0].repairs) == refused.value.repairs
    log = MessageLog.open(topic.store, topic="t", now_ms=0)
    ManagedCursor.open(
        topic.store, topic="t", subscription=SCHEDULE, ledgers=log.ledgers, repair=refused.value.repairs[0], now_ms=0
    )
    topic.open()
    assert topic.due(7_999, "a") == {"a": list(range(2, 12))}


def test_an_ack_that_a_limit_has_no_room_for_is_made_later():
    topic = Delayed(SETTINGS["in memory"], subscriptions="a", limits=GateLimits(max_unacked_ranges=1))
    for number in (2, 6, 10):
        topic.cancel(number)
    subscription = topic.topic.subscriptions["a"]
    assert not subscription.cursor.is_acked(topic.positions[6])
    found = []
    for now_ms in range(1_000, 9_000, 500):
        found += topic.due(now_ms)["a"]
    assert sorted(found) == [0, 1, 3, 4, 5, 7, 8, 9, 11]
    assert subscription.cursor.backlog == 0


def test_a_trim_forgets_changes_and_a_deletion_leaves_nothing_of_them():
    topic = Delayed(SETTINGS["in memory"])
    topic.cancel(0)
    topic.reschedule(1, 1_050)
    topic.reschedule(11, 9_000)
    assert [each.name for each in topic.topic.stored_subscriptions()] == ["a", "b"]
    topic.due(2_500)
    topic.topic.tick(now_ms=3_000)
    assert topic.topic.trim(now_ms=3_000) == 2
    assert (list(topic.topic.log.cancelled), list(topic.topic.log.rescheduled)) == ([], [topic.positions[11]])
    topic.crash()
    assert list(topic.topic.log.rescheduled) == [topic.positions[11]]
    assert delete_topic(topic.store, "t")
    assert (topic.store.ledgers.owners(), topic.store.metadata.children("/managed-ledgers")) == ([], [])
