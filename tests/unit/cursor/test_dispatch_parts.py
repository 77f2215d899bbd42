"""The parts of a subscription, one by one: its consumers, waiting messages, messages in flight, and the queue of
holes."""

from __future__ import annotations

import random

import pytest

from ackstate import Position
from ackstate.cursor import StoreError, SubscriptionType
from ackstate.cursor.view import CursorView
from ackstate.delay.position_set import PositionSet
from ackstate.dispatch.consumers import Consumers
from ackstate.dispatch.deliveries import Deliveries, Sent
from ackstate.dispatch.hole_queue import HoleQueue
from ackstate.dispatch.replay_queue import ReplayQueue, Waiting
from ackstate.inspect.hole_report import HoleReason
from topics import NumberedTopic

KEY_SHARED = SubscriptionType.KEY_SHARED
NACKED = HoleReason.NACKED


def waiting_messages(owners=None):
    """Each key is of the owner that a dict names."""
    owners = {} if owners is None else owners
    return ReplayQueue(lambda keys: [owners.get(key, "") for key in keys], became_ready=lambda position: None)


# Waiting messages


def test_consumers_that_come_and_go_leave_nothing_behind():
    topic = NumberedTopic(KEY_SHARED)
    topic.publish_keys("abcdefghij")
    for number in range(50):
        topic.subscription.dispatch(f"c{number}", 5, now_ms=0)
        topic.subscription.consumer_closed(f"c{number}")
    assert len(topic.subscription._messages.waiting._ready) <= 1
    assert topic.dispatch("last") == [*range(10)]


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


def test_what_is_ready_is_followed_by_who_holds_it_though_it_is_empty_for_a_while():
    waiting = waiting_messages({b"k": "a"})
    waiting.put(Position(1, 0), Waiting(NACKED, key=b"k"))
    ready = waiting.ready_for("a")
    waiting.take(Position(1, 0))
    waiting.put(Position(1, 1), Waiting(NACKED, key=b"k"))
    assert list(ready) == [Position(1, 1)]


def test_a_consumer_that_had_nothing_left_gets_what_is_its_again():
    owners = {b"k": "a"}
    waiting = waiting_messages(owners)
    waiting.put(Position(1, 0), Waiting(NACKED, key=b"k"))
    owners[b"k"] = "b"
    waiting.owners_changed()
    assert [*waiting._ready] == ["b"]
    owners[b"k"] = "a"
    waiting.owners_changed()
    assert list(waiting.ready_for("a")) == [Position(1, 0)]
    waiting._check()


@pytest.mark.parametrize(
    ("key", "ready"),
    [(None, {10_049: [], 10_050: [2], 10_060: [0, 2], 18_959: [0, 2], 18_960: [0, 1, 2]}),
     (b"k", {10_050: [], 10_059: [], 10_060: [0], 18_959: [0], 18_960: [0, 1, 2]})],
)  # fmt: skip
def test_what_waits_for_a_time_waits_no_longer_after_the_clock_was_set_back(key, ready):
    waiting = waiting_messages()
    waiting.release(now_ms=10_000_000)
    waiting.put(Position(1, 0), Waiting(NACKED, key=key, until_ms=10_000_100))
    waiting.put(Position(1, 1), Waiting(NACKED, key=key, until_ms=10_009_000))
    waiting.release(now_ms=10_000_040)
    waiting.follow_clock(now_ms=10_000)
    assert waiting.next_until_ms == 10_060
    waiting.put(Position(1, 2), Waiting(NACKED, key=key, until_ms=10_050))
    for now_ms, entry_ids in ready.items():
        waiting.release(now_ms=now_ms)
        assert [position.entry_id for position in waiting.ready_for("")] == entry_ids
        waiting._check()


def test_callers_whose_times_differ_a_little_do_not_shorten_a_wait():
    waiting = waiting_messages()
    waiting.put(Position(1, 0), Waiting(NACKED, until_ms=1_100))
    for now_ms in [1_000, 995] * 100:
        waiting.release(now_ms=now_ms)
    assert not waiting.ready_for("")
    assert waiting.next_until_ms == 1_100


def test_a_clock_that_creeps_back_shortens_a_wait_as_one_that_jumps():
    topic = NumberedTopic()
    topic.publish()
    topic.dispatch(now_ms=10_000)
    topic.nack(0, delay_ms=5_000, now_ms=10_000)
    for now_ms in range(10_000, 8_900, -100):
        assert topic.dispatch(now_ms=now_ms) == []
        assert topic.subscription.next_wake_ms == 15_000
    assert topic.dispatch(now_ms=8_900) == []
    assert topic.subscription.next_wake_ms == 13_900
    assert topic.dispatch(now_ms=13_900) == [0]


