"""Redelivery and its count, as stories: given back, delayed, dead, sought, skipped, part of a batch, after a crash."""

import pytest

from ackstate import CursorConfig, Format, SubscriptionType
from ackstate.dispatch import RetryPolicy
from topics import StoryTopic, for_each_kind

KINDS = {"shared": SubscriptionType.SHARED, "keys": SubscriptionType.KEY_SHARED}

STORIES = {
    "each delivery says how often it was sent before": (
        "publish 2; send a -> 0 1; nack 1; send a -> 1/1; nack 1; send a -> 1/2; leave a; send b -> 0/1 1/3"
    ),
    "the count is kept while a message waits, and begins anew after a seek": (
        "publish 1; send a; nack 0 +10; at 9; send a -> -; at 10; send a -> 0/1; seek 0; send a -> 0"
    ),
    "a delayed message counts from its first delivery": (
        "publish 1 @100; send a -> -; at 100; send a -> 0; nack 0; send a -> 0/1"
    ),
    "what was not sent or is acked cannot be given back": (
        "publish 2; send a 1; ack 0; nack 0 1 -> False False; send a -> 1"
    ),
    "the next wake is the first of what was given back and what is delayed": (
        "publish 3; publish 1 @70; send a; wake -> 70; nack 0 +90; wake -> 70; nack 1 +50; wake -> 50; ack 1; "
        "wake -> 70; at 200; send a -> 0/1 3; wake -> None"
    ),
    "an ack of a part takes it off, and the last settles": (
        "publish 2 x4; send a 1; part 0 1 3; held -> 2; part 0 0 3; held -> 1; unacked -> 0 1; part 0 0 1 2; "
        "held -> 0; unacked -> 1"
    ),
    "given back, a batch comes again with what is left of it": (
        "publish 1 x4; send a; part 0 2; nack 0; held -> 0; send a -> 0/1; held -> 1; ack 0; held -> 0"
    ),
    "an ack of a part of a batch that waits": (
        "publish 1 x4; send a; nack 0 +10; part 0 0 1; at 10; send a -> 0/1; held -> 2"
    ),
    "a consumer that leaves gives back the messages of batches": (
        "publish 3 x5; send a 2; held -> 10; leave a -> 10; leave a -> 0; held -> 0; send b -> 0/1 1/1 2"
    ),
    "a seek back brings acked messages again and forgets who had what": (
        "publish 5; send a 4; ack 0 1 3; nack 2 +1000; seek 1; held -> 0; wake -> None; send a -> 1 2 3 4"
    ),
    "a seek forward acks what it passes": (
        "publish 2; publish 1 @50; publish 2; send a 3; seek 4; unacked -> 4; at 100; send a -> 4; send a -> -"
    ),
    "a seek brings delayed messages to wait again": (
        "publish 1 @50; publish 1; send a -> 1; seek 0; at 10; send a -> 1; at 50; send a -> 0; at 60; send a -> -"
    ),
    "an ack of what was sent before a seek counts after it": (
        "publish 3; send a; ack 1; seek 0; ack 1; send a -> 0 2; ack 2; unacked -> 0"
    ),
    "skip acks the next entries, whoever has them": (
        "publish 6; send a 3; ack 1; nack 2 +50; skip 3; unacked -> 4 5; held -> 0; wake -> None; at 100; send a -> 4 5"
    ),
    "clear acks what is sent, given back, delayed and unread": (
        "publish 3; publish 1 @50; publish 1; send a 3; nack 1 +10; nack 2; clear; unacked -> -; held -> 0; "
        "at 1000; send a -> -; publish 1; send a -> 5"
    ),
}  # fmt: skip
DEAD_LETTERS = {  # after so many redeliveries
    "is handed over and acked": (
        2, "publish 2; send a -> 0 1; nack 0; send a -> 0/1; nack 0; send a -> 0/2; nack 0; send a -> -; dead -> 0/3; "
        "unacked -> 1; held -> 1",
    ),
    "with a delay is handed over when its time has come": (
        0, "publish 1; send a; nack 0 +10; at 9; send a -> -; dead -> -; at 10; send a -> -; dead -> 0/1",
    ),
    "of which the hand-over fails is lost and acked by nothing, and holds nobody up": (
        0, "publish 4; send a 3; nack 1; fail 2; send a ! OSError; unacked -> 0 1 2 3; wake -> 1000; at 999; "
        "send a -> 3; at 1000; send a ! OSError; unacked -> 0 1 2 3; wake -> 2000; at 1999; "
        "send a -> -; at 2000; send a -> -; dead -> 1/1; unacked -> 0 2 3",
    ),
    "that failed takes no count from what was to be sent with it": (
        1, "publish 2; send a; nack 1; send a; nack 1; nack 0; fail 1; send a ! OSError; held -> 0; send a -> 0/1",
    ),
    # Its ack would be one range more than there may be; then the messages around it are acked.
    "whose ack would pass a limit waits and holds nobody up": (
        0, "publish 5; send a; ack 4; nack 2; limits ranges=1; send a -> -; dead -> -; ack 3; send a -> -; dead -> 2/1",
    ),
}  # fmt: skip


