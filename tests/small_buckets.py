"""A bucketed index with buckets of four messages: creation, filling, polls, and its stored snapshots."""

from __future__ import annotations

from ackstate import Position
from ackstate.delay import BucketRegistry, DelayConfig, SnapshotStorage

KEY = "#pulsar.internal.delayed.bucket"


def config(**settings) -> DelayConfig:
    """Strict; a bucket of 4, segments of 2 whatever the time."""
    few = {"min_index_count_per_bucket": 4, "max_indexes_per_segment": 2, "is_deliver_at_time_strict": True}
    return DelayConfig(**(few | settings))


def storage_of(store, **more) -> SnapshotStorage:
    return SnapshotStorage(store.ledgers, BucketRegistry(store.metadata, "/buckets"), "delayed", **more)


def keys_of(store) -> dict[str, str]:
    return dict(BucketRegistry(store.metadata, "/buckets").get_all())


def add(index, *messages, now_ms=0) -> None:
    for ledger_id, entry_id, deliver_at_ms in messages:
        assert index.add_message(Position(ledger_id, entry_id), deliver_at_ms=deliver_at_ms, now_ms=now_ms)


def fill(index, ledger_id, first_ms, *, count=4, now_ms=0) -> None:
    """Messages of one ledger, 10 ms apart."""
    add(index, *((ledger_id, entry_id, first_ms + 10 * entry_id) for entry_id in range(count)), now_ms=now_ms)


def many_buckets(index, *, count, first_ms=1000) -> None:
    """A bucket a ledger, from ledger 3 on, and one message behind them."""
    for number in range(count):
        fill(index, 3 + number, first_ms + 100 * number)
    add(index, (3 + count, 0, 9000))


def poll(index, now_ms, max_messages=100) -> list[tuple[int, int]]:
    return [tuple(position) for position in index.scheduled_messages(max_messages, now_ms=now_ms)]


def ranges(index) -> list[tuple[int, int, int, int]]:
    """The first and last ledger of each bucket, which segment is in memory, and the last one."""
    return [(*bucket.key, bucket.current, bucket.last) for bucket in index._sealed]
