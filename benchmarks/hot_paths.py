"""Times the calls that a broker makes for each message, each beside the least that Python needs, or a naive peer."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from heapq import nlargest
from itertools import count
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from ackstate import DeletedRanges, LedgerMap, ManagedCursor, MemoryStore, Message, Position, Run, SqliteStore
from ackstate.analysis.workloads.traffic import HOUR_MS
from ackstate.cursor import CursorConfig, Format, persist_all
from ackstate.cursor.results import Receipt, ReceiptStatus
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, InMemoryDelayTracker, SnapshotStorage
from ackstate.delay import TopicDelayIndex as DelayIndex
from ackstate.dispatch import Subscription
from ackstate.entry_bitmap import bitmaps_of
from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Usage
from ackstate.selection import Keep, select
from ackstate.topic.log import MessageLog, SoleUse
from ackstate.wire import native
from ackstate.wire.pulsar import PositionInfo, RangeForm, encode_position_info
from ackstate.wire.pulsar.cursor_state_pb2 import PositionInfo as PositionInfoMessage
from benchmarks import workloads
from benchmarks.measurement import Against, BenchmarkReport, Spread, TimedPart, Timing, run, timed_in_turn
from benchmarks.workloads import alternating, clustered, mixed_delays, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.stores import Store

ABOUT = (
    "Interleaved rounds, one thread. CPU time of the thread, for stores the time on the clock, SQLite with "
    "synchronous=FULL in a temporary directory. Acks are out of order within windows of 1,000, each of an entry that "
    "stands alone above the live holes."
)
LEDGER = 7
BATCH = 20_000
HOLES = (10_000, 1_000_000)


def short(number: int) -> str:
    """Return ``10 k`` or ``1 M``."""
    return (
        f"{number // 1_000_000} M"
        if number >= 1_000_000
        else f"{number // 1_000} k"
        if number >= 1_000
        else f"{number}"
    )


@contextmanager
def sqlite() -> Iterator[SqliteStore]:
    """Open a store of its own."""
    with tempfile.TemporaryDirectory() as directory, closing(SqliteStore(Path(directory) / "store")) as store:
        yield store


def every(call: Callable[..., object], arguments: Sequence[object], **options: object) -> None:
    """Call a function with each argument: the timed function of single calls."""
    if options:
        for argument in arguments:
            call(argument, **options)
    else:
        for argument in arguments:
            call(argument)


def windows(first: int, size: int) -> list[Position]:
    """Return every other entry from one on, out of order within windows of 1,000."""
    chance, found = random.Random(workloads.SEED), []
    for begin in range(0, size, 1_000):
        window = [Position(LEDGER, first + 2 * at) for at in range(begin, min(begin + 1_000, size))]
        chance.shuffle(window)
        found += window
    return found


def ranges(report: BenchmarkReport, small: int) -> None:
    """Add one entry, add many, and choose the ranges that fit a limit."""
    for holes in (each // small for each in HOLES):
        held, timings = DeletedRanges(), {}
        held.add_entries(LEDGER, 2 * alternating(holes))
        chosen = np.random.default_rng(workloads.SEED).choice(2 * holes, min(BATCH, holes // 10), replace=False)
        positions = [Position(LEDGER, 2 * each + 1 + each % 2) for each in chosen.tolist()]
        entries, bitmap = [entry for _, entry in positions], workloads.bitmap_of(2 * alternating(holes))
        each = len(positions)
        timings["ours"] = Timing(lambda ranges, p=positions: every(ranges.add, p), held.copy, each)
        timings["a bitmap alone"] = Timing(lambda ids, e=entries: every(ids.add, e), bitmap.copy, each)
        for name, spread in timed_in_turn(timings, clock=thread_time_ns).items():
            report.time(f"DeletedRanges.add, {short(holes)} holes: {name}", "ns an add", spread)
    size = 1_000_000 // small
    for pattern, ids in {"alternating": alternating(size), "in random order": shuffled(alternating(size))}.items():
        report.compare({
            f"add_entries, {short(size)} {pattern}": Timing(
                lambda ranges, ids=ids: ranges.add_entries(LEDGER, ids), DeletedRanges, size
            ),
            f"the same into a bitmap, {pattern}": Timing(lambda _, ids=ids: workloads.bitmap_of(ids), each=size),
        }, "ns an entry", beside=f"the same into a bitmap, {pattern}", clock=thread_time_ns)  # fmt: skip
    held = DeletedRanges()
    held.add_entries(LEDGER, clustered(size))
    fit = size // 100
    report.compare({
        f"select the widest {short(fit)} of {short(size)} ranges": Timing(
            lambda _: select(held, range_count_max=fit, keep=Keep.WIDEST), each=1e6
        ),
        "heapq.nlargest over the ranges": Timing(
            lambda _: nlargest(fit, held.runs(), key=lambda run: run.end - run.first), each=1e6
        ),
    }, "ms", beside="heapq.nlargest over the ranges", runs=3, clock=thread_time_ns)  # fmt: skip
    record = native.Record(native.RecordKind.SNAPSHOT, 1, 0, 0, Position(LEDGER, -1), held)
    written, bitmap = native.encode(record), workloads.bitmap_of(clustered(size))
    report.compare({
        f"encode a snapshot of {short(size)} ranges": Timing(native.encode, lambda: record, 1e6),
        "decode it": Timing(native.decode, lambda: written, 1e6),
        "serialize the bitmap": Timing(BitMap.serialize, lambda: bitmap, 1e6),
    }, "ms", beside="serialize the bitmap", clock=thread_time_ns)  # fmt: skip
    listed = DeletedRanges()
    listed.add_entries(LEDGER, 2 * alternating(10_000 // small))
    info, name = PositionInfo(Position(LEDGER, -1), listed), f"encode {short(10_000 // small)} ranges as Pulsar's list"
    report.compare({
        name: Timing(partial(encode_position_info, form=RangeForm.LIST), lambda: info, 1e3),
        "by the protobuf runtime": Timing(into_message, lambda: list(listed.runs()), 1e3),
    }, "us", beside="by the protobuf runtime", runs=50, clock=thread_time_ns)  # fmt: skip


def into_message(runs: list[Run]) -> bytes:
    """Make a message a range, as Pulsar does; filling in is three times as fast as keyword arguments."""
    message = PositionInfoMessage(ledger_id=LEDGER, entry_id=-1)
    for ledger_id, first, end in runs:
        added = message.individual_deleted_messages.add()
        added.lower_endpoint.ledger_id = added.upper_endpoint.ledger_id = ledger_id
        added.lower_endpoint.entry_id, added.upper_endpoint.entry_id = first - 1, end - 1
    return message.SerializeToString()


def cursor_on(store: Store, log: LedgerMap, name: str = "s", *, holes: int = 0, **config: object) -> ManagedCursor:
    """Open a cursor with alternating entries acked and durable."""
    settings = CursorConfig(**config) if config else None
    cursor = ManagedCursor.open(store, topic="t", subscription=name, ledgers=log, config=settings, now_ms=0)
    if holes:
        cursor.ack_entries(LEDGER, np.arange(1, 2 * holes, 2, dtype=np.uint32), now_ms=0)
        cursor.persist(now_ms=0)
    return cursor


def acks(report: BenchmarkReport, small: int) -> None:
    """Ack in memory, one by one and by lists, beside the least that plain Python needs for each."""
    size = 50_000 // small
    for holes in (0, *(each // small for each in HOLES)):
        positions, names = windows(2 * holes + 1, size), count()
        log = LedgerMap.from_counts({LEDGER: 2 * (holes + size) + 2})
        store = MemoryStore()

        def new(
            store: Store = store, log: LedgerMap = log, names: Iterator[int] = names, holes: int = holes
        ) -> ManagedCursor:
            return cursor_on(store, log, f"s{next(names)}", holes=holes)

        lists = {n: [positions[at : at + n] for at in range(0, size, n)] for n in (100, 1_000)}
        timings = {"an ack": Timing(lambda cursor, p=positions: every(cursor.ack, p, now_ms=1), new, size)}
        if not holes:
            timings["the least: a lock, two bitmaps and a receipt"] = Timing(
                partial(into_two_bitmaps, positions), BitMap, size
            )
        for n, parts in lists.items():
            timings[f"ack_many of {n:,}"] = Timing(lambda c, p=parts: every(c.ack_many, p, now_ms=1), new, size)
            if not holes:
                timings[f"the least: bitmaps of {n:,} positions"] = Timing(partial(into_bitmaps, parts), BitMap, size)
        for name, spread in timed_in_turn(timings, clock=thread_time_ns, runs=5 if holes < HOLES[1] else 3).items():
            report.time(f"{name}, {short(holes)} live holes", "ns an ack", spread)


def counts(report: BenchmarkReport, small: int) -> None:
    """Count the deliveries of messages, and ack others beside them; none of the acks is of a counted message."""
    counted, size = 10_000 // small, 50_000 // small
    positions = windows(2 * counted + 1, size)
    log, written = LedgerMap.from_counts({LEDGER: 2 * (counted + size) + 2}), {}
    known = {"none": {}, "times of none": dict.fromkeys(range(0, 2 * counted, 2), (2, 0))}
    known["times of all"] = {entry_id: (2, 10**12 + entry_id) for entry_id in known["times of none"]}

    def new(name: str) -> ManagedCursor:
        cursor = cursor_on(MemoryStore(), log)
        cursor.count_deliveries({Position(LEDGER, entry_id): each for entry_id, each in known[name].items()})
        written[name] = cursor.persist(now_ms=1).bytes_written
        return cursor

    report.compare({
        f"an ack, {len(each):,} counted, {name}": Timing(
            lambda cursor: every(cursor.ack, positions, now_ms=1), partial(new, name), size
        )
        for name, each in known.items()
    }, "ns an ack", beside="an ack, 0 counted, none", clock=thread_time_ns)  # fmt: skip
    for name in ("times of none", "times of all"):
        report.count(f"a record of {counted:,} counted messages, {name}", "bytes", written[name])


def into_two_bitmaps(positions: list[Position], whole: BitMap) -> None:
    """Do the least that an ack needs: add to the acked and to the unpersisted entries, and return a receipt."""
    lock, part, opened, new = threading.RLock(), BitMap(), object(), tuple.__new__

    def ack(position: Position, *, now_ms: int) -> Receipt:  # noqa: ARG001 - as `ManagedCursor.ack`
        with lock:
            _, entry_id = position
            if entry_id not in whole and entry_id - 1 not in whole and entry_id + 1 not in whole:
                whole.add(entry_id)
                part.add(entry_id)
        return new(Receipt, (1, 1, opened, {}, ReceiptStatus.ACCEPTED, None))

    every(ack, positions, now_ms=1)


def into_bitmaps(parts: list[list[Position]], whole: BitMap) -> None:
    """Do the least that a list of acks needs: read each position, and add the entries to the acked ones."""
    for part in parts:
        whole |= BitMap([entry_id for _, entry_id in part])


def persists(report: BenchmarkReport, small: int) -> None:
    """Ack and persist one entry, beside a bare commit of as many bytes; and the bytes beside Pulsar's format."""
    acked = 200
    for holes in (10_000 // small, 500_000 // small):
        log = LedgerMap.from_counts({LEDGER: 2 * holes + 1_000_000})
        with sqlite() as disk, bare_sqlite() as bare, closing(MemoryStore()) as memory:
            timings = {}
            for name, store, config in (
                ("memory", memory, {}),
                ("SQLite", disk, {}),
                ("memory, Pulsar's format", MemoryStore(), {"format": Format.PULSAR}),
            ):
                cursor, fresh = cursor_on(store, log, holes=holes, **config), count(2 * holes + 2, 2)
                timings[name] = Timing(partial(ack_and_persist, cursor, fresh, acked), each=1e3 * acked)
            timings["a bare commit of 94 bytes"] = Timing(
                lambda _, bare=bare: every(bare, [bytes(94)] * acked), each=1e3 * acked
            )
            for name, spread in timed_in_turn(timings, runs=10, clock=thread_time_ns).items():
                report.time(f"ack and persist, {short(holes)} live holes, {name}", "us CPU", spread)
    for holes in (each // small for each in HOLES):
        log, written = LedgerMap.from_counts({LEDGER: 2 * holes + 1_000_000}), {}
        for name in Format:
            cursor, fresh = cursor_on(MemoryStore(), log, holes=holes, format=name), count(2 * holes + 2, 2)
            before, done = cursor.stats(), 0
            # Two whole cycles of compaction, or of whole states.
            while cursor.stats().snapshot_count < before.snapshot_count + 3 and done < 50_000 // small:
                ack_and_persist(cursor, fresh, acked, None)
                done += acked
            written[name] = (cursor.stats().bytes_persisted - before.bytes_persisted) / done
        against = Against("Pulsar's format", written[Format.PULSAR])
        report.count(f"written for an ack, {short(holes)} live holes", "bytes", written[Format.NATIVE], against)


def ack_and_persist(cursor: ManagedCursor, entries: Iterator[int], number: int, _: object) -> None:
    """Persist each ack: the timed function."""
    for _ in range(number):
        cursor.ack(Position(LEDGER, next(entries)), now_ms=1)
        cursor.persist(now_ms=1)


@contextmanager
def bare_sqlite() -> Iterator[Callable[[bytes], object]]:
    """Yield a function that inserts bytes and commits, as an append of `SqliteStore` must at least."""
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(sqlite3.connect(Path(directory) / "bare", isolation_level=None)) as connection,
    ):
        for setting in ("journal_mode = WAL", "synchronous = FULL", "locking_mode = EXCLUSIVE"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, data BLOB)")
        yield lambda data: connection.execute("INSERT INTO entries (data) VALUES (?)", (data,))


def cursors(report: BenchmarkReport, small: int) -> None:
    """Open a thousand cursors on SQLite, persist them together and each by itself, and open one with many ranges."""
    number = 1_000 // small
    log = LedgerMap.from_counts({LEDGER: 100_000})
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(64) as threads:
        taken: dict[str, list[float]] = {}

        def timed(name: str, call: Callable[[], object]) -> object:
            begun = perf_counter_ns()
            found = call()
            taken.setdefault(name, []).append((perf_counter_ns() - begun) / 1e6)
            return found

        for each in range(5):
            with closing(SqliteStore(Path(directory) / f"{each}")) as store:
                names = [f"s{at}" for at in range(number)]
                for what in ("create", "reopen"):
                    opening = partial(threads.map, partial(cursor_on, store, log), names)
                    opened = timed(what, lambda opening=opening: list(opening()))
                    firsts = count(0 if what == "create" else 50_000, 20)
                    for how, persist in (
                        ("first persist", lambda them: persist_all(them, now_ms=2)),
                        ("persist_all", lambda them: persist_all(them, now_ms=3)),
                        ("each by itself", lambda them: every(ManagedCursor.persist, them, now_ms=4)),
                    ):
                        first = next(firsts)
                        every(lambda cursor, f=first: cursor.ack_entries(LEDGER, range(f, f + 20, 2), now_ms=1), opened)
                        timed(how, partial(persist, opened))
        for name, times in taken.items():
            report.time(f"{number:,} cursors, {name}", "ms", Spread.of(times))
    size = 1_000_000 // small
    for pattern, acked in {"alternating": alternating(size), "runs of 100": clustered(size)}.items():
        store, end = MemoryStore(), int(acked[-1]) + 2
        log = LedgerMap.from_counts({LEDGER: end + 4_000})
        cursor_on(store, log)
        cursor = cursor_on(store, log)
        cursor.ack_entries(LEDGER, acked + 1, now_ms=0)
        ack_and_persist(cursor, count(end + 1, 2), 1_000, None)
        data = native.encode(native.Record(native.RecordKind.SNAPSHOT, 1, 0, 0, Position(LEDGER, -1), cursor.deleted))
        report.compare({
            f"open, {short(size)} ranges {pattern}, 1,000 deltas": Timing(
                lambda _, store=store, log=log: cursor_on(store, log), each=1e6
            ),
            "decode its ranges alone": Timing(native.decode, lambda data=data: data, 1e6),
        }, "ms", beside="decode its ranges alone")  # fmt: skip


class SameMessageLog:
    """A log with the same message everywhere, so that the times are the subscription's own."""

    def __init__(self, entry_count: int) -> None:
        self.topic = "t"
        self.ledgers = LedgerMap.from_counts({LEDGER: entry_count})
        self.sole_use = SoleUse("this log")
        self.cancelled = None
        self._message = Message(b"")

    def add_listener(self, listener: object) -> None:
        """See `MessageLog.add_listener`: nothing is published here."""

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """See `MessageLog.read`."""
        return iter([self._message] * len(positions))


FAR = 2**40
OPEN_LIMITS = GateLimits(FAR, FAR, max_unacked_ranges=FAR, max_unacked_messages_per_consumer=FAR)
"""Never reached here, and checked each time."""


def dispatch(report: BenchmarkReport, small: int) -> None:
    """Send a message through a subscription with every limit on and ack it, beside the ack of a bare cursor."""
    sent = 2_000
    for holes in (0, *(each // small for each in HOLES)):
        log = SameMessageLog(2 * holes + 1_000_001)

        def reading(holes: int = holes, log: SameMessageLog = log) -> ManagedCursor:
            cursor = cursor_on(MemoryStore(), log.ledgers, holes=holes)
            cursor.reader.rewind(Position(LEDGER, 2 * holes + 1))
            return cursor

        bare, cursor = reading(), reading()
        subscription = Subscription(log, cursor, gate=DispatchGate(OPEN_LIMITS))

        def send_and_ack(_: object, subscription: Subscription = subscription) -> None:
            for _ in range(sent // 100):
                for delivery in subscription.dispatch("c", 100, now_ms=1):
                    subscription.ack(delivery.position, now_ms=1)

        least = f"ack by a bare cursor, {short(holes)} holes"
        report.compare({
            f"dispatch and ack, {short(holes)} holes": Timing(send_and_ack, each=1e3 * sent),
            least: Timing(
                lambda p, c=bare: every(c.ack, p, now_ms=1), lambda c=bare: c.reader.read(sent), 1e3 * sent
            ),
        }, "us a message", beside=least, clock=thread_time_ns)  # fmt: skip


def gate(report: BenchmarkReport, _: int) -> None:
    """Request one message from a gate with every rule on, beside the two comparisons of a dispatcher of Pulsar."""
    half = 500_000
    usage = Usage(17 * half, 17 * half, half, half, half, half)
    closed = DispatchGate(GateLimits(0, half, max_unacked_messages_per_consumer=0))
    assert closed.request((17,), usage=usage).granted == 0
    every(closed.when_open, [int] * 1_000)
    shared = DispatchGate(OPEN_LIMITS, broker=BrokerLimit(FAR))
    granted, calls = DispatchGate(OPEN_LIMITS), 2_000

    def request(gate: DispatchGate) -> Timing:
        return Timing(lambda _: every(gate.request, [(17,)] * calls, usage=usage, consumer="c", now_ms=1), each=calls)

    def request_and_send(cost: tuple[int, ...]) -> None:
        shared.request(cost, usage=usage, consumer="c", now_ms=1)
        shared.count_unacked(1)

    is_blocked, permits = False, half
    report.compare({
        "request, granted": request(granted), "request, refused, 1,000 wait": request(closed),
        "request and count, broker's limit": Timing(lambda _: every(request_and_send, [(17,)] * calls), each=calls),
        "two comparisons": Timing(lambda _: every(lambda _: not is_blocked and permits > 0, [0] * calls), each=calls),
    }, "ns a request", beside="two comparisons", clock=thread_time_ns)  # fmt: skip


def stores(report: BenchmarkReport, small: int) -> None:
    """Append and publish on SQLite, beside a bare file with a write and an fdatasync for each."""
    appends = 1_024 // small
    with sqlite() as store, tempfile.TemporaryFile(buffering=0) as file:
        ids = [store.ledgers.create("benchmark") for _ in range(32)]
        lock = threading.Lock()

        def sync(_: object, data: bytes = bytes(100)) -> None:
            with lock:
                file.write(data)
                os.fdatasync(file.fileno())

        def by_threads(call: Callable[[int], object], threads: int) -> Timing:
            def append(_: object) -> None:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(lambda each: every(call, [each] * (appends // threads)), ids[:threads]))

            return Timing(append, each=1e3 * appends)

        for threads in (1, 8, 32):
            name, least = f"append 100 bytes, threads: {threads}", f"the same to a bare file, threads: {threads}"
            timings = {
                name: by_threads(lambda each: store.ledgers.append(each, [bytes(100)]), threads),
                least: by_threads(sync, threads),
            }
            report.compare(timings, "us an append", beside=least, runs=5)
        log, batch = MessageLog.open(store, topic="t"), [Message(bytes(100))] * 100
        report.compare({
            "publish 100 messages of 100 bytes a call": Timing(lambda _: every(log.publish, [batch] * 20), each=2e6),
            "10,000 bytes to a bare file": Timing(
                lambda _: every(partial(sync, data=bytes(10_000)), range(20)), each=2e6
            ),
        }, "us a message", beside="10,000 bytes to a bare file")  # fmt: skip


def delays(report: BenchmarkReport, small: int) -> None:
    """Add delayed messages one by one and get them when they are due, beside Pulsar's in-memory tracker in Python."""
    size = 1_000_000 // small
    ledgers = list(mixed_delays(size, now_ms=2 * workloads.TICK_MS))
    messages = [message for ledger in ledgers for message in ledger.messages()]

    def view() -> object:
        return DelayIndex(tick_time_ms=workloads.TICK_MS).open_view(lambda _position: False)

    def tracker() -> InMemoryDelayTracker:
        return InMemoryDelayTracker(tick_time_ms=workloads.TICK_MS)

    def add(tracker: object) -> None:
        for position, deliver_at_ms in messages:
            tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)

    def filled(make: Callable[[], object]) -> tuple[object, workloads.NothingAcked]:
        made, subscription = make(), workloads.NothingAcked((each.ledger_id, each.as_bitmap()) for each in ledgers)
        if make is view:
            made.attach(subscription)
        add(made)
        return made, subscription

    def drain(given: tuple[object, workloads.NothingAcked]) -> TimedPart:
        tracker, subscription = given
        nanos = drained = 0
        for now_ms in range(60_000, HOUR_MS + 120_000, 60_000):
            begun = thread_time_ns()
            due = tracker.scheduled_messages(size, now_ms=now_ms)
            nanos += thread_time_ns() - begun
            drained += subscription.send(bitmaps_of(due).items())
        assert (drained, subscription.unsent_count) == (size, 0)
        return TimedPart(nanos)

    for what, timed, fresh in (("add", add, lambda make: make()), ("drain each minute", drain, filled)):
        names = {f"{what}, {short(size)} messages": view, f"{what}, InMemoryDelayTracker": tracker}
        timings = {name: Timing(timed, partial(fresh, make), size) for name, make in names.items()}
        report.compare(timings, "ns a message", beside=list(names)[1], runs=3, clock=thread_time_ns)
    buckets(report, messages, size)


def buckets(report: BenchmarkReport, messages: list[tuple[Position, int]], size: int) -> None:
    """Add messages to buckets on SQLite, and recover those, beside a plain loop over their times."""
    config = DelayConfig(tick_time_ms=workloads.TICK_MS)
    with sqlite() as store:
        storage = SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/delayed/t"), "delayed/t")
        index = BucketedDelayIndex(config, storage=storage)
        begun = perf_counter_ns()
        for position, deliver_at_ms in messages:
            index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)
        report.count(f"buckets: add, {short(size)} messages", "ns a message", (perf_counter_ns() - begun) / size)
        stored = snapshot_bytes(storage)
        report.count("buckets: on disk", "bytes a message", stored / size)
        times = [deliver_at_ms for _, deliver_at_ms in messages]
        report.compare({
            f"buckets: recover {short(size)} messages": Timing(
                lambda _: BucketedDelayIndex.recover(config, storage=storage, now_ms=0), each=1e6
            ),
            "sum of their times in Python": Timing(lambda _: sum(times), each=1e6),
        }, "ms", beside="sum of their times in Python", runs=5)  # fmt: skip


def imports(report: BenchmarkReport, _: int) -> None:
    """Import the library in a new process, beside the libraries on which its bitmaps stand."""

    def timing(names: str) -> Timing:
        code = f"from time import process_time; begun = process_time(); import {names}; print(process_time() - begun)"
        command = [sys.executable, "-c", code]
        compiled = dict(os.environ, PYTHONDONTWRITEBYTECODE="")
        return Timing(
            lambda _: TimedPart(1e9 * float(subprocess.check_output(command, text=True, env=compiled))), each=1e6
        )

    report.compare(
        {
            "import ackstate": timing("ackstate"),
            "import Topics and SqliteStore": timing("ackstate; from ackstate import Topics, SqliteStore"),
            "import numpy, pyroaring": timing("numpy, pyroaring"),
        }, "ms CPU", beside="import numpy, pyroaring",
    )  # fmt: skip


def snapshot_bytes(storage: SnapshotStorage) -> int:
    """Return how many bytes the stored buckets have."""
    ledgers = storage.ledgers
    owned = ledgers.owned_by("delayed/t")
    return sum(len(entry) for each in owned for entry in ledgers.read(each, 0, ledgers.last(each) + 1))


if __name__ == "__main__":
    parts = (ranges, acks, counts, persists, cursors, dispatch, gate, stores, delays, imports)
    run("hot_paths", ABOUT, {part.__name__: part for part in parts})
