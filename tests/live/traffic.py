"""Subscriptions of all types, whose messages are published, received and acked through several lives of a broker."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import pulsar

from live.messages import place_of, subscribe

_COUNT, _BATCH = 200, 10
MESSAGE_BYTES_MAX = 30_000  # of the broker: a longer message is sent in chunks


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
        consumers: Their number; if several, the first one leaves in each round, and another comes.
        is_compacted: Whether the topic is compacted in each round.
        is_chunked: Whether each message takes two entries.
    """

    topic: str
    type: pulsar.ConsumerType
    is_cumulative: bool = False
    batch: int = 0
    index_acks: bool = True
    partitions: int = 0
    delay_ms: int = 0
    consumers: int = 1
    is_compacted: bool = False
    is_chunked: bool = False


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
    KillScenario("kill-compacted", _TYPES.Shared, is_compacted=True),
    KillScenario("kill-chunked", _TYPES.Shared, is_chunked=True),
    KillScenario("kill-odd ü+%20~", _TYPES.Shared),
)


class KillTraffic:
    """The messages of a scenario, through all kills."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.published = 0
        self.names = {}  # number -> its topic, and its entry and index
        self.acked = {}  # number -> when the client acked it, s
        self.consumers, self.messages = [], {}

    def open(self, client):
        """Open the consumers, and receive what is not acked; return the acked messages that came, and when acked."""
        self.messages = {}
        self.consumers = [self._subscribed(client) for _ in range(self.scenario.consumers)]
        self._receive(set(range(self.published)) - self.acked.keys())
        return {number: self.acked.pop(number) for number in self.acked.keys() & self.messages.keys()}

    def _subscribed(self, client):
        options = {"consumer_type": self.scenario.type, "batch_index_ack_enabled": self.scenario.index_acks}
        return subscribe(client, self.scenario.topic, "s", **options)

    def replace_consumer(self, client):
        """Close the first of several consumers, and open another, which waits for messages until others are acked."""
        if len(self.consumers) > 1:
            left, *others = self.consumers
            self.consumers = [*others, self._subscribed(client)]
            left.close()
            held = {number for number, (consumer, _) in self.messages.items() if consumer is left}
            self.messages = {number: held_by for number, held_by in self.messages.items() if number not in held}
            self._receive(held - self.acked.keys())

    def other_producer(self, client):
        """Return a producer of messages that nobody acks, or None."""
        if self.scenario.is_cumulative or self.scenario.is_chunked:
            return None
        return client.create_producer(self.scenario.topic, batching_enabled=False, send_timeout_millis=1_000)

    def publish(self, client):
        """Publish messages, and receive them."""
        options = {"batching_enabled": False}
        if self.scenario.batch:
            options = {"batching_enabled": True, "batching_max_messages": _BATCH, "batching_max_publish_delay_ms": 2000}
        length = MESSAGE_BYTES_MAX + 1_000 if self.scenario.is_chunked else 0
        options["chunking_enabled"] = self.scenario.is_chunked
        producer = client.create_producer(self.scenario.topic, block_if_queue_full=True, **options)
        fresh = range(self.published, self.published + _COUNT)
        for number in fresh:
            delayed = (
                {"deliver_after": timedelta(milliseconds=self.scenario.delay_ms)}
                if self.scenario.delay_ms and number % 3 == 0
                else {}
            )
            data = b"%d" % number
            producer.send_async(data.ljust(length), None, partition_key=str(number % 16), **delayed)
        producer.flush()
        producer.close()
        self.published += _COUNT
        self._receive(set(fresh))

    def _receive(self, expected):
        deadline_s = time.monotonic() + 60
        # Messages come in order: where some are sure to come, those that come again are before them.
        quiet, quiet_min = 0, 3 if expected else 20
        while quiet < quiet_min or not expected <= self.messages.keys():
            came = [each for each in map(_received, self.consumers) if each is not None]
            quiet = 0 if came else quiet + 1
            for consumer, message in came:
                self._note(consumer, message)
            missing = expected - self.messages.keys()
            assert time.monotonic() < deadline_s, f"{self.scenario.topic}: {len(missing)} messages are missing"

    def _note(self, consumer, message):
        if not message.data():
            return
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
        left = sorted(self.messages.keys() - self.acked.keys())
        now_s = time.time()
        if self.scenario.is_cumulative and left:
            last = left[int(share * (len(left) - 1))]
            consumer, message = self.messages[last]
            with suppress(pulsar.PulsarException):  # the broker is dead
                consumer.acknowledge_cumulative(message)
            self.acked |= {number: now_s for number in left if number <= last}
            return
        chosen = set(rng.sample(left, int(share * len(left))))
        if self.scenario.batch and not self.scenario.index_acks:
            # Messages of a batch are acked when its last one is: leave no batch half done.
            chosen = {number for number in left if number // _BATCH % 3}
        for number in sorted(chosen):
            consumer, message = self.messages[number]
            with suppress(pulsar.PulsarException):  # the broker is dead
                consumer.acknowledge(message)
        self.acked |= dict.fromkeys(chosen, now_s)

    def whole_entries(self, came):
        """Return by topic the entries, acked as a whole, of which messages came: entry -> when acked as a whole."""
        entries = {}
        first_chunks = self.first_chunks()
        for number, (topic, name) in self.names.items():
            entry = ":".join(name.split(":")[:2])
            for each in {entry, first_chunks.get(entry, entry)}:
                entries.setdefault((topic, each), []).append(number)
        found = {topic: {} for topic, _ in entries}
        acked = self.acked | came
        for (topic, entry), numbers in entries.items():
            if came.keys() & set(numbers) and acked.keys() >= set(numbers):
                found[topic][entry] = max(acked[each] for each in numbers)
        return found

    def first_chunks(self):
        """Return the entry of the last chunk of each message -> that of the first one, if messages have chunks."""
        if not self.scenario.is_chunked:
            return {}
        lasts = sorted(tuple(map(int, name.split(":"))) for _, name in self.names.values())
        ends = dict(lasts)  # ledger -> its last entry that ends a message
        found = {}
        for ledger, entry in lasts:
            first = f"{ledger}:{entry - 1}"
            if not entry:  # the first chunk is the last entry of the ledger before
                before = max(each for each in ends if each < ledger)
                first = f"{before}:{ends[before] + 1}"
            found[f"{ledger}:{entry}"] = first
        return found


def _received(consumer):
    try:
        return consumer, consumer.receive(150)
    except pulsar.Timeout:
        return None
