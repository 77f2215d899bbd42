"""Generates traces of a given shape: each subscription by itself, chunk after chunk, from the seed of its plan.

Events have turns. Block q of `Traffic.block` entries has twice as many slots, even ones for deliveries, odd ones for
acks, one of each for each class. A class whose entries wait for n blocks has its first event in block n, and one in
every block from there.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.chunks import SEVERAL_FILES_SCHEMA, WRITE_OPTIONS, ChunkRow, Events, table_of
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.analysis.trace.parquet import new_trace, write_manifest
from ackstate.analysis.workloads.traffic import MESSAGES_PER_SECOND, UNACKED_MAX, Traffic, workload_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.chunks import Int64s
    from ackstate.analysis.trace.parquet import NewFiles

# A row group takes 2 to 5 MB.
_ROW_GROUP_CHUNKS, _ROW_GROUPS_PER_FILE, _FILES_PER_CORE = 64, 64, 4
EVENTS_MAX, SUBSCRIPTIONS_MAX, FLUSH_INTERVAL_MS_MAX = 10**13, 10**7, 86_400_000
_RATE_MIN, _RATE_MAX = 0.001, 10_000_000.0
_SPAN_S_MAX = 100 * 365 * 86_400
_NS_PER_MS, _NS_PER_S = 1_000_000, 1_000_000_000
_BEGIN_MS = 1_700_000_000_000
# Near Pulsar's 50,000, and a multiple of every block of a workload.
ENTRIES_PER_LEDGER, LEDGER_FIRST = 51_200, 1_000
# Rates hold for about this long.
_SPELL_MS = 250
_PUBLISHED_AT_ONCE = 64
_NEVER = 2**55


@dataclass(frozen=True, slots=True)
class TracePlan:
    """The parameters of a generated trace."""

    workload: str  # A name of `WORKLOADS`
    events: int  # Events of all subscriptions together, not counting those of the topics
    seed: int = 1  # Decides everything else: the same plan gives the same trace
    subscriptions: int = 8  # Number of subscriptions
    topics: int = 4  # Number of topics over which the subscriptions are spread
    messages_per_second: float = MESSAGES_PER_SECOND  # Mean rate of a topic
    flush_interval_ms: int = 1_000  # Interval at which every cursor persists

    def __post_init__(self) -> None:
        workload_named(self.workload)
        _check("events", self.events, 1, EVENTS_MAX)
        _check("subscriptions", self.subscriptions, 1, SUBSCRIPTIONS_MAX)
        _check("topics", self.topics, 1, self.subscriptions, "as many as subscriptions at most")
        _check("messages per second", self.messages_per_second, _RATE_MIN, _RATE_MAX)
        _check("flush interval in ms", self.flush_interval_ms, 1, FLUSH_INTERVAL_MS_MAX)
        if self.events < self.subscriptions:
            raise ValueError(f"{self.events} events are fewer than one for each of {self.subscriptions} subscriptions")
        # An entry has at least one event, its delivery or its ack.
        if self.events_of(0) / self.messages_per_second > _SPAN_S_MAX:
            raise ValueError(f"{self.events} events take more than 100 years: raise the rate")

    def events_of(self, subscription: int) -> int:
        """Return the number of a subscription's events; it never rises with the index."""
        share, rest = divmod(self.events, self.subscriptions)
        return share + (subscription < rest)

    def topic_of(self, subscription: int) -> int:
        """Return the number of a subscription's topic; subscription k is the first of topic k."""
        return subscription % self.topics

    def series_of(self, subscription: int) -> SubscriptionSeries:
        """Return a subscription's events."""
        shape, topic, rate = workload_named(self.workload), self.topic_of(subscription), self.messages_per_second
        # Delays are set at publish time, the same for all subscriptions of the topic.
        told_by = ("topic", topic) if shape.delay_ms else ("subscription", subscription)
        arrivals = Arrivals.at_rate(_key_of(self.seed, "arrivals", topic), rate)
        return SubscriptionSeries(shape, arrivals, _key_of(self.seed, *told_by), rate, Flushes(self.flush_interval_ms))


def _check(what: str, value: float, lowest: float, highest: float, why: str = "") -> None:
    # Written so that nan fails as well.
    if not lowest <= value <= highest:
        raise ValueError(f"{what} must be from {lowest:,} to {highest:,}, got {value:,}" + (f", {why}" if why else ""))


