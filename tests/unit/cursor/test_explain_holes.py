"""Why is the gate shut, which holes are there, who has them, and what does filling them free? On real runs."""

import pytest

from ackstate import CursorConfig, StoreError
from ackstate.dispatch.explain import HoleReason
from ackstate.limits import Rule
from topics import StoryTopic

FAILING = CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0)


def reports(topic, top=10, *, now_ms=10):
    """Return for each hole the numbers of its first and last message, and the report."""
    found = topic.subscription.explain_holes(top, now_ms=now_ms)
    return [(topic.positions.index(hole.first), topic.positions.index(hole.last), hole) for hole in found]


def by_first(topic, *, now_ms=10):
    return {first: hole for first, _, hole in reports(topic, now_ms=now_ms)}


def run_of_every_kind():
    """Messages 3 and 4 are delayed until 500 ms; a has 0 and 2, b has 8 and 9; 5 waits until 300 ms, 7 does; c left."""
    return StoryTopic().tell(
        "publish 3; publish 2 @500; publish 11; send a 4 -> 0 1 2 5; send b 4 -> 6 7 8 9; send c 4 -> 10 11 12 13; "
        "ack 1 6 10 12; at 1; nack 5 +299; nack 7; leave c -> 2"
    )


def test_each_hole_says_why_it_is_there():
    found = by_first(run_of_every_kind())
    told = {first: (hole.why, hole.detail, hole.consumers) for first, hole in found.items()}
    assert told == {
        0: (HoleReason.IN_FLIGHT, "in flight with 'a'", ("a",)),
        2: (HoleReason.DELAYED, "2 of 4 messages: delayed until 500 ms", ("a",)),
        7: (HoleReason.IN_FLIGHT, "2 of 3 messages: in flight with 'b'", ("b",)),
        11: (HoleReason.OWNER_GONE, "its consumer 'c' is gone", ()),
    }
    assert {first: hole.deliver_at_ms for first, hole in found.items()} == {0: None, 2: 500, 7: None, 11: None}


def test_a_message_that_was_given_back_says_by_whom_and_until_when():
    topic = StoryTopic().tell("publish 5; send a 5; ack 1 3; at 1; nack 0 +300; nack 2")
    found = by_first(topic)
    assert (found[0].why, found[0].detail) == (HoleReason.NACKED, "given back by 'a', not to be sent before 301 ms")
    assert (found[2].why, found[2].detail) == (HoleReason.NACKED, "given back by 'a'")
    # A consumer's delay is none of the message's own.
    assert (found[0].deliver_at_ms, found[0].consumers) == (None, ())
    assert topic.dispatch("b", 5, now_ms=301) == [0, 2]
    found = by_first(topic)
    assert (found[0].why, found[0].consumers, found[0].delivery_count) == (HoleReason.IN_FLIGHT, ("b",), 2)


def test_after_a_seek_back_the_holes_that_late_acks_make_were_never_delivered():
    topic = StoryTopic().tell("publish 5; send a 5; at 1; seek 0; ack 2")
    ((first, last, hole),) = reports(topic)
    assert (first, last, hole.why, hole.detail) == (0, 1, HoleReason.NEVER_DELIVERED, "never delivered")
    assert (hole.delivery_count, hole.consumers) == (0, ())


def test_a_due_message_that_was_not_sent_yet_is_delayed_no_more():
    topic = run_of_every_kind()
    assert by_first(topic, now_ms=499)[2].why is HoleReason.DELAYED
    hole = by_first(topic, now_ms=500)[2]
    assert (hole.why, hole.deliver_at_ms) == (HoleReason.NEVER_DELIVERED, None)


def test_of_a_wide_hole_some_messages_are_looked_at_and_it_is_said_of_how_many():
    topic = StoryTopic().tell("publish 300; send a 300; ack 299")
    topic.nack(*(number for number in range(299) if number % 3))
    ((_, _, hole),) = reports(topic)
    assert hole.entry_count == 299
    assert hole.detail == "43 of 64 looked at, of 299, messages: given back by 'a'"


# Costs, their order, and the effect of acking.


def staircase():
    """Holes 0 to 2, 5, 9 to 14, 130 to 131; ledger 2 is acked but for its first entry and 7."""
    topic = StoryTopic().tell("publish 200; publish 10; send a 500")  # of one ledger, and of another
    holes = {0, 1, 2, 5, *range(9, 15), 130, 131, 200, 207}
    topic.ack(*(number for number in range(209) if number not in holes))
    return topic


