"""Redelivery if crashed over time, thinned for a plot: the peak and the end of each slice of time, both exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ackstate.analysis.estimate.slices import SLICES_MAX, ThinnedCurve
from ackstate.analysis.replay.curves import SERIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.replay.acked import Int64s
    from ackstate.analysis.replay.curves import Series
    from ackstate.analysis.trace.parquet import Span

    Key = tuple[str, str]

TOTAL = ("", "")
"""The key of all subscriptions together."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: each value holds from its time to the next.

    Attributes:
        policy: Index in the grid.
        topic: Empty for all subscriptions at once.
        subscription: Empty for all subscriptions at once.
        ts_ms: Rising, each once; the first and the last are those of the trace.
        value: Acked messages that a crash would redeliver.
        causes: For each of `CAUSES`, the number of them due to it; the rest are not yet flushed.
    """

    policy: int
    topic: str
    subscription: str
    ts_ms: tuple[int, ...]
    value: tuple[int, ...]
    causes: tuple[tuple[int, ...], ...]

    @property
    def is_total(self) -> bool:
        """Whether it is the curve of all subscriptions at once."""
        return (self.topic, self.subscription) == TOTAL


@dataclass(frozen=True, slots=True)
class CrashTimes:
    """When processes died.

    Attributes:
        ts_ms: The first `CRASHES_MAX` times, rising.
        count: The number of times.
    """

    ts_ms: tuple[int, ...]
    count: int

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Return the times in the rows of `estimates`."""
        total = next(row for row in rows if (row["policy"], row["scope"]) == (0, "total"))
        return cls(tuple(total["crash_ms"] or ()), total["crash_count"])


def curves_of_rows(
    rows: Sequence[Mapping[str, Any]], span: Span, policies: Sequence[int], *, subscriptions: Sequence[Key],
    drawn: int = 0,
) -> list[Curve]:  # fmt: skip
    """Return the curve of all subscriptions at once under some policies, and some subscriptions' under one.

    Returns:
        Totals and subscriptions in the order given.
    """
    points = {(row["policy"], row["topic"], row["subscription"]): row for row in rows if row["curve_ms"] is not None}
    wanted = [(number, TOTAL) for number in policies] + [(drawn, key) for key in subscriptions]
    found = []
    for number, key in wanted:
        curve = ThinnedCurve(span.begin_ms, span.end_ms, slices_max=SLICES_MAX)
        if row := points.get((number, *key)):
            ts_ms = np.array(row["curve_ms"], np.int64)
            curve.add(ts_ms, np.array(row["curve"], np.int64).reshape(SERIES, -1))
        found.append(
            curve_of((policies.index(number), *key), *curve.points(SERIES), begin_ms=span.begin_ms, end_ms=span.end_ms)
        )
    return found


def curve_of(key: tuple[int, str, str], ts_ms: Int64s, values: Series, *, begin_ms: int, end_ms: int) -> Curve:
    """Return the curve of some points in order; no points if nothing is ever redelivered."""
    begin = np.zeros((SERIES, 1), np.int64)
    ts_ms = np.concatenate([[begin_ms], ts_ms, [end_ms]])
    values = np.concatenate([begin, values, values[:, -1:] if values.size else begin], axis=1)
    # Points may share a time: a peak at the end of a slice, or that at the end of the trace. The last one counts.
    lasts = np.append(ts_ms[1:] != ts_ms[:-1], True)
    value, *causes = (tuple(each) for each in values[:, lasts].tolist())
    return Curve(*key, tuple(ts_ms[lasts].tolist()), value, tuple(causes))
