"""Subscriptions of all types, whose messages are published, received and acked through several lives of a broker."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import pulsar

from live.messages import place_of, subscribe

_COUNT, _BATCH = 200, 10


class KillScenario(NamedTuple):
    """A subscription, and how its client acks.

    Attributes:
        topic: Its topic, whose only subscription is `s`.
        type: Of the consumers.
        is_cumulative: Whether it acks everything up to some message.
        batch: Messages in each entry, or 0 for one.
        index_acks: Whether the client acks single messages of a batch.
        partitions: Of the topic, or 0.
        delay_ms: By which a third of the messages is delayed.
        consumers: Their number.
    """

    topic: str
    type: pulsar.ConsumerType
    is_cumulative: bool = False
    batch: int = 0
    index_acks: bool = True
    partitions: int = 0
    delay_ms: int = 0
    consumers: int = 1


_TYPES = pulsar.ConsumerType
SCENARIOS = (
    KillScenario("kill-shared", _TYPES.Shared),
    KillScenario("kill-key-shared", _TYPES.KeyShared, consumers=2),
    KillScenario("kill-failover", _TYPES.Failover),
    KillScenario("kill-failover-cumulative", _TYPES.Failover, is_cumulative=True),
    KillScenario("kill-exclusive", _TYPES.Exclusive),
    KillScenario("kill-exclusive-cumulative", _TYPES.Exclusive, is_cumulative=True, batch=_BATCH),
    KillScenario("kill-index-acks", _TYPES.Shared, batch=_BATCH),
    KillScenario("kill-whole-batches", _TYPES.Shared, batch=_BATCH, index_acks=False),
    KillScenario("kill-partitioned", _TYPES.Shared, partitions=2),
    KillScenario("kill-delayed", _TYPES.Shared, delay_ms=1_200),
)


class KillTraffic:
    """The messages of a scenario, through all kills."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.published = 0
        self.names = {}  # number -> its topic, and its entry and index
        self.acked = set()
        self.consumers, self.messages = [], {}

    def open(self, client):
        """Open the consumers, and receive everything that is not acked; return the acked messages that came."""
        options = {"consumer_type": self.scenario.type, "batch_index_ack_enabled": self.scenario.index_acks}
        self.messages = {}
        self.consumers = [
            subscribe(client, self.scenario.topic, "s", **options) for _ in range(self.scenario.consumers)
        ]
        self._receive(set(range(self.published)) - self.acked)
        came = self.acked & self.messages.keys()
        self.acked -= came
        return came

    def publish(self, client):
        """Publish messages, and receive them."""
        options = {"batching_enabled": False}
        if self.scenario.batch:
            options = {"batching_enabled": True, "batching_max_messages": _BATCH, "batching_max_publish_delay_ms": 2000}
        producer = client.create_producer(self.scenario.topic, block_if_queue_full=True, **options)
        fresh = range(self.published, self.published + _COUNT)
        for number in fresh:
            delayed = (
                {"deliver_after": timedelta(milliseconds=self.scenario.delay_ms)}
                if self.scenario.delay_ms and number % 3 == 0
                else {}
            )
            producer.send_async(b"%d" % number, None, partition_key=str(number % 16), **delayed)
        producer.flush()
        producer.close()
        self.published += _COUNT
        self._receive(set(fresh))

    def _receive(self, expected):
        deadline_s = time.monotonic() + 60
        quiet = 0
        while quiet < 3 or not expected <= self.messages.keys():
            came = [each for each in map(_received, self.consumers) if each is not None]
            quiet = 0 if came else quiet + 1
            for consumer, message in came:
                self._note(consumer, message)
            missing = expected - self.messages.keys()
            assert time.monotonic() < deadline_s, f"{self.scenario.topic}: {len(missing)} messages are missing"

    def _note(self, consumer, message):
        number = int(message.data())
        entry, index = place_of(message)
        partition = f"-partition-{message.message_id().partition()}" if self.scenario.partitions else ""
        self.names[number] = (
            self.scenario.topic + partition,
            f"{entry}" + (f":{index}" if self.scenario.batch else ""),
        )
        self.messages[number] = consumer, message

    def ack(self, rng, share):
        """Ack some of the messages that are not acked."""
        left = sorted(self.messages.keys() - self.acked)
        if self.scenario.is_cumulative:
            last = left[int(share * (len(left) - 1))]
            consumer, message = self.messages[last]
            consumer.acknowledge_cumulative(message)
            self.acked |= {number for number in left if number <= last}
            return
        chosen = set(rng.sample(left, int(share * len(left))))
        if self.scenario.batch and not self.scenario.index_acks:
            # Messages of a batch are acked when its last one is: leave no batch half done.
            chosen = {number for number in left if number // _BATCH % 3}
        for number in sorted(chosen):
            consumer, message = self.messages[number]
            consumer.acknowledge(message)
        self.acked |= chosen

    def whole_entries(self, came):
        """Return the number of entries, by topic, that were acked as a whole and of which messages came."""
        entries = {}
        for number in self.names:
            topic, name = self.names[number]
            entry = ":".join(name.split(":")[:2])
            entries.setdefault((topic, entry), []).append(number)
        found = {}
        for (topic, _), numbers in entries.items():
            is_back = came.intersection(numbers) and all(each in self.acked or each in came for each in numbers)
            found[topic] = found.get(topic, 0) + bool(is_back)
        return found


def _received(consumer):
    try:
        return consumer, consumer.receive(150)
    except pulsar.Timeout:
        return None
