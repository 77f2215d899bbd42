"""The cost of delayed messages in buckets on disk, and the time to recover them."""

from __future__ import annotations

import tempfile
from contextlib import closing, contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from ackstate import SqliteStore
from ackstate.analysis.workloads.traffic import HOUR_MS
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage
from benchmarks.delay.footprint import owned_bytes
from benchmarks.delayed_messages import TICK_MS, mixed_delays
from benchmarks.measurement import Against, BenchmarkReport, Spread, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

ABOUT = (
    "Messages due within an hour, any time as likely as another, in ledgers of 50 thousand, added one by one with "
    "Pulsar's settings: each ledger becomes a bucket, in segments of at most 5 thousand messages and 5 minutes, in "
    "SQLite with a sync for each. The message that begins a ledger seals the bucket before it: these calls are the "
    "seals, the others the adds, of which each ledger's is one figure. In memory: the memory of Python and CRoaring "
    "after a recovery. The last ledger is not sealed. Pulsar: its bucket tracker; recovery of 1 million in 20 buckets."
)
OWNER = "delayed/t"
CONFIG = DelayConfig(tick_time_ms=TICK_MS, is_deliver_at_time_strict=True)
SIZES = (1_000_000, 10_000_000)
PULSAR_RECOVERY = Against("Pulsar", 11, 50)
LIMIT_RECOVERY = Against("limit", 2_000)


class Filled(NamedTuple):
    """How long it took to add.

    Attributes:
        adds_ns: For a message, by ledger.
        seals_ns: For each seal.
    """

    adds_ns: list[float]
    seals_ns: list[float]


@contextmanager
def storage() -> Iterator[SnapshotStorage]:
    """Open a store on disk for the time being."""
    with tempfile.TemporaryDirectory() as directory, closing(SqliteStore(directory)) as store:
        yield SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/delayed/t"), OWNER)


def fill(index: BucketedDelayIndex, count: int) -> Filled:
    """Add messages one by one."""
    filled = Filled([], [])
    for ledger in mixed_delays(count):
        first, *others = ledger.one_by_one()
        begin = perf_counter_ns()
        index.add_message(first[0], deliver_at_ms=first[1], now_ms=0)
        sealed = perf_counter_ns()
        for position, deliver_at_ms in others:
            index.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=0)
        filled.adds_ns.append((perf_counter_ns() - sealed) / max(1, len(others)))
        filled.seals_ns.append(sealed - begin)
    return filled._replace(seals_ns=filled.seals_ns[1:])


def recovered(storage: SnapshotStorage) -> BucketedDelayIndex:
    index, report = BucketedDelayIndex.recover(CONFIG, storage=storage, now_ms=0)
    assert not report.fell_back
    assert not report.dropped
    return index


def snapshot_bytes(storage: SnapshotStorage) -> int:
    """Return how many bytes the stored buckets have."""
    ledgers = storage.ledgers
    return sum(
        len(entry) for each in ledgers.owned_by(OWNER) for entry in ledgers.read(each, 0, ledgers.last(each) + 1)
    )


def drain(index: BucketedDelayIndex) -> None:
    """Take out all, one minute at a time: the timed function."""
    for now_ms in range(60_000, HOUR_MS + 60_000, 60_000):
        index.scheduled_messages(HOUR_MS, now_ms=now_ms)
    assert len(index) == 0


def measure(report: BenchmarkReport, count: int, *, runs: int = 5) -> None:
    """Report everything of one size."""
    what = f"{count:,}"
    with storage() as stored:
        filled = fill(BucketedDelayIndex(CONFIG, storage=stored), count)
        index = recovered(stored)
        sealed, buckets = len(index), index.stats().bucket_count
        report.time(f"{what}: add", "ns a message", _spread(filled.adds_ns), Against("Pulsar", 750, 1_200))
        seals = _spread([each / 1e6 for each in filled.seals_ns])
        report.time(f"{what}: seal of a bucket of 50,000", "ms", seals, Against("Pulsar's longest", 43, 60))
        report.count(f"{what}: buckets", "", buckets)
        per_message = snapshot_bytes(stored) / sealed
        report.count(f"{what}: snapshots", "bytes a message", per_message, Against("Pulsar", 16.64))
        report.count(f"{what}: in memory", "bytes a message", owned_bytes([index]) / sealed)
        report.count(f"{what}: in memory, its own figure", "bytes a message", index.memory_bytes / sealed)
        against = LIMIT_RECOVERY if count == max(SIZES) else PULSAR_RECOVERY
        spread = timed(lambda _: recovered(stored), lambda: None, runs=runs, each=1e6)
        report.time(f"{what}: recovery from {buckets} buckets", "ms", spread, against)
        # Only once, because drained messages are deleted.
        begin = perf_counter_ns()
        drain(index)
        spread = _spread([(perf_counter_ns() - begin) / sealed])
        report.time(f"{what}: drain each minute", "ns a message", spread, Against("Pulsar's in-memory", 250))


def _spread(figures: list[float]) -> Spread:
    return Spread.of(figures)


if __name__ == "__main__":
    report = BenchmarkReport("delay_bucketed", ABOUT)
    for count in SIZES:
        measure(report, count)
    report.publish()
