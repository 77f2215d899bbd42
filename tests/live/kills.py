"""Kills a broker, and compares the redelivery with the interceptor's trace, the recorder of polls and snapshots."""

import os
import random
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pulsar

from ackstate.analysis.trace.events import EventKind
from live.command import ackstate, ackstate_json, started
from live.findings import Section
from live.messages import client_of
from live.traffic import MESSAGE_BYTES_MAX, SCENARIOS, KillTraffic
from trace_files import read_back

_ROOT = Path(__file__).parents[2]
_KILLS_PER_POLICY = int(os.environ.get("KILLS") or 10)
_IN_TRAFFIC_S = 0.3  # acks so late may still be in the client, in the broker's queue or with the interceptor
_BETWEEN_POLLS_S = 2.5
_POLICIES = {
    "Pulsar's default": {"managedLedgerDefaultMarkDeleteRateLimit": 1.0},
    "10 writes a second, flushed every second, with deduplication and ledgers of 70 entries": {
        "managedLedgerDefaultMarkDeleteRateLimit": 10.0, "managedLedgerCursorPositionFlushSeconds": 1,
        "managedLedgerMaxEntriesPerLedger": 70, "brokerDeduplicationEnabled": "true",
    },
    "at most 20 ranges, flushed every 3 s": {
        "managedLedgerDefaultMarkDeleteRateLimit": 1.0, "managedLedgerCursorPositionFlushSeconds": 3,
        "managedLedgerMaxUnackedRangesToPersist": 20, "managedLedgerPersistIndividualAckAsLongArray": "false",
    },
}  # fmt: skip


