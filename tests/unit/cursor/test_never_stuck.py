"""Blocked never means stuck: while a limit of the ack state binds, the messages that fill its holes still go out.

Messages are of one ledger. An ack record of one entry takes 14 bytes, of entry 0 it takes 23, of entries from 129 on
16: so 1,031 bytes are room for the acks of exactly 73 messages that begin with entry 0.
"""

from __future__ import annotations

import pytest

from ackstate import AckRefusedError, CursorConfig, StoreError, SubscriptionType
from ackstate.limits import GateLimits, Rule
from topics import NumberedTopic

BYTES, RANGES = Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES
NO_BYTES = {"max_unpersisted_ack_record_bytes": 0}


class Story(NumberedTopic):
    """A topic without a limit of bytes, unless it is given, whose store can be made to fail."""

    def __init__(self, kind=SubscriptionType.SHARED, **limits):
        # A cursor ledger that cannot be written leaves nothing: the metadata store is not given so much.
        config = CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)
        super().__init__(kind, tick_time_ms=1, config=config, **{**NO_BYTES, **limits})

    def restart(self, **limits):
        super().restart(**{**NO_BYTES, **limits})

    def fail_to_persist(self):
        """Let the store fail from now on."""
        self.log.store.break_ledgers()
        with pytest.raises(StoreError):
            self.cursor.persist(now_ms=0)

    def one_by_one(self, consumer="a", *, now_ms=0):
        sent = []
        while one := self.dispatch(consumer, 1, now_ms=now_ms):
            sent += one
        return sent

    @property
    def closed_rules(self):
        return [reason.rule for reason in self.subscription.why_blocked()]

    @property
    def used_bytes(self):
        return sum(self.subscription.usage()[:2])

    @property
    def used_ranges(self):
        return sum(self.subscription.usage()[3:5])

    @property
    def acked_up_to(self):
        return self.cursor.mark_delete_position.entry_id

    def check(self):
        super().check()
        limit = self.gate.limits.max_unpersisted_ack_record_bytes
        assert not limit or self.used_bytes <= limit


# Four bugs in the limits of Kafka's share groups: KAFKA-19245, 19555, 17210, 19227.


@pytest.mark.parametrize(
    "limits",
    [
        {"max_unpersisted_ack_record_bytes": 1_031},
        {"max_unacked_ranges": 73},
        {"max_unacked_messages": 73},
        {"max_unacked_messages_per_consumer": 73},
    ],
)
def test_at_a_limit_no_fetch_takes_more_than_there_is_room_for(limits):
    """A fetch of many records at a limit that had room for one took them all."""
    story = Story(**limits)
    story.publish(500)
    assert story.dispatch("a", 72) == [*range(72)]
    assert story.dispatch("a", 500) == [72]
    assert story.dispatch("a", 500) == []
    story.nack(3)
    assert story.dispatch("a", 500) == [3]
    assert story.dispatch("a", 500) == []
    assert story.subscription.unacked_messages == 73


@pytest.mark.parametrize("limit_after", [10, 4, 1])
def test_a_restart_at_the_limit_with_nothing_given_back_goes_on(limit_after):
    """With the persisted state at the limit and no record available the fetch never completed."""
    story = Story(max_unacked_ranges=10)
    story.publish(40)
    assert story.dispatch() == [*range(10)]
    story.ack(1, 3, 5, 7, 9)
    story.cursor.persist(now_ms=0)
    assert story.used_ranges == 10
    story.restart(max_unacked_ranges=limit_after)
    assert (story.used_ranges, story.cursor.read_position.entry_id) == (5, 0)
    while story.cursor.backlog:
        sent = story.dispatch("a", 3)
        assert sent, f"stuck with {story.cursor.backlog} messages"
        assert story.used_ranges <= max(limit_after, 5)
        story.ack(*sent)


def test_a_restart_at_the_limit_with_only_delayed_holes_waits_for_their_time():
    story = Story(max_unacked_ranges=4)
    for deliver_at_ms in (100, -1) * 4 + (-1,):
        story.publish(1, deliver_at_ms=deliver_at_ms)
    assert story.dispatch() == [1, 3, 5, 7]
    story.ack(1, 3, 5, 7)
    story.cursor.persist(now_ms=0)
    story.restart(max_unacked_ranges=4)
    assert story.dispatch(now_ms=99) == []
    assert (story.closed_rules, story.subscription.next_wake_ms) == ([RANGES], 100)
    assert story.one_by_one(now_ms=100) == [0, 2, 4, 6]
    story.ack(0, 2, 4, 6, now_ms=101)
    assert story.dispatch(now_ms=101) == [8]


