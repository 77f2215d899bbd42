"""The example broker is killed or stopped under real Pulsar clients, which reconnect by themselves."""

import re
import signal
import subprocess
import sys
from itertools import count

import pulsar
import pytest
from pulsar import ConsumerType

from ackstate.analysis.crash.subject import Operation, OperationKind
from example_broker import (
    NEVER_MS,
    ROOT,
    AdminBroker,
    BrokerProcess,
    client_of,
    environment,
    id_of,
    publish,
    publish_batch,
    receive,
    rest,
    subscribe,
    texts,
)
from waiting import wait_until

pytestmark = pytest.mark.slow

TOPIC = "orders"
KINDS = {
    "individual": {"kind": ConsumerType.Shared, "batch_index_ack_enabled": True},
    "cumulative": {"batch_index_ack_enabled": True},
    "by-key": {"kind": ConsumerType.KeyShared, "batch_index_ack_enabled": True},
}


@pytest.fixture
def broker(tmp_path, request):
    broker = BrokerProcess(tmp_path / "store", flush_ms=getattr(request, "param", 50))
    yield broker
    broker.kill()


@pytest.fixture
def admin_broker(tmp_path):
    broker = AdminBroker(tmp_path / "store")
    yield broker
    broker.kill()


def ack(name, consumer, messages, *, share):
    """Ack a share of messages, which is a prefix if the acks are cumulative."""
    acked = messages[: round(len(messages) * share)]
    if name == "cumulative":
        consumer.acknowledge_cumulative(acked[-1])
    else:
        acked = messages[:: round(1 / share)]
        for message in acked:
            consumer.acknowledge(message)
    return {id_of(message) for message in acked}


def test_a_crash_redelivers_what_is_not_durable_and_nothing_else(admin_broker, tmp_path):
    """Acks of a first life are durable after a while, those of a second life never are; the clients are the same."""
    broker, copies = admin_broker, count()

    def durable_acks(name):
        return broker.durable_acks(TOPIC, name, tmp_path / f"copy-{next(copies)}")

    with client_of(broker) as client:
        consumers = {name: subscribe(client, TOPIC, name, **options) for name, options in KINDS.items()}
        for number in range(5):
            publish(client, TOPIC, f"{number}", partition_key=f"{number % 2}")
            publish_batch(client, TOPIC, *[f"{number}.{index}" for index in range(7)], partition_key=f"{number % 3}")
        messages = {name: receive(consumer, 40) for name, consumer in consumers.items()}
        published = {id_of(message) for message in messages["individual"]}
        durable = {name: ack(name, consumers[name], messages[name], share=0.5) for name in KINDS}
        wait_until(lambda: all(durable_acks(name) == durable[name] for name in KINDS))
        broker.kill()
        broker.flush_ms = NEVER_MS
        for _ in range(2):
            assert {name: durable_acks(name) for name in KINDS} == durable
            broker.start()
            unacked = {}
            for name, consumer in consumers.items():
                again = receive(consumer, len(published - durable[name]))
                assert {id_of(message) for message in again} == published - durable[name], name
                unacked[name] = len(again)
                if name != "cumulative":  # Its client drops a message that it has acked once, even if it comes again.
                    unacked[name] -= len(ack(name, consumer, again, share=0.5))
            wait_until(
                lambda unacked=unacked: all(broker.unacked_count(TOPIC, name) == unacked[name] for name in KINDS)
            )
            broker.kill()


@pytest.mark.parametrize("broker", [NEVER_MS], indirect=True)
def test_after_ctrl_c_clients_continue_and_nothing_comes_again_that_was_acked(broker):
    with client_of(broker) as client:
        consumers = {name: subscribe(client, TOPIC, name, **options) for name, options in KINDS.items()}
        producer = client.create_producer(TOPIC)
        for number in range(10):
            producer.send(b"%d" % number)
        acked = {name: ack(name, consumer, receive(consumer, 10), share=0.5) for name, consumer in consumers.items()}
        broker.stop(signal.SIGINT)  # before the client has sent the acks
        sent = []
        producer.send_async(b"meanwhile", lambda result, _: sent.append(result))
        broker.start()
        producer.send(b"after")
        assert sent == [pulsar.Result.Ok]
        for name, consumer in consumers.items():
            again = receive(consumer, 7)
            assert not {id_of(message) for message in again} & acked[name], name
            assert {"meanwhile", "after"} <= {*texts(again)}
        assert not any(rest(consumer, silence_ms=150) for consumer in consumers.values())


def test_every_message_that_was_confirmed_survives(broker):
    """Killed amid publishes of two producers: none that was confirmed is missing, and none is out of order.

    The consumer comes last, so the new broker must not delete messages of a subscription that it has not opened yet.
    """
    confirmed = []
    with client_of(broker) as client:
        subscribe(client, TOPIC).close()
        producers = [client.create_producer(TOPIC) for _ in range(2)]
        for number in range(300):
            for name, producer in zip("ab", producers, strict=True):
                text = f"{name}{number}"
                producer.send_async(
                    text.encode(), lambda result, _, text=text: result == pulsar.Result.Ok and confirmed.append(text)
                )
        wait_until(lambda: len(confirmed) >= 50)
        broker.kill()
        before_crash = list(confirmed)
        broker.start()
        for producer in producers:
            producer.flush()
        received = texts(rest(subscribe(client, TOPIC)))
        assert len(confirmed) == 600
        assert set(before_crash) <= set(received)
        for name in "ab":
            once = list(dict.fromkeys(text for text in received if text[0] == name))
            assert once == [f"{name}{number}" for number in range(300)]


def test_what_clients_receive_again_after_a_kill_was_predicted(tmp_path):
    command = [sys.executable, "-m", "examples.kill_and_compare", tmp_path / "kill", "--seconds", "1.5"]
    done = subprocess.run(
        [*command, "--engine", "local"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    rows = re.findall(r"^(\S+) +acked +(\d+) +predicted .* observed +(\d+) +equal$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name, *_ in rows] == ["in-order", "one-percent-stuck", "by-key"]
    assert all(int(acked) > 10 for _, acked, _ in rows)


def test_the_subject_of_the_crash_harness_reports_what_is_acked_and_durable(tmp_path, monkeypatch):
    from examples.broker_subject import BrokerSubject

    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    ledgers, killed, recovered = {1: 3, 4: 20}, BrokerSubject(), BrokerSubject()
    killed.start(tmp_path, ledgers)
    try:
        for number, (kind, *entry) in enumerate((
            (OperationKind.ACK, 1, 2), (OperationKind.MARK_DELETE, 4, 1), (OperationKind.ACK, 4, 9)
        )):  # fmt: skip
            killed.apply(Operation(number, kind, *entry))
        assert killed.receipts() == []
        killed.apply(Operation(3, OperationKind.PERSIST))
        assert sorted(killed.receipts()) == [0, 1, 2]
    finally:
        killed.end()
    try:
        acked = {(run.ledger_id, run.first) for run in recovered.recover(tmp_path, ledgers).acked}
        assert acked == {(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (4, 9)}
    finally:
        recovered.end()


@pytest.mark.soak
def test_no_kill_of_broker_and_client_breaks_a_promise():
    subject = ["--subject", "examples.broker_subject:BrokerSubject"]
    command = [sys.executable, "-m", "ackstate.analysis.cli", "crash", "--layer", "L3", *subject, "--budget", "5m"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
