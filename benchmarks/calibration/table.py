"""Renders a calibration as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ackstate.analysis.replay.policy import Policy

if TYPE_CHECKING:
    from benchmarks.calibration.results import Calibration, PointResult

_HEADS = ("traffic", "store", "policy", "kills", "equal", "observed", "expected", "mean observed", "cuts", "slack")
_WORDS = 3


def result_table(calibration: Calibration) -> Table:
    """Return a table with one row per point."""
    table = Table(box=None, header_style="bold")
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if number < _WORDS else "right", overflow="fold")
    for point in calibration.points:
        table.add_row(*_cells(point), style=None if _holds(point) else "red")
    return table


def _cells(point: PointResult) -> list[str]:
    policy = Policy.from_mapping(point.policy).label
    equal = len(point.kills) - point.unequal
    mean, cuts = point.mean, point.power_cuts
    observed = [death.observed for death in point.kills]
    return [
        point.shape,
        point.store,
        policy,
        str(len(point.kills)),
        str(equal) if equal == len(point.kills) else f"{equal} (!)",
        f"{min(observed):,} to {max(observed):,}",
        f"{point.expected:,.1f}",
        f"{mean.observed:,.1f} ± {mean.half_width:,.1f}" if mean else "-",
        f"{len(cuts) - point.beyond} of {len(cuts)}" if cuts else "-",
        f"{sum(death.slack for death in cuts):,}" if cuts else "-",
    ]


def _holds(point: PointResult) -> bool:
    return not point.unequal and not point.beyond and point.spark_agrees
