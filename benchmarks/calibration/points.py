"""Which settings are calibrated, on which traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import TYPE_CHECKING

from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.workloads.traffic import WORKLOADS
from benchmarks.calibration.blocked import blocked
from benchmarks.calibration.workload import made

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.calibration.workload import CalibrationWorkload

BLOCKED = "blocked"
"""The shape whose dispatch a limit on bytes stops."""

_SHAPES = tuple(WORKLOADS)
# In order there is never more than one range.
_WITH_HOLES = tuple(shape for shape in _SHAPES if shape != "in_order")
_OLD = "become_old_ack_record_seconds"

_ANYWHERE: tuple[dict[str, object], ...] = (
    {"flush_interval_ms": 100},
    {"flush_interval_ms": 20, "tick_ms": 10},
    {"flush_interval_ms": 0, "tick_ms": 10},
    {"flush_interval_ms": 300, "tick_ms": 50},
    {},
    {"mark_delete_rate_limit": 1, "flush_interval_ms": 2_000},
    {"mark_delete_rate_limit": 20, "flush_interval_ms": 1_000},
    {"mark_delete_rate_limit": 0.5, "flush_interval_ms": 5_000, "tick_ms": 10},
    {"compaction_bytes_min": 0, "flush_interval_ms": 50},
    {"ledger_entry_count_max": 3, "flush_interval_ms": 50},
    {"ledger_rollover_ms": 300, "flush_interval_ms": 50},
    {"format": "PULSAR", "flush_interval_ms": 100},
    {"format": "PULSAR", "range_form": "LIST", "flush_interval_ms": 100},
    {"ledger_writable": False, "flush_interval_ms": 100},
    {"ledger_writable": False, "format": "PULSAR", "compression": "ZSTD", "compression_bytes_min": 0},
)
_WHERE_HOLES_ARE: tuple[dict[str, object], ...] = (
    {"range_count_max": 5, "flush_interval_ms": 100},
    {"range_count_max": 5, "keep": "WIDEST", "flush_interval_ms": 100},
    {"range_count_max": 0, "flush_interval_ms": 100},
    {"format": "PULSAR", "range_count_max": 5, "flush_interval_ms": 100},
    {"format": "PULSAR", "range_count_max": 5, "keep": "WIDEST", "flush_interval_ms": 100},
    {"format": "PULSAR", "range_form": "LIST", "range_count_max": 12, "keep": "WIDEST", "tick_ms": 10},
    {_OLD: 1, "flush_interval_ms": 100},
    {_OLD: 3, "flush_interval_ms": 100},
    {_OLD: 2, "range_count_max": 8, "flush_interval_ms": 250},
    {_OLD: 1, "format": "PULSAR", "tick_ms": 10},
    {_OLD: 3, "format": "PULSAR", "mark_delete_rate_limit": 5},
    {"ledger_writable": False, "metadata_range_count_max": 3, "flush_interval_ms": 250},
    {"ledger_writable": False, "metadata_range_count_max": 3, "format": "PULSAR", "flush_interval_ms": 250},
    {"ledger_writable": False, "metadata_bytes_max": 400, "flush_interval_ms": 250, "tick_ms": 10},
)
_WHERE_BYTES_BLOCK: tuple[dict[str, object], ...] = (
    {"max_unpersisted_ack_record_bytes": 1_024, "flush_interval_ms": 500},
    {"max_unpersisted_ack_record_bytes": 2_048, "flush_interval_ms": 200, "format": "PULSAR"},
    {"max_unpersisted_ack_record_bytes": 1_024, "mark_delete_rate_limit": 2, "flush_interval_ms": 2_000},
    {"max_unpersisted_ack_record_bytes": 4_096, "range_count_max": 100, "flush_interval_ms": 1_000, "tick_ms": 10},
)
POINT_COUNT_MAX = 10_000


@dataclass(frozen=True)
class Point:
    """A point of the grid.

    Attributes:
        shape: The shape of the traffic: a name of `WORKLOADS`, or `BLOCKED`.
        seed: The seed of the traffic.
        policy: The policy of the cursor.
    """

    shape: str
    seed: int
    policy: Policy

    @property
    def label(self) -> str:
        """The key of the point."""
        return f"{self.shape} {self.policy.label}"

    @cached_property
    def workload(self) -> CalibrationWorkload:
        """The traffic."""
        return _blocked(self.policy, self.seed) if self.shape == BLOCKED else _made(self.shape, self.seed)


# The same grid has the same traffic in every run.
_made, _blocked = cache(made), cache(blocked)


def grid(point_count: int, seed: int) -> list[Point]:
    """Return points: each setting on one shape, then on the next one, and then the same with other traffic.

    Raises:
        ValueError: The number is below 1 or above 10,000.
    """
    if not 1 <= point_count <= POINT_COUNT_MAX:
        raise ValueError(f"{point_count} points: expected 1 to {POINT_COUNT_MAX:,}")
    points: list[Point] = []
    for turn in count():
        for shape, settings in _turn(turn):
            if len(points) == point_count:
                return points
            policy = Policy.from_mapping(settings)
            points.append(Point(shape, seed + turn // len(_WITH_HOLES), policy))
    raise AssertionError


def _turn(turn: int) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield every setting once, neighbours of different kinds, on a shape that changes from turn to turn."""
    kinds = ((_ANYWHERE, _SHAPES), (_WHERE_HOLES_ARE, _WITH_HOLES), (_WHERE_BYTES_BLOCK, (BLOCKED,)))
    for number in range(max(len(settings) for settings, _ in kinds)):
        for settings, shapes in kinds:
            # Blocking points have their own traffic, which the first rounds include.
            if number < len(settings) and (shapes[0] != BLOCKED or turn % len(_WITH_HOLES) == 0):
                # 5 has no factor in common with either number of shapes.
                yield shapes[(number + 5 * turn) % len(shapes)], settings[number]