@pytest.mark.parametrize("until_ms", [float("nan"), 5.0, "5", None])
def test_a_time_that_is_no_integer_is_refused_and_nothing_waits(until_ms):
    waiting = waiting_messages()
    waiting.put(Position(1, 0), Waiting(NACKED, key=b"k", until_ms=7))
    with pytest.raises(TypeError, match=r"until_ms of 1:1 must be an integer, got "):
        waiting.put(Position(1, 1), Waiting(NACKED, key=b"k", until_ms=until_ms))
    assert (len(waiting), waiting.next_until_ms) == (1, 7)
    waiting._check()


# Messages in flight


def test_a_position_that_is_not_on_its_way_settles_nothing():
    deliveries = Deliveries()
    deliveries.add(Position(1, 2), Sent("a"))
    assert deliveries.complete(Position(1, 3)) is None
    assert len(deliveries) == 1


# Consumers


def consumers(kind=KEY_SHARED):
    return Consumers(kind)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (5, TypeError, "the name of a consumer must be text, got 5"),
        (None, TypeError, "the name of a consumer must be text, got None"),
        (b"b", TypeError, "the name of a consumer must be text, got b'b'"),
        (["b"], TypeError, r"the name of a consumer must be text, got \['b'\]"),
        ("", ValueError, "the name of a consumer must not be empty"),
        ("\ud800", ValueError, r"the name of a consumer must be UTF-8, got '\\ud800'"),
    ],
)
def test_a_name_that_is_none_is_refused_and_the_others_go_on(name, error, text):
    open_now = consumers()
    open_now.open("a", priority=0)
    with pytest.raises(error, match=text):
        open_now.open(name, priority=0)
    assert open_now.names == ("a",)
    assert open_now.owner(b"k") == "a"


@pytest.mark.parametrize("priority", [None, 1.0, True, "1", float("nan")])
def test_a_priority_that_is_no_integer_is_refused_and_the_others_go_on(priority):
    open_now = consumers(SubscriptionType.FAILOVER)
    open_now.open("a", priority=0)
    for name in ("a", "b"):
        with pytest.raises(TypeError, match=f"priority of consumer '{name}' must be an integer, got "):
            open_now.open(name, priority=priority)
    assert open_now.names == ("a",)
    open_now.open("b", priority=-1)
    assert "b" in open_now
    assert open_now.active == "b"


# The queue of holes


def acked_topic(count, acked):
    topic = NumberedTopic()
    topic.publish(count)
    for number in acked:
        topic.cursor.ack(topic.positions[number], now_ms=0)
    return topic


def position_set(positions):
    ready = PositionSet()
    for position in positions:
        ready.add(position)
    return ready


def hole_queue(topic, *, tries_max=3):
    return HoleQueue(topic.cursor, tries_max=tries_max, counts_unpersisted=False)


def all_offered(queue, topic, ready):
    """Which messages a queue has, by number: it is left with them, passed over."""
    return sorted({topic.positions.index(position) for position in queue.offered(ready)})


def sent(queue, ready, count):
    """The first `count` that are offered, each of which is sent."""
    found = []
    for position in queue.offered(ready):
        ready.discard(position)
        found.append(position)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("tries_max", [0, -1])
def test_less_than_one_try_is_refused(tries_max):
    with pytest.raises(ValueError, match=f"hole_tries_max must be at least 1, got {tries_max}"):
        hole_queue(NumberedTopic(), tries_max=tries_max)


@pytest.mark.parametrize("tries_max", [1.5, float("nan"), None, "3"])
def test_tries_that_are_no_number_of_times_are_refused(tries_max):
    with pytest.raises(TypeError, match="hole_tries_max must be a whole number, got "):
        hole_queue(NumberedTopic(), tries_max=tries_max)


def test_what_was_noted_late_counts_as_it_is_now():
    topic = acked_topic(10, [2, 7])
    ready = position_set(topic.positions[3:7])
    queue = hole_queue(topic)
    queue.fill(ready)
    topic.ack(5)  # its hole is two holes now, 3 to 4 and 6 to 6
    ready.discard(topic.positions[5])
    ready.add(topic.positions[0])
    changed = [topic.positions[0], topic.positions[5], topic.positions[0]]
    queue.note_all(changed, ready)
    # One message, two, and two of which one waits: each hole is between as many ranges, or below the first.
    assert [topic.positions.index(position) for position in queue.offered(ready)] == [6, 0, 3, 4]


