"""`dispatch_all`, as stories: who receives what, and which events wake the waiter. The model has the rest."""

import pytest

from ackstate import (
    BrokerLimit,
    CorruptStateError,
    CursorClosedError,
    CursorConfig,
    MemoryStore,
    Message,
    StoreError,
    SubscriptionType,
    Topic,
    TopicSettings,
)
from ackstate.dispatch.admission import RoundWaiter
from topics import StoryTopic, for_each_kind, limits_of

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED
EXCLUSIVE, FAILOVER = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER
# Of the consumers a and b the key e is of a, the key b of b.
STORIES = {  # of types, with limits and options
    "consumers take turns that continue in the next round": (
        [SHARED], "", {"turn_entries": 2},
        "join a *100; join b *100; join c *100; publish 5; round -> a 0 1, b 2 3, c 4; publish 1; round -> a 5; "
        "publish 1; round -> b 6",
    ),
    "a batch takes a permit for each message that is not acked, and may overdraw": (
        [SHARED], "", {},
        "join a *5; join b; publish 3 x3; round -> a 0 1; permits a -> -1; permits a +1; woken -> -; permits b +1; "
        "woken -> round; round -> b 2; permits b -> -2; part 2 2; nack 2; permits a +3; round -> a 2; permits a -> 2",
    ),
    "a consumer at its own limit is passed over": (
        [SHARED], "each=2", {},
        "join a *9; join b *9 p1; publish 6; round -> a 0 1, b 2 3; woken -> -; ack 0 1; woken -> round; "
        "round -> a 4 5",
    ),
    "messages of a key that are read ahead wait with one that waits for a time": (
        [KEY_SHARED], "", {},
        "join a *9; keys e; settle; nack 0 +1000; keys ee; round -> -; at 1; round -> -; at 999; round -> -; at 1000; "
        "round -> a 0 1 2",
    ),
    "to redeliver all rewinds in order": (
        [EXCLUSIVE, FAILOVER], "", {},
        "join a *9; publish 4; settle; ack 1; redeliver a -> 3; redeliver a -> 0; publish 1; round -> a 0 2 3 4",
    ),
    "a round is bounded and wakes at once": (
        [SHARED], "", {"round_entries_max": 3},
        "join a *100; publish 5; round -> a 0 1 2; woken -> round; round -> a 3 4; woken -> -",
    ),
    "events that change nothing do not wake": (  # no one has permits, or who has them had some
        [SHARED], "", {},
        "join a *2; publish 2; settle; publish 1; ack 0; persist; woken -> -; permits a +9; settle; permits a +9; "
        "ack 1; persist; woken -> -",
    ),
    "a nack with a delay wakes if its time comes before what the round said": (
        [SHARED, KEY_SHARED], "", {},
        "join a *9; publish 3; settle; nack 2 +100; woken -> round; round -> -; wakes -> 100; nack 0 +40; "
        "woken -> round; round -> -; wakes -> 40; nack 1 +50; woken -> -; at 40; settle -> a 0; wakes -> 50",
    ),
    "so does one that holds the order": (
        [EXCLUSIVE, FAILOVER], "", {},
        "join a *9; publish 3; settle; nack 2 +100; woken -> round; round -> -; wakes -> 100; nack 0 +40; "
        "woken -> round; round -> -; wakes -> 40; at 40; settle -> a 0 1; wakes -> 100",
    ),
    "a clock that was set back brings the times of waiting messages nearer": (
        [SHARED], "", {},
        "join a *9; at 3600000; publish 2; settle; nack 0 +500; settle; wakes -> 3600500; at 0; redeliver b; "
        "woken -> round; round -> -; wakes -> 500",
    ),
    "a limit that begins to bind wakes no one": (
        [SHARED], "ranges=1", {}, "join a *9; publish 3; round -> a 0; woken -> -",
    ),
    "more messages that are due than a round queues wake at once, though a limit binds": (
        [SHARED], "ranges=1", {},
        "join a *9; publish 150 @50; round -> -; woken -> -; at 50; round -> a 0; woken -> round",
    ),
    "dispatch takes no permits": ([SHARED], "", {}, "join a *1; publish 3; send a 2 -> 0 1; round -> a 2"),
}  # fmt: skip
ONE, AHEAD, KEYED_AHEAD = "join a *9; publish 2; settle", {"look_ahead_max": 2}, "join b *9; join a; keys "
# Each settles; an event, and the numbers that are sent after it.
EVENTS = {
    "publish": (SHARED, "", {}, "join a *9", "publish 1", "a 0"),
    "publish for later": (SHARED, "", {}, "join a *9", "publish 1 @50", "-"),
    "nack": (SHARED, "", {}, ONE, "nack 1", "a 1"),
    "redeliver": (SHARED, "", {}, ONE, "redeliver a", "a 0 1"),
    "permits come": (SHARED, "", {}, "join a *1; publish 2", "permits a +1", "a 1"),
    "consumer opens": (SHARED, "", {}, "publish 1", "join a *1", "a 0"),
    "consumer closes": (SHARED, "", {}, "join a *1; join b *9; publish 1", "leave a", "b 0"),
    "active consumer without messages closes": (FAILOVER, "", {}, "join a; join b *9; publish 1", "leave a", "b 0"),
    "rule opens": (SHARED, "messages=1", {}, ONE, "ack 0", "a 1"),
    "room for a redelivery": (  # No rule is closed: there is nothing new to send.
        SHARED, "messages=3", {},
        "join a *9; publish 1 x2; publish 1; settle; nack 0 +10; publish 1; settle; at 20; settle; closed -> -",
        "ack 1", "a 0",
    ),
    "limits are raised": (SHARED, "messages=1", {}, ONE, "limits", "a 1"),
    "ack makes a hole that an unread message fills": (SHARED, "ranges=1", {}, "join a *9; publish 4", "ack 0", "a 1"),
    "persist makes room": (
        SHARED, "bytes=1024", {}, "join a *200; publish 200; settle; ack 1..71/2", "persist", "a 72..107",
    ),
    "key is released": (KEY_SHARED, "", {}, "join a *9; keys b; settle; join b *9; leave a", "keys b", "b 1"),
    "reader may look further ahead": (KEY_SHARED, "", AHEAD, f"{KEYED_AHEAD}eeeb", "send a 2", "b 3"),
    "waiting message is acked": (KEY_SHARED, "", AHEAD, f"{KEYED_AHEAD}eeb", "ack 0", "b 2"),
    "earlier message of a key is acked": (
        KEY_SHARED, "", {}, "join a *9; keys ee; settle; nack 0 +1000; nack 1", "ack 0", "a 1",
    ),
    "message that holds the order is acked": (
        EXCLUSIVE, "", {}, "join a *9; publish 1; settle; nack 0 +1000; publish 1", "ack 0", "a 1",
    ),
    "seek": (SHARED, "", {}, ONE, "seek 1", "a 1"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "limits", "options", "story"), for_each_kind(STORIES))
