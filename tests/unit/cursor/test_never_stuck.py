"""Blocked never means stuck: while a limit of the ack state binds, the messages that fill its holes still go out.

Entries are of one ledger. An ack record of one entry takes 14 bytes, of entry 0 it takes 23, of entries from 129 on 16:
so 1,031 bytes are room for the acks of exactly 73 messages that begin with entry 0.
"""

from __future__ import annotations

import random

import pytest

from ackstate import (
    AckRefusedError,
    CursorConfig,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    SqliteStore,
    StoreError,
    Subscription,
    SubscriptionType,
)
from ackstate.delay import TopicDelayIndex
from ackstate.deleted_ranges import isolated_range_bytes
from ackstate.limits import DispatchGate, GateLimits, Rule
from ackstate.message import NO_DELAY
from ackstate.stores.memory import MemoryDisk
from ackstate.topic import MessageLog

BYTES, RANGES = Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES
# A cursor ledger that cannot be written leaves nothing: the metadata store is not given so much.
CONFIG = CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)


class OneSubscription:
    """One topic with one subscription; messages are known by their entry ids."""

    def __init__(self, *, path=None, kind=SubscriptionType.SHARED, **limits):
        self.path, self.disk = path, MemoryDisk()
        self.kind = kind
        self.open(limits)

    def open(self, limits):
        self.store = MemoryStore(self.disk) if self.path is None else SqliteStore(self.path)
        self.log = MessageLog.open(self.store, topic="t")
        self.cursor = ManagedCursor.open(
            self.store, topic="t", subscription="s", ledgers=self.log.ledgers, config=CONFIG, now_ms=0
        )
        self.subscription = Subscription(
            self.log,
            self.cursor,
            gate=DispatchGate(GateLimits(**{"max_unpersisted_ack_record_bytes": 0, **limits})),
            delays=TopicDelayIndex(tick_time_ms=1).open_view(self.cursor.is_acked),
            kind=self.kind,
        )

    def restart(self, **limits):
        self.store.close()
        self.open(limits)

    def publish(self, count, *, delayed=(), keys=None):
        """Append messages, those named to be delivered at 100 ms."""
        key_of = (lambda _: None) if keys is None else (lambda number: keys[number].encode())
        self.log.publish(
            [
                Message(b"", key=key_of(number), deliver_at_ms=100 if number in delayed else NO_DELAY)
                for number in range(count)
            ]
        )
        self.ledger_id = self.log.ledgers.current_ledger_id

    def sent(self, count=500, *, consumer="c", now_ms=0):
        sent = [each.position.entry_id for each in self.subscription.dispatch(consumer, count, now_ms=now_ms)]
        self.check()
        return sent

    def sent_one_by_one(self, *, consumer="c", now_ms=0):
        sent = []
        while one := self.sent(1, consumer=consumer, now_ms=now_ms):
            sent += one
        return sent

    def ack(self, *entries, now_ms=0):
        for entry in entries:
            self.subscription.ack(Position(self.ledger_id, entry), now_ms=now_ms)
            self.check()

    def nack(self, *entries):
        for entry in entries:
            assert self.subscription.nack(Position(self.ledger_id, entry))
            self.check()

    def persist(self, *, now_ms=0):
        return self.cursor.persist(now_ms=now_ms)

    def fail_to_persist(self):
        """Let the store fail from now on."""
        self.store.break_ledgers()
        with pytest.raises(StoreError):
            self.persist()

    @property
    def closed_rules(self):
        return [reason.rule for reason in self.subscription.why_blocked()]

    @property
    def used_bytes(self):
        return sum(self.subscription.usage()[:2])

    @property
    def used_ranges(self):
        return sum(self.subscription.usage()[3:5])

    def check(self):
        self.cursor._check()
        self.subscription.check_invariants()
        limits = self.subscription._gate.limits
        if limits.max_unpersisted_ack_record_bytes:
            assert self.used_bytes <= limits.max_unpersisted_ack_record_bytes


# Four bugs in the limits of Kafka's share groups.


