"""L0: random schedules of a whole broker on the faulty memory store, compared after each event with plain sets.

`crash.model` defines the events and the comparisons. A run is the schedule of one seed: 70 to 150
events, of which about one in twelve is a crash. If it breaks a promise, the shortest story found within a few seconds
is reported.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from ackstate.analysis.crash.layer import RunOutcome, quiet
from ackstate.analysis.crash.promises import Promise
from crash.model.simulation import BrokerSimulation
from crash.model.story import failure_of, told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.crash.layer import Layer
    from crash.model.settings import Settings

_SHRINK_SECONDS = 5.0
FEATURES = (
    "delta", "whole", "snapshot", "metadata", "cut", "held_back", "batches", "resets", "failed_resets",
    "failed_persists", "fenced", "raced", "fenced_publishes", "published_in_a_race", "group_persists", "derived",
    "deletions", "trimmed_ledgers", "failed_trims", "lost_ledgers",
)  # fmt: skip
"""Further counts of a run: a feature that is never used is not tested."""


def schedules(first_seed: int) -> Iterator[RunOutcome]:
    """See `Layer`."""
    with quiet("ackstate.cursor"):
        for seed in count(first_seed):
            yield run(seed)


def run(seed: int, settings: Settings | None = None, *, shrink_seconds: float = _SHRINK_SECONDS) -> RunOutcome:
    """Run the schedule of a seed, with the drawn or given settings, and check it."""
    simulation = BrokerSimulation(seed, settings)
    failure = failure_of(simulation, range(simulation.event_count()))
    counts = (
        dict.fromkeys(FEATURES, 0)
        | simulation.counts
        | {"steps": simulation.step_count, "faults": simulation.fault_count}
    )
    if failure is None:
        return RunOutcome(seed, simulation.crash_count, counts=counts)
    error = failure.error
    return RunOutcome(
        seed,
        simulation.crash_count,
        lost_durable=error.entry_count if error.promise is Promise.I2 else 0,
        invented=error.entry_count if error.promise is Promise.I1 else 0,
        gauge_mismatch=int(error.promise is Promise.I3),
        broken=(told(seed, failure, seconds_max=shrink_seconds),),
        counts=counts,
    )


if TYPE_CHECKING:
    _: Layer = schedules
