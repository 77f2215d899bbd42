"""A thinned curve is bounded, and does not depend on how it came: chunk by chunk or at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.estimate.slices import ThinnedCurve

BEGIN_MS = 100
STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=80)


def arrays(steps):
    ts_ms = BEGIN_MS + np.cumsum([gap for gap, _, _ in steps])
    return ts_ms, np.array([[value, cause] for _, value, cause in steps]).T


def thinned(steps, cuts, *, slices_max=8):
    ts_ms, values = arrays(steps)
    curve = ThinnedCurve(BEGIN_MS, int(ts_ms[-1]), slices_max=slices_max)
    bounds = [0, *sorted(cuts), len(steps)]
    for low, high in pairwise(bounds):
        curve.add(ts_ms[low:high], values[:, low:high])
    return curve


def points_of(curve):
    ts_ms, values = curve.points(2)
    return ts_ms.tolist(), values.tolist()


def slowly(steps, width_ms):
    """Say of each slice the first peak and the last change, one point after another."""
    times, values_of = arrays(steps)
    at_end = dict(zip(times.tolist(), values_of.T.tolist(), strict=True))
    before, slices = [0, 0], {}
    for ts_ms, values in at_end.items():
        if values != before:
            slices.setdefault((ts_ms - BEGIN_MS) // width_ms, []).append((ts_ms, values))
        before = values
    kept = []
    for changes in slices.values():
        peak = max(changes, key=lambda change: (change[1][0], -change[0]))
        kept += [peak] if peak == changes[-1] else [peak, changes[-1]]
    return [ts_ms for ts_ms, _ in kept], [[values[row] for _, values in kept] for row in range(2)]


@given(STEPS, st.lists(st.integers(0, 80), max_size=6))
def test_however_it_is_cut_the_peak_and_the_end_of_each_slice_stay(steps, cuts):
    curve = thinned(steps, [min(cut, len(steps)) for cut in cuts])
    assert points_of(curve) == slowly(steps, curve.width_ms)
    last_ms = max(points_of(curve)[0], default=BEGIN_MS)
    assert (last_ms - BEGIN_MS) // curve.width_ms < 8


@pytest.mark.parametrize("seconds", [3, 30, 3_000])
def test_a_longer_time_does_not_make_it_larger(seconds):
    curve = ThinnedCurve(0, seconds * 1_000, slices_max=50)
    for second in range(seconds):
        ts_ms = second * 1_000 + np.arange(0, 1_000, 10)
        curve.add(ts_ms, (ts_ms % 70)[None, :])
    assert len(curve.points(1)[0]) <= 100
    assert len(curve._ts_ms) <= 101