def test_a_story_of_rounds(kind, limits, options, story):
    StoryTopic(kind, options=options, **limits_of(limits.split())).tell(story)


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_that_lets_a_round_send_more_wakes_the_waiter_once(event):
    kind, limits, options, before, happens, sent = EVENTS[event]
    topic = StoryTopic(kind, options=options, **limits_of(limits.split()))
    topic.tell(f"{before}; settle; {happens}; woken -> round; round -> {sent}")


def test_a_round_that_fails_after_it_sent_returns_the_permits(monkeypatch):
    broker = StoryTopic().tell("join a *9; publish 2; settle; nack 0 1; publish 1; woken -> round")
    read = broker.log.read

    def fail_at_new(positions, *more):
        if broker.positions[2] in positions:
            raise StoreError("no")
        return read(positions, *more)

    with monkeypatch.context() as patched:
        patched.setattr(broker.log, "read", fail_at_new)
        broker.tell("round ! StoreError")
    broker.tell("permits a -> 7; held -> 0; woken -> -; round -> a 0 1 2")


def test_a_dispatch_that_cannot_read_a_message_wakes_when_it_is_to_be_read_again(monkeypatch):
    def unreadable(_):
        raise CorruptStateError("message", offset=0, expected="its entry", found="nothing")

    broker = StoryTopic(**limits_of(["each=2"])).tell("join a *3; publish 4; settle -> a 0 1")
    monkeypatch.setattr(broker.log, "read", unreadable)
    # The first one was read before.
    broker.tell("send b -> 2; woken -> round; round -> -; wakes -> 60000")


def test_what_a_round_sent_becomes_old():
    topic = StoryTopic(config=CursorConfig(become_old_ack_record_seconds=1))
    topic.tell("join a *9; publish 3; round -> a 0 1 2; ack 1; at 999; covers -> 0; at 1000; covers -> 1")


def test_a_redelivery_that_its_broker_has_no_room_for_waits_for_other_subscriptions():
    broker, woken = BrokerLimit(4, 0.25), []
    topic = Topic.open(MemoryStore(), "t", settings=TopicSettings(broker_limit=broker), now_ms=0)
    one, other = (topic.subscribe(name, now_ms=0) for name in ("one", "other"))
    positions = topic.publish([Message(b"")] * 4, now_ms=0)
    one.add_permits("ann", 9)
    one.dispatch("ann", 2, now_ms=0)
    one.nack(positions[0], now_ms=0)
    other.dispatch("bob", 3, now_ms=0)
    assert one.dispatch_all(now_ms=0, waiter=lambda: woken.append("round")).deliveries == []
    assert woken == []
    other.ack_many(positions[:3], now_ms=0)
    assert woken == ["round"]
    ((_, sent),) = one.dispatch_all(now_ms=0).deliveries
    assert [each.position for each in sent] == [positions[0], *positions[2:]]


# The waiter


def test_a_new_waiter_replaces_the_old_one_and_none_keeps_it():
    broker, calls = StoryTopic().tell("join a *9"), []
    for name in ("old", "new"):
        broker.subscription.dispatch_all(now_ms=0, waiter=lambda name=name: calls.append(name))
    broker.subscription.dispatch_all(now_ms=0)
    broker.publish(2)
    broker.publish(2)
    assert calls == ["new"]


def test_close_calls_the_waiter_and_a_later_round_is_refused():
    broker = StoryTopic().tell("join a *9; round -> -")
    broker.subscription.close(now_ms=0)
    broker.tell("woken -> round")
    with pytest.raises(CursorClosedError):
        broker.do("round", ())


@pytest.mark.parametrize("event", [RoundWaiter.room_made, RoundWaiter.wake])
def test_an_event_during_a_round_wakes_when_it_ends(event):
    waiter, calls = RoundWaiter(), []
    assert waiter.begin_round() is None
    event(waiter)
    waiter.messages_came()  # by the round itself
    waiter.arm(lambda: calls.append("called"), messages=True, room=True)
    assert calls == ["called"]
    waiter.wake()
    assert calls == ["called"]