WAYS_TO_FREE = {
    "acks": lambda story: story.ack(*range(15)),
    "one cumulative ack": lambda story: story.ack_up_to(14),
    "a persist": lambda story: (story.ack(*range(1, 73, 2)), story.cursor.persist(now_ms=0)),
    "a promotion": lambda story: (story.ack(*range(1, 73, 2)), story.cursor.promote(0, now_ms=1)),
    "returns": lambda story: story.nack(*range(15)),
    "a consumer that closes": lambda story: story.subscription.consumer_closed("a"),
    "a seek": lambda story: story.subscription.seek(story.positions[50], now_ms=1),
    "a skip": lambda story: story.subscription.skip(15, now_ms=1),
    "a backlog cleared": lambda story: story.subscription.clear_backlog(now_ms=1),
    "a higher limit": lambda story: story.subscription.change_limits(
        GateLimits(max_unpersisted_ack_record_bytes=2_000)
    ),
    "no limit": lambda story: story.subscription.change_limits(GateLimits(**NO_BYTES)),
}


@pytest.mark.parametrize("way", WAYS_TO_FREE)
def test_whoever_waits_is_woken_once_when_the_limit_frees(way):
    """Fetches that waited for room were not completed when there was some."""
    story = Story(max_unpersisted_ack_record_bytes=1_031)
    story.publish(400)
    assert story.dispatch("a", 500) == [*range(73)]
    assert story.dispatch("b", 500) == []
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
    story = Story(**limits)
    story.publish(200)
    assert story.dispatch("slow", 200) == [*range(sent_count)]
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
@pytest.mark.parametrize("at_once", [False, True])
def test_the_lowest_hole_goes_first_and_new_messages_stay(sent_count, limits, rule, used, at_once):
    story = with_holes(sent_count, **limits)
    (reason,) = story.subscription.why_blocked()
    assert (reason.rule, reason.used) == (rule, used)
    # Messages above the highest acked one divide nothing: they are sent again last.
    sent = story.dispatch("quick", 500) if at_once else story.one_by_one("quick")
    assert sent == [*HOLES, sent_count - 1]
    assert story.closed_rules == [rule]
    story.ack(*HOLES)
    assert story.closed_rules == []
    assert story.dispatch("quick", 2) == [sent_count, sent_count + 1]


def test_after_a_restart_above_a_lowered_limit_unread_holes_are_filled_from_their_edges():
    story = with_holes(61, max_unacked_ranges=61)
    story.log.store.mend_ledgers()
    story.cursor.persist(now_ms=0)
    story.restart(max_unacked_ranges=3)
    assert (story.used_ranges, story.acked_up_to) == (5, -1)
    # The messages within 3 to 5 and 11 to 14 would divide them: there is no room for one more range.
    assert story.dispatch() == [0, 1, 3, 5, 7, 9, 11, 14]
    assert (story.used_ranges, story.closed_rules) == (5, [RANGES])
    story.ack(0, 1, 3, 5, 7, 9, 11, 14)
    # Two ranges, 5 to 11 and 14 to 15, are at the mark where it opens.
    assert (story.used_ranges, story.closed_rules) == (2, [])
    # It closes with 4 at once; 12 and 13 make the range beside them longer, so they need no room.
    assert story.dispatch() == [4, 12, 13]
    assert story.used_ranges == 3


def test_a_wide_hole_is_filled_from_both_edges_at_a_full_range_limit():
    story = Story()
    story.publish(20)
    story.dispatch("a", 10)
    story.ack(0, 9)
    story.cursor.persist(now_ms=0)
    story.restart(max_unacked_ranges=1)
    filled = []
    while story.acked_up_to < 9:
        filled.append(story.dispatch())
        assert story.used_ranges == 1
        story.ack(*filled[-1])
    assert filled == [[1, 8], [2, 7], [3, 6], [4, 5]]
    assert story.dispatch() == [10]


# A full limit and a store that fails.


def filled_to_the_last_byte():
    """The acks of 36 messages and the reservations for 38 take every byte; 37 wait without one."""
    story = Story(max_unpersisted_ack_record_bytes=1_036)
    story.publish(400)
    assert story.dispatch("a", 500) == [*range(73)]
    story.ack(*range(1, 73, 2))
    story.fail_to_persist()
    story.nack(*range(0, 73, 2), delay_ms=50)
    assert story.used_bytes == 36 * 14
    assert story.dispatch("slow") == [*range(73, 111)]
    assert story.used_bytes == 1_036
    assert story.dispatch("slow") == []
    return story


