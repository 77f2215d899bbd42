"""Redelivery if crashed under every policy of a grid: exact for every instant, for each subscription and their sums.

Four steps. Chunks are made small wherever they are read; every subscription is replayed under all policies at once;
the curves of a slice of time are added up for topics, namespaces and all; what was found for each is put together. On
the driver there is a row for each estimate, and nothing else. A run over the days that are new takes the same steps,
with a state before and after them (`incremental`).

A worker sees sorted rows and holds of them 64 chunks, one subscription's acks as bitmaps for each recovery that
policies see differently, and of each curve up to 130,000 values, whatever the length of the trace; of a slice it holds
the curves of all subscriptions.

A subscription with most of the trace is read and made small on all cores; what is left to do one chunk after another
is a small part. Policies that need the cursor itself (limits, young age, Pulsar's format, wrong route) see whole
chunks, and replay one subscription on one core.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ackstate.analysis.estimate.compact_curve import SLICES_MAX, ThinnedCurve
from ackstate.analysis.estimate.parts import ESTIMATE, PART, RESULT_KEY, SCOPES, add_slices, put_together
from ackstate.analysis.estimate.rows import LocalRows
from ackstate.analysis.estimate.slices import Slices
from ackstate.analysis.estimate.sorted_chunks import is_counted, joined, sorted_chunks
from ackstate.analysis.estimate.subscription_parts import RequestedParts, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.rows import Rows
    from ackstate.analysis.estimate.trace_source import TraceSource
    from ackstate.analysis.replay.policy import Policy

CHUNKS_PER_SLICE = 64
"""So many chunks of events in a slice are what a worker adds up at once."""


def estimates(
    source: TraceSource,
    policies: Sequence[Policy | None],
    *,
    scopes: Sequence[str] = SCOPES,
    crashes_per_day: float = 1,
    is_plotted: bool = False,
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
        is_plotted: Whether curves are wanted, of all together and of the worst subscriptions.

    Returns:
        ``policy``: index in the grid; ``scope, namespace, topic, subscription``: what it is for, empty beyond the
        scope; ``expected``: mean over time, null if no time passed, as the next three; ``p50, p90, p99``: the least
        number that holds for that share of the time; ``max, max_ts_ms``: the most, and when first, null if it is 0: of
        a subscription at any event, of others at the end of any millisecond; ``not_flushed, young, cut_by_ranges,
        cut_by_bytes, cut_by_route``: expected by cause; they add up to it, and as recorded are told by the trace;
        ``write_count, bytes_written, bytes_kept, bytes_kept_max``: as `Costs`, summed up; ``blocked_ms``: of the
        subscription for which dispatch stood still longest; ``duration_ms``: of the trace; ``duplicates_per_day``.

        ``curve_ms, curve``: in each of about 500 slices of time when the peak and the last change are, and then row by
        row the numbers of `SERIES`; of all together under each policy, and under the first also of at least the
        `CURVE_COUNT_MAX` subscriptions of which most comes back, if there are as many; null for others.
        ``crash_ms, crash_count``: when processes died, of subscriptions and, at most `CRASHES_MAX` times, of all
        together, and how many times there are, under the first policy. ``crashes``: of a subscription as recorded,
        three numbers for each: what came back, what would have, had the persist under way been written, and whether
        there was one.
    """
    span = source.span()
    if not span.chunk_count:
        return LocalRows(lambda: (), ESTIMATE)
    count = slice_count(span.chunk_count) if is_plotted or set(scopes) != {"subscription"} else 0
    curve = ThinnedCurve.until(span.begin_ms, span.end_ms, slices_max=SLICES_MAX)
    widest = {"width_ms_max": curve.width_ms} if is_plotted else {}
    slices = Slices.of(span.begin_ms, span.end_ms, count, **widest)
    replays: list[Rows] = []
    for numbers in _alike(policies):
        mine = [policies[number] for number in numbers]
        wanted = RequestedParts(mine, numbers, span.begin_ms, slices, is_plotted=is_plotted)
        replays.append(sorted_chunks([source], mine).through(partial(replay, wanted=wanted), PART))
    parts = joined(replays)
    if count:
        parts = in_slices(parts, slices, scopes)
    make = partial(put_together, duration_ms=slices.end_ms - slices.begin_ms, crashes_per_day=crashes_per_day)
    return parts.together(RESULT_KEY).through(make, ESTIMATE)


def slice_count(chunk_count: int) -> int:
    """Return into how many slices the time of some chunks is cut, at least."""
    return -(-chunk_count // CHUNKS_PER_SLICE)


def in_slices(parts: Rows, slices: Slices, scopes: Sequence[str] = SCOPES) -> Rows:
    """Add the curves of each slice up; see `add_slices`."""
    by_slice = parts.together(("policy", "slice"), ("namespace", "topic"))
    return by_slice.through(partial(add_slices, slices=slices, scopes=tuple(scopes)), PART)


def _alike(policies: Sequence[Policy | None]) -> list[list[int]]:
    """Return which policies are counted and which need the cursor, without those of which there are none."""
    found: dict[bool, list[int]] = {True: [], False: []}
    for number, policy in enumerate(policies):
        found[is_counted(policy)].append(number)
    return [numbers for numbers in found.values() if numbers]
