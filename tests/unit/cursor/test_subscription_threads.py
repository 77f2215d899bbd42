"""Dispatchers, ackers, a persister, a publisher and one who closes consumers, all at once on one subscription.

Dispatchers that the gate keeps waiting do nothing until it calls them: one lost call and they wait for ever.
"""

import queue
import random
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from ackstate import (
    ConsumerClosedError,
    CursorConfig,
    ManagedCursor,
    MemoryStore,
    Start,
    StoreError,
    Subscription,
    Topics,
    TopicSettings,
)
from ackstate.dispatch import AckRefusedError
from ackstate.limits import DispatchGate, GateLimits, Rule
from ackstate.message import Message
from ackstate.metrics import CursorCollector
from ackstate.topic import MessageLog
from ackstate.topic.log import SoleUse

LIMIT = 1_024
MESSAGES = 1_500
CONSUMERS = ("a", "b", "c")
FEW_BYTES = GateLimits(max_unpersisted_ack_record_bytes=LIMIT)
FEW_MESSAGES = GateLimits(
    max_unpersisted_ack_record_bytes=LIMIT, max_unacked_messages=24, max_unacked_messages_per_consumer=10
)


class Flaky:
    """Passes calls on, but for some writes, which fail before or after they happened."""

    def __init__(self, inner, workers):
        self._inner, self._workers = inner, workers

    def __getattr__(self, name):
        call = getattr(self._inner, name)
        return self._failing(call) if name in {"append", "append_many", "create", "put"} else call

    def _failing(self, call):
        def write(*args, **named):
            self._workers.sample()
            if self._workers.fails():
                raise StoreError("before it happened")
            result = call(*args, **named)
            self._workers.sample()
            if self._workers.fails():
                raise StoreError("after it happened")
            return result

        return write


class WaiterOfThreads:
    def __init__(self):
        self.called = threading.Event()
        self.calls = 0

    def __call__(self):
        self.calls += 1
        self.called.set()


