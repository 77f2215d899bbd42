"""Kills the broker of examples/broker under Pulsar's clients, and compares the redelivery with a prediction.

    python -m examples.kill_and_compare /tmp/kill --seed 1 --seconds 4 [--engine local]

Three subscriptions ack at once, each in its own way, until SIGKILL at a moment that the seed decides. Then the broker
starts again, and new clients receive everything that is not acked. *Observed* are the messages among these whose ack
the dead broker had accepted, as its recording shows. *Predicted* is the number that Spark computes from the recording
for that instant. Both must be equal.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pulsar
from pulsar import ConsumerType

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import AS_RECORDED
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recording import histories, read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.estimate.engine import TraceSource

TOPIC = "persistent://public/default/orders"
MESSAGES_PER_S = 1_000
FLUSH_MS = 250
TIMEOUT_MS = 20_000
LAST = b"the last message"
STUCK_SHARE = 0.01

Entry = tuple[int, int]
"""A ledger id and an entry id."""


class AckBehaviour(NamedTuple):
    """How the consumers of a subscription ack."""

    kind: ConsumerType
    consumer_count: int
    think_ms_max: float


SUBSCRIPTIONS = {
    "in-order": AckBehaviour(ConsumerType.Exclusive, 1, 0),
    "one-percent-stuck": AckBehaviour(ConsumerType.Shared, 1, 0),
    "by-key": AckBehaviour(ConsumerType.KeyShared, 3, 4),
}


class KillOutcome(NamedTuple):
    """One subscription after the kill.

    Attributes:
        name: The subscription.
        acked: Acks that the dead broker had accepted.
        predicted: The prediction; with a second one if a persist was under way, which may have been written or not.
        observed: Acked messages that the clients received again.
    """

    name: str
    acked: int
    predicted: tuple[int, ...]
    observed: int

    @property
    def holds(self) -> bool:
        """Whether a prediction came true."""
        return self.observed in self.predicted


class BrokerKill:
    """A broker with clients, in a directory of its own.

    Args:
        directory: Replaced.
        seed: Decides the moment of the kill, and the acks of the consumers.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        if directory.exists():
            shutil.rmtree(directory)
        self._store = directory / "store"
        self._recording = directory / "recording"
        self._trace = directory / "trace"
        self._log = directory / "clients.log"
        self._random = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._is_over = threading.Event()

    def run(self, seconds: float) -> dict[str, set[Entry]]:
        """Kill a broker, and return for each subscription the entries that its successor sends again."""
        with self._broker() as (process, url), clients(url, self._log) as client:
            threads = [threading.Thread(target=self._publish, args=(client,))]
            for name, subscription in SUBSCRIPTIONS.items():
                for _ in range(subscription.consumer_count):
                    consumer = subscribe(client, name)
                    threads.append(threading.Thread(target=self._consume, args=(consumer, name)))
            for thread in threads:
                thread.start()
            time.sleep(self._random.uniform(seconds / 3, seconds))
            process.kill()
            self._is_over.set()
            for thread in threads:
                thread.join()
        self._accepted = {name: accepted(self._recording, name) for name in SUBSCRIPTIONS}
        with self._broker() as (process, url), clients(url, self._log) as client:
            consumers = {name: subscribe(client, name) for name in SUBSCRIPTIONS}
            client.create_producer(TOPIC).send(LAST)
            received = {name: set(entries_up_to_last(consumer)) for name, consumer in consumers.items()}
            process.terminate()
            process.wait()
        return received

    def compare(self, received: dict[str, set[Entry]], *, is_local: bool) -> list[KillOutcome]:
        """Predict the redelivery of the crash, and compare it with the received messages."""
        write_trace(read_recording(self._recording), self._trace)
        rows = estimates(self._source(is_local=is_local), [AS_RECORDED], is_plotted=True).collect()
        crashes = {row["subscription"]: row["crashes"] for row in rows if row["scope"] == "subscription"}
        outcomes = []
        for name, acked in self._accepted.items():
            # A broker that dies with every ack written leaves no crash.
            not_written, written, is_persisting = (crashes[name] or (0, 0, 0))[-3:]
            predicted = (not_written, written) if is_persisting else (not_written,)
            outcomes.append(KillOutcome(name, len(acked), predicted, len(received[name] & acked)))
        return outcomes

    def _source(self, *, is_local: bool) -> TraceSource:
        if is_local:
            return LocalSource.of(self._trace)
        from ackstate.analysis.spark.session import local_session  # noqa: PLC0415 - not needed without Spark
        from ackstate.analysis.spark.source import SparkSource  # noqa: PLC0415

        return SparkSource.of(local_session(), self._trace)

    @contextmanager
    def _broker(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """Run the broker; yield its process and its URL."""
        command = [sys.executable, "-m", "examples.broker", str(self._store), "--port", "0"]
        command += ["--flush-ms", str(FLUSH_MS), "--recording", str(self._recording)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command
            try:
                assert process.stdout is not None
                listening = re.fullmatch(r"listening on 127\.0\.0\.1 (\d+)\n", process.stdout.readline())
                if listening is None:
                    raise RuntimeError("the broker did not start")
                yield process, f"pulsar://127.0.0.1:{listening[1]}"
            finally:
                process.kill()

    def _publish(self, client: pulsar.Client) -> None:
        """Publish at a steady rate until the broker is dead."""
        producer = client.create_producer(TOPIC, max_pending_messages=100_000)
        start_s, count = time.monotonic(), 0
        while not self._is_over.is_set():
            while count < (time.monotonic() - start_s) * MESSAGES_PER_S:
                producer.send_async(b"order", lambda *_: None, partition_key=str(count % 100))
                count += 1
            time.sleep(0.005)

    def _consume(self, consumer: pulsar.Consumer, name: str) -> None:
        """Ack as the subscription does until the broker is dead."""
        chance = random.Random(self._random.random())  # noqa: S311
        think_ms_max = SUBSCRIPTIONS[name].think_ms_max
        with suppress(pulsar.PulsarException):
            while not self._is_over.is_set():
                with suppress(pulsar.Timeout):
                    message = consumer.receive(50)
                    time.sleep(chance.uniform(0, think_ms_max) / 1_000)
                    if name == "in-order":
                        consumer.acknowledge_cumulative(message)
                    elif name != "one-percent-stuck" or chance.random() >= STUCK_SHARE:
                        consumer.acknowledge(message)


@contextmanager
def clients(url: str, log: Path) -> Iterator[pulsar.Client]:
    """Yield a client that writes its errors to a file, and end it without waiting for the broker."""
    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, str(log)))
    try:
        yield client
    finally:
        client.shutdown()


