"""Redelivery if crashed under every policy of a grid: exact for every instant, for each subscription and their sums.

Four steps. Each chunk is compacted where it is read; every subscription is replayed under all policies at once; the
curves are added up for topics, namespaces and all, one slice of time after the other; the results of each scope are
merged. The driver only holds a row for each estimate.

A worker reads sorted rows. It holds 64 chunks of them, one subscription's acks as bitmaps for each recovery on which
policies differ, and up to 130,000 values of each curve, for any length of the trace; for a slice it holds the curves of
all subscriptions.

A subscription with most of the trace is read and compacted on all cores; the remaining work per chunk is a small part.
Policies for which deliveries matter (a young age, a gate) read whole chunks, and replay one subscription on one core.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ackstate.analysis.estimate.chunks import sorted_chunks, takes_compact
from ackstate.analysis.estimate.engine import LocalRows, joined
from ackstate.analysis.estimate.parts import ESTIMATE, PART, RESULT_KEY, SCOPES, add_slices, put_together
from ackstate.analysis.estimate.slices import SLICES_MAX, Slices, ThinnedCurve
from ackstate.analysis.estimate.subscription_parts import RequestedParts, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.analysis.estimate.engine import Rows, TraceSource
    from ackstate.analysis.replay.policy import Policy

CHUNKS_PER_SLICE = 64
"""A worker adds up this many chunks of events in a slice at once."""


def estimates(  # noqa: PLR0913 - each is needed once
    source: TraceSource,
    policies: Sequence[Policy | None],
    *,
    scopes: Sequence[str] = SCOPES,
    crashes_per_day: float = 1,
    is_plotted: bool = False,
    drawn: int = 0,
    told: Callable[[], object] | None = None,
) -> Rows:
    """Estimate redelivery after a crash at any instant of a trace, under each policy of a grid.

    All numbers are over the whole trace, from its first event to its last, so that those of subscriptions add up to
    those of their topic. Before its first event, and while its process is dead, a subscription redelivers nothing;
    after its last event the broker continues to tick.

    ``policy``: index in the grid; ``scope, namespace, topic, subscription``: names, empty beyond the scope;
    ``expected``: mean over time, null if no time passed, as are ``p50, p90, p99``: the least number that is not
    exceeded for that share of the time; ``max, max_ts_ms``: the peak and its first time, null if it is 0: of a
    subscription at any event, of others at the end of any millisecond; ``not_flushed, young, cut_by_ranges,
    cut_by_bytes, cut_by_route``: ``expected`` by cause, which add up to it; as recorded they come from the trace;
    ``write_count, bytes_written, bytes_kept, bytes_kept_max``: as `Costs`, summed up; ``blocked_ms``: the longest
    time that dispatch of a subscription was blocked; ``duration_ms``: of the trace; ``duplicates_per_day``.

    ``curve_ms, curve``: the times of the peak and of the last change in each of about 500 slices of time, and then
    row by row the values of `SERIES`; for all together under each policy, and under the drawn one also for at least
    the `CURVE_COUNT_MAX` subscriptions with most redelivery, if there are as many; null for others.
    ``crash_ms, crash_count``: when processes died, of subscriptions and, at most `CRASHES_MAX` times, of all
    together, and the number of these times, under the first policy. ``crashes``: of a subscription as recorded,
    three numbers for each crash: redelivery, redelivery if the persist in progress had been written, and whether
    a persist was in progress.
    """
    span = source.span
    if not span.chunk_count:
        return LocalRows(lambda: (), ESTIMATE)
    count = -(-span.chunk_count // CHUNKS_PER_SLICE) if is_plotted or set(scopes) != {"subscription"} else 0
    curve = ThinnedCurve(span.begin_ms, span.end_ms, slices_max=SLICES_MAX)
    widest = {"width_ms_max": curve.width_ms} if is_plotted else {}
    slices = Slices.of(span.begin_ms, span.end_ms, count, **widest)
    replays: list[Rows] = []
    alike: dict[bool, list[int]] = {True: [], False: []}
    for number, policy in enumerate(policies):
        alike[takes_compact(policy)].append(number)
    for numbers in filter(None, alike.values()):
        mine = [policies[number] for number in numbers]
        wanted = RequestedParts(
            mine, numbers, span.begin_ms, slices, is_plotted=is_plotted, drawn=drawn,
            is_polled=span.poll_ms > 0, days=span.days,
        )  # fmt: skip
        replays.append(sorted_chunks(source, mine).through(partial(replay, wanted=wanted, told=told), PART))
    parts = joined(replays)
    if count:
        by_slice = parts.together(("policy", "slice"), ("namespace", "topic"))
        parts = by_slice.through(partial(add_slices, slices=slices, scopes=tuple(scopes)), PART)
    make = partial(put_together, duration_ms=slices.end_ms - slices.begin_ms, crashes_per_day=crashes_per_day)
    return parts.together(RESULT_KEY).through(make, ESTIMATE)
