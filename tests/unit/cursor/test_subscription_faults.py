"""An error in a call, in a store or in a callback must not be lost, passed on to others, or hidden."""

import threading

import pytest

from ackstate import CursorConfig, DeadLetterPolicy, Message, Position, StoreError, SubscriptionType
from ackstate.dispatch import SubscriptionOptions
from ackstate.dispatch.explain import HoleReason
from ackstate.dispatch.messages import ReplayQueue, Waiting
from ackstate.limits import Rule
from topics import NumberedTopic, StoryTopic

KEY_SHARED, EXCLUSIVE = SubscriptionType.KEY_SHARED, SubscriptionType.EXCLUSIVE
BYTES, RANGES = Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES


def test_no_persist_begins_between_the_check_of_a_late_ack_and_the_ack(monkeypatch):
    topic = StoryTopic(max_unpersisted_ack_record_bytes=1_024).tell("publish 3; send a; nack 1")
    was_kept_out = []

    def acked_while_another_persists(position, *, now_ms, ack=topic.cursor.ack):
        other = threading.Thread(target=topic.cursor.persist, kwargs={"now_ms": 0})
        other.start()
        other.join(0.1)
        was_kept_out.append(topic.cursor.lock._is_owned() and topic.cursor.stats().persist_count == persists_before)
        others.append(other)
        return ack(position, now_ms=now_ms)

    others = []
    topic.ack(2)  # so that there is something to persist
    persists_before = topic.cursor.stats().persist_count
    monkeypatch.setattr(topic.cursor, "ack", acked_while_another_persists)
    topic.subscription.ack(topic.positions[1], now_ms=0)
    others[0].join(60)
    assert was_kept_out == [True]
    assert topic.cursor.stats().persist_count == persists_before + 1


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, KEY_SHARED])
def test_a_tracker_that_fails_in_the_middle_of_a_batch_loses_no_message(kind, monkeypatch):
    topic = NumberedTopic(kind, tick_time_ms=10)
    topic.publish(8, deliver_at_ms=5)
    view, calls = topic.subscription._messages.delayed._tracker, []

    def failing(position, *, deliver_at_ms, now_ms, add=view.add_message):
        calls.append(position)
        if len(calls) == 3:
            raise StoreError("the tracker is away")
        return add(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)

    monkeypatch.setattr(type(view), "add_message", lambda _, *args, **named: failing(*args, **named))
    with pytest.raises(StoreError, match="away"):
        topic.dispatch(now_ms=20)
    assert topic.subscription.unacked_messages == 0
    assert topic.dispatch(now_ms=20) == [0, 1, 2, 3, 4, 5, 6, 7]


def young_topic():
    return NumberedTopic(
        config=CursorConfig(become_old_ack_record_seconds=3_600), max_unpersisted_ack_record_bytes=1_024
    )


def test_who_waits_is_woken_as_soon_as_a_dispatch_could_open_the_gate_by_promotion():
    topic = young_topic()
    topic.publish(400)
    topic.dispatch("a", 400)
    assert topic.dispatch("a", 1) == []
    woken = []
    topic.subscription.when_open(lambda: woken.append(1))
    sent = topic.subscription.in_flight("a")
    for position in sent[1::2]:
        topic.subscription.ack(position, now_ms=1)
    assert woken == [1]
    assert topic.subscription.why_blocked()[0].rule is BYTES
    assert len(topic.dispatch("a", 5)) == 5


def test_the_holes_that_are_named_are_those_that_bring_down_what_the_rule_counts():
    topic = StoryTopic(max_unpersisted_ack_record_bytes=1_024)
    # Filling those holes in the durable acks would add to the un-persisted ones.
    topic.tell("publish 300; send a 40; ack 1..39/2; persist")
    sent = topic.dispatch("a", 300)
    topic.ack(*sent[1::2])
    assert topic.dispatch("a", 1) == []
    (reason,) = topic.subscription.why_blocked(top=100)
    freed = {hole.first: amount for hole, amount in zip(reason.releases, reason.frees, strict=True)}
    assert set(freed) == {topic.positions[number] for number in sent[2::2]}
    before = topic.cursor.view.unpersisted_record_bytes
    first = next(iter(freed))
    topic.subscription.ack(first, now_ms=0)
    assert before - topic.cursor.view.unpersisted_record_bytes == freed[first]


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, KEY_SHARED])
def test_a_message_that_cannot_be_read_holds_nobody_up_and_is_not_acked(kind, caplog):
    topic = NumberedTopic(kind)
    topic.publish(2)
    (lost,) = topic.log.publish([Message(b"")])
    topic.positions.append(lost)
    topic.publish(1)
    ledger = topic.log.store.ledgers
    read = ledger.read

    def damaged(ledger_id, first, end):
        entries = read(ledger_id, first, end)
        return [b"?" if first + at == lost.entry_id else entry for at, entry in enumerate(entries)]

    ledger.read = damaged
    assert topic.dispatch(now_ms=1) == [0, 1, 3]
    assert f"message {lost} cannot be read" in caplog.text
    assert not topic.cursor.is_acked(lost)
    topic.ack(3)
    topic.ack(0, 1)
    (hole,) = topic.subscription.explain_holes()
    assert (hole.first, hole.last, hole.why) == (lost, lost, HoleReason.DATA_LOST)
    ledger.read = read
    assert topic.dispatch(now_ms=60_000) == []
    assert topic.dispatch(now_ms=60_001) == [2]


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, EXCLUSIVE])
def test_where_nothing_is_delayed_no_hole_is_said_to_be(kind):
    topic = NumberedTopic(kind)
    topic.publish(2, deliver_at_ms=10**9)
    topic.subscription.ack(topic.positions[1], now_ms=0)
    assert topic.subscription.explain_holes(now_ms=5)[0].why is HoleReason.NEVER_DELIVERED


