"""Measures the CPU time that the interceptor costs a broker, into benchmarks/results/interceptor.json.

Two brokers run at the same time, one of them with the interceptor, and get the same load in turn: messages are
published, received and acked one by one, at a steady pace. The measure is the CPU time of the broker's threads per
acked message, without those that compile: it depends less on other work of the machine than the highest throughput.

python -P -m live.interceptor_cost [ROUNDS]
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.measurement import Against, BenchmarkReport, Screen, Spread
from live.cluster import Cluster
from live.kills import interceptor
from live.messages import client_of, subscribe

_ROUNDS, _WARM_UP_ROUNDS = 20, 6
_COMPILER = "CompilerThre"
_RECORDER = "ackstate-record"
_ABOUT = (
    "Two brokers of Pulsar 4.2, one of them with the interceptor, get the same load in turn: 100 bytes a message, "
    "published, received and acked one by one at a steady pace. CPU time of the broker's threads without those that "
    "compile, for an acked message; the interceptor's own thread is part of it."
)


class Load(NamedTuple):
    """A load of messages.

    Attributes:
        batch: Messages in each entry, or 0 for one.
        rate: Messages a second.
    """

    batch: int
    rate: int


_LOADS = {"single messages": Load(0, 20_000), "batches of 100": Load(100, 50_000)}
_SECONDS, _BURST_S, _BEHIND = 3, 0.01, 5
"""The length of a round, the time between two bursts of messages, and by how many bursts the acks are behind."""


def _cpu_ns(process):
    """Return the CPU time of each thread that does not compile, and its name."""
    found = {}
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            name = (thread / "comm").read_text().strip()
            used = int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue  # it has ended
        if _COMPILER not in name:
            found[thread.name] = name, used
    return found


def _used_us(before, after, *, name=""):
    """Return the CPU time between two looks, of all threads or of those of a name."""
    threads = ((used - before.get(thread, ("", 0))[1], each) for thread, (each, used) in after.items())
    return sum(used for used, each in threads if each.startswith(name)) / 1_000


def _load(cluster, topic, load):
    """Publish, receive and ack at a pace; return CPU time per message, of all and of the recorder, and the rate."""
    options = {"batching_enabled": bool(load.batch), "batching_max_messages": max(load.batch, 2)}
    bursts, burst = round(_SECONDS / _BURST_S), round(load.rate * _BURST_S)
    with client_of(cluster) as client, closing(subscribe(client, topic, "s", receiver_queue_size=5_000)) as consumer:
        producer = client.create_producer(topic, block_if_queue_full=True, **options)
        payload = b"x" * 100
        before, begun_s = _cpu_ns(cluster.broker.process), time.monotonic()
        for number in range(bursts + _BEHIND):
            for _ in range(burst if number < bursts else 0):
                producer.send_async(payload, None)
            for _ in range(burst if number >= _BEHIND else 0):
                consumer.acknowledge(consumer.receive(60_000))
            time.sleep(max(begun_s + (number + 1) * _BURST_S - time.monotonic(), 0))
        rate = bursts * burst / (time.monotonic() - begun_s)
        time.sleep(1)  # the client sends the last acks, the recorder writes
        after = _cpu_ns(cluster.broker.process)
        producer.close()
    count = bursts * burst
    return _used_us(before, after) / count, _used_us(before, after, name=_RECORDER) / count, rate


def main(rounds):
    """Measure, print and write; other numbers of rounds are not stored."""
    report = (BenchmarkReport if rounds == _ROUNDS else Screen)("interceptor", _ABOUT)
    with TemporaryDirectory(prefix="ackstate-cost-") as directory:
        clusters = {name: Cluster(Path(directory, name), is_compiled=True) for name in ("without", "with")}
        recorder = interceptor(directory, Path(directory, "recording"))
        try:
            for name, cluster in clusters.items():
                cluster.start(managedLedgerDefaultMarkDeleteRateLimit=1.0, **(recorder if name == "with" else {}))
            for name, load in _LOADS.items():
                _measure(report, clusters, name, load, rounds)
        finally:
            for cluster in clusters.values():
                cluster.stop()
    report.publish()


def _measure(report, clusters, title, load, rounds):
    measured = {name: [] for name in clusters}
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for name in list(clusters)[:: 1 if number % 2 else -1]:
            found = _load(clusters[name], title.replace(" ", "-"), load)
            if number >= 0:
                measured[name].append(found)
            print(f"{title}, round {number}, {name}: {found[0]:.2f} us, {found[2]:.0f} acks/s", flush=True)
    more = [100 * (mine[0] / other[0] - 1) for mine, other in zip(measured["with"], measured["without"], strict=True)]
    used, recorder, rates = (
        {name: Spread.of(each[column] for each in rows) for name, rows in measured.items()} for column in range(3)
    )
    for what, unit, of in (("broker", "us CPU a message", used), ("acks", "acks/s", rates)):
        report.time(f"{title}: {what} without", unit, of["without"])
        report.time(f"{title}: {what} with", unit, of["with"], Against("without", of["without"].median))
    report.time(f"{title}: more CPU with it, by pairs of rounds", "%", Spread.of(more))
    report.time(f"{title}: the interceptor's thread", "us CPU a message", recorder["with"])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else _ROUNDS)
