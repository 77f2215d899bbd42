"""A broker opens states that we wrote in place, and we open the states that the broker wrote."""

import random
import time
from contextlib import closing
from itertools import pairwise

from ackstate import ManagedCursor, Position
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import Recovery
from ackstate.stores.pulsar import TopicOwnedError, hold_topic, open_cluster
from ackstate.topic.subscriptions import stored_subscriptions
from ackstate.topic_name import persistence_name
from live.findings import Section
from live.java_process import release
from live.messages import client_of, place_of, publish, receive, subscribe
from live.states import all_states, nothing, seeded

JARS_VARIABLE = "ACKSTATE_BOOKKEEPER_CLASSPATH"
_ACKED_BY_CLIENT = 10
_FREE_WITHIN_S = 60
COUNTS = {"single": 900, "many": 600, "batched": 600}
BATCH = 10


def opened(cluster, *, only_reads=False):
    """Open the cluster's cursors."""
    return open_cluster(f"pulsar+zk://{cluster.hosts}", only_reads=only_reads)


def full_name(topic):
    """Return the whole name of a topic of `public/default`."""
    return f"persistent://public/default/{topic}"


class HeldTopic:
    """Holds a topic as soon as no broker owns it."""

    def __init__(self, store, topic):
        self._store, self._topic = store, full_name(topic)

    def __enter__(self):
        deadline_s = time.monotonic() + _FREE_WITHIN_S
        while True:
            try:
                self._held = hold_topic(self._store.nodes, self._topic)
                return self._held.__enter__()
            except TopicOwnedError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.1)

    def __exit__(self, *error):
        return self._held.__exit__(*error)


def publish_topics(cluster):
    """Publish the topics, and return for each of them where each number is."""
    places = {}
    with client_of(cluster) as client:
        subscribe(client, "single", "seed").close()
        publish(client, "single", range(COUNTS["single"]))
    cluster.stop_broker()
    cluster.start_broker(managedLedgerMaxEntriesPerLedger=50)
    with client_of(cluster) as client:
        for topic, batch in (("many", 0), ("batched", BATCH)):
            subscribe(client, topic, "seed").close()
            publish(client, topic, range(COUNTS[topic]), batch=batch)
        for topic, count in COUNTS.items():
            with closing(subscribe(client, topic, "seed")) as consumer:
                places[topic] = {int(each.data()): place_of(each) for each in receive(consumer, count)}
            assert len(places[topic]) == count
    return places


