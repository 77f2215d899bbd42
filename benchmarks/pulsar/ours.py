"""Runs the commands of the benchmark on ackstate; the counterpart of `src/ackstate/Main.java`."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING

from pyroaring import BitMap

from ackstate import DeletedRanges, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage, TopicDelayIndex
from benchmarks.hot_paths import snapshot_bytes
from benchmarks.memory import DELAYED, in_new_process
from benchmarks.pulsar.tasks import COUNTS, LEDGER_WEIGHT
from benchmarks.pulsar.workloads import FIRST_LEDGER, read
from benchmarks.workloads import LEDGER_SIZE, TICK_MS, NothingAcked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.delay import DelayedDeliveryTracker
    from benchmarks.pulsar.sides import Answer
    from benchmarks.pulsar.workloads import Rows

    _Due = list[tuple[int, BitMap]]


class Ours:
    """Our side."""

    name = "ours"

    def __init__(self) -> None:
        self._stored: tuple[MemoryStore, LedgerMap] | None = None

    def run(self, command: str, **options: object) -> Answer:
        """See `Side.run`."""
        run: Callable[..., Answer] = getattr(self, f"_{command}")
        return run(**options)

    def _ack(  # noqa: PLR0913 - the options of the command
        self,
        *,
        file: str,
        holes: int,
        acks: int,
        list: int,  # noqa: A002
        persist: int,
        words: int = 1,  # noqa: ARG002 - Pulsar's option
        entries: int = 0,
    ) -> Answer:
        rows = read(file, 2)
        store = MemoryStore()
        cursor = _opened(store, _log_of(rows))
        _ack_runs(cursor, rows[:holes])
        cursor.persist(now_ms=0)
        part = rows[holes : holes + acks]
        before = cursor.stats()
        with _collection_off():
            if entries:
                nanos = _ack_entry_ids(cursor, part, list)
            elif list == 1:
                nanos = _ack_singly(cursor, _positions(part), persist=bool(persist))
            else:
                nanos = _ack_lists(cursor, [_positions(part[at : at + list]) for at in range(0, acks, list)])
        after = cursor.stats()
        written = after.bytes_persisted - before.bytes_persisted
        persists = after.persist_count - before.persist_count
        return _state(cursor) | {"nanos": nanos, "bytes": written, "persists": persists}

    def _store(self, *, file: str, words: int = 1, deltas: int = 0) -> Answer:  # noqa: ARG002
        runs = read(file, 3)
        log = _log_of(runs)
        store = MemoryStore()
        # The first persist of a cursor that was opened again is a snapshot, the others append to it.
        _opened(store, log)
        cursor = _opened(store, log)
        whole = len(runs) - deltas
        for ledger_id, bitmap in _bitmaps(runs[:whole]):
            cursor.ack_entries(ledger_id, bitmap, now_ms=0)
        cursor.persist(now_ms=0)
        for ledger_id, bitmap in (each for run in runs[whole:] for each in _bitmaps(run[None])):
            cursor.ack_entries(ledger_id, bitmap, now_ms=0)
            cursor.persist(now_ms=0)
        self._stored = store, log
        return _state(cursor) | {"bytes": cursor.stats().bytes_persisted}

    def _reopen(self) -> Answer:
        assert self._stored, "store comes first"
        store, log = self._stored
        with _collection_off():
            begun = perf_counter_ns()
            cursor = _opened(store, log)
            nanos = perf_counter_ns() - begun
        return _state(cursor) | {"nanos": nanos}

    def _forget(self) -> Answer:
        self._stored = None
        return {}

    def _fill(self, *, file: str, lookups: str) -> Answer:
        added = _positions(read(file, 2))
        looked_up = _positions(read(lookups, 2))
        ranges = DeletedRanges()
        found = counted = 0
        with _collection_off():
            begun = perf_counter_ns()
            for position in added[:-COUNTS]:
                ranges.add(position)
            ranges.settle()
            filled = perf_counter_ns()
            for position in looked_up:
                found += position in ranges
            searched = perf_counter_ns()
            for position in added[-COUNTS:]:
                ranges.add(position)
                counted += ranges.settle().range_count
            end = perf_counter_ns()
        times = {"add_nanos": filled - begun, "lookup_nanos": searched - filled, "count_nanos": end - searched}
        return times | {"found": found, "counted": counted, "ranges": ranges.range_count}

    def _weigh(self, *, file: str, copies: int = 1) -> Answer:  # noqa: ARG002
        count = len(read(file, 2))
        return {"bytes": in_new_process("ranges", "DeletedRanges, in one call", count), "ranges": count}

    def _delay(self, *, file: str, **steps: int) -> Answer:
        rows = read(file, 3)
        index = TopicDelayIndex(tick_time_ms=TICK_MS)
        view = index.open_view(lambda _position: False)
        subscription = _none_sent(rows)
        view.attach(subscription)
        messages = _messages(rows)
        with _collection_off():
            begun = perf_counter_ns()
            for position, deliver_at_ms in messages:
                view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)
            nanos = perf_counter_ns() - begun
            return _drain(view, subscription, **steps) | {"add_nanos": nanos}

    def _bucket(self, *, file: str, sealed: int, **steps: int) -> Answer:
        rows = read(file, 3)
        config = DelayConfig(tick_time_ms=TICK_MS, min_index_count_per_bucket=sealed)
        store = MemoryStore()
        storage = SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/delayed/t"), "delayed/t")
        messages = _messages(rows)
        # A message of the next ledger seals the last bucket; it is not in a bucket itself.
        messages.append((Position(int(rows[-1, 0]) + 1, 0), 2 * steps["end"]))
        with _collection_off():
            index = BucketedDelayIndex(config, storage=storage)
            begun = perf_counter_ns()
            for position, deliver_at_ms in messages:
                index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)
            added = perf_counter_ns()
            index.close()
            size = snapshot_bytes(storage)
            closed = perf_counter_ns()
            index, _ = BucketedDelayIndex.recover(config, storage=storage, now_ms=0)
            answer = {"add_nanos": added - begun, "recover_nanos": perf_counter_ns() - closed, "bytes": size}
            answer["recovered"] = index.delayed_message_count
            return answer | _drain(index, _none_sent(rows), **steps)

    def _weigh_delays(self, *, file: str, subscriptions: int, trackers: int) -> Answer:  # noqa: ARG002 - Pulsar's option
        # The process that is weighed makes the same messages itself, as many as the file has.
        assert len(read(file, 3)) == DELAYED
        return {"bytes": in_new_process("delays", "TopicDelayIndex", subscriptions), "held": DELAYED}


@contextmanager
def _collection_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _log_of(rows: Rows) -> LedgerMap:
    """Return a log of full ledgers, and one open ledger of an entry, as Pulsar's has."""
    end = int(rows[:, 0].max()) + 1
    return LedgerMap.from_counts(dict.fromkeys(range(FIRST_LEDGER, end), LEDGER_SIZE) | {end: 1})