def _key_of(*parts: object) -> int:
    """Return a 64-bit hash of these parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _scattered(key: int, indexes: Int64s) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return 64 bits for each index that look random: SplitMix64 started at `key`, from S. Vigna's description."""
    bits = indexes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A rate that rises and falls, in spells of a quarter of a second, between two thirds and twice its mean.

    Time is in ns from 0, and a slot is half the time of a message: one slot for its arrival, one for an ack. Every
    spell has the same number of slots and begins in the first half of its own time.
    """

    key: int
    spell_slots: int
    spell_ns: int

    @classmethod
    def at_rate(cls, key: int, messages_per_second: float) -> Arrivals:
        """Return arrivals of this mean rate."""
        slots = max(2, round(2 * messages_per_second * _SPELL_MS / 1_000))
        return cls(key, slots, round(slots * _NS_PER_S / (2 * messages_per_second)))

    def at_ns(self, slots: Int64s) -> Int64s:
        """Return the times of slots, strictly rising below 10^8 messages a second."""
        if not len(slots):
            return slots
        spells = slots // self.spell_slots
        first = int(spells.min())
        begins = self._begin_ns(np.arange(first, int(spells.max()) + 2))
        lasts, passed = np.diff(begins), slots - spells * self.spell_slots
        spells -= first
        at_ns: Int64s = begins[spells] + lasts[spells] * passed // self.spell_slots
        return at_ns

    def _begin_ns(self, spells: Int64s) -> Int64s:
        late = (_scattered(self.key, spells) % np.uint64(self.spell_ns // 2)).astype(np.int64)
        return np.where(spells > 0, spells * self.spell_ns + late, 0)


class Flushes(NamedTuple):
    """Persists at a fixed interval, the first one after it; each has a begin and an end."""

    interval_ms: int

    @property
    def length_ms(self) -> int:
        """The duration of a persist: a hundredth of the interval, at most 5 ms."""
        return min(5, self.interval_ms // 100)

    def before(self, at_ns: int) -> int:
        """Return the number of begins and ends up to a time, inclusive."""
        at_ms = at_ns // _NS_PER_MS
        return at_ms // self.interval_ms + max(at_ms - self.length_ms, 0) // self.interval_ms

    def between(self, first: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return times, kinds and persists' numbers of the begins and ends numbered from `first` to `end`, excluded."""
        indexes = np.arange(first, end)
        number, is_end = indexes // 2 + 1, indexes % 2
        at_ms = number * self.interval_ms + is_end * self.length_ms
        return at_ms * _NS_PER_MS, np.where(is_end, EventKind.PERSIST_ENDED, EventKind.PERSIST_BEGUN), number


