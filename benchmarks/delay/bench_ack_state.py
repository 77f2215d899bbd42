"""The size of the ack states of a topic's subscriptions that all have the same holes: messages not yet due."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate import LedgerMap
from ackstate.cursor import CursorConfig, ManagedCursor, MemoryStore
from ackstate.cursor.journal.shared_holes import LiveBucket, SharedHoles
from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes, encode_metadata, encode_segment, segment_metadata
from benchmarks.acked_entries import SEED
from benchmarks.measurement import Against, BenchmarkReport, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from ackstate.cursor.store import Store

ABOUT = (
    "100 thousand messages that are not yet due, at random among 400 thousand of a topic in 8 ledgers, due within an "
    "hour; each subscription acks all others, 5 thousand entries at a time with a persist after each, but for 100 of "
    "its own that its consumers hold. At the end it is opened again and persists its whole state. The delayed messages "
    "are in two buckets, in segments of at most 5 thousand and 5 minutes. At rest: all that the store holds in the "
    "cursors' names, records and pins included; written: all that went to the store for them, buckets apart. Opening "
    "and persisting a whole state is time in this process with a store in memory; the buckets are read once. The limit "
    "is ``managedLedgerMaxUnackedRangesToPersist``: the acks that it excludes are redelivered after a crash."
)
LEDGERS = 8
ENTRIES = 50_000
DELAYED = 100_000
IN_FLIGHT = 100
BUCKETS = 2
SEGMENT = 5_000
CHUNK = 5_000
HOUR_MS = 3_600_000
SUBSCRIPTIONS = (1, 10, 100, 1_000)
RANGE_COUNT_MAX = 10_000
OWNER = "delay buckets"


class AckStateSize(NamedTuple):
    """The size and time of the subscriptions of a topic.

    Attributes:
        subscriptions: How many there are.
        at_rest_bytes: Their bytes in the store, each with a complete state and nothing after it.
        snapshot_bytes: The part of the complete states.
        written_bytes: The bytes written for them since the first ack.
        bucket_bytes: The bytes of the delay buckets, referenced or not; once per topic.
        journal_bytes: The bytes of their journals before that, deltas included.
        persist_ms: The time of each to write its complete state.
        open_ms: The time of each to be opened.
    """

    subscriptions: int
    at_rest_bytes: int
    snapshot_bytes: int
    written_bytes: int
    bucket_bytes: int
    journal_bytes: int
    persist_ms: Spread
    open_ms: Spread


class WeighingStore:
    """A store in memory that counts the written bytes."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.written_bytes = 0
        self.ledgers = _Weighed(self, self.memory.ledgers)
        self.metadata = _Weighed(self, self.memory.metadata)

    def held_bytes(self, owner: str) -> int:
        """Return the size of the ledgers whose owner's name begins so."""
        ledgers = self.memory.disk.ledgers.values()
        return sum(len(entry) for ledger in ledgers if ledger.owner.startswith(owner) for entry in ledger.entries)

    def value_bytes(self) -> int:
        """Return the size of all small values and their paths."""
        return sum(len(path) + len(value.data) for path, value in self.memory.disk.values.items())

    def close(self) -> None:
        """See `Store.close`."""


class _Weighed:
    def __init__(self, store: WeighingStore, part: object) -> None:
        self._store, self._part = store, part

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            if name in {"append", "put"}:
                self._store.written_bytes += len(given[1])  # type: ignore[arg-type]
            elif name == "append_all":
                self._store.written_bytes += sum(len(entry) for _, entry in given[0])  # type: ignore[attr-defined]
            return getattr(self._part, name)(*given, **named)

        return call


def delayed_numbers() -> npt.NDArray[np.int64]:
    """Return which messages are delayed, as if all ledgers were one, in order."""
    return np.sort(np.random.default_rng(SEED).choice(LEDGERS * ENTRIES, DELAYED, replace=False))


def seal_buckets(store: Store, numbers: npt.NDArray[np.int64]) -> list[LiveBucket]:
    """Write the delayed messages in buckets, each of as many ledgers, as the delay index does."""
    due_ms = np.random.default_rng(SEED + 1).integers(1, HOUR_MS, len(numbers))
    live = []
    for part, part_due_ms in zip(np.array_split(numbers, BUCKETS), np.array_split(due_ms, BUCKETS), strict=True):
        bucket_id = store.ledgers.create(OWNER)
        segments = [DelayedIndexes(times, *np.divmod(each, ENTRIES)) for each, times in segments_of(part, part_due_ms)]
        encoded = [encode_segment(segment) for segment in segments]
        metadata = encode_metadata([segment_metadata(*pair) for pair in zip(segments, encoded, strict=True)])
        store.ledgers.append_all([(bucket_id, entry) for entry in (metadata, *encoded)])
        live.append(LiveBucket(bucket_id, 1))
    return live


