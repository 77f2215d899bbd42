"""Dispatchers, ackers, a persister, a publisher and one who closes consumers, all at once on one subscription.

Dispatchers that the gate keeps waiting do nothing until it calls them: one lost call and they wait for ever.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from types import SimpleNamespace

import pytest

from ackstate import ConsumerClosedError, CursorConfig, ManagedCursor, MemoryStore, StoreError, Subscription
from ackstate.dispatch import AckRefusedError
from ackstate.limits import DispatchGate, GateLimits, Rule
from ackstate.message import Message
from ackstate.topic import MessageLog

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
