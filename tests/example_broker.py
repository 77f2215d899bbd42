"""The example broker as a process, and real Pulsar clients that use it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pulsar
from pulsar import InitialPosition

from ackstate import ManagedCursor, SqliteStore
from ackstate.topic import MessageLog

ROOT = Path(__file__).parents[1]
NEVER_MS = 3_600_000
TIMEOUT_MS = 20_000


def environment():
    """Return the environment of a broker: all processes share compiled modules, so that each starts soon."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(ROOT / ".pytest_cache" / "bytecode")}


class BrokerProcess:
    """A broker on 127.0.0.1, which keeps its port when it is started again."""

    options = ()

    def __init__(self, store, *, flush_ms=50):
        self.store = store
        self.flush_ms = flush_ms
        self.port = 0
        self.process = None
        self.start()

    def start(self):
        command = [sys.executable, "-m", "examples.broker", self.store]
        command += ["--port", str(self.port), "--flush-ms", str(self.flush_ms), *self.options]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = self.announced_port(r"listening on 127\.0\.0\.1 (\d+)\n")

    def announced_port(self, pattern):
        """Return the port in the next line that the broker prints."""
        announced = re.fullmatch(pattern, self.process.stdout.readline())
        assert announced, self.process.stderr.read()
        return int(announced[1])

    @property
    def url(self):
        return f"pulsar://127.0.0.1:{self.port}"

    def kill(self):
        """Crash."""
        self.process.kill()
        self.process.communicate()

    def stop(self, number=signal.SIGTERM):
        """Stop in order."""
        self.process.send_signal(number)
        _, complaint = self.process.communicate(timeout=30)
        assert (self.process.returncode, complaint) == (0, ""), complaint

    def durable_acks(self, topic, subscription, directory):
        """Return the messages that a recovery would find acked, each as (ledger, entry, batch index), -1 for no batch.

        The broker must be dead. The store is copied to the directory first, since a recovery takes a cursor over.
        """
        name = f"persistent://public/default/{topic}"
        with closing(SqliteStore(shutil.copytree(self.store, directory))) as store:
            log = MessageLog.open(store, topic=name)
            cursor = ManagedCursor.open(store, topic=name, subscription=subscription, ledgers=log.ledgers, now_ms=0)
            acked = set()
            for ledger_id in log.ledgers:
                for entry_id in range(log.ledgers.entry_count(ledger_id)):
                    acked |= acked_in_entry(log, cursor, ledger_id, entry_id)
            return acked


class AdminBroker(BrokerProcess):
    """A broker with its admin paths, which keeps their port, too."""

    admin_port = 0

    @property
    def options(self):
        return "--admin-port", str(self.admin_port)

    def announced_port(self, pattern):
        self.admin_port = super().announced_port(r"admin on http://127\.0\.0\.1:(\d+)\n")
        return super().announced_port(pattern)

    @property
    def admin_url(self):
        return f"http://127.0.0.1:{self.admin_port}"

    def unacked_count(self, topic, subscription):
        """Return how many messages its consumers have not acked."""
        with urlopen(f"{self.admin_url}/admin/v2/persistent/public/default/{topic}/stats") as answer:
            return json.load(answer)["subscriptions"][subscription]["unackedMessages"]


def acked_in_entry(log, cursor, ledger_id, entry_id):
    from ackstate import Position

    position = Position(ledger_id, entry_id)
    (message,) = log.read([position])
    count = message.message_count
    words = cursor.view.batch.get(position) or ()
    bits = sum((word & (2**64 - 1)) << (64 * index) for index, word in enumerate(words))
    indexes = [index for index in range(count) if cursor.is_acked(position) or (words and not bits >> index & 1)]
    return {(ledger_id, entry_id, -1 if count == 1 else index) for index in indexes}


@contextmanager
def client_of(broker, **options):
    """Yield a client, and close it."""
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(broker.url, logger=logger, operation_timeout_seconds=20, **options)
    try:
        yield client
    finally:
        client.shutdown()


def subscribe(client, topic, name="s", kind=pulsar.ConsumerType.Exclusive, **options):
    """Return a consumer; a new subscription starts at the first message."""
    options = {"initial_position": InitialPosition.Earliest, "negative_ack_redelivery_delay_ms": NEVER_MS, **options}
    return client.subscribe(topic, name, consumer_type=kind, **options)


def receive(consumer, count):
    """Return the next messages."""
    return [consumer.receive(TIMEOUT_MS) for _ in range(count)]


def texts(messages):
    return [message.data().decode() for message in messages]


def publish(client, topic, *all_texts, **options):
    """Publish messages one by one, and return their ids."""
    producer = client.create_producer(topic)
    ids = [producer.send(text.encode(), **options) for text in all_texts]
    producer.close()
    return ids


def publish_batch(client, topic, *all_texts, **options):
    """Publish messages as one entry."""
    producer = client.create_producer(
        topic, batching_enabled=True, batching_max_messages=len(all_texts), batching_max_publish_delay_ms=5_000
    )
    for text in all_texts:
        producer.send_async(text.encode(), lambda *_: None, **options)
    producer.flush()
    producer.close()


def id_of(message):
    each = message.message_id()
    return each.ledger_id(), each.entry_id(), each.batch_index()


def rest(consumer, *, silence_ms=700):
    """Return all messages that still come."""
    messages = []
    while True:
        try:
            messages.append(consumer.receive(silence_ms))
        except pulsar.Timeout:
            return messages
