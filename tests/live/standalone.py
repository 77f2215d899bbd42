"""The cursors of a standalone broker that is down, in its RocksDB."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from ackstate.cursor import CursorConfig, Format, ManagedCursor
from ackstate.cursor.store import StoreLockedError
from ackstate.stores.pulsar_cluster import open_cluster
from live.cluster import Standalone
from live.command import ackstate_json
from live.findings import Section
from live.messages import client_of, place_of, publish, receive, subscribe
from live.opening import full_name

_TOPIC, _COUNT, _TURNS = "down", 300, 3


class StandaloneMetadata:
    """The section; it starts a standalone broker of its own."""

    def __init__(self, _cluster):
        self._rng = random.Random(42)
        self._numbers, self._acked = {}, set()
        self.section = Section(
            "A standalone broker's RocksDB",
            "A standalone broker unloads a topic and is stopped. `inspect` reads the cursor from its metadata"
            " directory, and `ManagedCursor` opens it in place, acks, and closes it; then the broker is started and"
            " must know every ack and no other. While the broker runs its database is refused.",
        )

    def run(self):
        """Run it."""
        with TemporaryDirectory(prefix="ackstate-standalone-") as directory:
            broker = Standalone(Path(directory))
            try:
                broker.start()
                self._publish(broker)
                for turn in range(_TURNS):
                    self._turn(broker, turn)
            finally:
                broker.kill_broker()
        return [self.section]

    def _publish(self, broker):
        with client_of(broker) as client:
            subscribe(client, _TOPIC, "s").close()
            publish(client, _TOPIC, range(_COUNT))
            with closing(subscribe(client, _TOPIC, "s")) as consumer:
                self._numbers = {place_of(each)[0]: int(each.data()) for each in receive(consumer, _COUNT)}

    def _turn(self, broker, turn):
        where, url = f"turn {turn}", f"pulsar+rocksdb:{broker.metadata_directory}"
        self.section.refused(
            "databases of a running broker refused", StoreLockedError, lambda: open_cluster(url), where=where
        )
        broker.unload_namespace()
        broker.stop_broker()
        shown = ackstate_json("inspect", url, "--all-ranges")["cursors"]
        self.section.compare("cursors that inspect finds", [each["subscription"] for each in shown], ["s"], where=where)
        with closing(open_cluster(url)) as store:
            log = store.find_message_log(full_name(_TOPIC)).ledgers
            cursor = ManagedCursor.open(
                store, topic=full_name(_TOPIC), subscription="s", ledgers=log,
                config=CursorConfig(format=Format.PULSAR), now_ms=turn,
            )  # fmt: skip
            known = {number for position, number in self._numbers.items() if cursor.is_acked(position)}
            self.section.compare("states that we took over", known, self._acked, where=where)
            unacked = sorted(position for position, number in self._numbers.items() if number not in self._acked)
            chosen = sorted(self._rng.sample(unacked, 20))
            cursor.ack_many(chosen, now_ms=turn)
            cursor.close(now_ms=turn)
            self._acked |= {self._numbers[position] for position in chosen}
        broker.start()
        found = broker.internal_stats(_TOPIC)["cursors"]["s"]
        self.section.compare(
            "states that the broker took over", (found["markDeletePosition"], found["individuallyDeletedMessages"]),
            (str(cursor.mark_delete_position), str(cursor.deleted)), where=where,
        )  # fmt: skip
        with client_of(broker) as client, closing(subscribe(client, _TOPIC, "s")) as consumer:
            messages = receive(consumer, _COUNT - len(self._acked))
            got = {int(each.data()) for each in messages}
            self.section.compare("sets of messages received", got, set(range(_COUNT)) - self._acked, where=where)
            for message in self._rng.sample(messages, 15):
                consumer.acknowledge(message)
                self._acked.add(int(message.data()))
            time.sleep(0.5)