class ObservedThreads:
    """The threads, and their observations."""

    def __init__(self, limits, *, become_old_s=0, patience_s=30.0):
        self.patience_s = patience_s
        self.held_max = 36 if limits is FEW_BYTES else 6
        self.is_flaky = False
        self.samples = self.persist_failures = self.refusals = 0
        self.errors, self.waiters = [], []
        self.all_published, self.stop = threading.Event(), threading.Event()
        self.sent = queue.Queue()
        self.log = MessageLog.open(MemoryStore(), topic="t", entries_per_ledger_max=300)
        self.log_alone = threading.Lock()  # A publish overlaps with no dispatch.
        store = MemoryStore()
        flaky = SimpleNamespace(
            ledgers=Flaky(store.ledgers, self), metadata=Flaky(store.metadata, self), close=store.close
        )
        self.cursor = None
        self.cursor = ManagedCursor.open(
            flaky, topic="t", subscription="s", ledgers=self.log.ledgers, now_ms=0,
            config=CursorConfig(flush_interval_ms=1, ledger_retry_ms=1, become_old_ack_record_seconds=become_old_s),
        )  # fmt: skip
        self.gate = DispatchGate(limits)
        self.subscription = Subscription(self.log, self.cursor, gate=self.gate)
        self.began_s = time.monotonic()
        self.is_flaky = True

    @property
    def now_ms(self):
        """A clock that runs a hundred times as fast."""
        return int((time.monotonic() - self.began_s) * 100_000)

    def fails(self):
        return self.is_flaky and random.random() < 0.2

    def sample(self):
        if self.cursor is not None:
            with self.cursor.lock:
                used = self.cursor.view.unpersisted_record_bytes
            assert used <= LIMIT, f"{used} of {LIMIT}"
            self.samples += 1

    def dispatch(self, consumer):
        while not self.stop.is_set():
            try:
                with self.log_alone:
                    deliveries = self.subscription.dispatch(consumer, 8, now_ms=self.now_ms)
            except ConsumerClosedError:
                self.subscription.consumer_opened(consumer)
                continue
            for delivery in deliveries:
                self.sent.put(delivery.position)
            if deliveries:
                continue
            waiter = WaiterOfThreads()
            self.waiters.append(waiter)
            self.subscription.when_open(waiter, consumer)
            assert waiter.called.wait(self.patience_s), f"{consumer} was not told that the gate is open"
            self.stop.wait(0.001)  # Open, and nothing to send, it may well be.

    def ack(self, number):
        """Hold some messages and ack now this one, now that one, so that there are holes."""
        chance, held = random.Random(number), []
        while not self.stop.is_set():
            try:
                held.append(self.sent.get(timeout=0.002))
                if len(held) < self.held_max:
                    continue
            except queue.Empty:
                self.sample()
            if held:
                self.settle(held.pop(chance.randrange(len(held))), chance)

    def settle(self, position, chance):
        if chance.random() < 0.1:
            self.subscription.nack(position, delay_ms=chance.choice((0, 100)), now_ms=self.now_ms)
        else:
            self.ack_one(position)
        self.sample()

    def ack_one(self, position):
        try:
            self.subscription.ack(position, now_ms=self.now_ms)
        except AckRefusedError:
            self.refusals += 1
            self.subscription.nack(position, now_ms=self.now_ms)

    def publish(self):
        for begin in range(0, MESSAGES, 20):
            with self.log_alone:
                self.log.publish([Message(b"%d" % number) for number in range(begin, begin + 20)])
            self.stop.wait(0.002)
        self.all_published.set()

    def persist(self):
        while not self.stop.is_set():
            try:
                self.cursor.tick(now_ms=self.now_ms)
            except StoreError:
                self.persist_failures += 1
            if self.all_published.is_set() and not self.cursor.backlog:
                self.stop.set()
            self.stop.wait(0.004)

    def close_consumers(self):
        chance = random.Random(7)
        while not self.stop.is_set():
            self.subscription.consumer_closed(chance.choice(CONSUMERS))
            self.stop.wait(0.03)

    def guard(self, work, *args):
        try:
            work(*args)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()

    def run(self):
        works = [
            *((self.dispatch, consumer) for consumer in CONSUMERS),
            (self.ack, 1), (self.ack, 2),
            (self.publish,), (self.persist,), (self.close_consumers,),
        ]  # fmt: skip
        threads = [threading.Thread(target=self.guard, args=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + self.patience_s + 30
        for thread in threads:
            thread.join(timeout=max(0, deadline_s - time.monotonic()))
        if self.errors:
            raise self.errors[0]
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "become_old_s", "closed"),
    [
        (FEW_BYTES, 0, [Rule.UNPERSISTED_ACK_RECORD_BYTES]),
        (FEW_BYTES, 1, [Rule.UNPERSISTED_ACK_RECORD_BYTES]),
        (FEW_MESSAGES, 0, [Rule.UNACKED_MESSAGES, Rule.CONSUMER_UNACKED_MESSAGES]),
    ],
    ids=["few bytes", "few bytes and young acks", "few messages"],
)
def test_threads_pass_no_limit_lose_no_wake_up_and_finish(limits, become_old_s, closed):
    workers = ObservedThreads(limits, become_old_s=become_old_s)
    workers.run()
    assert (workers.cursor.backlog, workers.subscription.unacked_messages) == (0, 0)
    assert {waiter.calls for waiter in workers.waiters} == {1}
    workers.subscription.check_invariants()
    workers.cursor._check()
    counts = {rule: workers.gate.blocked_count(rule) for rule in closed}
    assert min(counts.values()) > 3, f"too seldom closed to tell much: {counts}"
    assert workers.persist_failures > 0
    assert workers.samples > MESSAGES


TOPIC_MESSAGES = 2_000


