"""Blocked never means stuck: while a limit of the ack state binds, the messages that fill its holes still go out.

Messages are of one ledger. An ack record of one entry takes 14 bytes, of entry 0 it takes 23, of entries from 129 on
16: so 1,031 bytes are room for the acks of exactly 73 messages that begin with entry 0.
"""

import pytest

from ackstate import AckRefusedError, CursorConfig, SubscriptionType
from ackstate.limits import GateLimits
from topics import NumberedTopic, StoryTopic, limits_of

KEY_SHARED = SubscriptionType.KEY_SHARED
NO_BYTES = {"max_unpersisted_ack_record_bytes": 0}
BYTES, RANGES = "UNPERSISTED_ACK_RECORD_BYTES", "UNACKED_RANGES"


class Story(StoryTopic):
    """A topic without a limit of bytes, unless it is given, whose store can be made to fail."""

    def __init__(self, limits="", kind=SubscriptionType.SHARED, **more):
        # A cursor ledger that cannot be written leaves nothing: the metadata store is not given so much.
        config = CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)
        super().__init__(kind, config=config, **NO_BYTES | limits_of(limits.split()) | more)

    @property
    def used_bytes(self):
        return sum(self.subscription.usage()[:2])

    def check(self):
        super().check()
        limit = self.gate.limits.max_unpersisted_ack_record_bytes
        assert not limit or self.used_bytes <= limit


# Four bugs in the limits of Kafka's share groups: KAFKA-19245, 19555, 17210, 19227.


@pytest.mark.parametrize("limit", ["bytes=1031", "ranges=73", "messages=73", "each=73"])
def test_at_a_limit_no_fetch_takes_more_than_there_is_room_for(limit):
    """A fetch of many records at a limit that had room for one took them all."""
    Story(limit).tell(
        "publish 500; take a 72 -> 0..71; take a 500 -> 72; take a 500 -> -; nack 3; take a 500 -> 3; take a 500 -> -; "
        "held -> 73"
    )


@pytest.mark.parametrize("limit_after", [10, 4, 1])
def test_a_restart_at_the_limit_with_nothing_given_back_goes_on(limit_after):
    """With the persisted state at the limit and no record available the fetch never completed."""
    story = Story("ranges=10").tell(
        "publish 40; take a -> 0..9; ack 1..9/2; persist; ranges -> 10; "
        f"crash bytes=0 ranges={limit_after}; ranges -> 5"
    )
    assert story.cursor.read_position.entry_id == 0
    while story.cursor.backlog:
        sent = story.dispatch("a", 3)
        assert sent, f"stuck with {story.cursor.backlog} messages"
        assert int(story.do("ranges", ())) <= max(limit_after, 5)
        story.ack(*sent)


def test_a_restart_at_the_limit_with_only_delayed_holes_waits_for_their_time():
    Story("ranges=4").tell(
        "publish 1 @100; publish 1; "
        * 4
        + "publish 1; take a -> 1..7/2; ack 1..7/2; persist; crash bytes=0 ranges=4; at 99; take a -> -; "
        f"closed -> {RANGES}; wake -> 100; at 100; singly a -> 0..6/2; at 101; ack 0..6/2; take a -> 8"
    )


WAYS_TO_FREE = {
    "acks": "ack 0..14", "one cumulative ack": "upto 14", "a persist": "ack 1..71/2; persist",
    "a promotion": "ack 1..71/2; at 1; promote", "returns": "nack 0..14", "a consumer that closes": "leave a",
    "a seek": "at 1; seek 50", "a skip": "at 1; skip 15", "a backlog cleared": "at 1; clear",
    "a higher limit": "limits bytes=2000", "no limit": "limits bytes=0",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS_TO_FREE)
def test_whoever_waits_is_woken_once_when_the_limit_frees(way):
    """Fetches that waited for room were not completed when there was some."""
    Story("bytes=1031").tell(
        "publish 400; take a 500 -> 0..72; take b 500 -> -; wait b; woken -> -; "
        f"{WAYS_TO_FREE[way]}; woken -> b; closed -> -; wait b; woken -> b"
    )


# The sent messages, and their order.

HOLES = "0 1 3 4 5 7 9 11 12 13 14"


