"""Redelivery if crashed under every policy of a grid: exact for every instant, for each subscription and their sums.

Four steps. Chunks are made small wherever they are read; every subscription is replayed under all policies at once;
the curves of a slice of time are added up for topics, namespaces and all; what was found for each is put together. On
the driver there is a row for each estimate, and nothing else.

A worker sees sorted rows and holds of them 64 chunks, one subscription's acks as bitmaps for each recovery that
policies see differently, and of each curve up to 130,000 values, whatever the length of the trace; of a slice it holds
the curves of all subscriptions.

A subscription with most of the trace is read and made small on all cores; what is left to do one chunk after another
is a small part. Policies that need the cursor itself (limits, young age, Pulsar's format, wrong route) see whole
chunks, and replay one subscription on one core.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

from ackstate.analysis.redelivery.curve_sum import Histogram
from ackstate.analysis.redelivery.parts import (
    ESTIMATE,
    PART,
    RESULT_KEY,
    SCOPES,
    Part,
    add_slices,
    batches_of,
    narrow_sums,
    put_together,
)
from ackstate.analysis.redelivery.rows import LocalRows
from ackstate.analysis.redelivery.slices import Slices, SliceWriter, namespace_of
from ackstate.analysis.redelivery.sorted_chunks import by_subscription, is_counted, sorted_chunks
from ackstate.analysis.redelivery.subscription_replay import SubscriptionReplay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from ackstate.analysis.redelivery.acked import Chunk
    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.rows import Rows
    from ackstate.analysis.redelivery.trace_source import TraceSource

_CHUNKS_PER_SLICE = 64


def estimates(
    source: TraceSource,
    policies: Sequence[Policy | None],
    *,
    scopes: Sequence[str] = SCOPES,
    crashes_per_day: float = 1,
) -> Rows:
    """Estimate what a crash at any instant of a trace brings back, under each policy of a grid.

    All numbers are over the whole trace, from its first event to its last, so that those of subscriptions add up to
    those of their topic. Before its first event, and while its process is dead, nothing of a subscription comes back;
    after its last one the broker goes on to tick.

    Args:
        source: The trace; where it is read decides where everything else runs.
        policies: The grid; `AS_RECORDED` is the recording itself.
        scopes: Of `SCOPES`, for which: a topic is what its unload redelivers, ``total`` a crash of the broker.
        crashes_per_day: The rate for which duplicates are counted.

    Returns:
        ``policy``: index in the grid; ``scope, namespace, topic, subscription``: what it is for, empty beyond the
        scope; ``expected``: mean over time, null if no time passed, as the next three; ``p50, p90, p99``: the least
        number that holds for that share of the time; ``max, max_ts_ms``: the most, and when first, null if it is 0: of
        a subscription at any event, of others at the end of any millisecond; ``not_flushed, young, cut_by_ranges,
        cut_by_bytes, cut_by_route``: expected by cause; they add up to it, and as recorded are told by the trace;
        ``write_count, bytes_written, bytes_kept, bytes_kept_max``: as `Costs`, summed up; ``blocked_ms``: of the
        subscription for which dispatch stood still longest; ``duration_ms``: of the trace; ``duplicates_per_day``.
    """
    span = source.span()
    if not span.chunk_count:
        return LocalRows(lambda: (), ESTIMATE)
    slice_count = -(-span.chunk_count // _CHUNKS_PER_SLICE) if set(scopes) != {"subscription"} else 0
    slices = Slices.of(span.begin_ms, span.end_ms, slice_count)
    replays: list[Rows] = [
        sorted_chunks(source, [policies[number] for number in numbers]).through(
            partial(_replay, policies=policies, slices=slices, numbers=numbers), PART
        )
        for numbers in _alike(policies)
    ]
    parts = reduce(lambda some, others: some.plus(others), replays)
    if slice_count:
        by_slice = parts.together(("policy", "slice"), ("namespace", "topic"))
        parts = by_slice.through(partial(add_slices, slices=slices, scopes=tuple(scopes)), PART)
    make = partial(put_together, duration_ms=slices.end_ms - slices.begin_ms, crashes_per_day=crashes_per_day)
    return parts.together(RESULT_KEY).through(make, ESTIMATE)


def _alike(policies: Sequence[Policy | None]) -> list[list[int]]:
    """Return which policies are counted and which need the cursor, without those of which there are none."""
    found: dict[bool, list[int]] = {True: [], False: []}
    for number, policy in enumerate(policies):
        found[is_counted(policy)].append(number)
    return [numbers for numbers in found.values() if numbers]


def _replay(
    batches: Iterable[pa.RecordBatch],
    *,
    policies: Sequence[Policy | None],
    slices: Slices,
    numbers: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Replay sorted chunks under some policies, and write down what each subscription's curves come to."""
    mine = range(len(policies)) if numbers is None else numbers
    yield from batches_of(_parts_of_chunks(batches, [policies[number] for number in mine], slices, mine))


def _parts_of_chunks(
    batches: Iterable[pa.RecordBatch], policies: Sequence[Policy | None], slices: Slices, numbers: Sequence[int]
) -> Iterator[Part]:
    for key, log, chunks in by_subscription(batches):
        subscription = _Subscription(key, policies, log, slices)
        for chunk in chunks:
            yield from _numbered(subscription.take(chunk), numbers)
        yield from _numbered(subscription.end(), numbers)


def _numbered(parts: Iterable[Part], numbers: Sequence[int]) -> Iterator[Part]:
    return (part._replace(policy=numbers[part.policy]) for part in parts)


class _Subscription:
    def __init__(
        self, key: tuple[str, str], policies: Sequence[Policy | None], log: dict[int, int], slices: Slices
    ) -> None:
        self._names = (namespace_of(key[0]), *key)
        self._slices = slices
        self._replay = SubscriptionReplay(policies, log)
        self._writers = [SliceWriter(slices) for _ in policies]

    def take(self, chunk: Chunk) -> Iterator[Part]:
        """Take the next chunk in, and return what is ready to be passed on."""
        for policy, points in enumerate(self._replay.take(chunk)):
            for change in self._writers[policy].changes(points):
                yield Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None)
            yield from self._large_histogram(policy)

    def end(self) -> Iterator[Part]:
        """Return the rest."""
        for policy, points in enumerate(self._replay.end(self._slices.end_ms)):
            changes = self._writers[policy]
            for change in (*changes.changes(points), *changes.end()):
                yield Part(policy, change.number, SCOPES[0], *self._names, *change[1:], None)
            curve = self._replay.curves[policy]
            sums = narrow_sums([curve.sum.peak, curve.sum.peak_ts_ms, *curve.sum.cause_sums, *curve.costs])
            yield Part(policy, -1, SCOPES[0], *self._names, 0, *curve.sum.histogram.columns(), sums)

    def _large_histogram(self, policy: int) -> Iterator[Part]:
        curve = self._replay.curves[policy]
        if curve.sum.histogram.is_large:
            yield Part(policy, -1, SCOPES[0], *self._names, 0, *curve.sum.histogram.columns(), None)
            curve.sum.histogram = Histogram()