def test_holes_between_acks_that_are_not_durable_go_out_at_a_full_limit_and_bring_the_use_down():
    story = filled_to_the_last_byte()
    assert story.closed_rules == [BYTES]
    # 0 lets the mark-delete position move, 2 to 70 join two ranges each, and 72 makes one longer.
    assert story.dispatch("quick", now_ms=50) == [*range(0, 73, 2)]
    assert story.used_bytes == 1_036
    used = []
    for entry in range(0, 73, 2):
        story.ack(entry, now_ms=51)
        used.append(story.used_bytes)
    assert used == [*range(1_022, 531, -14), 532]
    assert (story.acked_up_to, story.closed_rules) == (72, [])
    assert story.dispatch("quick", 2, now_ms=51) == [111, 112]


def sent_against_nothing():
    """Consumer `quick` has 2, for whose ack nothing is reserved; its neighbours are durable by now, the limit full."""
    story = filled_to_the_last_byte()
    assert story.dispatch("quick", 2, now_ms=50) == [0, 2]
    story.log.store.mend_ledgers()
    assert story.cursor.persist(now_ms=51).messages_covered == 36
    assert story.used_bytes == 38 * 14
    assert story.dispatch("slow", now_ms=51) == [*range(4, 73, 2), 111]
    assert story.used_bytes == 1_036
    story.log.store.break_ledgers()
    return story


def test_an_ack_for_which_nothing_is_reserved_is_refused_if_there_is_no_room_and_the_store_makes_none():
    story = sent_against_nothing()
    position = story.positions[2]
    before = str(story.cursor.deleted), story.subscription.usage()
    for refused in (lambda: story.ack(2, now_ms=60), lambda: story.subscription.ack_batch(position, [0], now_ms=60)):
        with pytest.raises(AckRefusedError, match=f"too little is reserved for the ack of {position}"):
            refused()
    assert (str(story.cursor.deleted), story.subscription.usage()) == before
    # It may be given back, and then goes out as soon as there is room for its ack.
    story.nack(2)
    assert story.dispatch("quick", now_ms=60) == []
    story.ack(4, now_ms=60)
    story.log.store.mend_ledgers()
    story.cursor.persist(now_ms=61)
    assert story.dispatch("quick", now_ms=61) == [2]
    story.ack(2, now_ms=61)
    assert story.used_bytes == 1_036


def test_an_ack_for_which_nothing_is_reserved_makes_its_room_by_a_persist():
    story = sent_against_nothing()
    story.ack(4, now_ms=60)
    assert (story.used_bytes, story.cursor.view.unpersisted_record_bytes) == (1_036, 14)
    with pytest.raises(AckRefusedError) as refused:
        story.ack(2, now_ms=61)
    assert str(refused.value.__cause__) == "no ledger can be written, as scripted"
    story.log.store.mend_ledgers()
    story.ack(2, now_ms=61)
    assert (story.used_bytes, story.cursor.view.unpersisted_record_bytes) == (1_036, 14)
    assert story.cursor.is_acked(story.positions[2])


def test_a_poison_message_in_the_lowest_hole_does_not_starve_the_others():
    story = with_holes(73, max_unpersisted_ack_record_bytes=1_031, unpersisted_release_ratio=0.1)
    sent = []
    while len(sent) < 14:
        (entry,) = story.dispatch("quick", 1)
        sent.append(entry)
        story.ack(entry) if entry else story.nack(entry)
    assert sent == [*HOLES, 72, 0, 0]
    assert story.closed_rules == [BYTES]
    assert story.dispatch("quick", 1) == [0]
    story.ack(0)
    assert story.acked_up_to == 15


def test_poison_at_both_edges_of_the_only_hole_is_tried_again_rather_than_never():
    """The messages between them would divide the hole, and there is no room for that."""
    story = Story(max_unacked_ranges=1)
    story.publish(6)
    assert story.dispatch() == [0]
    story.ack(0, 5)
    assert story.closed_rules == []
    for _ in range(20):
        sent = story.dispatch()
        assert sorted(sent) == [1, 4]
        assert story.dispatch() == []
        story.nack(*sent)
    story.ack(*story.dispatch())
    assert story.dispatch() == [2, 3]


# Keys and delays.


def key_shared(ranges):
    """Of 100 messages the even ones are of consumer a, the odd ones of b."""
    story = Story(SubscriptionType.KEY_SHARED, max_unacked_ranges=ranges)
    story.publish_keys("eb" * 50)
    for consumer in "ab":
        story.subscription.consumer_opened(consumer)
    return story


