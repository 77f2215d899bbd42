"""Publishes, receives and acks with Pulsar's ordinary client."""

import os
from contextlib import contextmanager

import pulsar

from ackstate import Position


@contextmanager
def client_of(broker):
    """Yield a client of a broker."""
    client = pulsar.Client(
        broker.service_url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull), operation_timeout_seconds=60
    )
    try:
        yield client
    finally:
        client.close()


def subscribe(client, topic, subscription, **options):
    """Return a consumer of a Shared subscription, from the first message on."""
    usual = {"consumer_type": pulsar.ConsumerType.Shared, "receiver_queue_size": 1000, "batch_index_ack_enabled": True}
    return client.subscribe(topic, subscription, initial_position=pulsar.InitialPosition.Earliest, **usual | options)


def publish(client, topic, numbers, *, batch=0):
    """Publish numbers as messages, in batches of a size if one is given; each entry is complete when this returns."""
    options = {"batching_enabled": False}
    if batch:
        options = {"batching_enabled": True, "batching_max_messages": batch, "batching_max_publish_delay_ms": 2000}
    producer = client.create_producer(topic, block_if_queue_full=True, **options)
    for number in numbers:
        producer.send_async(b"%d" % number, None)
    producer.flush()
    producer.close()


def place_of(message):
    """Return where a message is: its entry, and its index in a batch or -1."""
    found = message.message_id()
    return Position(found.ledger_id(), found.entry_id()), found.batch_index()


def receive(consumer, expected_count, *, quiet_ms=400):
    """Return the messages of a consumer, until the expected number have come and none follows for a while."""
    found = []
    while True:
        try:
            found.append(consumer.receive(quiet_ms if len(found) >= expected_count else 15_000))
        except pulsar.Timeout:
            return found