class Turns(NamedTuple):
    """The slots of one parity that have an event."""

    first_block: Int64s  # For each class, the first block in which it has an event
    parity: int  # 0 or 1

    @property
    def _at(self) -> Int64s:
        return 2 * np.arange(len(self.first_block)) + self.parity

    def before(self, slot: int) -> int:
        """Return the number of events before a slot."""
        blocks = -((self._at - slot) // (2 * len(self.first_block)))
        return int(np.maximum(blocks - self.first_block, 0).sum())

    def between(self, first: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return slot, block and class of the events from slot `first` (inclusive) to `end` (exclusive), in order."""
        block = 2 * len(self.first_block)
        blocks = np.arange(first // block, -(-end // block))
        slots = blocks[:, None] * block + self._at
        has_event = (blocks[:, None] >= self.first_block) & (slots >= first) & (slots < end)
        row, classes = np.nonzero(has_event)
        return slots[has_event], blocks[row], classes


class _EntryRuns(NamedTuple):
    """Events of runs of entries: the slot, the first entry (counted over all ledgers), the length, and the number."""

    slots: Int64s
    first: Int64s
    length: Int64s | int
    number: Int64s


@final
@dataclass(frozen=True)
class SubscriptionSeries:
    """A subscription's infinite series of events."""

    workload: Traffic  # The shape
    arrivals: Arrivals  # The times of the topic's slots
    key: int  # Assigns the entries of each block to classes
    messages_per_second: float  # The mean rate, which converts waiting times into blocks
    flushes: Flushes  # The persists of the cursor

    def chunks(self, count: int) -> Iterator[Events]:
        """Yield the first events of the series, `CHUNK_EVENTS` at a time."""
        waiting, slot = Events(*[np.empty(0, np.int64)] * len(Events._fields)), 0
        step = 2 * self.workload.block * max(CHUNK_EVENTS // (2 * self.workload.block), 1)
        while count:
            size = min(count, CHUNK_EVENTS)
            parts = [waiting]
            while sum(len(part.kind) for part in parts) < size:
                parts.append(self._between(slot, slot + step))
                slot += step
            waiting = joined(parts)
            yield waiting.where(slice(0, size))
            waiting = waiting.where(slice(size, None))
            count -= size

    def published(self, count: int) -> Iterator[Events]:
        """Yield the PUBLISH events of the topic before the end of that many events of this series, as `chunks` does."""
        at_once = 1 if self.workload.delay_ms else _PUBLISHED_AT_ONCE
        end = -(-(self.slot_of(count - 1) + 1) // (2 * at_once))
        for first, last in pairwise([*range(0, end, CHUNK_EVENTS), end]):
            entries = np.arange(first, last) * at_once
            due = self._due_ms(entries) if self.workload.delay_ms else np.full(len(entries), -1)
            kinds, length = np.full(len(entries), EventKind.PUBLISH), np.full(len(entries), at_once)
            yield _columns(_wall_ms(self.arrivals.at_ns(2 * entries)), kinds, entries, length, due)

    def slot_of(self, seq: int) -> int:
        """Return the last slot that has at most this many events before it."""
        return bisect_right(range(2**62), seq, key=self._before) - 1

    def _before(self, slot: int) -> int:
        at_ns = int(self.arrivals.at_ns(np.array([slot]))[0])
        return self._deliveries.before(slot) + self._acks.before(slot) + self.flushes.before(at_ns)

    @cached_property
    def _delayed(self) -> Int64s:
        """For each class, the blocks from an entry's block to its delivery's: at least 1."""
        return np.maximum(self._blocks(self.workload.delay_ms or (0.0,) * self.workload.block), 1)

    @cached_property
    def _held(self) -> Int64s:
        """For each class, the blocks from an entry's block to its ack's: at least 1 more."""
        acked = np.array([ms is not None for ms in self.workload.ack_ms])
        waited = np.maximum(self._blocks([ms or 0.0 for ms in self.workload.ack_ms]), 1)
        return np.where(acked, self._delayed + waited, _NEVER)

    def _blocks(self, waits_ms: Sequence[float]) -> Int64s:
        per_ms = self.messages_per_second / 1_000 / self.workload.block
        return np.rint(np.array(waits_ms) * per_ms).astype(np.int64)

    @cached_property
    def _deliveries(self) -> Turns:
        if not self.workload.is_in_runs:
            return Turns(self._delayed, 0)
        # A run is delivered when its whole block is published.
        last = np.full(self.workload.block, _NEVER)
        last[-1] = 0
        return Turns(last, 0)

    @cached_property
    def _acks(self) -> Turns:
        first = self._held.copy()
        if self.workload.stuck:
            first[0] += UNACKED_MAX
        return Turns(first, 1)

    def _between(self, first: int, end: int) -> Events:
        """Return the events from slot `first` (inclusive) to slot `end` (exclusive)."""
        bounds_ns = self.arrivals.at_ns(np.array([first, end])).tolist()
        delivered, acked = self._delivered(first, end), self._acked(first, end)
        flushed = self.flushes.between(*map(self.flushes.before, bounds_ns))
        at_ns = np.concatenate((flushed[0], self.arrivals.at_ns(delivered.slots), self.arrivals.at_ns(acked.slots)))
        # Stable, so that a persist comes before other events of its instant.
        order = np.argsort(at_ns, kind="stable")
        kinds = (flushed[1], _same(EventKind.DELIVER, delivered), _same(EventKind.ACK, acked))
        return _columns(
            _wall_ms(at_ns[order]),
            np.concatenate(kinds)[order],
            np.concatenate((np.full(len(flushed[0]), -1), delivered.first, acked.first))[order],
            np.concatenate((flushed[0] * 0, _same(delivered.length, delivered), _same(1, acked)))[order],
            np.concatenate((flushed[2], delivered.number, acked.number))[order],
        )

    def _delivered(self, first: int, end: int) -> _EntryRuns:
        slots, blocks, classes = self._deliveries.between(first, end)
        if self.workload.is_in_runs:
            begins, ends = (self._run_begin(which) for which in (blocks, blocks + 1))
            return _EntryRuns(slots, begins, ends - begins, np.zeros_like(slots))
        # Without delays the turns follow the order of the log, by entry instead of by class.
        return self._runs(slots, blocks - self._delayed[classes], classes, is_by_entry=not self.workload.delay_ms)

    def _acked(self, first: int, end: int) -> _EntryRuns:
        slots, blocks, classes = self._acks.between(first, end)
        is_in_order = not self.workload.delay_ms and len(set(self._held.tolist())) == 1
        return self._runs(slots, blocks - self._held[classes], classes, is_by_entry=is_in_order)

    def _runs(self, slots: Int64s, blocks: Int64s, turns: Int64s, *, is_by_entry: bool) -> _EntryRuns:
        offsets = turns if is_by_entry else self._offset_of(blocks, turns)
        classes = self._class_of(blocks, turns) if is_by_entry else turns
        numbers = classes % self.workload.consumers
        if self.workload.stuck:
            is_full = (classes == 0) & (blocks >= UNACKED_MAX)
            numbers = np.where(is_full, 1 + blocks % (self.workload.consumers - 1), numbers)
        return _EntryRuns(slots, blocks * self.workload.block + offsets, 1, numbers)

    def _class_of(self, blocks: Int64s, offsets: Int64s) -> Int64s:
        """Return the class of the entry at an offset of a block: a seeded permutation for each block."""
        factor, shift, flip = self._permutation(blocks)
        return np.asarray(((factor * offsets + shift) & (self.workload.block - 1)) ^ flip, np.int64)

    def _offset_of(self, blocks: Int64s, classes: Int64s) -> Int64s:
        """Return the offset of the entry of a class: the inverse of `_class_of`."""
        factor, shift, flip = self._permutation(blocks)
        # An odd number is its own inverse modulo 8; Newton's step doubles the bits, here to 12.
        inverse = factor * (2 - factor * factor)
        inverse *= 2 - factor * inverse
        return np.asarray((inverse * ((classes ^ flip) - shift)) & (self.workload.block - 1), np.int64)

    def _permutation(self, blocks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        bits = _scattered(self.key, blocks)
        factor, shift, flip = (
            (bits >> np.uint64(at)).astype(np.int64) & (self.workload.block - 1) for at in (8, 24, 40)
        )
        return factor | 1, shift, flip

    def _run_begin(self, blocks: Int64s) -> Int64s:
        """Return the start of the run delivered in each block: somewhat before the block, in the same ledger."""
        size = self.workload.block
        before = (_scattered(self.key, ~blocks) % np.uint64(size)).astype(np.int64)
        begins = blocks * size
        return np.where(begins % ENTRIES_PER_LEDGER, begins - before, begins)

    def _due_ms(self, entries: Int64s) -> Int64s:
        """Return the times at which a delayed workload's entries are due, -1 for entries that are not delayed."""
        blocks, offsets = np.divmod(entries, self.workload.block)
        classes = self._class_of(blocks, offsets)
        slots = (blocks + self._delayed[classes]) * 2 * self.workload.block + 2 * classes
        delays = np.array(self.workload.delay_ms)
        return np.where(delays[classes] > 0, _wall_ms(self.arrivals.at_ns(slots)), -1)


def _wall_ms(at_ns: Int64s) -> Int64s:
    return np.asarray(_BEGIN_MS + at_ns // _NS_PER_MS, np.int64)


def _columns(ts_ms: Int64s, kinds: Int64s, first: Int64s, length: Int64s, number: Int64s) -> Events:
    """Split entries counted over all ledgers, -1 for none, into ledger and entry."""
    is_none = first < 0
    ledgers = first // ENTRIES_PER_LEDGER
    entries = np.where(is_none, -1, first - ledgers * ENTRIES_PER_LEDGER)
    ledger_ids = np.where(is_none, -1, LEDGER_FIRST + ledgers)
    return Events(ts_ms, kinds, ledger_ids, entries, np.where(is_none, -1, entries + length - 1), number)


def joined(parts: Sequence[Events]) -> Events:
    """Return the concatenated events."""
    return Events(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _same(value: Int64s | int, runs: _EntryRuns) -> Int64s:
    return np.broadcast_to(np.asarray(value, np.int64), runs.slots.shape)


class GeneratedFile(NamedTuple):
    """The size of generated files."""

    events: int  # Events of subscriptions
    published: int  # Events of topics
    files: int  # Number of files
    size_bytes: int  # Size of the files


def make_trace(spark: SparkSession, plan: TracePlan, out: Location) -> GeneratedFile:
    """Generate a trace at `out`, which appears there when it is complete; an existing trace is replaced.

    `out` is a directory that every worker sees by that path. Each worker generates whole subscriptions. The same plan
    gives the same rows on any number of cores; their distribution over files may differ.
    """
    schema = ", ".join(f"{name} bigint" for name in GeneratedFile._fields)
    with new_trace(out) as written:
        by_size = plan.events // (_ROW_GROUPS_PER_FILE * _ROW_GROUP_CHUNKS * CHUNK_EVENTS)
        files = min(plan.subscriptions, max(by_size, _FILES_PER_CORE * _cores(spark)))
        subscriptions = spark.range(0, plan.subscriptions, numPartitions=files)
        work = partial(_make, plan=plan, written=written)
        try:
            (total,) = subscriptions.mapInArrow(work, schema).groupBy().sum(*GeneratedFile._fields).collect()
        except BaseException:
            # Tasks that still run would write into the directory that is being removed.
            spark.sparkContext.cancelAllJobs()
            raise
        if isinstance(written.directory, Path):
            write_manifest(written.directory)
    return GeneratedFile(*total)


def _cores(spark: SparkSession) -> int:
    return spark.sparkContext.defaultParallelism


def _make(batches: Iterable[pa.RecordBatch], *, plan: TracePlan, written: NewFiles) -> Iterator[pa.RecordBatch]:
    """Write the file of one partition, and yield its size."""
    from pyspark import TaskContext  # noqa: PLC0415 - series are generated without Spark, too

    subscriptions = (number for batch in batches for number in batch.column(0).to_pylist())
    context = TaskContext.get()
    assert context is not None
    file = written.file(context.partitionId())
    if isinstance(file, Path):
        # A second attempt at a task may start while the first still writes.
        unfinished = file.with_name(f".{file.name}.{context.taskAttemptId()}")
        made = write_subscriptions(plan, subscriptions, unfinished)
        if made.files:
            unfinished.rename(file)
    else:
        made = write_subscriptions(plan, subscriptions, file)
    yield pa.RecordBatch.from_pydict({name: [count] for name, count in made._asdict().items()})


def write_subscriptions(plan: TracePlan, subscriptions: Iterable[int], file: Location) -> GeneratedFile:
    """Write subscriptions into one Parquet file, and with the first one of a topic its PUBLISH events.

    Memory: a row group, for any number of events.
    """
    writer: pq.ParquetWriter | None = None
    events = published = 0
    with ExitStack() as opened:
        for subscription in subscriptions:
            if writer is None:
                sink = opened.enter_context(file.open("wb"))
                writer = opened.enter_context(pq.ParquetWriter(sink, SEVERAL_FILES_SCHEMA, **WRITE_OPTIONS))
            series, count = plan.series_of(subscription), plan.events_of(subscription)
            topic = plan.topic_of(subscription)
            key = (f"persistent://public/default/topic-{topic:05}", f"subscription-{subscription:05}")
            events += _write(writer, key, series.chunks(count))
            if topic == subscription:
                published += _write(writer, (key[0], ""), series.published(count))
    return GeneratedFile(events, published, 1, file.stat().st_size) if writer else GeneratedFile(0, 0, 0, 0)


def _write(writer: pq.ParquetWriter, key: tuple[str, str], chunks: Iterable[Events]) -> int:
    """Write the chunks of a subscription or a topic, and return their number of events."""
    rows = (ChunkRow(key, number, number * CHUNK_EVENTS, each) for number, each in enumerate(chunks))
    count = 0
    while group := list(islice(rows, _ROW_GROUP_CHUNKS)):
        writer.write_table(table_of(group))
        count += sum(len(row.events.kind) for row in group)
    return count
