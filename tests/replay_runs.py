"""Run a replay of one subscription beside a real cursor, and compare them at every instant."""

from __future__ import annotations

from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from chunks import chunk_of


def replayed(events, policies, log, *, sizes, end_ms):
    """Return, for each policy, millisecond -> number at its end, and the replay itself."""
    replay, begin = SubscriptionReplay(policies, log), 0
    found = [[] for _ in policies]
    parts = []
    for size in [*sizes, len(events)]:
        if events[begin : begin + size]:
            parts.append(replay.take(chunk_of(events[begin : begin + size])))
        begin += size
    parts.append(replay.end(end_ms))
    for part in parts:
        for points, mine in zip(part, found, strict=True):
            mine.extend(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    curves = []
    for mine in found:
        last, value = dict(mine), 0
        curves.append({now: (value := last.get(now, value)) for now in range(events[0].ts_ms, end_ms + 1)})
    return curves, replay


def assert_agreement(trace, policies, sizes):
    events, log = trace
    is_restarted = any(event.kind in montecarlo.RESTARTS for event in events)
    end_ms = events[-1].ts_ms + 450
    curves, replay = replayed(events, policies, log, sizes=sizes, end_ms=end_ms)
    for policy, curve, sums in zip(policies, curves, replay.curves, strict=True):
        seen = montecarlo.observe(events, policy, log, end_ms=end_ms)
        assert montecarlo.first_difference(curve, seen.at_end) is None, policy.label
        assert sums.sum.peak == seen.peak, policy.label
        costs = sums.costs
        assert costs.write_count == seen.write_count, policy.label
        # Acks given at once, or read again, may leave a bitmap that is as large either way in the other of two forms.
        slack = 0 if policy.leaves_nothing_out and not is_restarted else 10 * seen.write_count
        assert abs(costs.bytes_written - seen.bytes_written) <= slack, policy.label
        assert seen.bytes_kept is None or abs(costs.bytes_kept - seen.bytes_kept) <= slack, policy.label


SIZES = st.lists(st.integers(0, 20), max_size=4)
GRIDS = st.lists(montecarlo.POLICIES, min_size=1, max_size=2)
PLAIN = st.builds(
    lambda flush, tick, rate: [Policy.from_mapping(
        {"flush_interval_ms": flush, "tick_ms": tick, "mark_delete_rate_limit": rate, "compaction_bytes_min": 100}
    )],
    st.sampled_from((0, 1, 5, 30, 400)), st.sampled_from((1, 7, 50)), st.sampled_from((0, 0, 1, 20)),
)  # fmt: skip
