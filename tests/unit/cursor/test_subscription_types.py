"""Who gets which messages, as stories; and how keys are shared out. test_rounds.py has the model."""

from collections import Counter

import pytest

from ackstate import Message, SubscriptionType
from ackstate.dispatch.consumers import Consumers
from ackstate.position_set import PositionSet
from topics import NumberedTopic, StoryTopic, for_each_kind, limits_of

EXCLUSIVE, FAILOVER, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER, SubscriptionType.SHARED
KEYS = SubscriptionType.KEY_SHARED
# Of the consumers a and b the keys e and h are of a, the keys b and d of b.
IS_OPEN = "ConsumerBusyError consumer 'a' is open: close it first, or choose another name"
WAS_CLOSED = "ConsumerClosedError consumer 'a' was closed: open it again first"
STORIES = {  # of types, with limits
    "an exclusive subscription refuses a second consumer": (
        [EXCLUSIVE], "",
        "publish 3; send a 2 -> 0 1; join b ! ConsumerBusyError 'b': 'a' has; send b ! ConsumerBusyError 'b': 'a' has; "
        "consumers -> a; active -> a; held -> 2; send a -> 2",
    ),
    "to open a consumer twice is refused and changes nothing": (
        SubscriptionType, "", f"publish 2; join a; join a p7 ! {IS_OPEN}; consumers -> a; send a -> 0 1",
    ),
    "to open a consumer that a dispatch opened is refused and changes nothing": (
        SubscriptionType, "", f"publish 2; send a 1 -> 0; join a p7 ! {IS_OPEN}; consumers -> a; send a -> 1",
    ),
    # No one would give its messages back: a dispatch that comes late, after the connection has gone.
    "a consumer that was closed gets nothing before it is opened again": (
        SubscriptionType, "",
        f"publish 3; send a 2 -> 0 1; leave a -> 2; send a ! {WAS_CLOSED}; send a ! {WAS_CLOSED}; consumers -> -; "
        "held -> 0; take b 1 -> 0; leave b; join a; take a -> 0 1 2",
    ),
    "priority goes before the name": ([FAILOVER], "", "join a p1; join z; join y; active -> y"),
    "a better consumer takes over all that is not acked, as in pulsar, and either may ack it": (
        [FAILOVER], "",
        "publish 4; send b 3 -> 0 1 2; ack 0; join a; held -> 0; send b -> -; send a -> 1/1 2/1 3; ack 1; "
        "unacked -> 2 3",
    ),
    "a message given back brings all that was sent after it, so that the order stays": (
        [EXCLUSIVE, FAILOVER], "",
        "publish 6; send a 5; nack 2 -> True; held -> 2; nack 3 -> False; send a -> 2/1 3/1 4/1 5",
    ),
    "nothing passes a message given back with a delay": (
        [EXCLUSIVE, FAILOVER], "",
        "publish 4; send a 3; at 1000; nack 1 +100; wake -> 1100; at 1099; send a -> -; at 1100; take a -> 1 2 3",
    ),
    "no limit holds a single active consumer back": (
        [EXCLUSIVE, FAILOVER], "messages=2 ranges=1 bytes=1024",
        "publish 1000; send a 1000 -> 0..999; ack 1..999/2; bytes -> 7872; closed -> -; publish 1; "
        "send a -> 1000; wait a; woken -> a",
    ),
    "a single active consumer gets delayed messages at once, as in pulsar": (
        [EXCLUSIVE, FAILOVER], "", "publish 2 @1000; send a -> 0 1; wake -> None",
    ),
    "a consumer that may have one message has it": (
        [SHARED, KEYS], "each=1", "publish 2; send a -> 0; send a -> -; ack 0; send a -> 1",
    ),
    "no rule keeps back what is not there": (
        [SHARED, KEYS], "ranges=2", "publish 2; send a -> 0 1; send a -> -; closed -> -",
    ),
    # A message that waits and is acked with the cursor itself: those of its key never filled a hole again.
    "what was acked past the subscription does not hold its key up": (
        [KEYS], "ranges=3", "join a; keys eh 4; send a 3 -> 0 1 2; nack 1; past 1 4 6; send a 3 -> 3 5",
    ),
    "a consumer at its limit does not hold others up": (
        [KEYS], "each=2",
        "join a; join b; keys eb 3; send a -> 0 2; send b -> 1 3; ack 1 3; send b -> 5; ack 0 2; send a -> 4",
    ),
    "given back the messages of a key go in order to whose it is now": (
        [KEYS], "", "join a; keys b 3; send a 2; join b; nack 1 0; send a -> -; send b -> 0/1 1/1 2",
    ),
    "the messages of a key whose consumer leaves go in order to whose it is now": (
        [KEYS], "", "join a; keys b 3; send a 2; join b; leave a; send b -> 0/1 1/1 2",
    ),
    "later messages of a key wait with one given back with a delay": (
        [KEYS], "",
        "join a; join b; keys eehe; send a 2 -> 0 1; nack 0 +100; send a -> 2; nack 1; at 99; send a -> -; at 100; "
        "take a -> 0 1 3",
    ),
    "when the delay of a message is over, the next one that waits for a time holds the rest": (
        [KEYS], "",
        "join a; keys e 5; send a 4; nack 3 1; nack 0 +20; nack 2 +100; at 19; send a -> -; at 20; take a -> 0 1; "
        "at 100; take a -> 2 3 4",
    ),
    "a message that is sent again keeps its key with its consumer": (
        [KEYS], "", "join a; keys b 2; send a 1; nack 0; send a 1 -> 0/1; join b; send b -> -; send a -> 1",
    ),
    # Each hole is filled from its ends, and of the two messages of a key the earlier one goes first.
    "while a limit binds, holes are filled in the order of the key": (
        [KEYS], "",
        "join a; publish 1; publish 1 k; publish 3; publish 1 k; publish 4; send a 10; nack 1 2 3 5 8; ack 0 4 6 7 9; "
        "limits ranges=2; runs -> 3; take a -> 1 3 5 8",
    ),
    "a message comes again lowest first, and acked never": (
        [SHARED], "",
        "publish 5; take a 3 -> 0 1 2; nack 2 0 0 3 -> True True False False; ack 2; take b -> 0 3 4; upto 3; "
        "leave b -> 1; take c -> 4",
    ),
    "a delayed message takes no reservation": (
        [SHARED], "messages=2", "publish 3 @100; publish 1; send a -> 3; held -> 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "limits", "story"), for_each_kind(STORIES))
def test_a_story_of_who_gets_which_messages(kind, limits, story):
    StoryTopic(kind, **limits_of(limits.split())).tell(story)


def test_a_dead_letter_lets_the_rest_of_its_key_go():
    StoryTopic(KEYS, dead_after=0).tell("join a; keys e 3; send a 2; nack 0; send a -> 2; dead -> 0/1")


def test_no_more_than_it_may_is_read_ahead():
    topic = StoryTopic(KEYS, options={"look_ahead_max": 5}).tell("join a; join b; keys e 300; send b -> -")
    assert len(topic.subscription._messages.waiting) == 5
    received = []
    while got := topic.dispatch("a", 7):
        received += got
    assert received == list(range(300))


def test_what_was_read_ahead_is_read_once_also_after_a_seek(monkeypatch):
    topic, reads = NumberedTopic(KEYS), []
    topic.positions += topic.log.publish([Message(bytes(900_000), key=b"e")] * 4)
    monkeypatch.setattr(topic.log, "read", lambda positions, read=topic.log.read: reads.append(1) or read(positions))
    for first in (0, 1):
        assert topic.dispatch("a", 1) == [0]
        topic.subscription.seek(topic.positions[0], now_ms=first)
    reads.clear()
    assert [topic.dispatch("a", 1) for _ in range(4)] == [[0], [1], [2], [3]]
    assert len(reads) == 1


def owners(names, keys):
    consumers = Consumers(KEYS)
    for name in names:
        consumers.open(name, priority=0)
    return [consumers.owner(key) for key in keys]


def test_the_keys_of_these_stories_are_whose_they_say():
    assert owners("ab", [b"e", b"h", b"b", b"d"]) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("consumer_count", [2, 3, 5, 10])
def test_keys_are_shared_out_evenly_and_few_move_when_a_consumer_comes(consumer_count):
    names = [f"consumer-{number}" for number in range(consumer_count)]
    keys = [b"key-%d" % number for number in range(4_000)]
    before, after = owners(names, keys), owners([*names, "another"], keys)
    assert all(0.8 < count * consumer_count / 4_000 < 1.2 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"another"}
    assert 0.8 < len(moved) * (consumer_count + 1) / 4_000 < 1.2


@pytest.mark.parametrize("kind", [FAILOVER, KEYS])
def test_to_give_back_many_of_one_key_with_a_delay_costs_each_the_same(monkeypatch, kind):
    topic = NumberedTopic(kind)
    topic.publish(200, key=b"k")
    topic.dispatch("a", 200)
    moves = []
    for name in ("add", "discard"):
        monkeypatch.setattr(PositionSet, name, counted(getattr(PositionSet, name), moves))
    for number in range(199, -1, -1):
        topic.subscription.nack(topic.positions[number], delay_ms=10)
    sent = topic.subscription.dispatch("a", 200, now_ms=10)
    assert [each.position for each in sent] == topic.positions
    assert len(moves) < 200 * 25


def counted(method, calls):
    def call(self, position):
        calls.append(position)
        return method(self, position)

    return call
