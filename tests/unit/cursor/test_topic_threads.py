"""Many threads on one topic, as the threading rules allow: nothing is lost, sent twice, or counted wrongly."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from ackstate import CursorConfig, MemoryStore, Message, Start, Topics, TopicSettings

MESSAGES, SUBSCRIPTIONS = 2_000, 3


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
        self.sent = {f"s{number}": Counter() for number in range(SUBSCRIPTIONS)}
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
        left = MESSAGES
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
        while not self.is_over():
            for each in self.topic.subscriptions.values():
                assert 0 <= each.stats().cursor.backlog <= MESSAGES

    def consumer(self, name):
        subscription, received = self.topic.subscriptions[name], []
        chance = random.Random(name)

        def dispatch():
            subscription.consumer_opened("ann")
            while sum(self.sent[name].values()) < MESSAGES and not self.errors:
                with self.alone:
                    subscription.add_permits("ann", 20)
                    sent = subscription.dispatch_all(now_ms=0)
                for _, deliveries in sent.deliveries:
                    self.sent[name].update(each.message.payload for each in deliveries)
                    received.extend(each.position for each in deliveries)

        def ack():
            acked = 0
            while acked < MESSAGES and not self.errors:
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
        assert len(broker.sent[name]) == MESSAGES
        subscription.check_invariants()
        assert subscription.unacked_messages == 0
    broker.topics.tick(now_ms=0)
    broker.topics.trim(now_ms=0)
    assert len(list(broker.topic.log.ledgers)) == 1