class BrokerKills:
    """A broker with the interceptor is killed under each policy, every second time in the middle of acks and messages.

    `ackstate redelivery` answers from the trace that the interceptor's files become; `ackstate pulsar record` polls the
    cluster once a second all the while. Both must list every crash that lost acks, and no other, and name the entries
    that the client receives again, but for acks of the last moment. `ackstate pulsar snapshot` looks just before each
    quiet kill: its one number must be theirs.

    Args:
        cluster: A started cluster, without the topics.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self._rng = random.Random(int(os.environ.get("SEED") or 26))
        self._traffic = [KillTraffic(scenario) for scenario in SCENARIOS]
        self._last = self._snapshot = None  # the policy of the last kill; the snapshot before it if it was quiet
        self._killed_ms = []  # of each kill, before it
        self._came = {}  # topic -> for each kill, the entries that came, and when they were acked
        self.section = Section("Redelivery of a killed broker")

    def run(self):
        """Run it."""
        with TemporaryDirectory() as directory:
            self._cluster.admin("persistent/public/default/kill-partitioned/partitions", method="PUT", body=2)
            recording, polls = Path(directory, "recording"), Path(directory, "polls")
            settings = interceptor(directory, recording) | {"maxMessageSize": MESSAGE_BYTES_MAX}
            policies = [policy for policy in _POLICIES for _ in range(_KILLS_PER_POLICY)]
            self._cluster.stop_broker()
            self._cluster.start_broker(**_POLICIES[policies[0]], **settings)
            with client_of(self._cluster) as client:
                for each in self._traffic:
                    each.open(client)
            # It lists topics only once a minute.
            with recorded(self._cluster, polls, "public/default/kill-*"):
                for number, policy in enumerate(policies):
                    if number:
                        self._cluster.start_broker(**_POLICIES[policy], **settings)
                    self._kill(self._opened(number), in_traffic=number % 2 == 1)
                    self._last = policy
                self._cluster.start_broker(**settings)
                with client_of(self._cluster) as client:
                    self._open(client, len(policies))
                    time.sleep(15)
            self._judge("recorder", polls, _BETWEEN_POLLS_S)
            trace = Path(directory, "trace")
            status, _, errors = ackstate("trace", "convert", recording, trace)
            self.section.compare("interceptor: recordings converted into a trace", status, 0, where=errors)
            self._judge("interceptor", trace, _IN_TRAFFIC_S)
        return [self.section]

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
            if each.scenario.is_compacted:
                self._cluster.admin(f"persistent/public/default/{each.scenario.topic}/compaction", method="PUT")
        return client

    def _kill(self, client, *, in_traffic):
        """Ack and kill."""
        begun_s = time.monotonic()
        for _ in range(self._rng.randrange(2, 6)):
            for each in self._traffic:
                each.ack(self._rng, self._rng.uniform(0.2, 0.6))
            time.sleep(self._rng.uniform(0.15, 0.9))
        for each in self._traffic:
            each.replace_consumer(client)
        # The recorder needs a poll after the last ack.
        time.sleep(max(2.5, 9 - (time.monotonic() - begun_s)) + self._rng.uniform(0, 1))
        self._snapshot = None
        if in_traffic:
            producers = [each for each in (one.other_producer(client) for one in self._traffic) if each]
            killing = threading.Timer(self._rng.uniform(1, 3), self._die)
            killing.start()
            while killing.is_alive():
                for producer in producers:
                    with suppress(pulsar.PulsarException):  # the broker is dead
                        producer.send_async(b"", lambda *_: None, partition_key="0")
                for each in self._traffic:
                    each.ack(self._rng, self._rng.uniform(0.02, 0.1))
                time.sleep(0.05)
            killing.join()
        else:
            words = ("pulsar", "snapshot", self._cluster.web_url, "--namespace", "public/default")
            self._snapshot = ackstate_json(*words)
            self._die()
        threading.Thread(target=client.close, daemon=True).start()

    def _die(self):
        self._killed_ms.append(time.time_ns() // 1_000_000)
        self._cluster.kill_broker()

    def _open(self, client, number):
        for each in self._traffic:
            found = each.whole_entries(each.open(client))
            for topic, entries in sorted(found.items()):
                where = f"kill {number}, {self._last}, {topic}"
                self._came.setdefault(topic, []).append((where, entries))
                if self._snapshot is None:
                    continue
                said = [
                    (one["at_least"], one["comes_back"])
                    for one in self._snapshot["subscriptions"]
                    if (_short(one["topic"]), one["subscription"]) == (topic, "s")
                ]
                count = len(entries)
                self.section.compare("snapshot: numbers of quiet kills", said, [(count, count)], where=where)

    def _judge(self, source, trace, late_s):
        """Compare the crashes of a trace, and the entries that each names, with what came back after each kill."""
        compare = self.section.compare
        checked = ackstate_json("trace", "check", trace)
        compare(
            f"{source}: traces without dropped events", (checked["events"] > 0, checked["dropped_events"]), (True, 0)
        )
        numbers = {
            _short(each["topic"]): [(one["at_crash_if_written"], one["at_crash"]) for one in each["crashes"]]
            for each in ackstate_json("redelivery", trace, "--engine", "local")["subscriptions"]
            if each["subscription"] == "s"
        }
        crashes = crashes_of(trace)
        ends_ms = [*self._killed_ms[1:], 1 << 62]
        for topic, came in self._came.items():
            listed = {}  # kill -> the entries named, and the numbers, of its crash
            for (ts_ms, named), bounds in zip(crashes.get((topic, "s"), ()), numbers[topic], strict=True):
                kill = next((kill for kill, end_ms in enumerate(ends_ms) if ts_ms < end_ms - 500), None)
                compare(
                    f"{source}: crashes that are kills, once each", kill is None or kill in listed, False, where=topic
                )
                listed[kill] = named, bounds
            for kill, (where, entries) in enumerate(came):
                named, bounds = listed.get(kill, (set(), (0, 0)))
                killed_s = self._killed_ms[kill] / 1_000
                missing = [killed_s - acked_s for entry, acked_s in entries.items() if entry not in named]
                found = (len(named - entries.keys()), [round(each, 3) for each in missing if each > late_s])
                compare(f"{source}: entries named that came, and no other missing", found, (0, []), where=where)
                if source == "interceptor" and kill % 2:
                    # A record of the last moment may have made some of them durable.
                    found = len(named) <= bounds[1]
                    compare(f"{source}: numbers under traffic that are high enough", found, True, where=where)
                    if bounds != (len(named),) * 2:
                        self.section.notes.append(f"{where}: {bounds} instead of {len(named)}")
                else:
                    compare(f"{source}: numbers of what is named", bounds, (len(named),) * 2, where=where)


@contextmanager
def recorded(cluster, trace, topics):
    """Poll topics of a cluster once a second, into a trace."""
    words = [
        "pulsar", "record", cluster.web_url, trace, "--metadata", f"zk:{cluster.hosts}", "--topics", topics,
        "--every", "1s",
    ]  # fmt: skip
    recorder = started(*words)
    try:
        yield
    finally:
        assert recorder.poll() is None, "the recorder has ended"
        recorder.send_signal(signal.SIGTERM)
        recorder.wait(timeout=60)


def crashes_of(trace):
    """Return (topic, subscription) -> the crashes of a trace: when, and the entries that came back."""
    found = {}
    for (topic, subscription), events in read_back(trace).items():
        crashes, named = found.setdefault((_short(topic), subscription), []), set()
        for event in events:
            if event.kind is EventKind.CRASH:
                named = set()
                crashes.append((event.ts_ms, named))
            elif event.kind is EventKind.RESET:
                named = set()
            elif event.kind is EventKind.REDELIVER:
                named |= {f"{event.ledger_id}:{entry}" for entry in range(event.first_entry, event.last_entry + 1)}
    return found


def interceptor(directory, recording):
    """Return the settings of a broker that records into a directory."""
    return {
        "brokerInterceptors": "ackstate", "brokerInterceptorsDirectory": _ROOT / "interceptor" / "target",
        "narExtractionDirectory": Path(directory, "nar"), "ackstateRecorderDirectory": recording,
    }  # fmt: skip


def _short(topic):
    return topic.rpartition("/")[2]
