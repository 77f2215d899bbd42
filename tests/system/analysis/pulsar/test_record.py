"""Record the example broker while a real client of Pulsar works, kill it, and count its redeliveries."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pulsar
import pytest

from ackstate.analysis.trace.check import check_events
from command_line import ENTRY, run
from example_broker import AdminBroker, client_of, rest, subscribe
from waiting import wait_until

TOPIC = "persistent://public/default/orders"


class Gateway(ThreadingHTTPServer):
    """Passes requests on to a broker's admin port, and counts the polls of its one topic that it answers."""

    def __init__(self, broker):
        super().__init__(("127.0.0.1", 0), Passed)
        self.broker = broker
        self.polls = self.failures = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def await_poll(self):
        """Wait for a poll that begins later than now, and for its end."""
        enough = self.polls + 3
        wait_until(lambda: self.polls >= enough)

    def await_failure(self):
        enough = self.failures + 1
        wait_until(lambda: self.failures >= enough)


class Passed(BaseHTTPRequestHandler):
    def do_GET(self):
        try:
            answer = httpx.get(f"{self.server.broker.admin_url}{self.path}", trust_env=False)
        except httpx.TransportError:
            self.server.failures += 1
            return
        self.send_response(answer.status_code)
        for name in ("Content-Type", "Content-Length"):
            self.send_header(name, answer.headers[name])
        self.end_headers()
        self.wfile.write(answer.content)
        self.server.polls += self.path.endswith("/internalStats")

    def log_message(self, *_):
        """No lines on the terminal."""


@contextmanager
def gateway_to(broker):
    with Gateway(broker) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield gateway
        finally:
            gateway.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "flush_ms"),
    [(0, 3_600_000), pytest.param(1, 700, marks=pytest.mark.soak), pytest.param(2, 4_000, marks=pytest.mark.soak)],
)
def test_the_redelivered_count_is_inside_the_interval(tmp_path, capsys, seed, flush_ms):
    rng = random.Random(seed)
    broker, path = AdminBroker(tmp_path / "store", flush_ms=flush_ms), tmp_path / "trace"
    acked = set()
    with ExitStack() as stack:
        stack.callback(broker.kill)
        gateway = stack.enter_context(gateway_to(broker))
        with client_of(broker) as client:
            consumer = subscribe(client, "orders", "billing", pulsar.ConsumerType.Shared)
            command = [
                *ENTRY,
                "pulsar",
                "record",
                gateway.url,
                str(path),
                "--every",
                "1s",
                "--topics",
                "public/default/*",
            ]
            recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(recorder.kill)
            producer, end_s = client.create_producer("orders"), time.monotonic() + 7
            while time.monotonic() < end_s:
                for _ in range(rng.randint(1, 20)):
                    producer.send(b"one")
                    message = consumer.receive(20_000)
                    if rng.random() < 0.8:
                        consumer.acknowledge(message)
                        acked.add(str(message.message_id()))
                time.sleep(0.05)  # for other tests: more messages add nothing
            # The broker dies after a poll that has seen the last acks: later ones would be unknown.
            gateway.await_poll()
            broker.kill()
        # A poll fails: without the time of the load, nothing else distinguishes a restart from a reset.
        gateway.await_failure()
        broker.start()
        with client_of(broker) as client:
            again = {str(message.message_id()) for message in rest(subscribe(client, "orders", "billing",
                     pulsar.ConsumerType.Shared))}  # fmt: skip
        gateway.await_poll()
        recorder.send_signal(signal.SIGINT)
        out, err = recorder.communicate(timeout=60)
        assert (recorder.returncode, err) == (0, ""), out
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
