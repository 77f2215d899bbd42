"""Export and import both ways, and their refusals."""

import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from live.command import ackstate, ackstate_json, started
from live.findings import Section
from live.messages import client_of, place_of, publish, receive, subscribe

_COUNT, _BATCH, _LONG = 600, 10, 40_000
_ODD = "move ü+%20~"


class Transfer:
    """`pulsar export` reads the subscriptions of live topics, with single messages and with partly acked batches.

    The file is imported through the live broker: under another name (a clone), and under its own after the subscription
    was deleted (a restore). A consumer of the copy must receive exactly the messages that the original has not acked.
    Imports are also killed with SIGKILL in the middle, and repeated.

    Args:
        cluster: A started cluster, without the topics.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self._url = f"pulsar+zk://{cluster.hosts}"
        self.section = Section("Export and import")

    def run(self):
        """Run it."""
        with TemporaryDirectory() as directory:
            self._cluster.admin("persistent/public/default/move-partitioned/partitions", method="PUT", body=2)
            for topic, batch in (("move", 0), ("move-batched", _BATCH), ("move-partitioned-partition-1", 0), (_ODD, 0)):
                self._move(Path(directory), topic, batch)
            self._interrupted(Path(directory))
            self._refusals(Path(directory))
        return [self.section]

    def _move(self, directory, topic, batch):
        file, clone = directory / f"{topic}.ack", "clone"
        if topic == _ODD:
            clone = "a/clone ü+%20~ \N{PARTY POPPER}'*"
        expected = self._original(topic, batch)
        name = f"persistent://public/default/{topic.removesuffix('-partition-1')}"
        found = ackstate_json("pulsar", "export", self._url, name, file, "--subscription", "s")
        self.section.compare("exports of one cursor", len(found["cursors"]), 1, where=topic)
        # Before the topic is unloaded: 4.2.4 then forgets which messages of a batch are acked.
        for _ in range(2):
            self._import(file, "--as", clone)
        self._received(topic, clone, "messages received of a clone", expected)
        self._cluster.admin(
            f"persistent/public/default/{quote(topic, safe='')}/subscription/s?force=true", method="DELETE"
        )
        self._import(file)
        self._received(topic, "s", "messages received of a restored subscription", expected)

    def _interrupted(self, directory):
        """Kill imports through the broker as soon as it has some acks, then repeat the import."""
        topic, file = "move-long", directory / "long.ack"
        with client_of(self._cluster) as client:
            subscribe(client, topic, "s").close()
            publish(client, topic, range(_LONG))
            with closing(subscribe(client, topic, "s")) as consumer:
                for message in receive(consumer, _LONG):
                    if int(message.data()) % 2:
                        consumer.acknowledge(message)
                time.sleep(1.5)
        ackstate_json("pulsar", "export", self._url, topic, file)
        for attempt in range(3):
            name = f"copy-{attempt}"
            words = ("pulsar", "import", file, self._cluster.service_url, "--as", name)
            with started(*words) as importing:
                while not (acked := self._range_count(topic, name)) and importing.poll() is None:
                    time.sleep(0.01)
                importing.kill()
            self.section.compare("imports killed in the middle", 0 < acked < _LONG // 2, True, where=f"{name}: {acked}")
            (imported,) = ackstate_json(*words, "--check", self._cluster.web_url)["cursors"]
            found = (imported["missing_acks"], imported["range_count"])
            self.section.compare("killed imports that were completed by another", found, (0, _LONG // 2), where=name)

    def _range_count(self, topic, name):
        cursor = self._cluster.internal_stats(topic)["cursors"].get(name)
        return cursor["totalNonContiguousDeletedMessagesRange"] if cursor else 0

    def _original(self, topic, batch):
        """Make a subscription with holes, and return the numbers that it has not acked."""
        with client_of(self._cluster) as client:
            for name in ("keeper", "s"):
                subscribe(client, topic, name).close()
            publish(client, topic, range(_COUNT), batch=batch)
            with closing(subscribe(client, topic, "s")) as consumer:
                messages = receive(consumer, _COUNT)
                acked = [each for each in messages if _is_to_be_acked(int(each.data()), batch)]
                for each in acked:
                    consumer.acknowledge(each)
                # The last acks are of whole entries, because 4.2.4 does not write one of a part alone.
                time.sleep(1.5)
            left = set(range(_COUNT)) - {int(each.data()) for each in acked}
            if batch:
                partly = {place_of(each)[0] for each in acked} & {
                    place_of(each)[0] for each in messages if int(each.data()) in left
                }
                self.section.compare("partly acked batches in the original", len(partly) > 0, True, where=topic)
            return left

    def _import(self, file, *options):
        words = (file, self._cluster.service_url, *options, "--check", self._cluster.web_url)
        (imported,) = ackstate_json("pulsar", "import", *words)["cursors"]
        self.section.compare("imports without a missing ack", imported["missing_acks"], 0)

    def _received(self, topic, name, what, expected):
        with client_of(self._cluster) as client, closing(subscribe(client, topic, name)) as consumer:
            got = [int(each.data()) for each in receive(consumer, len(expected))]
        self.section.compare(what, set(got), expected, where=f"{topic}, {name}")
        self.section.compare("copies without a message twice", len(got), len(set(got)), where=f"{topic}, {name}")

    def _refusals(self, directory):
        file = directory / "move.ack"
        damaged = directory / "damaged.ack"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        status, _, errors = ackstate("pulsar", "import", damaged, self._cluster.service_url)
        self.section.compare("damaged files refused", (status, "checksum" in errors), (2, True))
        other = directory / "other.ack"
        with client_of(self._cluster) as client:
            subscribe(client, "other", "s").close()
            publish(client, "other", range(_COUNT))
            with closing(subscribe(client, "other", "s")) as consumer:
                for each in receive(consumer, _COUNT)[::2]:
                    consumer.acknowledge(each)
                time.sleep(1.5)
        ackstate_json("pulsar", "export", self._url, "other", other)
        foreign = _renamed(other, "persistent://public/default/other", "persistent://public/default/move")
        status, _, errors = ackstate("pulsar", "import", foreign, self._cluster.service_url)
        self.section.compare(
            "files of another topic refused by the client",
            (status, "another topic" in errors or "recognises" in errors),
            (2, True),
            where=errors,
        )
        with client_of(self._cluster) as client, closing(subscribe(client, "move", "s")):
            status, _, errors = ackstate("pulsar", "import", file, self._cluster.service_url)
            self.section.compare(
                "subscriptions with consumers refused", (status, "has consumers" in errors), (2, True), where=errors
            )
        for path in ("etcd:127.0.0.1:2379", "pulsar+oxia://127.0.0.1:6648"):
            status, _, errors = ackstate("inspect", path)
            self.section.compare(
                "other metadata stores refused by name", (status, "is not supported" in errors), (2, True)
            )


def _renamed(file, old, new):
    """Return a file whose cursors belong to another topic, with the right checksum."""
    from dataclasses import replace

    from ackstate.analysis.pulsar import ack_state_file as files

    found = files.read_ack_states(file)
    cursors = tuple(replace(each, topic=each.topic.replace(old, new)) for each in found.cursors)
    path = file.with_name("foreign.ack")
    files.write_ack_states(path, replace(found, cursors=cursors))
    return path


def _is_to_be_acked(number, batch):
    """Tell which messages the original acks: in batches, some messages of each third one, and each fourth one whole."""
    if not batch:
        return number % 3 != 1 or number > _COUNT - 20
    entry, index = divmod(number, batch)
    return (entry % 3 == 0 and index % 2 == 1) or entry % 4 == 1