def test_with_keys_each_consumer_gets_the_holes_of_its_keys_in_the_order_of_each_key():
    story = key_shared(20)
    assert (story.dispatch("a", 10), story.dispatch("b", 10)) == ([*range(0, 20, 2)], [*range(1, 21, 2)])
    story.ack(2, 4, 9, 12)  # Holes: 0 and 1; 3; 5 to 8; 10 and 11.
    story.cursor.persist(now_ms=0)
    story.restart(max_unacked_ranges=2)
    for consumer in "ab":
        story.subscription.consumer_opened(consumer)
    rounds = []
    while RANGES in story.closed_rules or not rounds:
        rounds.append((story.dispatch("a"), story.dispatch("b")))
        story.ack(*rounds[-1][0], *rounds[-1][1])
    # 6 would divide its hole as long as 5 is not acked; 11 waits for 7, which comes before it.
    assert rounds == [([0], [1, 3, 5]), ([6, 8, 10], []), ([], [7, 11])]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_holes_of_an_owner_who_left_are_filled_by_who_has_its_keys_now(is_restarted):
    story = key_shared(8)
    assert (story.dispatch("a", 4), story.dispatch("b", 4)) == ([0, 2, 4, 6], [1, 3, 5, 7])
    story.ack(1, 3, 5, 7)
    story.cursor.persist(now_ms=0)
    if is_restarted:
        story.restart(max_unacked_ranges=3)
        for consumer in "ab":
            story.subscription.consumer_opened(consumer)
    else:
        story.subscription.change_limits(GateLimits(**NO_BYTES, max_unacked_ranges=3))
    assert story.closed_rules == [RANGES]  # before anybody asks
    assert (story.dispatch("b"), story.dispatch("b")) == ([], [])
    story.subscription.consumer_closed("a")
    assert story.dispatch("b") == [0, 2, 4, 6]


def test_delayed_messages_in_holes_are_not_sent_early_and_hold_up_no_other_hole():
    story = Story(max_unacked_ranges=12)
    for number in range(30):
        story.publish(1, deliver_at_ms=100 if number in {3, 5, 9} else -1)
    assert story.dispatch() == [0, 1, 2, 4, 6, 7, 8, 10, 11, 12, 13, 14]
    story.ack(1, 4, 8, 11)
    story.cursor.persist(now_ms=0)
    story.restart(max_unacked_ranges=3)
    # 10 joins nothing as long as 9 is not acked; but it lies at the edge of its hole.
    assert sorted(story.dispatch(now_ms=99)) == [0, 2, 7, 10]
    story.ack(0, 2, 7, 10, now_ms=99)
    assert story.dispatch(now_ms=99) == [6]
    story.ack(6, now_ms=99)
    assert story.acked_up_to == 2
    assert story.dispatch(now_ms=99) == []
    assert sorted(story.dispatch(now_ms=100)) == [3, 5, 9]


@pytest.mark.slow
def test_many_holes_that_have_no_room_do_not_hide_those_that_need_none():
    """650 holes between durable acks, each of which would add 14 to 16 bytes, and above them 49 that add nothing."""
    story = Story()
    story.publish(2_000)
    story.dispatch("a", 1_400)
    acks = [story.positions[number] for number in range(1, 1_400, 2)]
    story.subscription.ack_many(acks[:650], now_ms=0)
    story.cursor.persist(now_ms=0)
    story.log.store.break_ledgers()
    story.subscription.ack_many(acks[650:], now_ms=0)
    for number in range(0, 1_400, 2):
        story.subscription.nack(story.positions[number], delay_ms=50)
    story.subscription.change_limits(GateLimits(max_unpersisted_ack_record_bytes=1_024))
    assert story.dispatch("slow", 500) == [*range(1_400, 1_414)]
    assert story.used_bytes == 1_024
    assert story.dispatch("quick", 1, now_ms=50)


@pytest.mark.parametrize(
    ("rule", "limit", "lower", "opens_at"),
    [
        ("max_unpersisted_ack_record_bytes", 2_000, 1_024, 84),
        ("max_unacked_ranges", 150, 20, 124),
        ("max_unacked_messages", 150, 20, 131),
        ("max_unacked_messages_per_consumer", 150, 20, 130),
    ],
)
def test_a_limit_lowered_below_the_use_blocks_loses_nothing_and_wakes_who_waits(rule, limit, lower, opens_at):
    off = {**NO_BYTES, "max_unacked_messages": 0, "max_unacked_messages_per_consumer": 0}
    topic = NumberedTopic(**off | {rule: limit})
    topic.publish(400)
    sent = topic.dispatch("a", 140)
    topic.subscription.change_limits(GateLimits(**off | {rule: lower}))
    assert topic.dispatch("a", 1) == []
    (reason,) = topic.subscription.why_blocked()
    assert reason.used > reason.limit == lower
    woken = []
    topic.subscription.when_open(lambda: woken.append(1), "a")
    acked = 0
    while not woken:
        topic.ack(acked)
        acked += 1
    assert acked == opens_at
    assert topic.subscription.unacked_messages == len(sent) - acked
    assert topic.dispatch("a", 1) == [len(sent)]
    topic.ack(*range(acked, len(sent) + 1))
    assert topic.cursor.mark_delete_position == topic.positions[len(sent)]