def test_a_limit_smaller_than_one_fetch_lets_two_consumers_work_in_parallel():
    # KAFKA-19245: 200 record locks were fewer than one fetch of 500, so a second consumer never got any.
    story = OneSubscription(max_unacked_messages=200, max_unacked_messages_per_consumer=90)
    story.publish(500)
    assert story.sent(500, consumer="a") == [*range(90)]
    assert story.sent(500, consumer="b") == [*range(90, 180)]
    story.ack(*range(45))
    assert story.sent(500, consumer="a") == [*range(180, 225)]
    story.ack(*range(90, 135))
    assert story.sent(500, consumer="b") == [*range(225, 270)]


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"max_unpersisted_ack_record_bytes": 1_031}, 73),
        ({"max_unacked_ranges": 73}, 73),
        ({"max_unacked_messages": 73}, 73),
        ({"max_unacked_messages_per_consumer": 73}, 73),
    ],
)
def test_at_a_limit_no_fetch_takes_more_than_there_is_room_for(limits, room):
    # KAFKA-19555: a fetch of many records at a limit that had room for one took them all.
    story = OneSubscription(**limits)
    story.publish(500)
    assert story.sent(room - 1) == [*range(room - 1)]
    assert story.sent(500) == [room - 1]
    assert story.sent(500) == []
    story.nack(3)
    assert story.sent(500) == [3]
    assert story.sent(500) == []
    assert story.subscription.unacked_messages == room


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
@pytest.mark.parametrize("limit_after", [10, 4, 1])
def test_a_restart_at_the_limit_with_nothing_given_back_goes_on(tmp_path, backend, limit_after):
    # KAFKA-17210: with the persisted state at the limit and no record available the fetch never completed.
    story = OneSubscription(path=tmp_path / "db" if backend == "sqlite" else None, max_unacked_ranges=10)
    story.publish(40)
    assert story.sent() == [*range(10)]
    story.ack(1, 3, 5, 7, 9)
    story.persist()
    assert story.used_ranges == 10
    story.restart(max_unacked_ranges=limit_after)
    assert (story.used_ranges, story.cursor.read_position.entry_id) == (5, 0)
    while story.cursor.backlog:
        sent = story.sent(3)
        assert sent, f"stuck with {story.cursor.backlog} messages"
        assert story.used_ranges <= max(limit_after, 5)
        story.ack(*sent)
    story.store.close()


def test_a_restart_at_the_limit_with_only_delayed_holes_waits_for_their_time():
    story = OneSubscription(max_unacked_ranges=4)
    story.publish(9, delayed={0, 2, 4, 6})
    assert story.sent() == [1, 3, 5, 7]
    story.ack(1, 3, 5, 7)
    story.persist()
    story.restart(max_unacked_ranges=4)
    assert story.sent(now_ms=99) == []
    assert story.closed_rules == [RANGES]
    assert story.subscription.next_wake_ms == 100
    assert story.sent_one_by_one(now_ms=100) == [0, 2, 4, 6]
    story.ack(0, 2, 4, 6, now_ms=101)
    assert story.sent(now_ms=101) == [8]


WAYS_TO_FREE = {
    "acks": lambda story: story.ack(*range(15)),
    "one cumulative ack": lambda story: story.subscription.ack_cumulative(Position(story.ledger_id, 14), now_ms=1),
    "a persist": lambda story: (story.ack(*range(1, 73, 2)), story.persist()),
    "a promotion": lambda story: (story.ack(*range(1, 73, 2)), story.cursor.promote(0, now_ms=1)),
    "returns": lambda story: story.nack(*range(15)),
    "a consumer that closes": lambda story: story.subscription.consumer_closed("a"),
    "a seek": lambda story: story.subscription.seek(Position(story.ledger_id, 50), now_ms=1),
    "a skip": lambda story: story.subscription.skip(15, now_ms=1),
    "a backlog cleared": lambda story: story.subscription.clear_backlog(now_ms=1),
    "a higher limit": lambda story: story.subscription.change_limits(
        GateLimits(max_unpersisted_ack_record_bytes=2_000)
    ),
    "no limit": lambda story: story.subscription.change_limits(GateLimits(max_unpersisted_ack_record_bytes=0)),
}


@pytest.mark.parametrize("way", WAYS_TO_FREE)
def test_whoever_waits_is_woken_once_when_the_limit_frees(way):
    # KAFKA-19227: fetches that waited for room were not completed when there was some.
    story = OneSubscription(max_unpersisted_ack_record_bytes=1_031)
    story.publish(400)
    assert story.sent(consumer="a") == [*range(73)]
    assert story.sent(consumer="b") == []
    woken = []
    story.subscription.when_open(lambda: woken.append("b"), "b")
    assert woken == []
    WAYS_TO_FREE[way](story)
    assert woken == ["b"]
    assert story.subscription.why_blocked() == ()
    story.subscription.when_open(lambda: woken.append("again"), "b")
    assert woken == ["b", "again"]


