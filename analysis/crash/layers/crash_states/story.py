"""How is a broken promise told in as few steps as it takes?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash.layer import BrokenPromise, RunOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ackstate.analysis.crash.layers.crash_states.promises import Broken
    from ackstate.analysis.crash.layers.crash_states.workload import Workload


class Failure(NamedTuple):
    """A promise that a workload broke.

    Attributes:
        broken: The promise.
        step: During or after which step the power went; 0 before the first.
        disk: What the disk did last and what was lost, one line each.
    """

    broken: Broken
    step: int
    disk: tuple[str, ...]

    def told(self, workload: Workload) -> BrokenPromise:
        """Return the promise with its story."""
        story = (*replace(workload, steps=workload.steps[: self.step]).story(), *self.disk)
        return BrokenPromise(self.broken.promise, self.broken.found, story)


class Examined(NamedTuple):
    """What became of one workload: how many states were judged, what else was counted, the first that failed."""

    cycles: int
    counts: Mapping[str, int]
    failure: Failure | None


def outcome(
    seed: int, workload: Workload, examine: Callable[[Workload], Examined], *, attempts: int = 25
) -> RunOutcome:
    """Examine a workload and, if it fails, the shortest that fails like it.

    Args:
        seed: Which run it is.
        workload: What it does.
        examine: Carries a workload out and judges its crash states.
        attempts: How many shorter workloads may be tried.
    """
    examined = examine(workload)
    if examined.failure is None:
        return RunOutcome(seed, examined.cycles, counts=examined.counts)
    shortest, failure = _shrunk(workload, examined.failure, examine, attempts=attempts)
    return RunOutcome(
        seed,
        examined.cycles,
        lost_durable=failure.broken.lost,
        invented=failure.broken.invented,
        gauge_mismatch=int(failure.broken.is_gauge_wrong),
        broken=(failure.told(shortest),),
        counts=examined.counts,
    )


def _shrunk(
    workload: Workload, failure: Failure, examine: Callable[[Workload], Examined], *, attempts: int
) -> tuple[Workload, Failure]:
    """Leave out steps, many at a time first, as long as the same promise is broken."""
    workload = replace(workload, steps=workload.steps[: failure.step])
    size = max(1, len(workload.steps) // 2)
    while size:
        first = 0
        while first < len(workload.steps) and attempts:
            attempts -= 1
            shorter = replace(workload, steps=workload.steps[:first] + workload.steps[first + size :])
            found = examine(shorter).failure
            if found is not None and found.broken.promise == failure.broken.promise:
                workload, failure = replace(shorter, steps=shorter.steps[: found.step]), found
            else:
                first += size
        size //= 2
    return workload, failure