def segments_of(
    numbers: npt.NDArray[np.int64], due_ms: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield messages in order of their times, in batches of at most 5 minutes and a maximum number."""
    order = np.argsort(due_ms, kind="stable")
    numbers, due_ms = numbers[order], due_ms[order]
    begin = 0
    while begin < len(numbers):
        end = min(begin + SEGMENT, int(np.searchsorted(due_ms, due_ms[begin] + 300_000)))
        yield numbers[begin:end], due_ms[begin:end]
        begin = end


def acked_chunks(numbers: npt.NDArray[np.int64], subscription: int) -> list[tuple[int, npt.NDArray[np.uint32]]]:
    """Return the entries that a subscription acks, by ledger, in the order of the log."""
    held = np.random.default_rng(SEED + 2 + subscription).choice(LEDGERS * ENTRIES, IN_FLIGHT, replace=False)
    is_acked = np.ones(LEDGERS * ENTRIES, np.bool_)
    is_acked[numbers] = is_acked[held] = False
    chunks = []
    for begin in range(0, len(is_acked), CHUNK):
        ledger_id, first = divmod(begin, ENTRIES)
        chunks.append((ledger_id, (np.flatnonzero(is_acked[begin : begin + CHUNK]) + first).astype(np.uint32)))
    return chunks


def measure(
    *, shares: bool, subscriptions: Sequence[int] = SUBSCRIPTIONS, tell: Callable[[str], None] = print
) -> list[AckStateSize]:
    """Return the size for each number of subscriptions, which are added one after the other.

    Args:
        shares: Whether their snapshots may refer to the buckets.
        subscriptions: Rising numbers.
        tell: Receives each line of progress.
    """
    store = WeighingStore()
    numbers = delayed_numbers()
    live = seal_buckets(store, numbers)
    store.written_bytes = 0
    shared = SharedHoles(store, lambda: live) if shares else None
    log = LedgerMap.from_counts(dict.fromkeys(range(LEDGERS), ENTRIES))

    def opened(number: int) -> ManagedCursor:
        return ManagedCursor.open(
            store, topic="t", subscription=f"s{number}", ledgers=log, shared_holes=shared, now_ms=0
        )

    sizes: list[AckStateSize] = []
    journal_bytes, persist_ms, open_ms = 0, [], []
    for number in range(subscriptions[-1]):
        cursor = opened(number)
        for ledger_id, entry_ids in acked_chunks(numbers, number):
            cursor.ack_entries(ledger_id, entry_ids, now_ms=0)
            cursor.persist(now_ms=0)
        cursor.close(now_ms=0)
        journal_bytes += cursor.stats().journal_bytes
        before = perf_counter()
        again = opened(number)
        opened_at = perf_counter()
        again.mark_delete(again.mark_delete_position, properties={"round": 1}, now_ms=0)
        again.persist(now_ms=0)
        ended = perf_counter()
        assert again.deleted == cursor.deleted
        open_ms.append((opened_at - before) * 1e3)
        persist_ms.append((ended - opened_at) * 1e3)
        if number + 1 in subscriptions:
            sizes.append(
                AckStateSize(
                    number + 1,
                    store.held_bytes("cursor ") + store.value_bytes(),
                    store.held_bytes("cursor "),
                    store.written_bytes,
                    store.held_bytes(OWNER),
                    journal_bytes,
                    _spread(persist_ms),
                    _spread(open_ms),
                )
            )
            tell(
                f"{'shared' if shares else 'own'} holes, {number + 1} subscriptions: {sizes[-1].at_rest_bytes:,} bytes"
            )
    return sizes


def _spread(times: Sequence[float]) -> Spread:
    return Spread.of(times)


def left_out(*, shares: bool) -> int:
    """Return how many acked messages of a subscription a limit on ranges leaves out of the durable state."""
    store = MemoryStore()
    live = seal_buckets(store, delayed_numbers())
    cursor = ManagedCursor.open(
        store,
        topic="t",
        subscription="s",
        ledgers=LedgerMap.from_counts(dict.fromkeys(range(LEDGERS), ENTRIES)),
        config=CursorConfig(range_count_max=RANGE_COUNT_MAX),
        shared_holes=SharedHoles(store, lambda: live) if shares else None,
        now_ms=0,
    )
    for ledger_id, entry_ids in acked_chunks(delayed_numbers(), 0):
        cursor.ack_entries(ledger_id, entry_ids, now_ms=0)
        cursor.persist(now_ms=0)
    return cursor.redelivery_if_crashed


def main() -> None:
    """Measure and report."""
    report = BenchmarkReport("delay_ack_state", ABOUT)
    own, shared = measure(shares=False), measure(shares=True)
    report.count("the buckets, for any number of references", "bytes", own[0].bucket_bytes)
    for plain, slim in zip(own, shared, strict=True):
        what = f"{plain.subscriptions:,} subscriptions" if plain.subscriptions > 1 else "1 subscription"
        at_rest = Against("own holes", plain.at_rest_bytes)
        report.count(f"{what}: at rest, own holes", "bytes", plain.at_rest_bytes)
        report.count(f"{what}: at rest, shared holes", "bytes", slim.at_rest_bytes, at_rest)
        written = Against("own holes", plain.written_bytes)
        report.count(f"{what}: written, own holes", "bytes", plain.written_bytes)
        report.count(f"{what}: written, shared holes", "bytes", slim.written_bytes, written)
    whole, slim = own[-1], shared[-1]
    report.count("a whole state, own holes", "bytes", whole.snapshot_bytes / whole.subscriptions)
    report.count("a whole state, shared holes", "bytes", slim.snapshot_bytes / slim.subscriptions)
    report.count("a journal before that, own holes", "bytes", whole.journal_bytes / whole.subscriptions)
    report.count("a journal before that, shared holes", "bytes", slim.journal_bytes / slim.subscriptions)
    for what, own_ms, shared_ms in (
        ("writing a whole state", whole.persist_ms, slim.persist_ms),
        ("opening a cursor", whole.open_ms, slim.open_ms),
    ):
        report.time(f"{what}, own holes", "ms", own_ms)
        report.time(f"{what}, shared holes", "ms", shared_ms, Against("own holes", own_ms.median))
    what, unit = f"acked messages that a limit of {RANGE_COUNT_MAX:,} ranges leaves out", "messages"
    cut = report.count(f"{what}, own holes", unit, left_out(shares=False))
    report.count(f"{what}, shared holes", unit, left_out(shares=True), Against("own holes", cut))
    report.publish()


if __name__ == "__main__":
    main()
