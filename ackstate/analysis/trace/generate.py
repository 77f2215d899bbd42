"""Generates traces of a given shape: each subscription by itself, from the seed of its plan.

Events have turns. Block q of `Traffic.block` entries has twice as many slots, even ones for deliveries, odd ones for
acks. An entry that waits for n blocks has a slot of the n-th block after its own.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import count as counted_from
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.trace.chunks import ChunkWriter, Events, Gatherer, joined
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.parquet import new_trace, write_manifest
from ackstate.analysis.workloads.traffic import MESSAGES_PER_SECOND, UNACKED_MAX, Traffic, workload_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.chunks import Int64s
    from ackstate.analysis.trace.parquet import NewFiles

_EVENTS_PER_FILE, _FILES_PER_CORE = 2**26, 4
EVENTS_MAX, SUBSCRIPTIONS_MAX, FLUSH_INTERVAL_MS_MAX = 10**13, 10**7, 86_400_000
_RATE_MIN, _RATE_MAX = 0.001, 10_000_000.0
_SPAN_S_MAX = 100 * 365 * 86_400
_NS_PER_MS, _NS_PER_S = 1_000_000, 1_000_000_000
_BEGIN_MS = 1_700_000_000_000
# Near Pulsar's 50,000, and a multiple of every block of a workload.
ENTRIES_PER_LEDGER, LEDGER_FIRST = 51_200, 1_000
# Rates rise and fall in waves of about this length, between two thirds and twice their mean.
_WAVE_MS, _SWING = 500, 0.5
_PUBLISHED_AT_ONCE = 64
_ENTRIES_AT_ONCE = 8_192  # a multiple of every block and of `_PUBLISHED_AT_ONCE`


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
        return SubscriptionSeries(shape, arrivals, _key_of(self.seed, *told_by), rate, self.flush_interval_ms)


def _check(what: str, value: float, lowest: float, highest: float, why: str = "") -> None:
    # Written so that nan fails as well.
    if not lowest <= value <= highest:
        raise ValueError(f"{what} must be from {lowest:,} to {highest:,}, got {value:,}" + (f", {why}" if why else ""))


def _key_of(*parts: object) -> int:
    """Return a 64-bit hash of these parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The times of a topic's slots, in ns from 0; two slots for each message: one for its arrival, one for an ack."""

    phase: float  # Where the first wave begins, from 0 to 1
    wave_slots: int
    wave_ns: int

    @classmethod
    def at_rate(cls, key: int, messages_per_second: float) -> Arrivals:
        """Return arrivals of this mean rate."""
        slots = max(2, round(2 * messages_per_second * _WAVE_MS / 1_000))
        return cls(key / 2**64, slots, round(slots * _NS_PER_S / (2 * messages_per_second)))

    def at_ns(self, slots: Int64s) -> Int64s:
        """Return the times of slots, which never fall."""
        waves, slots = np.divmod(slots, self.wave_slots)
        share = slots / self.wave_slots
        late = np.sin(2 * np.pi * (share + self.phase)) - np.sin(2 * np.pi * self.phase)
        share += _SWING / (2 * np.pi) * late
        return np.asarray(waves * self.wave_ns + (share * self.wave_ns).astype(np.int64), np.int64)