# The sent messages, and their order.

HOLES = [0, 1, 3, 4, 5, 7, 9, 11, 12, 13, 14]


def with_holes(sent_count, **limits):
    """A slow consumer has the upper messages, and gave the holes below and the highest message of all back."""
    story = OneSubscription(**limits)
    story.publish(200)
    assert story.sent(consumer="slow") == [*range(sent_count)]
    story.ack(*[entry for entry in range(16) if entry not in HOLES])
    story.fail_to_persist()
    story.nack(*HOLES, sent_count - 1)
    return story


@pytest.mark.parametrize(
    ("sent_count", "limits", "rule", "used"),
    [
        (73, {"max_unpersisted_ack_record_bytes": 1_031}, BYTES, 5 * 14 + 56 * 14),
        (61, {"max_unacked_ranges": 61}, RANGES, 5 + 44),
    ],
)
def test_the_lowest_hole_goes_first_and_new_messages_stay(sent_count, limits, rule, used):
    story = with_holes(sent_count, **limits)
    (reason,) = story.subscription.why_blocked()
    assert (reason.rule, reason.used) == (rule, used)
    # Messages above the highest acked one divide nothing: they are sent again last.
    assert story.sent_one_by_one(consumer="quick") == [*HOLES, sent_count - 1]
    assert story.closed_rules == [rule]
    story.ack(*HOLES)
    assert story.closed_rules == []
    assert story.sent(2, consumer="quick") == [sent_count, sent_count + 1]


def test_after_a_restart_above_a_lowered_limit_unread_holes_are_filled_from_their_edges():
    story = with_holes(61, max_unacked_ranges=61)
    story.store.mend_ledgers()
    story.persist()
    story.restart(max_unacked_ranges=3)
    assert (story.used_ranges, story.cursor.mark_delete_position.entry_id) == (5, -1)
    # The messages within 3 to 5 and 11 to 14 would divide them: there is no room for one more range.
    assert story.sent(500) == [0, 1, 3, 5, 7, 9, 11, 14]
    assert story.used_ranges == 5
    assert story.closed_rules == [RANGES]
    story.ack(0, 1, 3, 5, 7, 9, 11, 14)
    # Two ranges, 5 to 11 and 14 to 15, are at the mark where it opens.
    assert (story.used_ranges, story.closed_rules) == (2, [])
    # It closes with 4 at once; 12 and 13 make the range beside them longer, so they need no room.
    assert story.sent(500) == [4, 12, 13]
    assert story.used_ranges == 3


def test_a_wide_hole_is_filled_from_both_edges_at_a_full_range_limit():
    story = OneSubscription()
    story.publish(20)
    assert story.sent(10) == [*range(10)]
    story.ack(0, 9)
    story.persist()
    story.restart(max_unacked_ranges=1)
    filled = []
    while story.cursor.mark_delete_position.entry_id < 9:
        filled.append(story.sent(500))
        assert story.used_ranges == 1
        story.ack(*filled[-1])
    assert filled == [[1, 8], [2, 7], [3, 6], [4, 5]]
    assert story.sent(500) == [10]


# A full limit and a store that fails.


def filled_to_the_last_byte():
    """The acks of 36 messages and the reservations for 38 take every byte; 37 wait without one."""
    story = OneSubscription(max_unpersisted_ack_record_bytes=1_036)
    story.publish(400)
    assert story.sent() == [*range(73)]
    story.ack(*range(1, 73, 2))
    story.fail_to_persist()
    for entry in range(0, 73, 2):
        assert story.subscription.nack(Position(story.ledger_id, entry), delay_ms=50)
    assert story.used_bytes == 36 * 14
    assert story.sent(consumer="slow") == [*range(73, 111)]
    assert story.used_bytes == 1_036
    assert story.sent(consumer="slow") == []
    return story


