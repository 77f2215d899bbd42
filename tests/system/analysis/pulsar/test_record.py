"""Record the example broker while a real client of Pulsar works, kill it, and count its redeliveries."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import pulsar
import pytest

from ackstate.analysis.trace.check import check_events
from command_line import ENTRY, run
from example_broker import AdminBroker, client_of, rest, subscribe

TOPIC = "persistent://public/default/orders"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "flush_ms"),
    [(0, 3_600_000), pytest.param(1, 700, marks=pytest.mark.soak), pytest.param(2, 4_000, marks=pytest.mark.soak)],
)
def test_the_redelivered_count_is_inside_the_interval(tmp_path, capsys, seed, flush_ms):
    rng = random.Random(seed)
    broker, path = AdminBroker(tmp_path / "store", flush_ms=flush_ms), tmp_path / "trace"
    acked = set()
    try:
        with client_of(broker) as client:
            consumer = subscribe(client, "orders", "billing", pulsar.ConsumerType.Shared)
            command = [
                *ENTRY,
                "pulsar",
                "record",
                broker.admin_url,
                str(path),
                "--every",
                "1s",
                "--topics",
                "public/default/*",
            ]
            recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            producer, end_s = client.create_producer("orders"), time.monotonic() + 7
            while time.monotonic() < end_s:
                for _ in range(rng.randint(1, 20)):
                    producer.send(b"one")
                    message = consumer.receive(20_000)
                    if rng.random() < 0.8:
                        consumer.acknowledge(message)
                        acked.add(str(message.message_id()))
                time.sleep(0.05)  # for other tests: more messages add nothing
            # A poll sees the last acks before the broker dies: later ones would be unknown.
            time.sleep(1.4)
            broker.kill()
        # A poll fails: without the time of the load, nothing else distinguishes a restart from a reset.
        time.sleep(1.4)
        broker.start()
        with client_of(broker) as client:
            again = {str(message.message_id()) for message in rest(subscribe(client, "orders", "billing",
                     pulsar.ConsumerType.Shared))}  # fmt: skip
        time.sleep(3)  # longer than the pause after a poll that failed
        recorder.send_signal(signal.SIGINT)
        out, err = recorder.communicate(timeout=60)
        assert (recorder.returncode, err) == (0, ""), out
    finally:
        broker.kill()
    redelivered = len(again & acked)
    assert check_events(path).kinds["ack"] > 20
    answer = json.loads(run(capsys, "redelivery", path, "--engine", "local", "--json").out)
    (found,) = answer["subscriptions"]
    assert len(acked) > 100
    if seed == 0:
        assert redelivered, "the flush interval is longer than the silence before the kill"
    for crash in found["crashes"]:
        assert crash["at_crash_if_written"] <= redelivered <= crash["at_crash"]
    assert len(found["crashes"]) == bool(redelivered), out
    assert found["low"]["max"] <= found["max"]