def test_a_cleared_backlog_leaves_no_delayed_messages():
    topic = StoryTopic().tell("publish 5 @1000000; send a -> -; at 1; clear")
    assert topic.subscription._messages.delayed._tracker.delayed_message_count == 0


def test_whoever_takes_dead_letters_may_ack_others():
    taken = []

    def take(delivery):
        taken.append(delivery.position)
        topic.subscription.ack(topic.positions[2], now_ms=0)

    topic = NumberedTopic(options=SubscriptionOptions(dead_letters=DeadLetterPolicy(0, take)))
    topic.publish(4)
    topic.dispatch()
    topic.nack(1, 2)
    assert topic.dispatch() == []
    assert (taken, topic.unacked()) == ([topic.positions[1]], [0, 3])


def test_a_batch_that_reached_no_consumer_counts_for_nothing():
    """Message 0 was about to be sent again when 1 was not accepted as a dead letter."""

    def refuse(delivery):
        raise StoreError("not now")

    options = SubscriptionOptions(dead_letters=DeadLetterPolicy(1, refuse))
    topic = NumberedTopic(options=options)
    topic.publish(2, message_count=3)
    topic.dispatch()
    topic.nack(1)
    topic.dispatch()
    topic.nack(0, 1)
    with pytest.raises(StoreError):
        topic.dispatch()
    stats = topic.subscription.stats()
    assert (stats.sent_messages, stats.redelivered_messages, stats.dead_lettered_messages) == (9, 3, 0)
    assert (stats.unacked_messages, stats.replay_entries) == (0, 2)


def test_closing_wakes_who_waits():
    topic = StoryTopic(max_unacked_messages=1).tell("publish 2; send a -> 0; send a -> -; wait a")
    topic.subscription.close(now_ms=0)
    assert topic.woken == ["a"]


def test_a_waiter_that_fails_keeps_nothing_from_being_done(caplog):
    topic = StoryTopic(KEY_SHARED, max_unacked_messages=1).tell("keys ab; send a -> 0; send a -> -")

    def failing():
        raise OSError("no owner is there")

    topic.subscription.when_open(failing)
    topic.ack(0)
    assert "no owner is there" in caplog.text
    assert topic.subscription._consumers._holders == {}
    assert topic.dispatch() == [1]


def test_a_failed_round_holds_no_key(monkeypatch):
    topic = NumberedTopic(KEY_SHARED)
    subscription = topic.subscription
    topic.publish_keys("abcdefghij" * 60)
    for consumer in "ab":
        subscription.consumer_opened(consumer, permits=150)
    read, sizes = topic.log.read, []

    def fails_the_second_time(positions):
        sizes.append(len(positions))
        if len(sizes) > 1:
            raise StoreError("no")
        return read(positions)

    with monkeypatch.context() as patched:
        patched.setattr(topic.log, "read", fails_the_second_time)
        with pytest.raises(StoreError):
            subscription.dispatch_all(now_ms=0)
    assert sizes[0] == 300  # which were sent, and are withdrawn
    assert subscription.unacked_messages == 0
    assert not subscription._consumers._held
    subscription._messages.waiting._check()
    subscription.consumer_closed("a")
    assert topic.dispatch("b", 600) == [*range(600)]
    topic.ack(*range(600))
    assert not subscription._consumers._held


@pytest.mark.parametrize(
    ("key", "ready"),
    [(None, {10_049: [], 10_050: [2], 10_060: [0, 2], 18_959: [0, 2], 18_960: [0, 1, 2]}),
     (b"k", {10_050: [], 10_059: [], 10_060: [0], 18_959: [0], 18_960: [0, 1, 2]})],
)  # fmt: skip
def test_what_waits_for_a_time_waits_no_longer_after_the_clock_was_set_back(key, ready):
    waiting = ReplayQueue(lambda keys: [""] * len(keys), became_ready=lambda: None)
    waiting.release(now_ms=10_000_000)
    waiting.put(Position(1, 0), Waiting(HoleReason.NACKED, key=key, until_ms=10_000_100))
    waiting.put(Position(1, 1), Waiting(HoleReason.NACKED, key=key, until_ms=10_009_000))
    waiting.release(now_ms=10_000_040)
    waiting.follow_clock(now_ms=10_000)
    assert waiting.next_until_ms == 10_060
    waiting.put(Position(1, 2), Waiting(HoleReason.NACKED, key=key, until_ms=10_050))
    for now_ms, entry_ids in ready.items():
        waiting.release(now_ms=now_ms)
        assert [position.entry_id for position in waiting.ready_for("")] == entry_ids
        waiting._check()


def test_a_clock_that_creeps_back_shortens_a_wait_as_one_that_jumps():
    StoryTopic().tell(
        "publish 1; at 10000; send a; nack 0 +5000; "
        + "".join(f"at {now_ms}; send a -> -; wake -> 15000; " for now_ms in range(10_000, 8_900, -100))
        + "at 8900; send a -> -; wake -> 13900; at 13900; take a -> 0"
    )