def test_holes_between_acks_that_are_not_durable_go_out_at_a_full_limit_and_bring_the_use_down():
    story = filled_to_the_last_byte()
    assert story.closed_rules == [BYTES]
    # 0 lets the mark-delete position move, 2 to 70 join two ranges each, and 72 makes one longer.
    assert story.sent(consumer="quick", now_ms=50) == [*range(0, 73, 2)]
    assert story.used_bytes == 1_036
    used = []
    for entry in range(0, 73, 2):
        story.ack(entry, now_ms=51)
        used.append(story.used_bytes)
    assert used == [*range(1_022, 531, -14), 532]
    assert story.cursor.mark_delete_position.entry_id == 72
    assert story.closed_rules == []
    assert story.sent(2, consumer="quick", now_ms=51) == [111, 112]


def sent_against_nothing():
    """Consumer `quick` has 2, for whose ack nothing is reserved; its neighbours are durable by now, the limit full."""
    story = filled_to_the_last_byte()
    assert story.sent(2, consumer="quick", now_ms=50) == [0, 2]
    story.store.mend_ledgers()
    assert story.persist(now_ms=51).messages_covered == 36
    assert story.used_bytes == 38 * 14
    assert story.sent(consumer="slow", now_ms=51) == [*range(4, 73, 2), 111]
    assert story.used_bytes == 1_036
    story.store.break_ledgers()
    return story


def test_an_ack_for_which_nothing_is_reserved_is_refused_if_there_is_no_room_and_the_store_makes_none():
    story = sent_against_nothing()
    position = Position(story.ledger_id, 2)
    before = story.cursor.stats(), story.subscription.usage()
    with pytest.raises(AckRefusedError, match=f"too little is reserved for the ack of {position}"):
        story.subscription.ack(position, now_ms=60)
    with pytest.raises(AckRefusedError):
        story.subscription.ack_batch(position, [0], now_ms=60)
    assert (story.cursor.stats(), story.subscription.usage()) == before
    # It may be given back, and then goes out as soon as there is room for its ack.
    story.nack(2)
    assert story.sent(consumer="quick", now_ms=60) == []
    story.ack(4, now_ms=60)
    story.store.mend_ledgers()
    story.persist(now_ms=61)
    assert story.sent(consumer="quick", now_ms=61) == [2]
    story.ack(2, now_ms=61)
    assert story.used_bytes == 1_036


def test_an_ack_for_which_nothing_is_reserved_makes_its_room_by_a_persist():
    story = sent_against_nothing()
    story.ack(4, now_ms=60)
    assert (story.used_bytes, story.cursor.view.unpersisted_record_bytes) == (1_036, 14)
    with pytest.raises(AckRefusedError) as refused:
        story.ack(2, now_ms=61)
    assert str(refused.value.__cause__) == "no ledger can be written, as scripted"
    story.store.mend_ledgers()
    story.ack(2, now_ms=61)
    assert (story.used_bytes, story.cursor.view.unpersisted_record_bytes) == (1_036, 14)
    assert str(story.cursor.deleted).startswith(f"[({story.ledger_id}:0..{story.ledger_id}:5],")


# Poison.


def test_a_poison_message_in_the_lowest_hole_does_not_starve_the_others():
    story = with_holes(73, max_unpersisted_ack_record_bytes=1_031, unpersisted_release_ratio=0.1)
    sent = []
    while len(sent) < 14:
        (entry,) = story.sent(1, consumer="quick")
        sent.append(entry)
        if entry == 0:
            story.nack(entry)
        else:
            story.ack(entry)
    assert sent == [*HOLES, 72, 0, 0]
    assert story.closed_rules == [BYTES]
    assert story.sent(1, consumer="quick") == [0]
    story.ack(0)
    assert story.cursor.mark_delete_position.entry_id == 15


def test_poison_at_both_edges_of_the_only_hole_is_tried_again_rather_than_never():
    # The messages between them would divide the hole, and there is no room for that.
    story = OneSubscription(max_unacked_ranges=1)
    story.publish(6)
    assert story.sent() == [0]
    story.ack(0)
    story.subscription.ack(Position(story.ledger_id, 5), now_ms=0)
    assert story.closed_rules == []
    for _ in range(20):
        sent = story.sent(500)
        assert sorted(sent) == [1, 4]
        assert story.sent(500) == []
        story.nack(*sent)
    story.ack(*story.sent(500))
    assert story.sent(500) == [2, 3]


# Keys and delays.


