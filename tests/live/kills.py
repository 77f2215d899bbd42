"""Kills a broker, and compares the redelivery with the interceptor's trace, the recorder of polls and snapshots."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pulsar

from live.command import ackstate, ackstate_json
from live.findings import Section
from live.messages import client_of
from live.traffic import SCENARIOS, KillTraffic

_ROOT = Path(__file__).parents[2]
_KILLS_PER_POLICY = 10
_POLICIES = {
    "Pulsar's default": {"managedLedgerDefaultMarkDeleteRateLimit": 1.0},
    "10 writes a second, flushed every second": {
        "managedLedgerDefaultMarkDeleteRateLimit": 10.0, "managedLedgerCursorPositionFlushSeconds": 1,
    },
    "at most 20 ranges, flushed every 3 s": {
        "managedLedgerDefaultMarkDeleteRateLimit": 1.0, "managedLedgerCursorPositionFlushSeconds": 3,
        "managedLedgerMaxUnackedRangesToPersist": 20, "managedLedgerPersistIndividualAckAsLongArray": "false",
    },
}  # fmt: skip


class BrokerKills:
    """The section.

    Args:
        cluster: A started cluster, without the topics.
    """

    TITLE = "Redelivery of a killed broker"

    def __init__(self, cluster):
        self._cluster = cluster
        self._rng = random.Random(26)
        self._traffic = [KillTraffic(scenario) for scenario in SCENARIOS]
        self._last = self._snapshot = None  # the policy of the last kill; the snapshot before it
        self._killed_ms = []  # of each kill, before it
        self._counted = {}  # topic -> for each kill, the entries that came
        kills = _KILLS_PER_POLICY * len(_POLICIES)
        self.section = Section(
            self.TITLE,
            f"A broker with the interceptor is killed {kills} times (SIGKILL), {_KILLS_PER_POLICY} times under each of"
            f" {len(_POLICIES)} policies: {'; '.join(_POLICIES)}. Each kill concerns {len(SCENARIOS)} topics: Shared,"
            " Key_Shared, Failover and Exclusive, two partitions, delayed messages, batches with and without acks of"
            " single messages, and cumulative acks, also inside a batch. `ackstate redelivery` answers from the trace"
            " that the interceptor's files become. `ackstate pulsar record` polls the cluster once a second all the"
            " while, and `ackstate pulsar snapshot` looks just before each kill. All three are compared with the"
            " messages that the client receives.",
        )

    def run(self):
        """Run it."""
        with TemporaryDirectory() as directory:
            self._cluster.admin("persistent/public/default/kill-partitioned/partitions", method="PUT", body=2)
            recording = Path(directory, "recording")
            recorder = None
            number = 0
            try:
                for policy, settings in _POLICIES.items():
                    for _ in range(_KILLS_PER_POLICY):
                        self._cluster.stop_broker()
                        self._cluster.start_broker(**settings, **interceptor(directory, recording))
                        client = self._opened(number)
                        # It lists topics only once a minute.
                        recorder = recorder or self._start_recorder(Path(directory, "polls"))
                        self._kill(client)
                        self._last = policy
                        number += 1
                self._cluster.start_broker(**interceptor(directory, recording))
                with client_of(self._cluster) as client:
                    self._open(client, number)
                    time.sleep(15)
            finally:
                if recorder is not None:
                    recorder.send_signal(signal.SIGTERM)
                    recorder.wait(timeout=60)
            self._judge_polls(Path(directory, "polls"))
            self._judge_trace(Path(directory))
        return [self.section]

    def _start_recorder(self, trace):
        words = [
            "pulsar", "record", self._cluster.web_url, trace, "--metadata", f"zk:{self._cluster.hosts}",
            "--topics", "public/default/kill-*", "--every", "1s",
        ]  # fmt: skip
        return subprocess.Popen(
            [str(Path(sys.prefix, "bin", "ackstate")), *map(str, words)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def _opened(self, number):
        """Count the redelivery after the last kill, and publish; return the client."""
        client = pulsar.Client(
            self._cluster.service_url,
            operation_timeout_seconds=60,
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
        )
        if number:
            self._open(client, number)
        else:
            for each in self._traffic:
                each.open(client)
        for each in self._traffic:
            each.publish(client)
        return client

    def _kill(self, client):
        """Ack and kill."""
        begun_s = time.monotonic()
        for _ in range(self._rng.randrange(2, 6)):
            for each in self._traffic:
                each.ack(self._rng, self._rng.uniform(0.2, 0.6))
            time.sleep(self._rng.uniform(0.15, 0.9))
        # The recorder needs a poll after the last ack.
        time.sleep(max(2.5, 9 - (time.monotonic() - begun_s)) + self._rng.uniform(0, 1))
        self._snapshot = ackstate_json("pulsar", "snapshot", self._cluster.web_url, "--namespace", "public/default")
        self._killed_ms.append(time.time_ns() // 1_000_000)
        self._cluster.kill_broker()
        threading.Thread(target=client.close, daemon=True).start()

    def _open(self, client, number):
        snapshot = _bounds(self._snapshot)
        for each in self._traffic:
            entries = each.whole_entries(each.open(client))
            for topic in sorted({topic for topic, _ in each.names.values()}):
                where = f"kill {number}, {self._last}, {topic}"
                low, high = snapshot[topic]
                self.section.compare(
                    "snapshot: numbers of entries within the bounds", low <= entries[topic] <= high, True,
                    where=f"{where}: {entries[topic]} of {low} to {high}",
                )  # fmt: skip
                self._counted.setdefault(topic, []).append((where, entries[topic]))

    def _judge_polls(self, trace):
        """Compare what the trace of polls redelivers at each kill with the counts; a load that lost nothing is none."""
        checked = ackstate_json("trace", "check", trace)
        self.section.compare("recorder: events of a cursor that is one", checked["events"] > 0, True)
        ends_ms = [*self._killed_ms[1:], 1 << 62]
        for each in ackstate_json("redelivery", trace, "--engine", "local")["subscriptions"]:
            counted = self._counted[_short(each["topic"])]
            for (where, entries), begin_ms, end_ms in zip(counted, self._killed_ms, ends_ms, strict=True):
                found = [crash["at_crash"] for crash in each["crashes"] if begin_ms <= crash["ts_ms"] < end_ms]
                expected = [entries] if entries else []
                self.section.compare("recorder: crashes, and entries redelivered", found, expected, where=where)

    def _judge_trace(self, directory):
        """Compare the crashes of the trace converted from all recordings with the counts."""
        trace = directory / "trace"
        status, _, errors = ackstate("trace", "convert", directory / "recording", trace)
        checked = ackstate_json("trace", "check", trace)
        self.section.compare("interceptor: recordings without dropped events", checked["dropped_events"], 0)
        self.section.compare("interceptor: recordings converted into a trace", status, 0, where=errors)
        for topic, intervals in _at_crashes(trace).items():
            for (where, entries), (low, high) in zip(self._counted[topic], intervals, strict=False):
                self.section.compare(
                    "interceptor: entries redelivered by the trace", (low, high), (entries, entries), where=where
                )


def interceptor(directory, recording):
    """Return the settings of a broker that records into a directory."""
    return {
        "brokerInterceptors": "ackstate", "brokerInterceptorsDirectory": _ROOT / "interceptor" / "target",
        "narExtractionDirectory": Path(directory, "nar"), "ackstateRecorderDirectory": recording,
    }  # fmt: skip


def _bounds(snapshot):
    """Return the least and the most that a snapshot says, by topic."""
    return {_short(each["topic"]): (each["at_least"], each["comes_back"]) for each in snapshot["subscriptions"]}


def _at_crashes(trace):
    """Return the bounds at each crash of a trace, by topic."""
    found = ackstate_json("redelivery", trace, "--engine", "local")
    return {_short(each["topic"]): [_bounds_at(crash) for crash in each["crashes"]] for each in found["subscriptions"]}


def _bounds_at(crash):
    """Return the lowest and the highest number at a crash."""
    return crash["at_crash_if_written"], crash["at_crash"]


def _short(topic):
    return topic.rpartition("/")[2]
