"""The broker of examples/broker, under Pulsar's client, as a subject of the crash harness.

    ackstate crash --layer L3 --subject examples.broker_subject:BrokerSubject --budget 60s

Broker and client are killed together, over and over. Each ack goes through the client and the protocol. An ack has a
receipt when the broker's recording shows a completed persist that covers it. A recovered broker holds those messages as
acked that it does not send to a new client.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from uuid import uuid4

import pulsar

from ackstate.analysis.crash.subject import EntryRun, OperationKind, Report
from ackstate.analysis.trace.recording import histories, read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.crash.subject import Operation

    Entry = tuple[int, int]

TOPIC = "persistent://public/default/orders"
SUBSCRIPTION = "billing"
_ROOT = Path(__file__).parents[1]
_TIMEOUT_MS = 20_000


@final
class BrokerSubject:
    """A broker with one Exclusive subscription, which takes single acks and cumulative ones.

    The n-th entry of the harness's message log is the message ``b"n"`` of the broker's.
    """

    persists_in_background = False

    def start(self, directory: Path, ledgers: Mapping[int, int]) -> None:
        """See `CrashSubject`."""
        self._entries = [(ledger_id, entry_id) for ledger_id, count in ledgers.items() for entry_id in range(count)]
        self._numbers = {entry: number for number, entry in enumerate(self._entries)}
        self._recording = directory / f"recording-{uuid4()}"
        self._client = pulsar.Client(
            self._start_broker(directory), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )
        self._producer = self._client.create_producer(TOPIC)
        self._ids = dict(self._not_acked("a subscription that acks nothing"))
        for number in range(len(self._ids), len(self._entries)):
            sent = self._producer.send(b"%d" % number)
            self._ids[number] = sent.ledger_id(), sent.entry_id()
        self._unacked = {number for number, _ in self._not_acked(SUBSCRIPTION)}
        self._consumer = self._subscribe(SUBSCRIPTION)
        self._waiting: dict[int, set[int]] = {}  # by operation the messages that it acked
        self._durable: list[int] = []

    def recover(self, directory: Path, ledgers: Mapping[int, int]) -> Report:
        """See `CrashSubject`."""
        self.start(directory, ledgers)
        return self.report()

    def apply(self, operation: Operation) -> None:
        """See `CrashSubject`."""
        if operation.kind is OperationKind.PERSIST:
            self._persist()
            return
        number = self._numbers[operation.ledger_id, operation.entry_id]
        message_id = pulsar.MessageId(-1, *self._ids[number], -1)
        if operation.kind is OperationKind.ACK:
            self._consumer.acknowledge(message_id)
            self._waiting[operation.number] = {number}
        else:
            self._consumer.acknowledge_cumulative(message_id)
            self._waiting[operation.number] = set(range(number + 1))
        self._unacked -= self._waiting[operation.number]

    def receipts(self) -> Sequence[int]:
        """See `CrashSubject`."""
        durable, self._durable = self._durable, []
        return durable

    def report(self) -> Report:
        """See `CrashSubject`."""
        acked = [entry for number, entry in enumerate(self._entries) if number not in self._unacked]
        return Report([EntryRun(ledger_id, entry_id, entry_id + 1) for ledger_id, entry_id in acked])

    def end(self) -> None:
        """Kill the broker and forget the client, for tests that do not kill this process."""
        self._client.shutdown()
        self._broker.kill()
        self._broker.communicate()

    def _persist(self) -> None:
        """Wait until the broker has made all acks durable; its client sends them now, since its consumer is closed."""
        self._consumer.close()
        deadline_s = time.monotonic() + _TIMEOUT_MS / 1_000
        while self._waiting:
            promised = self._promised()
            for operation in [each for each, numbers in self._waiting.items() if numbers <= promised]:
                self._durable.append(operation)
                del self._waiting[operation]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(self._waiting)} acks are not durable after {_TIMEOUT_MS} ms")
            time.sleep(0.002)
        self._consumer = self._subscribe(SUBSCRIPTION)

    def _promised(self) -> set[int]:
        """Return the messages whose acks are durable, as the broker has recorded."""
        runs = histories(read_recording(self._recording))[TOPIC, SUBSCRIPTION].promised.runs()
        promised = {(ledger_id, entry_id) for ledger_id, first, end in runs for entry_id in range(first, end)}
        return {number for number, entry in self._ids.items() if entry in promised}

    def _start_broker(self, directory: Path) -> str:
        """Start the broker, which is killed together with this process, and return its URL."""
        command = [sys.executable, "-m", "examples.broker", str(directory / "store"), "--port", "0", "--flush-ms", "1"]
        command += ["--recording", str(self._recording)]
        self._broker = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
        assert self._broker.stdout is not None
        listening = re.fullmatch(r"listening on 127\.0\.0\.1 (\d+)\n", self._broker.stdout.readline())
        if listening is None:
            raise RuntimeError("the broker did not start")
        return f"pulsar://127.0.0.1:{listening[1]}"

    def _subscribe(self, name: str) -> Any:
        return self._client.subscribe(TOPIC, name, initial_position=pulsar.InitialPosition.Earliest)

    def _not_acked(self, subscription: str) -> Iterator[tuple[int, Entry]]:
        """Yield the messages that a subscription has not acked, and their entries."""
        last = uuid4().bytes
        self._producer.send(last)
        consumer = self._subscribe(subscription)
        while (message := consumer.receive(_TIMEOUT_MS)).data() != last:
            if message.data().isdigit():
                message_id = message.message_id()
                yield int(message.data()), (message_id.ledger_id(), message_id.entry_id())
        consumer.close()