def test_with_keys_each_consumer_gets_the_holes_of_its_keys_in_the_order_of_each_key():
    keys = "ab" * 50
    story = OneSubscription(kind=SubscriptionType.KEY_SHARED, max_unacked_ranges=20)
    story.publish(100, keys=keys)
    story.subscription.consumer_opened("x")
    story.subscription.consumer_opened("y")
    owner = {key: story.subscription._consumers.owner(key.encode()) for key in "ab"}
    assert set(owner.values()) == {"x", "y"}, "both keys are one consumer's: nothing is tested"
    of_a, of_b = owner["a"], owner["b"]
    assert story.sent(10, consumer=of_a) == [*range(0, 20, 2)]
    assert story.sent(10, consumer=of_b) == [*range(1, 21, 2)]
    # Holes: 0 and 1; 3; 5 to 8; 10 and 11.
    story.ack(2, 4, 9, 12)
    story.persist()
    story.restart(max_unacked_ranges=2)
    for consumer in ("x", "y"):
        story.subscription.consumer_opened(consumer)
    rounds = []
    while RANGES in story.closed_rules or not rounds:
        rounds.append((story.sent(500, consumer=of_a), story.sent(500, consumer=of_b)))
        story.ack(*rounds[-1][0], *rounds[-1][1])
    # 6 would divide its hole as long as 5 is not acked; 11 waits for 7, which comes before it.
    assert rounds == [([0], [1, 3, 5]), ([6, 8, 10], []), ([], [7, 11])]


def test_unread_holes_of_an_owner_who_left_are_filled_by_who_has_its_keys_now():
    story = OneSubscription(kind=SubscriptionType.KEY_SHARED, max_unacked_ranges=8)
    story.publish(100, keys="ab" * 50)
    for consumer in ("x", "y"):
        story.subscription.consumer_opened(consumer)
    of_a = story.subscription._consumers.owner(b"a")
    of_b = "y" if of_a == "x" else "x"
    assert (story.sent(4, consumer=of_a), story.sent(4, consumer=of_b)) == ([0, 2, 4, 6], [1, 3, 5, 7])
    story.ack(1, 3, 5, 7)
    story.persist()
    story.restart(max_unacked_ranges=3)
    for consumer in ("x", "y"):
        story.subscription.consumer_opened(consumer)
    assert (story.sent(consumer=of_b), story.sent(consumer=of_b)) == ([], [])
    story.subscription.consumer_closed(of_a)
    assert story.sent(consumer=of_b) == [0, 2, 4, 6]


def test_delayed_messages_in_holes_are_not_sent_early_and_hold_up_no_other_hole():
    story = OneSubscription(max_unacked_ranges=12)
    story.publish(30, delayed={3, 5, 9})
    assert story.sent() == [0, 1, 2, 4, 6, 7, 8, 10, 11, 12, 13, 14]
    story.ack(1, 4, 8, 11)
    story.persist()
    story.restart(max_unacked_ranges=3)
    # 10 joins nothing as long as 9 is not acked; but it lies at the edge of its hole.
    assert sorted(story.sent(500, now_ms=99)) == [0, 2, 7, 10]
    story.ack(0, 2, 7, 10, now_ms=99)
    assert sorted(story.sent(500, now_ms=99)) == [6]
    story.ack(6, now_ms=99)
    assert story.cursor.mark_delete_position.entry_id == 2
    assert story.sent(500, now_ms=99) == []
    assert sorted(story.sent(500, now_ms=100)) == [3, 5, 9]


# Whatever happens.


@pytest.mark.slow
def test_many_holes_that_have_no_room_do_not_hide_those_that_need_none():
    # 650 holes between durable acks, each of which would add 14 to 16 bytes, and above them 49 that add nothing.
    story = OneSubscription()
    story.publish(2_000)
    story.sent(1_400)
    story.ack(*range(1, 1_301, 2))
    story.persist()
    story.store.break_ledgers()
    story.ack(*range(1_301, 1_400, 2))
    for entry in range(0, 1_400, 2):
        story.subscription.nack(Position(story.ledger_id, entry), delay_ms=50)
    story.subscription.change_limits(GateLimits(max_unpersisted_ack_record_bytes=1_024))
    assert story.sent(consumer="slow") == [*range(1_400, 1_414)]
    assert story.used_bytes == 1_024
    assert story.sent(1, consumer="quick", now_ms=50)
