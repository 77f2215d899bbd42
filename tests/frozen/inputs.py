"""Make the frozen traces, once: `python -m frozen.inputs`. Goes with what it calls; the traces stay.

Seven were generated, with crashes, which `ackstate trace generate` has no more.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ackstate import (
    AckStateError,
    CursorConfig,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    StoreError,
    Topics,
    TopicSettings,
)
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.recording import Recording
from ackstate.cursor.formats import Format
from ackstate.limits import GateLimits
from ackstate.selection import Keep
from ackstate.stores.memory import Fault, FaultKind
from frozen.command import TRACES, answer_of
from trace_files import read_rows

T0_MS = 1_700_000_000_000
LEDGERS = {3: 60, 5: 60, 9: 60}
CONFIGS = {
    "young and few ranges": CursorConfig(become_old_ack_record_seconds=1, range_count_max=2, keep=Keep.WIDEST),
    "pulsar": CursorConfig(format=Format.PULSAR, range_count_max=2, keep=Keep.WIDEST),
    "metadata": CursorConfig(format=Format.PULSAR, metadata_range_count_max=1),
    "batches do not count": CursorConfig(batch_index_acks=False),
}


class Life:
    """A cursor and what happens to it, recorded; `cumulative` is the share of acks that are."""

    def __init__(self, recordings, topic, name, config, seed, *, ledgers=LEDGERS, cumulative=0.03):
        self.chance, self.recordings, self.name, self.config = random.Random(seed), recordings, (topic, name), config
        self.ledgers, self.cumulative = LedgerMap.from_counts(ledgers), cumulative
        self.positions = [
            Position(ledger, entry) for ledger, count in ledgers.items() for entry in range(min(count, 60))
        ]
        self.store, self.now_ms = MemoryStore(), T0_MS
        self.open()

    def open(self):
        topic, name = self.name
        self.cursor = ManagedCursor.open(
            self.store, topic=topic, subscription=name, ledgers=self.ledgers, config=self.config, now_ms=self.now_ms
        )
        self.recordings[-1].follow(self.cursor, topic=topic, subscription=name, now_ms=self.now_ms)

    def step(self, reach):
        """Do one thing near the `reach`-th position."""
        self.now_ms += self.chance.choice((0, 1, 20, 130))
        near = self.positions[max(0, min(len(self.positions) - 1, reach + self.chance.randrange(-40, 3)))]
        cursor, now = self.cursor, {"now_ms": self.now_ms}
        match self.chance.choices("asbpfrkc", (60, 12, 12, 12, 4, 1, 1, 1))[0]:
            case "a" if self.chance.random() < self.cumulative:
                if near > cursor.mark_delete_position:
                    cursor.mark_delete(near, **now)
            case "a":
                cursor.ack(near, **now)
            case "s":
                cursor.delivered(near, now_ms=self.now_ms - 700)
            case "b":
                cursor.ack_batch(near, [self.chance.choice((0, 1, 3))], **now)
            case "p":
                with suppress(StoreError):
                    cursor.persist(**now)
            case "f":
                for later in range(self.chance.choice((1, 3))):
                    kind = self.chance.choice((FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER))
                    self.store.inject(Fault(self.store.mutation_count + later, kind))
                with suppress(StoreError):
                    cursor.persist(**now)
                self.store.forget_faults()
            case "r":
                with suppress(StoreError):
                    cursor.reset(near, **now)
            case "k":
                self.die()
            case "c":
                with suppress(StoreError):  # A limit of the metadata store refuses it: then the process dies.
                    cursor.close(**now)
                self.die()

    def die(self):
        """Go on as another process, on the same disk."""
        self.store = MemoryStore(self.store.disk)
        self.recordings.append(Recording(self.recordings[0].directory_))
        self.open()


def recorded(directory):
    """Return a list to which the lives append a recording for each process."""
    first = Recording(directory)
    first.directory_ = directory
    return [first]


def record_cursors(directory):
    """Batches, young acks, limits, displaced ranges, failed persists, resets, crashes."""
    for number, (name, config) in enumerate(CONFIGS.items()):
        life = Life(recorded(directory), f"persistent://public/default/t{number % 2}", name, config, number)
        for step in range(700):
            life.step(step // 4)


def record_topic(directory):
    """A subscription of a real topic: publishes, deliveries, delays, a gate, nacks, and a killed process."""
    chance, now_ms = random.Random(5), T0_MS
    settings = TopicSettings(
        entries_per_ledger_max=150,
        cursor=CursorConfig(flush_interval_ms=400),
        limits=GateLimits(max_unpersisted_ack_record_bytes=1024),
    )
    name, store, waiting = "persistent://shop/eu/orders", MemoryStore(), {"billing": [], "audit": []}
    for process in range(3):
        recording, topics = Recording(directory), Topics(store, settings=settings)
        topic = topics.open(name, now_ms=now_ms)
        for each in waiting:
            recording.follow(topic.subscribe(each, now_ms=now_ms).cursor, topic=name, subscription=each, now_ms=now_ms)
            waiting[each] = []
        for _ in range(120):
            now_ms += chance.choice((3, 40, 90))
            later = chance.choice((-1, -1, now_ms + 600))
            found = topic.publish([Message(b"", deliver_at_ms=later)] * chance.choice((0, 2, 9)), now_ms=now_ms)
            runs = [(ledger, entry, entry) for ledger, entry in found]
            recording.published(name, runs, now_ms=now_ms, deliver_at_ms=later)
            for each, sent in waiting.items():
                subscription = topic.subscriptions[each]
                sent += [got.position for got in subscription.dispatch(chance.choice("ab"), 20, now_ms=now_ms)]
                for position in chance.sample(sent, min(len(sent), chance.choice((0, 2, 4)))):
                    with suppress(AckStateError):
                        subscription.ack(position, now_ms=now_ms)
                    sent.remove(position)
                if sent and chance.random() < 0.1:
                    subscription.nack(sent.pop(), now_ms=now_ms)
            topics.tick(now_ms=now_ms)
        if process:
            topics.close(now_ms=now_ms)
            recording.close()
        store, now_ms = MemoryStore(store.disk), now_ms + 2_000


def record_idle(directory):
    """Two processes that were killed when they had long been idle, and one that is alive at the end."""
    recordings = recorded(directory)
    lives = [Life(recordings, "persistent://public/default/idle", name, CursorConfig(), 7) for name in ("a", "b")]
    for process in range(3):
        for life in lives:
            for entry in range(process * 40, process * 40 + 25):
                life.now_ms += 10
                life.cursor.ack(life.positions[entry ^ 3], now_ms=life.now_ms)
                if entry % 16 == 0 and life is lives[0]:
                    life.cursor.persist(now_ms=life.now_ms)
        if process < 2:
            recordings.append(Recording(directory))
            for life in lives:
                life.now_ms += 90_000
                life.store = MemoryStore(life.store.disk)
                life.open()


def record_far_ledgers(directory):
    """Cumulative acks, and ledgers whose ids are far apart."""
    ledgers = {0: 30, 7: 1, 8: 10_000, 1_000_000: 40, 2**40: 30, 2**62 + 5: 40, 2**63 - 2: 30}
    for seed, cumulative in enumerate((0.9, 0.3)):
        recordings, name = recorded(directory), f"share {cumulative}"
        life = Life(recordings, f"far/apart{seed}", name, CursorConfig(), seed, ledgers=ledgers, cumulative=cumulative)
        for step in range(400):
            if step == 150:
                life.cursor.ack_entries(8, range(70, 9_990), now_ms=life.now_ms)
            life.step(step * 230 // 400)


RECORDED = {"cursors": record_cursors, "topic": record_topic, "idle": record_idle, "far_ledgers": record_far_ledgers}


def quiet_and_long():
    """Subscriptions without acks or events of their own, and ranges that are overlong."""
    topic = "persistent://public/default/long"

    def line(subscription, ts_ms, kind, first=None, last=None, *, ledger=3, **more):
        entries = {} if first is None else {"ledger_id": ledger, "first_entry": first, "last_entry": last}
        return {"topic": topic, "subscription": subscription, "ts_ms": ts_ms, "kind": kind, **entries, **more}

    yield line("", 1_000, "publish", 0, 2**32 - 2)
    yield line("", 1_000, "publish", 0, 5_000_000, ledger=4)
    yield line("never acks", 1_100, "deliver", 0, 9)
    yield line("only opened", 1_200, "recover")
    yield line("acked before", 1_200, "recover", 0, 4_000_000)
    yield line("acked before", 2_000, "reset", 0, 17)
    yield line("long", 2_000, "ack", 5, 2**32 - 2)
    yield line("long", 2_500, "ack", 1, 5_000_000, ledger=4)
    yield line("long", 3_000, "persist_begun", number=1)
    yield line("long", 3_100, "ack", 0, 3)
    yield line("long", 3_200, "persist_ended", number=1)
    yield line("long", 9_000, "mark_delete", 4, 4)
    yield line("long", 15_000, "crash")
    yield line("long", 16_000, "recover")
    yield line("long", 16_000, "redeliver", 4, 4)
    yield {"topic": "persistent://public/default/silent", "ts_ms": 20_000, "kind": "publish", "ledger_id": 1,
           "first_entry": 0, "last_entry": 0}  # fmt: skip


def lines_of_trace(trace):
    """Return the events of a trace as JSON lines hold them."""
    lines = []
    for row in read_rows(trace):
        names = ("ts_ms", "kind", "ledger_id", "first_entry", "last_entry", "number")
        for seq, (ts_ms, kind, *entries) in enumerate(zip(*map(row.get, names), strict=True), row["first_seq"]):
            owner = {"topic": row["topic"]} | ({"subscription": row["subscription"]} if row["subscription"] else {})
            held = {name: value for name, value in zip(names[2:], entries, strict=True) if value != -1}
            if held.get("first_entry") == held.get("last_entry"):
                held.pop("last_entry", None)
            lines.append(owner | {"ts_ms": ts_ms, "kind": EventKind(kind).name.lower()} | held | {"seq": seq})
    return lines


def write(name, lines):
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    (TRACES / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(names):
    for name in names or [*RECORDED, "quiet_and_long"]:
        with tempfile.TemporaryDirectory() as found:
            directory, trace = Path(found) / "recording", Path(found) / "trace"
            if name in RECORDED:
                RECORDED[name](directory)
                answer_of("trace convert", str(directory), str(trace))
            write(name, lines_of_trace(trace) if name != "quiet_and_long" else quiet_and_long())


if __name__ == "__main__":
    main(sys.argv[1:])
