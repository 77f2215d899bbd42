"""Kills a broker again and again, and compares what comes back with what `ackstate pulsar snapshot` said before."""

import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError

import pulsar

from ackstate.analysis.pulsar.durable import DurableReader
from ackstate.analysis.pulsar.history import cursor_history
from ackstate.analysis.pulsar.recorder import existing_entries, minus
from live.command import ackstate_json
from live.findings import Section
from live.java_process import JARS
from live.kills import crashes_of, recorded
from live.messages import place_of, publish, subscribe
from live.opening import opened
from live.transactions import Transactions

_TOPICS, _SUBSCRIPTIONS, _PUBLISHED = 12, 5, 120
_TRANSACTIONAL = "s4"
_KILLS_PER_POLICY = int(os.environ.get("KILLS") or 2)
_RANGE = re.compile(r"\((\d+):(-?\d+)\.\.(\d+):(-?\d+)\]")
_PLACE = re.compile(r"entry (\d+) of cursor ledger (\d+)")
_POLICIES = (
    {"managedLedgerDefaultMarkDeleteRateLimit": 1.0},
    {"managedLedgerDefaultMarkDeleteRateLimit": 10.0, "managedLedgerCursorPositionFlushSeconds": 1},
    {
        "managedLedgerDefaultMarkDeleteRateLimit": 1.0, "managedLedgerMaxUnackedRangesToPersist": 20,
        "managedLedgerPersistIndividualAckAsLongArray": "false",
        "managedLedgerUnackedRangesOpenCacheSetEnabled": "false",
    },
)  # fmt: skip