class ThreadedTopic:
    """One publisher, a thread that dispatches and one that acks for each subscription; others persist and scrape."""

    def __init__(self):
        settings = TopicSettings(entries_per_ledger_max=100, cursor=CursorConfig(flush_interval_ms=0))
        self.topics = Topics(MemoryStore(), settings=settings)
        self.topic = self.topics.open("t", now_ms=0)
        # Rule 1: publishes, trims and the calls of subscriptions come one after the other.
        self.alone = threading.Lock()
        self.persisting = threading.Lock()  # no trim during a persist
        self.is_published = False
        self.sent = {f"s{number}": Counter() for number in range(3)}
        for name in self.sent:
            self.topic.subscribe(name, start=Start.EARLIEST, now_ms=0)
        self.errors = []

    def run(self):
        jobs = [self.publish, self.persist, self.scrape, *(job for name in self.sent for job in self.consumer(name))]
        threads = [threading.Thread(target=self.guarded, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not self.errors
        assert not any(thread.is_alive() for thread in threads)

    def guarded(self, job):
        try:
            job()
        except Exception as error:
            self.errors.append(error)
            self.is_published = True

    def publish(self):
        chance = random.Random(1)
        left = TOPIC_MESSAGES
        while left:
            count = min(left, chance.randint(1, 30))
            with self.alone:
                self.topic.publish([Message(b"%d" % number) for number in range(left, left - count, -1)], now_ms=0)
            left -= count
        self.is_published = True

    def persist(self):
        while not self.is_over():
            with self.persisting:
                self.topics.tick(now_ms=0)
            with self.alone, self.persisting:
                self.topics.trim(now_ms=0)

    def scrape(self):
        """Read all numbers without a lock, as the thread of an HTTP server does."""
        collector = CursorCollector()
        collector.add_topics(self.topics)
        while not self.is_over():
            families = {family.name: [sample.value for sample in family.samples] for family in collector.collect()}
            assert families["ackstate_cursors_unreadable"] == [0]
            assert all(0 <= backlog <= TOPIC_MESSAGES for backlog in families["pulsar_subscription_back_log"])

    def consumer(self, name):
        subscription, received = self.topic.subscriptions[name], []
        chance = random.Random(name)

        def dispatch():
            subscription.consumer_opened("ann")
            while sum(self.sent[name].values()) < TOPIC_MESSAGES and not self.errors:
                with self.alone:
                    subscription.add_permits("ann", 20)
                    sent = subscription.dispatch_all(now_ms=0)
                for _, deliveries in sent.deliveries:
                    self.sent[name].update(each.message.payload for each in deliveries)
                    received.extend(each.position for each in deliveries)

        def ack():
            acked = 0
            while acked < TOPIC_MESSAGES and not self.errors:
                if received:
                    with self.alone:
                        subscription.ack(received.pop(chance.randrange(len(received))), now_ms=0)
                    acked += 1

        return dispatch, ack

    def is_over(self):
        is_acked = all(each.cursor.backlog == 0 for each in self.topic.subscriptions.values())
        return self.errors or (self.is_published and is_acked)


@pytest.mark.slow
def test_threads_that_keep_the_rules_lose_nothing():
    broker = ThreadedTopic()
    broker.run()
    for name, subscription in broker.topic.subscriptions.items():
        assert set(broker.sent[name].values()) == {1}
        assert len(broker.sent[name]) == TOPIC_MESSAGES
        subscription.check_invariants()
        assert subscription.unacked_messages == 0
    broker.topics.tick(now_ms=0)
    broker.topics.trim(now_ms=0)
    assert len(list(broker.topic.log.ledgers)) == 1


class HeldUp(threading.Thread):
    """A thread that holds up one call of a store until it is told to go on."""

    def __init__(self, monkeypatch, ledgers, name, call):
        super().__init__(target=call)
        self.reached, self.passable, held_up = threading.Event(), threading.Event(), getattr(type(ledgers), name)

        def slow(*args, **named):
            if threading.current_thread() is self:
                self.reached.set()
                assert self.passable.wait(10)
            return held_up(*args, **named)

        monkeypatch.setattr(type(ledgers), name, slow)
        self.start()
        assert self.reached.wait(10)

    def end(self):
        self.passable.set()
        self.join()


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_publish_or_a_dispatch_while_the_log_changes_is_refused_and_changes_nothing(monkeypatch, is_trimmed):
    log = MessageLog.open(MemoryStore(), topic="t", entries_per_ledger_max=1)
    cursor = ManagedCursor.open(log.store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    subscription = Subscription(log, cursor)
    for _ in range(3):
        log.publish([Message(b"x")])
    subscription.ack_cumulative(log.ledgers.last_confirmed, now_ms=0)
    subscription.add_permits("ann", 9)
    calls = [lambda: log.publish([Message(b"refused")])]
    if is_trimmed:
        log.publish([Message(b"y")])
        calls += [lambda: subscription.dispatch_all(now_ms=0), lambda: subscription.dispatch("ann", 1, now_ms=0)]
        other = HeldUp(monkeypatch, log.store.ledgers, "delete", lambda: log.trim(3))
    else:
        other = HeldUp(monkeypatch, log.store.ledgers, "append", lambda: log.publish([Message(b"y")]))
    for call in calls:
        with pytest.raises(RuntimeError, match="of topic 't' is used by two threads at once"):
            call()
    other.end()
    log.publish([Message(b"z")])
    ((_, sent),) = subscription.dispatch_all(now_ms=0).deliveries
    assert [each.message.payload for each in sent] == [b"y", b"z"]


def test_threads_that_only_check_do_not_refuse_each_other():
    use, refused = SoleUse("the thing"), []

    def check():
        try:
            for _ in range(20_000):
                use.check()
        except RuntimeError as error:
            refused.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not refused