def test_what_holds_back_the_mark_delete_first_then_the_costliest_then_the_lowest():
    found = [(first, last, hole.cost_bytes) for first, last, hole in reports(staircase())]
    # 15: the range from 15 to 129 ends with a two-byte number. 0 to 2: the mark-delete position moves over 3 and 4.
    assert found == [(0, 2, 14), (130, 131, 16), (5, 5, 14), (9, 14, 14), (207, 207, 14), (200, 200, 0)]


# Why the gate is shut.


def test_the_byte_rule_says_how_much_since_when_and_what_would_release_it():
    topic = StoryTopic(max_unpersisted_ack_record_bytes=1_031).tell(
        "publish 200; at 3; send a 40 -> 0..39; at 5; send b 500 -> 40..72; at 6; ack 1..39/2"
    )
    (reason,) = topic.subscription.why_blocked(top=2)
    assert (reason.rule, reason.used, reason.limit, reason.released_at) == (
        Rule.UNPERSISTED_ACK_RECORD_BYTES, 1_031, 1_031, 824,
    )  # fmt: skip
    assert (reason.since_ms, reason.consumer, reason.store_error) == (5, "", None)
    assert [(hole.first.entry_id, hole.freed_bytes) for hole in reason.releases] == [(0, 14), (2, 14)]
    assert reason.holders == (("b", 33), ("a", 20))
    ledger_id = topic.positions[0].ledger_id
    assert reason.detail == (
        "max_unpersisted_ack_record_bytes (maxUnPersistAckRecordsBytes) is 1031, and 1031 are used; at 824 it opens. "
        f"Acking {ledger_id}:0 to {ledger_id}:0 (in flight with 'a') frees 14 bytes. "
        f"Acking {ledger_id}:2 to {ledger_id}:2 (in flight with 'a') frees 14 bytes."
    )
    topic.ack(*range(0, 40, 2))
    assert topic.subscription.why_blocked() == ()


def test_the_byte_rule_names_the_store_that_fails():
    topic = StoryTopic(config=FAILING, max_unpersisted_ack_record_bytes=1_031).tell(
        "publish 200; at 5; send a 500; at 6; ack 1..71/2; broken"
    )
    with pytest.raises(StoreError) as failed:
        topic.cursor.persist(now_ms=7)
    (reason,) = topic.subscription.why_blocked()
    assert reason.store_error is failed.value
    assert " at 824 it opens. The store is the cause: no ledger can be written, as scripted Acking " in reason.detail
    topic.tell("mended; at 8; persist; closed -> -")


def test_a_persist_with_nothing_to_write_does_not_clear_the_store():
    topic = StoryTopic(config=FAILING, max_unpersisted_ack_record_bytes=1_031).tell("publish 200; send a 500")
    topic.subscription._listener.persisted(error := StoreError("gone"))
    topic.cursor.persist(now_ms=1)
    assert topic.cursor.stats().persist_count == 1
    assert topic.subscription.why_blocked()[0].store_error is error


def test_the_range_rule_says_which_holes_would_release_it():
    topic = StoryTopic(max_unpersisted_ack_record_bytes=0, max_unacked_ranges=10).tell(
        "publish 30; at 4; send a 500 -> 0..9; ack 1 2 5 9"
    )
    (reason,) = topic.subscription.why_blocked()
    assert (reason.rule, reason.used, reason.limit, reason.released_at, reason.since_ms) == (
        Rule.UNACKED_RANGES, 3 + 6, 10, 8, 4,
    )  # fmt: skip
    assert [(hole.first.entry_id, hole.last.entry_id, hole.freed_ranges) for hole in reason.releases] == [
        (0, 0, 1), (3, 4, 1), (6, 8, 1),
    ]  # fmt: skip
    assert reason.holders == (("a", 6),)


def test_the_message_rule_says_who_holds_them():
    topic = StoryTopic(max_unacked_messages=10).tell("publish 30; at 1; send a 3; at 2; send b 6; at 9; send c 6 -> 9")
    (reason,) = topic.subscription.why_blocked(top=2)
    assert (reason.rule, reason.used, reason.limit, reason.released_at, reason.since_ms) == (
        Rule.UNACKED_MESSAGES, 10, 10, 4, 9,
    )  # fmt: skip
    assert (reason.holders, reason.releases) == ((("b", 6), ("a", 3)), ())
    assert reason.detail == (
        "max_unacked_messages (maxUnackedMessagesPerSubscription) is 10, and 10 are used; at 4 it opens. "
        "Unacked: 'b' has 6, 'a' has 3."
    )
