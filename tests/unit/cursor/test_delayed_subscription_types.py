"""Delays with keys, with dead letters, in the hands of a broker's registry, and of several threads."""

import threading

import pytest

from ackstate import DeadLetterPolicy
from ackstate.dispatch import SubscriptionOptions, SubscriptionType
from delayed_topic import NONE, TRACKERS, BucketedViews, DelayedTopic, Views

every_tracker = pytest.mark.parametrize("make_trackers", TRACKERS.values(), ids=TRACKERS)


@every_tracker
def test_a_key_stays_with_one_consumer_while_its_delayed_messages_fall_due(make_trackers):
    topic = DelayedTopic(make_trackers(), kind=SubscriptionType.KEY_SHARED)
    for number in range(24):
        topic.publish((NONE, 100, 200, 300)[number % 4], key=b"%d" % (number // 4))
    for consumer in "ab":
        topic.subscriptions["s"].consumer_opened(consumer)
    owner = {}
    came = []
    for now_ms in (0, 120, 220, 320):
        for consumer in "ab":
            numbers = topic.dispatch(now_ms=now_ms, consumer=consumer)
            for number in numbers:
                assert owner.setdefault(number // 4, consumer) == consumer, f"key {number // 4} has two consumers"
            came += numbers
        assert sorted(came) == [number for number in range(24) if number % 4 <= now_ms // 100]
    assert sorted(set(owner.values())) == ["a", "b"]
    topic.ack(*came, now_ms=320)
    assert topic.unacked() == []


@every_tracker
def test_a_delayed_message_becomes_a_dead_letter_only_after_it_was_sent(make_trackers):
    letters = []
    options = SubscriptionOptions(dead_letters=DeadLetterPolicy(1, lambda each: letters.append(each.position)))
    topic = DelayedTopic(make_trackers(), options=options)
    topic.publish(100, 500, NONE)
    assert topic.dispatch(now_ms=0) == [2]
    topic.ack(2)
    assert topic.dispatch(now_ms=110) == [0]
    topic.nack(0, now_ms=110)
    assert topic.dispatch(now_ms=110) == [0]
    topic.nack(0, now_ms=110)
    assert letters == []
    assert topic.dispatch(now_ms=110) == []
    assert letters == [topic.positions[0]]
    assert topic.unacked() == [1]
    assert topic.drain(now_ms=110).keys() == {1}
    assert letters == [topic.positions[0]]


@every_tracker
@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_types_that_keep_the_order_do_not_delay(make_trackers, kind):
    topic = DelayedTopic(make_trackers(), kind=kind)
    topic.publish(100, NONE)
    topic.deliver_at_ms = [0, 0]
    assert topic.dispatch(now_ms=0) == [0, 1]


class RisingClock:
    """Rises by one at each reading."""

    def __init__(self):
        self.now_ms, self._lock = 0, threading.Lock()

    def read(self):
        with self._lock:
            self.now_ms += 1
            return self.now_ms


class SubscriptionThread(threading.Thread):
    """One subscription's own thread, until it has acked everything once."""

    def __init__(self, topic, name, clock):
        super().__init__(name=name)
        self.topic, self.clock = topic, clock
        self.numbers = {position: number for number, position in enumerate(topic.positions)}
        self.came, self.error = [], None

    def run(self):
        try:
            while len(self.came) < len(self.numbers) and self.clock.now_ms < 60_000:
                self.work()
        except BaseException as error:
            self.error = error

    def work(self):
        subscription = self.topic.subscriptions[self.name]
        now_ms = self.clock.read()
        for each in subscription.dispatch("a", 9, now_ms=now_ms):
            number = self.numbers[each.position]
            assert self.topic.deliver_at_ms[number] <= self.clock.now_ms, f"message {number} at {now_ms} ms"
            subscription.ack(each.position, now_ms=now_ms)
            self.came.append(number)
        subscription.why_blocked()
        wake_ms = subscription.next_wake_ms  # Once: others go on meanwhile.
        assert wake_ms is None or wake_ms > 0


@pytest.mark.slow
@pytest.mark.parametrize("make_trackers", [Views, BucketedViews])
def test_three_subscriptions_share_one_index_in_three_threads(make_trackers):
    topic = DelayedTopic(make_trackers(), names=("x", "y", "z"))
    topic.publish(*(7 * number % 1_500 + 1 for number in range(300)), *[NONE] * 30)
    clock = RisingClock()
    workers = [SubscriptionThread(topic, name, clock) for name in topic.names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    for worker in workers:
        assert worker.error is None
        assert sorted(worker.came) == list(range(330))
        assert topic.tracker[worker.name].delayed_message_count == 0