def noted_as_filled(seed, count=150):
    """Ack, send and give back at random, update a queue now and then: in the end it equals a new one."""
    rng = random.Random(seed)
    topic = acked_topic(count, [])
    ready = PositionSet()
    queue = hole_queue(topic)
    changed = []
    for _ in range(200):
        position = topic.positions[rng.randrange(count)]
        if topic.cursor.is_acked(position):
            continue
        was_ready = position in ready
        ready.discard(position)
        if rng.random() < 0.4:
            topic.cursor.ack(position, now_ms=0)
            changed.append(position)
        elif not was_ready:
            ready.add(position)
            changed.append(position)
        if rng.random() < 0.1:
            queue.note_all(changed, ready)
            changed.clear()
        if rng.random() < 0.05:
            next(queue.offered(ready), None)
    queue.note_all(changed, ready)
    filled = hole_queue(topic)
    filled.fill(ready)
    assert all_offered(queue, topic, ready) == all_offered(filled, topic, ready)


@pytest.mark.parametrize("seed", range(8))
def test_a_queue_that_is_told_of_changes_has_what_one_filled_anew_has(seed):
    noted_as_filled(seed)


def test_holes_beside_an_ack_that_are_not_looked_at_are_missed(monkeypatch):
    monkeypatch.setattr(HoleQueue, "acked", lambda self, position, ready: None)
    with pytest.raises(AssertionError):
        noted_as_filled(0)


def test_messages_that_began_to_wait_and_are_not_put_in_are_missed(monkeypatch):
    monkeypatch.setattr(HoleQueue, "put", lambda self, position: (*position, position[1] + 1))
    with pytest.raises(AssertionError):
        noted_as_filled(0)


def test_a_hole_whose_first_message_was_acked_meanwhile_is_offered_further_on():
    topic = acked_topic(6, [5])
    ready = position_set(topic.positions[:3])
    queue = hole_queue(topic)
    queue.fill(ready)
    offered = queue.offered(ready)
    assert next(offered) == topic.positions[0]
    ready.discard(topic.positions[0])  # It was given away, and acked at once: the queue has not been updated yet.
    topic.ack(0)
    assert next(offered) == topic.positions[1]
    ready.discard(topic.positions[1])
    assert next(offered) == topic.positions[2]


@pytest.mark.parametrize("waiting_count", [0, 3])
def test_of_many_acks_a_queue_of_few_messages_looks_at_no_more_holes_than_it_has_messages(monkeypatch, waiting_count):
    topic = acked_topic(400, range(1, 400, 2))
    ready = position_set(topic.positions[0 : 2 * waiting_count : 2])
    queue = hole_queue(topic)
    looked_at = []
    hole_at = CursorView.hole_at
    monkeypatch.setattr(CursorView, "hole_at", lambda self, at: looked_at.append(at) or hole_at(self, at))
    queue.note_all(topic.positions[1::2], ready)
    assert looked_at == topic.positions[0 : 2 * waiting_count : 2]


def test_a_hole_with_several_messages_is_looked_at_once(monkeypatch):
    topic = acked_topic(10, [4, 9])
    ready = position_set(topic.positions[0:3])
    queue = hole_queue(topic)
    looked_at = []
    hole_at = CursorView.hole_at
    monkeypatch.setattr(CursorView, "hole_at", lambda self, at: looked_at.append(at) or hole_at(self, at))
    queue.note_all([topic.positions[4], *topic.positions[0:3]], ready)
    assert looked_at == [topic.positions[0]]


def test_after_very_many_changes_a_queue_has_what_waits():
    topic = acked_topic(2_600, range(1, 2_600, 2))
    ready = position_set(topic.positions[0::2])
    queue = hole_queue(topic)
    queue.note_all(topic.positions[0::2], ready)
    assert all_offered(queue, topic, ready) == [*range(0, 2_600, 2)]


def test_what_is_no_longer_true_does_not_pile_up():
    topic = acked_topic(5_000, [])
    queue = hole_queue(topic)
    for position in topic.positions[1::2]:
        ready = position_set([position])
        queue.note_all([position], ready)
    assert len(queue._heap) <= 1_003


def test_what_was_tried_too_often_is_so_still_after_very_many_changes():
    topic = acked_topic(2_600, range(1, 2_600, 2))
    ready = position_set(topic.positions[0::2])
    queue = hole_queue(topic, tries_max=1)
    queue.fill(ready)
    (first,) = sent(queue, ready, 1)
    ready.add(first)  # It was given back.
    queue.note_all(topic.positions[0::2], ready)
    (second,) = sent(queue, ready, 1)
    assert second != first


def test_what_was_acked_is_no_longer_counted():
    topic = acked_topic(6, [1, 3, 5])
    ready = position_set(topic.positions[0::2])
    queue = hole_queue(topic)
    queue.fill(ready)
    for position in sent(queue, ready, 3):
        topic.cursor.ack(position, now_ms=0)
        queue.note_all([position], ready)
    assert not queue._tries