@final
@dataclass(frozen=True)
class SubscriptionSeries:
    """A subscription's infinite series of events."""

    workload: Traffic  # The shape
    arrivals: Arrivals  # The times of the topic's slots
    key: int  # Assigns the entries of each block to classes
    messages_per_second: float  # The mean rate, which converts waiting times into blocks
    flush_interval_ms: int  # The interval at which the cursor persists, the first time after it

    def parts(self, count: int) -> Iterator[tuple[Events, Events]]:
        """Yield the first events of the series in parts, each with the PUBLISH events of the topic meanwhile.

        Memory: the messages that wait.
        """
        size, block = _ENTRIES_AT_ONCE, self.workload.block
        chance = np.random.default_rng(self.key)
        waiting: dict[int, list[Events]] = defaultdict(list)
        for number in counted_from():
            entries = np.arange(number * size, (number + 1) * size)
            classes = chance.permuted(np.arange(size).reshape(-1, block) % block, axis=1).ravel()
            turns = self._delivered(entries, classes), self._acked(entries, classes)
            for each in turns:
                parts = each.ts_ms // (2 * size)
                for part in np.unique(parts).tolist():
                    waiting[part].append(each.where(parts == part))
            events = self._timed(joined(waiting.pop(number)), number * 2 * size, (number + 1) * 2 * size)
            published = self._published(entries, classes)
            if len(events.kind) >= count:
                events = events.where(slice(0, count))
                yield events, published.where(published.ts_ms <= events.ts_ms[-1])
                return
            count -= len(events.kind)
            yield events, published

    def _delivered(self, entries: Int64s, classes: Int64s) -> Events:
        """Return the deliveries of entries, with slots instead of times."""
        block = self.workload.block
        if self.workload.is_in_runs:
            # A run is delivered when its whole block is published.
            first = entries[::block]
            return _turns(EventKind.DELIVER, 2 * (first + block - 1), first, block, first * 0)
        slots = self._delivery(entries, classes)
        return _turns(EventKind.DELIVER, slots, entries, 1, self._consumers(entries, classes))

    def _delivery(self, entries: Int64s, classes: Int64s) -> Int64s:
        """Return the slots of deliveries. Without delays they follow the order of the log."""
        turns = classes if self.workload.delay_ms else entries % self.workload.block
        return self._slots(entries, self._delayed()[classes], turns)

    def _acked(self, entries: Int64s, classes: Int64s) -> Events:
        """Return the acks of entries, with slots instead of times."""
        waits = self._delayed() + np.maximum(self._blocks([ms or 0.0 for ms in self.workload.ack_ms]), 1)
        is_in_order = not self.workload.delay_ms and len(set(waits.tolist())) == 1
        turns = entries % self.workload.block if is_in_order else classes
        slots = self._slots(entries, waits[classes], turns) + 1
        acks = _turns(EventKind.ACK, slots, entries, 1, self._consumers(entries, classes))
        acked = np.array([ms is not None for ms in self.workload.ack_ms])[classes]
        if self.workload.stuck:
            acked &= (classes != 0) | (entries // self.workload.block >= UNACKED_MAX)
        return acks.where(acked)

    def _slots(self, entries: Int64s, waits: Int64s, turns: Int64s) -> Int64s:
        return 2 * ((entries // self.workload.block + waits) * self.workload.block + turns)

    def _delayed(self) -> Int64s:
        """For each class, the blocks from an entry's block to its delivery's: at least 1."""
        return np.maximum(self._blocks(self.workload.delay_ms or (0.0,) * self.workload.block), 1)

    def _blocks(self, waits_ms: Sequence[float]) -> Int64s:
        per_ms = self.messages_per_second / 1_000 / self.workload.block
        return np.rint(np.array(waits_ms) * per_ms).astype(np.int64)

    def _consumers(self, entries: Int64s, classes: Int64s) -> Int64s:
        numbers, blocks = classes % self.workload.consumers, entries // self.workload.block
        if self.workload.stuck:
            is_full = (classes == 0) & (blocks >= UNACKED_MAX)
            numbers = np.where(is_full, 1 + blocks % (self.workload.consumers - 1), numbers)
        return numbers

    def _timed(self, turns: Events, first: int, end: int) -> Events:
        """Return the events from slot `first` (inclusive) to slot `end` (exclusive), persists included, in order."""
        persists = self._persists(*self.arrivals.at_ns(np.array([first, end])).tolist())
        turns = turns._replace(ts_ms=self.arrivals.at_ns(turns.ts_ms))
        # Stable, so that a persist comes before other events of its instant.
        events = joined([persists, turns])
        return _in_ledgers(events.where(np.argsort(events.ts_ms, kind="stable")))

    def _persists(self, begin_ns: int, end_ns: int) -> Events:
        """Return begins and ends of persists; one lasts a hundredth of the interval, at most 5 ms."""
        interval_ns, lasts_ms = self.flush_interval_ms * _NS_PER_MS, min(5, self.flush_interval_ms // 100)
        found = []
        for kind, late_ns in ((EventKind.PERSIST_BEGUN, 0), (EventKind.PERSIST_ENDED, lasts_ms * _NS_PER_MS)):
            first, end = (max(-((late_ns - each) // interval_ns), 1) for each in (begin_ns, end_ns))
            numbers = np.arange(first, end)
            found.append(_turns(kind, numbers * interval_ns + late_ns, numbers * 0 - 1, 1, numbers))
        return joined(found)

    def _published(self, entries: Int64s, classes: Int64s) -> Events:
        if not self.workload.delay_ms:
            first = entries[::_PUBLISHED_AT_ONCE]
            published = _turns(EventKind.PUBLISH, 2 * first, first, _PUBLISHED_AT_ONCE, first * 0 - 1)
        else:
            due_ms = _wall_ms(self.arrivals.at_ns(self._delivery(entries, classes)))
            is_delayed = np.array(self.workload.delay_ms)[classes] > 0
            published = _turns(EventKind.PUBLISH, 2 * entries, entries, 1, np.where(is_delayed, due_ms, -1))
        return _in_ledgers(published._replace(ts_ms=self.arrivals.at_ns(published.ts_ms)))


def _turns(kind: EventKind, slots: Int64s, first: Int64s, length: int, number: Int64s) -> Events:
    """Return events of runs of entries, counted over all ledgers, with slots instead of times."""
    return Events(slots, np.full(len(slots), kind), first, first, first + length - 1, number)


def _in_ledgers(events: Events) -> Events:
    """Convert times in ns, and entries counted over all ledgers, -1 for none."""
    is_none = events.first_entry < 0
    ledgers = events.first_entry // ENTRIES_PER_LEDGER
    first, last = (
        np.where(is_none, -1, each - ledgers * ENTRIES_PER_LEDGER) for each in (events.first_entry, events.last_entry)
    )
    ledger_ids = np.where(is_none, -1, LEDGER_FIRST + ledgers)
    return events._replace(ts_ms=_wall_ms(events.ts_ms), ledger_id=ledger_ids, first_entry=first, last_entry=last)


def _wall_ms(at_ns: Int64s) -> Int64s:
    return np.asarray(_BEGIN_MS + at_ns // _NS_PER_MS, np.int64)


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
        by_size = plan.events // _EVENTS_PER_FILE
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
    """Write subscriptions into one Parquet file, and with the first one of a topic its PUBLISH events."""
    numbers = list(subscriptions)
    if not numbers:
        return GeneratedFile(0, 0, 0, 0)
    published = 0
    with ChunkWriter(file, written={}) as writer:
        for subscription in numbers:
            topic = plan.topic_of(subscription)
            name = f"persistent://public/default/topic-{topic:05}"
            gathered = Gatherer(lambda key, rows: writer.write(key, Events.of_rows(rows)))
            for events, publishes in plan.series_of(subscription).parts(plan.events_of(subscription)):
                gathered.add((name, f"subscription-{subscription:05}"), np.column_stack(events))
                if topic == subscription:
                    gathered.add((name, ""), np.column_stack(publishes))
                    published += len(publishes.kind)
            gathered.flush()
    return GeneratedFile(writer.events - published, published, 1, file.stat().st_size)