def subscribe(client: pulsar.Client, name: str) -> pulsar.Consumer:
    """Open a consumer of a subscription, which begins with the first message."""
    return client.subscribe(
        TOPIC, name, consumer_type=SUBSCRIPTIONS[name].kind, initial_position=pulsar.InitialPosition.Earliest
    )


def entries_up_to_last(consumer: pulsar.Consumer) -> Iterator[Entry]:
    """Receive without acking, until the last message comes."""
    while (message := consumer.receive(TIMEOUT_MS)).data() != LAST:
        message_id = message.message_id()
        yield message_id.ledger_id(), message_id.entry_id()


def accepted(recording: Path, subscription: str) -> set[Entry]:
    """Return the entries whose acks a recording holds."""
    runs = histories(read_recording(recording))[TOPIC, subscription].accepted.runs()
    return {(ledger_id, entry_id) for ledger_id, first, end in runs for entry_id in range(first, end)}


def main() -> int:
    """Kill once, print a line for each subscription, and return 1 if a prediction did not come true."""
    parser = argparse.ArgumentParser(prog="python -m examples.kill_and_compare", description=__doc__)
    parser.add_argument("directory", type=Path, help="replaced by the store, the recording and the trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--engine", choices=["spark", "local"], default="spark")
    arguments = parser.parse_args()
    kill = BrokerKill(arguments.directory, arguments.seed)
    outcomes = kill.compare(kill.run(arguments.seconds), is_local=arguments.engine == "local")
    for each in outcomes:
        predicted = " or ".join(map(str, each.predicted))
        verdict = "equal" if each.holds else "NOT EQUAL"
        print(f"{each.name:18} acked {each.acked:6}  predicted {predicted:>11}  observed {each.observed:5}  {verdict}")  # noqa: T201
    return 0 if all(each.holds for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