def with_holes(sent_count, limits, **more):
    """A slow consumer has the upper messages, and gave the holes below and the highest message of all back."""
    last = sent_count - 1
    return Story(limits, **more).tell(
        f"publish 200; take slow 200 -> 0..{last}; ack 2 6 8 10 15; broken; persist ! StoreError; nack {HOLES} {last}"
    )


@pytest.mark.parametrize(
    ("sent_count", "limits", "rule", "used"),
    [(73, "bytes=1031", BYTES, 5 * 14 + 56 * 14), (61, "ranges=61", RANGES, 5 + 44)],
)
@pytest.mark.parametrize("take", ["take quick 500", "singly quick"])
def test_the_lowest_hole_goes_first_and_new_messages_stay(sent_count, limits, rule, used, take):
    story = with_holes(sent_count, limits)
    (reason,) = story.subscription.why_blocked()
    assert (reason.rule.name, reason.used) == (rule, used)
    # Messages above the highest acked one divide nothing: they are sent again last.
    story.tell(
        f"{take} -> {HOLES} {sent_count - 1}; closed -> {rule}; ack {HOLES}; closed -> -; "
        f"take quick 2 -> {sent_count} {sent_count + 1}"
    )


def test_after_a_restart_above_a_lowered_limit_unread_holes_are_filled_from_their_edges():
    story = with_holes(61, "ranges=61").tell("mended; persist; crash bytes=0 ranges=3; ranges -> 5; marked -> -1")
    # The messages within 3 to 5 and 11 to 14 would divide them: there is no room for one more range.
    story.tell(f"take a -> 0 1 3 5 7 9 11 14; ranges -> 5; closed -> {RANGES}; ack 0 1 3 5 7 9 11 14")
    # Two ranges, 5 to 11 and 14 to 15, are at the mark where it opens.
    story.tell("ranges -> 2; closed -> -")
    # It closes with 4 at once; 12 and 13 make the range beside them longer, so they need no room.
    story.tell("take a -> 4 12 13; ranges -> 3")


def test_a_wide_hole_is_filled_from_both_edges_at_a_full_range_limit():
    Story().tell(
        "publish 20; take a 10; ack 0 9; persist; crash bytes=0 ranges=1; take a -> 1 8; ranges -> 1; ack 1 8; "
        "take a -> 2 7; ranges -> 1; ack 2 7; take a -> 3 6; ranges -> 1; ack 3 6; take a -> 4 5; ranges -> 1; "
        "marked -> 3; ack 4 5; marked -> 9; take a -> 10"
    )


# A full limit and a store that fails.


def filled_to_the_last_byte():
    """The acks of 36 messages and the reservations for 38 take every byte; 37 wait without one."""
    return Story("bytes=1036").tell(
        "publish 400; take a 500 -> 0..72; ack 1..71/2; broken; persist ! StoreError; nack 0..72/2 +50; "
        f"bytes -> {36 * 14}; take slow -> 73..110; bytes -> 1036; take slow -> -"
    )


def test_holes_between_acks_that_are_not_durable_go_out_at_a_full_limit_and_bring_the_use_down():
    # 0 lets the mark-delete position move, 2 to 70 join two ranges each, and 72 makes one longer.
    story = filled_to_the_last_byte().tell(f"closed -> {BYTES}; at 50; take quick -> 0..72/2; bytes -> 1036; at 51")
    used = []
    for entry in range(0, 73, 2):
        story.tell(f"ack {entry}")
        used.append(story.used_bytes)
    assert used == [*range(1_022, 531, -14), 532]
    story.tell("marked -> 72; closed -> -; take quick 2 -> 111 112")


def sent_against_nothing():
    """Consumer `quick` has 2, for whose ack nothing is reserved; its neighbours are durable by now, the limit full."""
    return filled_to_the_last_byte().tell(
        f"at 50; take quick 2 -> 0 2; mended; at 51; covers -> 36; bytes -> {38 * 14}; take slow -> 4..72/2 111; "
        "bytes -> 1036; broken; at 60"
    )