class Snapshots:
    """A broker is killed under each policy, after each subscription was moved in any of many ways.

    `ackstate pulsar snapshot` looks just before, once with the metadata and once without. Both are compared with the
    entries that were acked in the broker's memory and that its successor does not know, and with those that the client
    receives again. `ackstate pulsar record` polls all the while: it must list each kill and unload that lost acks, with
    their entries. What was durable at some moments of a broker's life is compared with the history of the cursor ledger
    after its death.

    Args:
        cluster: A started cluster, without the topics.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self._rng = random.Random(int(os.environ.get("SEED") or 46))
        self._consumers = {}  # (topic, subscription) -> its consumer
        self._lost = {name: [] for name in self._names()}  # for each kill or unload that lost acks, their entries
        self._states = {}  # (topic, subscription) -> what was durable at some moments of the life of the broker
        self._committed = {}  # (topic, subscription) -> entries acked in committed transactions since the last kill
        self._unacked = {}  # (topic, subscription) -> messages that came and were not acked by the client
        self.section = Section("A snapshot, and what comes back")

    def run(self):
        """Run it."""
        self._cluster.stop_broker()
        self._start(_POLICIES[0])
        self._opened().close()
        self._transactions.leave()
        with TemporaryDirectory() as directory:
            trace = Path(directory, "trace")
            with recorded(self._cluster, trace, "public/default/snapshot-*"):
                self._kill()
            found = crashes_of(trace)
        for (topic, subscription), lost in self._lost.items():
            named = [entries for _, entries in found.get((topic.rpartition("/")[2], subscription), ())]
            where = f"{topic}, {subscription}"
            if subscription == _TRANSACTIONAL:  # a recording counts the acks that the log restores
                continue
            self.section.compare("crashes of the recorder, with what came back", named, lost, where=where)
        return [self.section]

    def _kill(self):
        policies = [each for each in _POLICIES for _ in range(_KILLS_PER_POLICY)]
        with DurableReader(f"zk:{self._cluster.hosts}", class_path=str(JARS)) as reader:
            client = self._opened()
            for number, policy in enumerate(policies):
                self._use(client, reader)
                said = self._snapshot()
                bound = self._snapshot("--metadata", "none")
                before = self._acked()
                self._cluster.kill_broker()
                threading.Thread(target=client.close, daemon=True).start()
                self._transactions.leave()
                places = {name: state.version[1:] for name, state in self._look(reader).items()}
                with closing(opened(self._cluster, only_reads=True)) as store:
                    for name in self._names():
                        self._judge_history(store, f"kill {number}, {policy}", name)
                self._start(policies[min(number + 1, len(policies) - 1)])
                after = self._acked()
                client = self._opened(before)
                for name in self._names():
                    lost = before[name] - after[name]
                    self._note(name, lost)
                    where = f"kill {number}, {policy}, {name}: {len(lost)} of {len(before[name])} acked"
                    if name[1] == _TRANSACTIONAL:
                        self._judge_transactions(where, said[name], name)
                        continue
                    self.section.compare("entries that the client receives again", self._came[name], lost, where=where)
                    self._judge(where, said[name], bound[name]["comes_back"], places[name], len(lost))
            time.sleep(5)  # a poll after the last load
            client.close()
            self._transactions.leave()

    def _note(self, name, lost):
        if lost:
            self._lost[name].append({f"{ledger}:{entry}" for ledger, entry in lost})

    def _look(self, reader):
        """Note what is durable now, and return it."""
        states = reader.read(self._names())
        for name, state in states.items():
            self._states.setdefault(name, []).append(state)
        return states

    def _judge_history(self, store, where, name):
        told = cursor_history(store, *name, top=1 << 20)
        counts = store.find_message_log(name[0]).ledgers.counts()
        states = [each for each in self._states.pop(name) if each.version[1] == told.cursor_ledger_id]
        for before, after in pairwise(states):
            these, those = existing_entries(counts, before), existing_entries(counts, after)
            new, lost = (sum(map(len, each.values())) for each in (minus(those, these), minus(these, those)))
            between = [each for each in told.changes if before.version[2] < each.record <= after.version[2]]
            found = sum(each.acked - each.lost for each in between), not lost or any(each.why for each in between)
            self.section.compare("histories between two looks", found, (new - lost, True), where=f"{where}, {name}")

    def _start(self, policy):
        # A ledger is full soon, so that ranges cross ledgers, and ledgers are trimmed.
        transactions = dict.fromkeys(("transactionCoordinatorEnabled", "systemTopicEnabled"), "true")
        self._cluster.start_broker(**policy, **transactions, managedLedgerMaxEntriesPerLedger=70)

    def _names(self):
        topics = [f"persistent://public/default/snapshot-{number}" for number in range(_TOPICS)]
        return [(topic, f"s{number}") for topic in topics for number in range(_SUBSCRIPTIONS)]

    def _judge(self, where, said, bound, place, lost):
        compare = self.section.compare
        where = f"{where}, said {said['at_least']} to {said['comes_back']}, without metadata {bound}"
        compare("bounds without metadata that are high enough", lost <= bound, True, where=where)
        found = _PLACE.search(said["why"])
        if place == ((int(found[2]), int(found[1])) if found else (-1, -1)):
            compare("snapshots of quiet subscriptions that are one number", said["is_exact"], True, where=where)
            compare("numbers that are exact", said["comes_back"], lost, where=where)
        else:
            # A flush came between the snapshot and the kill.
            compare("numbers before another write", lost <= said["comes_back"], True, where=where)

    def _judge_transactions(self, where, said, name):
        came, committed = self._came[name], self._committed.pop(name, set())
        where = f"{where}, {len(came)} came, said {said['at_least']} to {said['comes_back']}"
        is_bounded = said["at_least"] <= len(came) <= said["comes_back"]
        self.section.compare("acks of committed transactions that came again", came & committed, set(), where=where)
        self.section.compare("bounds with transactions", is_bounded, True, where=where)

    def _snapshot(self, *words):
        answer = ackstate_json("pulsar", "snapshot", self._cluster.web_url, "--namespace", "public/default", *words)
        return {(each["topic"], each["subscription"]): each for each in answer["subscriptions"]}

    def _opened(self, before=None):
        """Open all consumers, and receive all that is not acked; note which of the entries acked before have come."""
        client = pulsar.Client(
            self._cluster.service_url, operation_timeout_seconds=60,
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
        )  # fmt: skip
        self._consumers = {name: subscribe(client, *name) for name in self._names()}
        transactional = [name for name in self._names() if name[1] == _TRANSACTIONAL]
        self._transactions = Transactions(self._cluster, transactional)
        self._unacked = {name: {} for name in self._consumers}
        self._receive()
        self._came = {name: {*self._unacked[name]} & (before or {}).get(name, set()) for name in self._consumers}
        return client

    def _receive(self):
        with ThreadPoolExecutor(len(self._consumers)) as threads:
            for name, messages in zip(self._consumers, threads.map(_received, self._consumers.values()), strict=True):
                self._unacked[name] |= messages

    def _use(self, client, reader):
        """Publish, ack, and move each subscription in some way."""
        self._look(reader)
        for number in range(_TOPICS):
            publish(client, f"persistent://public/default/snapshot-{number}", range(_PUBLISHED))
        self._receive()
        for name in self._names():
            for _ in range(self._rng.randrange(1, 4)):
                self._move(name)
            if self._rng.random() < 0.1:
                self._look(reader)
        time.sleep(3)  # a seek and a load between the same two polls look like a crash
        for topic in {topic for topic, _ in self._names()}:
            if self._rng.random() < 0.2:
                before = self._acked()
                self._cluster.unload(topic.rpartition("/")[2])
                after = self._acked()
                for name in self._names():  # those beyond the limit on ranges
                    self._note(name, before[name] - after[name])
        time.sleep(self._rng.uniform(2, 4))
        self._look(reader)
        for name in self._names():
            if self._rng.random() < 0.7:
                self._ack(name)
        time.sleep(2.5)

    def _move(self, name):
        topic, subscription = name
        how = self._rng.choice(["ack", "ack", "ack", "cumulative", "skip", "skip_all", "expire", "reset"])
        path = f"persistent/public/default/{topic.rpartition('/')[2]}/subscription/{subscription}"
        if how == "ack":
            self._ack(name)
        elif how == "cumulative" and self._unacked[name]:
            self._ack(name, step=1)
        elif how == "skip":
            self._cluster.admin(f"{path}/skip/{self._rng.randrange(1, 40)}", method="POST")
        elif how == "skip_all" and self._rng.random() < 0.5:
            self._cluster.admin(f"{path}/skip_all", method="POST")
        elif how == "expire":
            with suppress(HTTPError):  # nothing is that old
                self._cluster.admin(f"{path}/expireMessages/{self._rng.randrange(1, 30)}", method="POST")
        elif how == "reset" and self._rng.random() < 0.3:
            self._cluster.admin(f"{path}/resetcursor/{time.time_ns() // 10**6 - 20_000}", method="POST")

    def _ack(self, name, step=0):
        held = self._unacked[name]
        step = step or self._rng.choice([2, 3, 7])
        places = [place for place in sorted(held)[: self._rng.randrange(1, 90)] if place[1] % step == 0]
        how = self._rng.choice(["", "commit", "commit", "abort"])
        if name[1] == _TRANSACTIONAL and self._rng.random() < 0.7:
            if self._transactions.ack(name, places, how) and how == "commit":
                self._committed.setdefault(name, set()).update(places)
            for place in places:  # without a commit they come again
                del held[place]
            return
        for place in places:
            with suppress(pulsar.PulsarException):  # disconnected by a seek or an unload
                self._consumers[name].acknowledge(held.pop(place))

    def _acked(self):
        """Return the acked entries of each subscription in the broker's memory, of ledgers that exist."""
        found = {}
        for topic in sorted({topic for topic, _ in self._names()}):
            stats = self._cluster.internal_stats(topic.rpartition("/")[2])
            counts = {each["ledgerId"]: each["entries"] for each in stats["ledgers"]}
            counts[max(counts)] = stats["currentLedgerEntries"]
            for name, cursor in stats["cursors"].items():
                found[topic, name] = _entries(cursor, counts)
        return found


def _received(consumer):
    """Return what a consumer receives, by place, until nothing comes for a while."""
    found, quiet = {}, 0
    while quiet < 4:
        try:
            message = consumer.receive(1_000)
        except pulsar.Timeout:
            quiet += 1
            continue
        found[tuple(place_of(message)[0])] = message
        quiet = 0
    return found


def _entries(cursor, counts):
    """Return the acked entries of a cursor as (ledger, entry)."""
    everything = [(ledger, entry) for ledger, count in sorted(counts.items()) for entry in range(count)]
    below = tuple(map(int, cursor["markDeletePosition"].split(":")))
    ranges = [(-1, -1, *below)]
    ranges += [tuple(map(int, each)) for each in _RANGE.findall(cursor["individuallyDeletedMessages"])]
    return {place for place in everything if any(lower[:2] < place <= lower[2:] for lower in ranges)}