def _opened(store: MemoryStore, log: LedgerMap) -> ManagedCursor:
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, now_ms=0)


def _state(cursor: ManagedCursor) -> Answer:
    position = cursor.mark_delete_position
    return {
        "ranges": cursor.deleted.range_count,
        "acked": len(cursor.deleted),
        "mark_delete_ledger": position.ledger_id,
        "mark_delete_entry": position.entry_id,
        "snapshots": cursor.stats().snapshot_count,
    }


def _positions(rows: Rows) -> list[Position]:
    return [Position(*row) for row in rows.tolist()]


def _by_ledger(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield the rows of each ledger, in their order."""
    for ledger_id in dict.fromkeys(rows[:, 0].tolist()):
        yield ledger_id, rows[rows[:, 0] == ledger_id]


def _none_sent(rows: Rows) -> NothingAcked:
    return NothingAcked((ledger_id, BitMap(part[:, 1].tolist())) for ledger_id, part in _by_ledger(rows))


def _bitmaps(runs: Rows) -> Iterator[tuple[int, BitMap]]:
    """Yield the entries of the runs of each ledger; the runs are in order of their ledgers."""
    ledger_id, bitmap = -1, BitMap()
    for ledger, first, end in runs.tolist():
        if ledger != ledger_id:
            if bitmap:
                yield ledger_id, bitmap
            ledger_id, bitmap = ledger, BitMap()
        bitmap.add_range(first, end)
    if bitmap:
        yield ledger_id, bitmap


def _ack_runs(cursor: ManagedCursor, rows: Rows) -> None:
    for ledger_id, part in _by_ledger(rows):
        cursor.ack_entries(ledger_id, part[:, 1], now_ms=0)


def _ack_singly(cursor: ManagedCursor, positions: Sequence[Position], *, persist: bool) -> int:
    begun = perf_counter_ns()
    for position in positions:
        cursor.ack(position, now_ms=1)
        if persist:
            cursor.persist(now_ms=1)
    return perf_counter_ns() - begun


def _ack_lists(cursor: ManagedCursor, calls: Sequence[list[Position]]) -> int:
    begun = perf_counter_ns()
    for positions in calls:
        cursor.ack_many(positions, now_ms=1)
    return perf_counter_ns() - begun


def _ack_entry_ids(cursor: ManagedCursor, rows: Rows, size: int) -> int:
    """Ack lists as the entry ids of a ledger: a list that goes over the end of one takes two calls."""
    lists = (rows[at : at + size] for at in range(0, len(rows), size))
    calls = [(ledger_id, part[:, 1].copy()) for each in lists for ledger_id, part in _by_ledger(each)]
    begun = perf_counter_ns()
    for ledger_id, entry_ids in calls:
        cursor.ack_entries(ledger_id, entry_ids, now_ms=1)
    return perf_counter_ns() - begun


def _messages(rows: Rows) -> list[tuple[Position, int]]:
    return [(Position(ledger_id, entry_id), deliver_at_ms) for ledger_id, entry_id, deliver_at_ms in rows.tolist()]


def _drain(
    tracker: DelayedDeliveryTracker,
    subscription: NothingAcked,
    *,
    maximum: int,
    step: int,
    end: int,
) -> Answer:
    """Advance the clock in steps, and take the due messages until a call returns none."""
    nanos = drained = checksum = 0
    for now_ms in range(step, end + 1, step):
        count = 1
        while count:
            begun = perf_counter_ns()
            positions = tracker.scheduled_messages(maximum, now_ms=now_ms)
            nanos += perf_counter_ns() - begun
            due = [(each, BitMap(ids for _, ids in part)) for each, part in groupby(positions, itemgetter(0))]
            count = subscription.send(due)
            drained += count
            checksum += sum(LEDGER_WEIGHT * each * len(ids) + sum(ids) for each, ids in due)
    return {"drain_nanos": nanos, "drained": drained, "sum": checksum, "left": tracker.delayed_message_count}
