"""One cursor, two owners in turn: a broker, which is unloaded, stopped or killed, and `ManagedCursor`."""

import random
import time
from contextlib import closing

from ackstate import AckStateError, CursorConfig, Format, ManagedCursor
from ackstate.wire.pulsar import RangeForm
from live.findings import Section
from live.messages import client_of, place_of, publish, receive, subscribe
from live.opening import HeldTopic, full_name, opened

_TOPIC, _SUBSCRIPTION, _COUNT, _TURNS = "handover", "s", 900, 20
_OURS, _THEIRS = 15, 12  # acks of each owner in a turn


class Handovers:
    """A broker and `ManagedCursor` own one cursor in turn, and each acks some messages.

    The broker gives the topic up because it is unloaded, stopped, or killed with SIGKILL; `ManagedCursor` closes the
    cursor, or leaves it as a killed process does. After each handover the new owner must know every ack and no other. A
    cursor object that was left open acks and persists once more after the broker has the cursor: it must be refused.

    Args:
        cluster: A started cluster, without the topic.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self._rng = random.Random(25)
        self._numbers = {}  # position -> number
        self._acked = set()
        self.section = Section("Two owners in turn")

    def run(self):
        """Run it."""
        with client_of(self._cluster) as client:
            subscribe(client, _TOPIC, _SUBSCRIPTION).close()
            publish(client, _TOPIC, range(_COUNT))
            with closing(subscribe(client, _TOPIC, _SUBSCRIPTION)) as consumer:
                self._numbers = {place_of(each)[0]: int(each.data()) for each in receive(consumer, _COUNT)}
        assert len(self._numbers) == _COUNT
        with closing(opened(self._cluster)) as store:
            for turn in range(_TURNS):
                self._turn(store, turn)
        return [self.section]

    def _turn(self, store, turn):
        where = f"turn {turn}"
        how = ("unload", "kill", "unload", "stop", "kill")[turn % 5]
        self._broker_leaves(how)
        cursor = self._open(store, turn, where, how)
        if how != "unload":
            self._cluster.start_broker(managedLedgerMaxEntriesPerLedger=70)
        found = self._cluster.internal_stats(_TOPIC)["cursors"][_SUBSCRIPTION]
        ours = (str(cursor.mark_delete_position), str(cursor.deleted))
        theirs = (found["markDeletePosition"], found["individuallyDeletedMessages"])
        self.section.compare("states that the broker took over", theirs, ours, where=where)
        self._stale(cursor, where)
        self._broker_acks(where)

    def _broker_leaves(self, how):
        if how == "unload":
            self._cluster.unload_namespace()
        elif how == "stop":
            self._cluster.stop_broker()
        else:
            self._cluster.kill_broker()
        what = {"unload": "unloads", "stop": "SIGTERMs of the broker", "kill": "SIGKILLs of the broker"}[how]
        self.section.compare(what, True, True)

    def _open(self, store, turn, where, how):
        """Open the cursor, ack some messages, and leave it open unless the turn is even."""
        with HeldTopic(store, _TOPIC):
            log = store.find_message_log(full_name(_TOPIC)).ledgers
            form = (RangeForm.WORDS, RangeForm.LIST)[turn % 2]
            cursor = ManagedCursor.open(
                store, topic=full_name(_TOPIC), subscription=_SUBSCRIPTION, ledgers=log,
                config=CursorConfig(format=Format.PULSAR, range_form=form, flush_interval_ms=10**9), now_ms=turn,
            )  # fmt: skip
            known = {number for position, number in self._numbers.items() if cursor.is_acked(position)}
            self.section.compare("states that we took over", known, self._acked, where=f"{where}, after {how}")
            unacked = sorted(position for position, number in self._numbers.items() if number not in self._acked)
            chosen = sorted(self._rng.sample(unacked, _OURS))
            cursor.ack_many(chosen, now_ms=turn)
            cursor.persist(now_ms=turn)
            if turn % 4 == 3:
                cursor.close(now_ms=turn)
            self._acked |= {self._numbers[position] for position in chosen}
        return cursor

    def _stale(self, cursor, where):
        """Use a cursor that the broker owns by now: nothing may be written."""
        unacked = min(position for position, number in self._numbers.items() if number not in self._acked)

        def write():
            """Ack and persist."""
            cursor.ack(unacked, now_ms=10**6)
            return cursor.persist(now_ms=10**6)

        self.section.refused("writes of a former owner that were refused", AckStateError, write, where=where)

    def _broker_acks(self, where):
        with client_of(self._cluster) as client, closing(subscribe(client, _TOPIC, _SUBSCRIPTION)) as consumer:
            messages = receive(consumer, _COUNT - len(self._acked))
            got = {int(each.data()) for each in messages}
            expected = set(range(_COUNT)) - self._acked
            self.section.compare("sets of messages received", got, expected, where=where)
            chosen = self._rng.sample(messages, _THEIRS)
            for message in chosen:
                consumer.acknowledge(message)
            # With its rate limit off the broker persists each ack.
            time.sleep(1.5)
            self._acked |= {int(each.data()) for each in chosen}