class OpensOurs:
    """`ManagedCursor` creates the cursors in place, in Pulsar's layout, while no broker owns the topics.

    Then the broker loads them: its `internalStats` are compared with the bytes that we wrote, and the messages that a
    consumer receives with those that these bytes leave unacked. A client acks more messages of each subscription; when
    the broker has unloaded the topics, and so written its cursors, we read the unacked messages of each of them.

    Args:
        cluster: A started cluster, without the topics.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self._places = {}
        self._written = {}  # (topic, subscription) -> mark-delete, deleted, batch, in_record
        self._unacked = {}  # (topic, subscription) -> numbers that no one has acked
        self.opens = Section("The broker opens our states")
        self.reads = Section("We open the states of the broker")

    def run(self):
        """Run both."""
        self._places = publish_topics(self._cluster)
        self._cluster.unload_namespace()
        with closing(opened(self._cluster)) as store:
            for topic in COUNTS:
                with HeldTopic(store, topic):
                    self._write(store, topic)
        answers = {topic: self._cluster.internal_stats(topic) for topic in COUNTS}
        stats = {topic: answer["cursors"] for topic, answer in answers.items()}
        self._moved = {topic: _ledger_ends(answer) for topic, answer in answers.items()}
        with client_of(self._cluster) as client:
            for (topic, name), written in self._written.items():
                self._compare(client, topic, name, written, stats[topic])
        time.sleep(1)
        with closing(opened(self._cluster, only_reads=True)) as store:
            # 4.2.4 writes a lone ack of a part of a batch only when it closes the cursor.
            for topic in ("single", "many"):
                self._read_back(store, topic, "a loaded topic")
            self._cluster.unload_namespace()
            for topic in COUNTS:
                self._read_back(store, topic, "an unloaded topic")
        return [self.opens, self.reads]

    def _write(self, store, topic):
        log = store.find_message_log(full_name(topic)).ledgers
        entries = sorted({place for place, _ in self._places[topic].values()})
        # Sealing seals all ledgers that were written so far.
        for state in sorted(all_states(), key=lambda state: state.place == "unclosed"):
            if state.topic != topic:
                continue
            cursor = ManagedCursor.open(
                store, topic=full_name(topic), subscription=state.name, ledgers=log, config=state.config(), now_ms=0
            )
            state.acks(cursor, entries, seeded(state))
            if state.place == "record":
                cursor.close(now_ms=2)
            else:
                cursor.persist(now_ms=2)
            if state.place == "ledger":
                store.ledgers.seal()
            found = Recovery(store, cursor_path(full_name(topic), state.name), log).find(())
            content = found.recovered.content
            in_record = found.record.cursor_ledger_id is None
            is_meant = state.place == "record" or state.acks is nothing  # which needs no cursor ledger
            self.opens.compare("states in the place that is meant", in_record, is_meant, where=state.name)
            has_limit = "limit" in state.name
            where = f"{topic}, {state.name}"
            if not has_limit:
                self.opens.compare(
                    "states read back by us at once",
                    (content.mark_delete, str(content.deleted)), (cursor.mark_delete_position, str(cursor.deleted)),
                    where=where,
                )  # fmt: skip
            self._written[topic, state.name] = (content.mark_delete, content.deleted, content.batch, in_record)

    def _compare(self, client, topic, name, written, stats):
        mark_delete, deleted, batch, in_record = written
        where = f"{topic}, {name}"
        found = stats.get(persistence_name(name))
        if not self.opens.compare("subscriptions that the broker has", found is not None, True, where=where):
            return
        # A broker moves a mark-delete position at the end of a ledger to the next ledger.
        moved = str(self._moved[topic].get(mark_delete))
        has_moved = found["markDeletePosition"] == moved
        what = "mark-delete positions" + has_moved * ", moved from the end of a ledger to the next"
        self.opens.compare(what, found["markDeletePosition"], moved if has_moved else str(mark_delete), where=where)
        self.opens.compare("lists of ranges", found["individuallyDeletedMessages"], str(deleted), where=where)
        known = {} if in_record and release() < "5.0.1" else batch  # see docs/evidence.md
        expected = {
            number
            for number, (place, index) in self._places[topic].items()
            if not (place <= mark_delete or place in deleted) and _is_unacked(known.get(place), index)
        }
        with closing(subscribe(client, topic, name)) as consumer:
            messages = receive(consumer, len(expected))
            got = [int(each.data()) for each in messages]
            self.opens.compare("sets of messages received", set(got), expected, where=where)
            self.opens.compare("subscriptions without a message twice", len(got), len(set(got)), where=where)
            chosen = random.Random(where).sample(messages, min(_ACKED_BY_CLIENT, len(messages)))
            for message in chosen:
                consumer.acknowledge(message)
            time.sleep(0.25)
        self._unacked[topic, name] = set(got) - {int(each.data()) for each in chosen}

    def _read_back(self, store, topic, when):
        log = store.find_message_log(full_name(topic)).ledgers
        there = {each.name: each for each in stored_subscriptions(store, full_name(topic), ledgers=log)}
        for (of, name), unacked in self._unacked.items():
            if of != topic:
                continue
            where = f"{topic}, {name}"
            problem = there[name].problem if name in there else "not listed"
            self.reads.compare("subscriptions without a problem", problem, None, where=where)
            found = Recovery(store, cursor_path(full_name(topic), name), log).find(())
            mark_delete, deleted, batch, *_ = found.recovered.content
            expected = {
                number
                for number, (place, index) in self._places[topic].items()
                if not (place <= mark_delete or place in deleted) and _is_unacked(batch.get(place), index)
            }
            kind = "in the record" if found.record.cursor_ledger_id is None else "in a cursor ledger"
            self.reads.compare(f"sets of unacked messages of {when}, state {kind}", expected, unacked, where=where)


def _ledger_ends(stats):
    """Return the last entry of each ledger that another follows -> the position before the first entry of that."""
    counts = {each["ledgerId"]: each["entries"] for each in stats["ledgers"]}
    return {Position(lower, counts[lower] - 1): Position(upper, -1) for lower, upper in pairwise(sorted(counts))}


def _is_unacked(words, index):
    """Return whether a message of an entry is unacked, by the words of a partly acked batch if it is one."""
    if words is None or index < 0:
        return True
    return index // 64 < len(words) and words[index // 64] >> index % 64 & 1 == 1
