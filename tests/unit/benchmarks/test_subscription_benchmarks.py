"""The counts and pictures of the subscription's benchmarks, at a size where they are known beforehand."""

from __future__ import annotations

from ackstate import Position
from benchmarks.bench_subscription import SameMessageLog, above_holes, send, send_and_ack


def test_a_state_with_holes_is_sent_only_what_lies_above_them():
    cursor, subscription = above_holes(3, backlog=2_000)
    assert cursor.deleted.range_count == 3
    assert send(subscription, 100)[:2] == [Position(7, 7), Position(7, 8)]
    cursor, subscription = above_holes(3, backlog=2_000)
    send_and_ack(subscription)
    assert (cursor.deleted.range_count, cursor.backlog, subscription.unacked_messages) == (4, 4, 0)


def test_the_log_of_one_message_deals_out_keys_in_turn():
    log = SameMessageLog(10, keys=(b"a", b"b"))
    assert [message.key for message in log.read([Position(7, 0), Position(7, 3)])] == [b"a", b"b"]