EVERY, ONE, RETRIES = (*KINDS.values(), SubscriptionType.FAILOVER), KINDS["shared"], RetryPolicy(100, 300, 2, 4)
CRASHES = {  # of kinds, with settings
    "a crash forgets the last delivery alone, a close none": (
        EVERY, {"dead_after": 3},
        "publish 1; send a -> 0; nack 0; send a -> 0/1; nack 0; send a -> 0/2; crash -> 0/2@0; send a -> 0/2; leave a; "
        "send b -> 0/3; crash; send a -> 0/3; close -> 0/4@0; send a -> -; dead -> 0/4; persist; crash -> -",
    ),
    "a close counts first deliveries in flight": (
        EVERY, {"dead_after": 1}, "publish 1; send a; close; send a -> 0/1; close; send a -> -; dead -> 0/2",
    ),
    "the redeliveries of a round share one write": (
        EVERY, {"dead_after": 9}, "publish 40; send a 30; leave a; writes -> 1; send b 20; send b; writes -> 2",
    ),
    "without dead letters there is none, and a crash forgets all since the last": (
        EVERY, {},
        "publish 1; send a; nack 0; send a; nack 0; persist; send a -> 0/2; nack 0; writes -> 2; crash -> 0/2@0",
    ),
    "nor in pulsar's format, which keeps no counts": (
        EVERY, {"dead_after": 2, "config": CursorConfig(format=Format.PULSAR)},
        "publish 1; send a; nack 0; send a -> 0/1; nack 0; writes -> 1; send a -> 0/2; crash -> -; send a -> 0",
    ),
    "what waits for a store that is full holds up no other": (
        [ONE], {"dead_after": 2},
        "publish 3; send a 2; nack 0 1; persist; send a 1 -> 0/1; nack 0; full; send a -> 1/1 2; at 999; send a -> -; "
        "wake -> 1000; at 1000; works; send a -> 0/2",
    ),
    "but in order": (
        [SubscriptionType.FAILOVER], {"dead_after": 2},
        "publish 3; send a 2; nack 0; persist; send a 1 -> 0/1; nack 0; full; send a -> -; at 999; send a -> -; "
        "at 1000; works; send a -> 0/2 1/1 2",
    ),
    "counts that the metadata store has no room for are left out, and wait for nothing": (
        EVERY, {"dead_after": 9, "config": CursorConfig(metadata_bytes_max=250)},
        "publish 50; send a; leave a; broken; persist -> 50; send b 1 -> 0/1; ack 0; writes -> 2; crash -> -",
    ),
    "a wait is neither forgotten nor repeated, and the last delivery has none": (
        EVERY, {"dead_after": 9, "retries": RETRIES},
        "publish 1; send a; retry 0; wake -> 100; persist; crash -> 0/1@100; at 99; send a -> -; wake -> 100; at 100; "
        "send a -> 0/1; retry 0; at 300; send a -> 0/2; retry 0; wake -> 600; at 600; send a -> 0/3; retry 0; "
        "send a -> -; dead -> 0/4",
    ),
    "a delay of its own takes the place of the policy's": (
        EVERY, {"retries": RETRIES, "dead_after": 9}, "publish 1; send a; nack 0; send a -> 0/1; nack 0 +5; wake -> 5",
    ),
    "a failover consumer receives them in order after it, and nothing passes one that waits": (
        [SubscriptionType.FAILOVER], {"retries": RETRIES, "dead_after": 9},
        "publish 5; send a 4; retry 2; persist; crash; send a -> 0 1; at 99; send a -> -; at 100; send a -> 2/1 3/1 4",
    ),
    "the messages of a key stay in order after it": (
        [KINDS["keys"]], {},
        "publish 4 k; send a 3; nack 1 +50; persist; crash; at 49; send a -> 0; at 50; send a -> 1/1 2 3",
    ),
    **{
        f"{ends} ends a count": (EVERY, {}, f"publish 2; send a; leave a; persist; crash -> 0/1@0 1/1@0; {ends}; "
        "persist; crash -> -; seek 0; send a -> 0 1") for ends in ("ack 0 1", "skip 2", "clear", "seek 0")
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "story"), for_each_kind(CRASHES))
def test_a_story_of_counts_that_outlive_a_crash(kind, settings, story):
    StoryTopic(kind, **settings).tell(story)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_story_of_redelivery(kind, story):
    StoryTopic(kind).tell(story)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("dead_after", "story"), DEAD_LETTERS.values(), ids=DEAD_LETTERS)
def test_a_story_of_a_dead_letter(kind, dead_after, story):
    StoryTopic(kind, dead_after=dead_after).tell(story)


def test_a_batch_that_is_sent_again_says_what_of_it_is_not_acked():
    topic = StoryTopic(SubscriptionType.SHARED)
    topic.tell("publish 1 x3; send a; part 0 0 2; nack 0")
    (again,) = topic.subscription.dispatch("a", 1, now_ms=0)
    assert again.unacked_words == (0b101,)


def test_the_refused_ack_of_a_message_given_back_changes_nothing():
    StoryTopic(SubscriptionType.SHARED).tell(
        "publish 4; send a; ack 3; nack 1; limits ranges=1; ack 1 ! AckRefusedError; unacked -> 0 1 2; held -> 2"
    )
    # The second ack of a part is that of the rest.
    StoryTopic(SubscriptionType.SHARED).tell(
        "publish 4 x2; send a; ack 3; nack 1; limits ranges=1; part 1 0; part 1 1 ! AckRefusedError; unacked -> 0 1 2"
    )
