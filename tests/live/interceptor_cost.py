"""Measures the CPU time that the interceptor costs a broker, into a file of JSON.

Two brokers run at the same time, one of them with the interceptor, and get the same load in turn: messages are
published, received and acked one by one. The measure is the CPU time of the broker's process per acked message: it
depends less on other work of the machine than a throughput does. Both brokers are warm, and none of them is restarted.

python -P -m live.interceptor_cost FILE [ROUNDS]
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pulsar

from live.cluster import Cluster
from live.kills import interceptor
from live.messages import client_of, subscribe

_COUNT = 100_000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WARM_UP_ROUNDS = 4
_LOADS = {"single messages": 0, "batches of 100": 100}


def _cpu_s(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _load(cluster, topic, batch):
    """Publish, receive and ack messages; return the broker's CPU seconds and the rate of acks."""
    options = {"batching_enabled": bool(batch), "batching_max_messages": max(batch, 1), "max_pending_messages": 5_000}
    with client_of(cluster) as client, closing(subscribe(client, topic, "s", receiver_queue_size=5_000)) as consumer:
        begun = _cpu_s(cluster.broker.process)
        producer = client.create_producer(topic, block_if_queue_full=True, **options)
        payload = b"x" * 100
        for _ in range(_COUNT):
            producer.send_async(payload, None)
        producer.flush()
        begun_s = time.monotonic()
        for _ in range(_COUNT):
            consumer.acknowledge(consumer.receive(60_000))
        rate = _COUNT / (time.monotonic() - begun_s)
        time.sleep(1)  # the client sends the last acks, the recorder writes
        used = _cpu_s(cluster.broker.process) - begun
        producer.close()
    return used, rate


def main(file, rounds):
    """Measure, print and write."""
    found = {"messages": _COUNT, "rounds": rounds, "cores": os.cpu_count(), "pulsar": pulsar.__version__, "loads": {}}
    with TemporaryDirectory(prefix="ackstate-cost-") as directory:
        clusters = {name: Cluster(Path(directory, name), is_compiled=True) for name in ("without", "with")}
        recorder = interceptor(directory, Path(directory, "recording"))
        try:
            for name, cluster in clusters.items():
                cluster.start(managedLedgerDefaultMarkDeleteRateLimit=1.0, **(recorder if name == "with" else {}))
            for load, batch in _LOADS.items():
                found["loads"][load] = _measured(clusters, load, batch, rounds)
            found["recorded_bytes"] = sum(each.stat().st_size for each in Path(directory, "recording").iterdir())
        finally:
            for cluster in clusters.values():
                cluster.stop()
    file.write_text(json.dumps(found, indent=1) + "\n")


def _measured(clusters, load, batch, rounds):
    used = {name: [] for name in clusters}
    rates = {name: [] for name in clusters}
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for name in list(clusters)[:: 1 if number % 2 else -1]:
            cpu_s, rate = _load(clusters[name], load.replace(" ", "-"), batch)
            if number >= 0:
                used[name].append(cpu_s / _COUNT * 1e6)
                rates[name].append(rate)
        print(f"{load}, round {number}", {name: each[-1:] for name, each in used.items()}, flush=True)
    shares = [mine / other - 1 for mine, other in zip(used["with"], used["without"], strict=True)]
    result = {
        "cpu_us_per_message": {name: _spread(each) for name, each in used.items()},
        "acks_per_s": {name: _spread(each) for name, each in rates.items()},
        "more_cpu": _spread(shares),
    }
    print(load, json.dumps(result), flush=True)
    return result


def _spread(values):
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
