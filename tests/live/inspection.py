"""`inspect`, `fsck` and `explain` on a live cluster, beside the broker's own statistics; nothing is changed."""

import time
from contextlib import closing

import pulsar
from kazoo.client import KazooClient

from ackstate import Position
from java_server import listens
from live.command import ackstate, ackstate_json
from live.findings import Section
from live.java_process import release
from live.messages import client_of, publish, receive, subscribe

_TOPICS = {"inspect-a": (400, 2), "inspect-b": (600, 3), "inspect-c": (300, 7)}  # messages, and which are not acked
_SUBSCRIPTIONS = ("s1", "s2")


class Inspection:
    """The commands read a cluster whose topics are loaded and have consumers.

    The version of every node of the cursors and of BookKeeper's ledgers is the same before and after, and the broker
    continues to append to the same cursor ledgers: nothing was written, and nothing fenced.

    Args:
        cluster: A started cluster, without the topics.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self.section = Section(
            "`inspect`, `fsck`, `explain`, `pulsar history` and `pulsar snapshot` beside `internalStats`"
        )

    def run(self):
        """Run it."""
        url = f"pulsar+zk://{self._cluster.hosts}"
        with client_of(self._cluster) as client:
            consumers = [self._consumed(client, topic, name) for topic in _TOPICS for name in _SUBSCRIPTIONS]
            time.sleep(1.5)
            before, stats = self._versions(), self._stats()
            inspected = [ackstate_json("inspect", f"{url}/public/default/{topic}", "--all-ranges") for topic in _TOPICS]
            explained = [ackstate_json("explain", f"{url}/public/default/{topic}") for topic in _TOPICS]
            self._compare_history(url, stats)
            snapshot = ackstate_json("pulsar", "snapshot", self._cluster.web_url, "--namespace", "public/default")
            status, _, errors = ackstate("fsck", f"{url}/public/default")
            self.section.compare("exit statuses of fsck", (status, errors), (0, ""))
            self.section.compare("versions of all nodes before and after", self._versions(), before)
            for each in snapshot["subscriptions"]:
                said, where = (each["comes_back"], each["is_exact"]), f"{each['topic']}, {each['subscription']}"
                self.section.compare("snapshots that find every ack durable", said, (0, True), where=where)
            self._compare(inspected, explained, stats)
            self._without_a_bookie(url, stats)
            self._continue(consumers, stats)
            self._seek(url, client)
            if release() >= "5.0.1":
                self._segment(url, client)
        return [self.section]

    def _consumed(self, client, topic, name):
        """Return a consumer that has acked some messages, and one that it has not."""
        count, step = _TOPICS[topic]
        consumer = subscribe(client, topic, name)
        if name == _SUBSCRIPTIONS[0]:
            subscribe(client, topic, _SUBSCRIPTIONS[1]).close()
            publish(client, topic, range(count), batch=0)
        messages = sorted(receive(consumer, count), key=lambda each: int(each.data()))
        for number, message in enumerate(messages):
            if number % step:
                consumer.acknowledge(message)
        return topic, name, consumer, messages[step]

    def _stats(self):
        return {topic: self._cluster.internal_stats(topic)["cursors"] for topic in _TOPICS}

    def _compare(self, inspected, explained, stats):
        for topic, answer, explanation in zip(_TOPICS, inspected, explained, strict=True):
            self.section.compare("numbers of cursors", len(answer["cursors"]), len(stats[topic]), where=topic)
            for cursor, reasons in zip(answer["cursors"], explanation["cursors"], strict=True):
                name = cursor["subscription"]
                found, state, where = stats[topic][name], cursor["state"], f"{topic}, {name}"
                ranges = ",".join(
                    f"({each['ledger_id']}:{each['first'] - 1}..{each['ledger_id']}:{each['last']}]"
                    for each in state["ranges"]
                )
                compare = self.section.compare
                compare("mark-delete positions", cursor["mark_delete"], found["markDeletePosition"], where=where)
                compare("lists of ranges", f"[{ranges}]", found["individuallyDeletedMessages"], where=where)
                compare("cursor ledgers", cursor["cursor_ledger_id"], found["cursorLedger"], where=where)
                count, _ = _TOPICS[topic]
                backlog = count - state["entry_count"] - (Position.parse(cursor["mark_delete"]).entry_id + 1)
                compare("backlogs", reasons["backlog"], backlog, where=where)
                first = _first_unacked(found)
                compare("messages that hold back the mark-delete", reasons["holes"][0]["first"], first, where=where)
                compare("ages of that message that are known", reasons["holes"][0]["age_ms"] > 0, True, where=where)

    def _compare_history(self, url, stats):
        for topic, cursors in stats.items():
            for name in _SUBSCRIPTIONS:
                told = ackstate_json("pulsar", "history", url, f"persistent://public/default/{topic}", name)
                found = (told["cursor_ledger_id"], told["record_count"], told["last"]["mark_delete"], told["lost"])
                theirs = (cursors[name]["cursorLedger"], cursors[name]["cursorLedgerLastEntry"] + 1)
                expected = (*theirs, cursors[name]["markDeletePosition"], 0)
                self.section.compare("histories of cursor ledgers", found, expected, where=f"{topic}, {name}")
                ranges = cursors[name]["totalNonContiguousDeletedMessagesRange"]
                self.section.compare("holes in a history", told["hole_count"], ranges, where=f"{topic}, {name}")

    def _seek(self, url, client):
        """Seek back, and read the loss in the history."""
        topic, name = next(iter(_TOPICS)), _SUBSCRIPTIONS[0]
        with closing(subscribe(client, topic, name)) as consumer:
            first = receive(consumer, 1)[0]
            consumer.acknowledge(first)  # a seek that leaves the mark-delete position is told from a cut by nothing
            time.sleep(1.5)
            consumer.seek(pulsar.MessageId.earliest)
            time.sleep(2)
            receive(consumer, _TOPICS[topic][0])
            consumer.acknowledge(first)
            time.sleep(1.5)
        told = ackstate_json("pulsar", "history", url, f"persistent://public/default/{topic}", name)
        whys = {each["why"] for each in told["changes"]} - {""}
        self.section.compare("seeks that a history shows", (told["lost"] > 0, whys), (True, {"reset"}), where=topic)

    def _segment(self, url, client):
        """Read a segment of a scalable topic."""
        self._cluster.admin("scalable/public/default/scalable?numInitialSegments=1", method="PUT")
        zookeeper = KazooClient(self._cluster.hosts)
        zookeeper.start(timeout=30)
        (name,) = zookeeper.get_children("/managed-ledgers/public/default/segment/scalable")
        zookeeper.stop()
        topic = f"segment://public/default/scalable/{name}"
        with closing(subscribe(client, topic, "s")) as consumer:
            publish(client, topic, range(50))
            for message in receive(consumer, 50):
                if int(message.data()) % 2:
                    consumer.acknowledge(message)
            time.sleep(1.5)
            told = ackstate_json("pulsar", "history", url, topic, "s")
        self.section.compare("holes of a segment", (told["hole_count"], told["lost"]), (25, 0), where=topic)

    def _without_a_bookie(self, url, stats):
        """Inspect once more while one bookie is dead."""
        if len(self._cluster.bookies) < 3:
            return
        bookie = self._cluster.bookies[0]
        bookie.kill()
        for topic in _TOPICS:
            for cursor in ackstate_json("inspect", f"{url}/public/default/{topic}")["cursors"]:
                found, where = stats[topic][cursor["subscription"]], f"{topic}, {cursor['subscription']}"
                shown = (cursor["mark_delete"], cursor["range_count"])
                theirs = (found["markDeletePosition"], found["totalNonContiguousDeletedMessagesRange"])
                self.section.compare("states read while one of three bookies is dead", shown, theirs, where=where)
        bookie.start(lambda: listens(bookie.port))

    def _continue(self, consumers, stats):
        """Let the broker append to its cursor ledgers once more."""
        for _, _, consumer, message in consumers:
            consumer.acknowledge(message)
        time.sleep(1.5)
        after = self._stats()
        for topic, name, consumer, _ in consumers:
            old, new = stats[topic][name], after[topic][name]
            grown = (
                new["cursorLedger"] == old["cursorLedger"]
                and new["cursorLedgerLastEntry"] > old["cursorLedgerLastEntry"]
            )
            self.section.compare("cursor ledgers that the broker continues", grown, True, where=f"{topic}, {name}")
            consumer.close()

    def _versions(self):
        """Return path -> transaction of the last change, of the cursors and BookKeeper's ledgers."""
        zookeeper = KazooClient(self._cluster.hosts)
        zookeeper.start(timeout=30)
        found = {}
        with closing(zookeeper):
            paths = ["/managed-ledgers", "/ledgers"]
            for path in paths:
                _, stat = zookeeper.get(path)
                found[path] = (stat.mzxid, stat.cversion)
                paths += [f"{path}/{name}" for name in zookeeper.get_children(path)]
            zookeeper.stop()
        return found


def _first_unacked(stats):
    """Return the first unacked message of a topic of one ledger, by the broker's statistics."""
    ledger_id, entry_id = Position.parse(stats["markDeletePosition"])
    return str(Position(ledger_id, entry_id + 1))