def test_an_ack_for_which_nothing_is_reserved_is_refused_if_there_is_no_room_and_the_store_makes_none():
    story = sent_against_nothing()
    before = str(story.cursor.deleted), story.subscription.usage()
    refused = f"AckRefusedError too little is reserved for the ack of {story.positions[2]}"
    story.tell(f"ack 2 ! {refused}; part 2 ! {refused}")
    assert (str(story.cursor.deleted), story.subscription.usage()) == before
    # It may be given back, and then goes out as soon as there is room for its ack.
    story.tell("nack 2; take quick -> -; ack 4; mended; at 61; persist; take quick -> 2; ack 2; bytes -> 1036")


def test_an_ack_for_which_nothing_is_reserved_makes_its_room_by_a_persist():
    story = sent_against_nothing().tell("ack 4; bytes -> 1036; unpersisted -> 14; at 61")
    with pytest.raises(AckRefusedError) as refused:
        story.ack(2, now_ms=61)
    assert str(refused.value.__cause__) == "no ledger can be written, as scripted"
    story.tell("mended; ack 2; bytes -> 1036; unpersisted -> 14")
    assert story.cursor.is_acked(story.positions[2])


def test_a_poison_message_in_the_lowest_hole_does_not_starve_the_others():
    story = with_holes(73, "bytes=1031", unpersisted_release_ratio=0.1)
    sent = []
    while len(sent) < 14:
        (entry,) = story.dispatch("quick", 1)
        sent.append(entry)
        story.ack(entry) if entry else story.nack(entry)
    assert sent == [*map(int, HOLES.split()), 72, 0, 0]
    story.tell(f"closed -> {BYTES}; take quick 1 -> 0; ack 0; marked -> 15")


def test_poison_at_both_edges_of_the_only_hole_is_tried_again_rather_than_never():
    """The messages between them would divide the hole, and there is no room for that."""
    Story("ranges=1").tell(
        "publish 6; take a -> 0; ack 0 5; closed -> -; "
        + "take a sorted -> 1 4; take a -> -; nack 1 4; " * 20
        + "take a sorted -> 1 4; ack 1 4; take a -> 2 3"
    )


# Keys and delays.


def key_shared(ranges):
    """Of 100 messages the even ones are of consumer a, the odd ones of b."""
    return Story(f"ranges={ranges}", KEY_SHARED).tell("keys eb 50; join a; join b")


def test_with_keys_each_consumer_gets_the_holes_of_its_keys_in_the_order_of_each_key():
    # Holes: 0 and 1; 3; 5 to 8; 10 and 11. 6 would divide its hole as long as 5 is not acked; 11 waits for 7, which
    # comes before it.
    key_shared(20).tell(
        "take a 10 -> 0..18/2; take b 10 -> 1..19/2; ack 2 4 9 12; persist; crash bytes=0 ranges=2; join a; join b; "
        f"take a -> 0; take b -> 1 3 5; ack 0 1 3 5; closed -> {RANGES}; take a -> 6 8 10; take b -> -; ack 6 8 10; "
        f"closed -> {RANGES}; take a -> -; take b -> 7 11; ack 7 11; closed -> -"
    )


@pytest.mark.parametrize("lowered", ["crash bytes=0 ranges=3; join a; join b", "limits bytes=0 ranges=3"])
def test_holes_of_an_owner_who_left_are_filled_by_who_has_its_keys_now(lowered):
    key_shared(8).tell(
        f"take a 4 -> 0..6/2; take b 4 -> 1..7/2; ack 1..7/2; persist; {lowered}; closed -> {RANGES}; take b -> -; "
        "take b -> -; leave a; take b -> 0..6/2"
    )


def test_delayed_messages_in_holes_are_not_sent_early_and_hold_up_no_other_hole():
    # 10 joins nothing as long as 9 is not acked; but it lies at the edge of its hole.
    Story("ranges=12").tell(
        "publish 3; publish 1 @100; publish 1; publish 1 @100; publish 3; publish 1 @100; publish 20; "
        "take a -> 0..2 4 6..8 10..14; ack 1 4 8 11; persist; crash bytes=0 ranges=3; at 99; "
        "take a sorted -> 0 2 7 10; ack 0 2 7 10; take a -> 6; ack 6; marked -> 2; take a -> -; at 100; "
        "take a sorted -> 3 5 9"
    )


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
