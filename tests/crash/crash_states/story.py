"""Reports a broken promise with the shortest workload that breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ackstate.analysis.crash.layer import BrokenPromise, RunOutcome
from ackstate.analysis.crash.oracle import counts
from ackstate.analysis.crash.shrink import Failing, shortest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ackstate.analysis.crash.oracle import Broken
    from crash.crash_states.log_trims import LogWorkload
    from crash.crash_states.workload import Workload


WorkloadT = TypeVar("WorkloadT", "Workload", "LogWorkload")


class WorkloadFailure(NamedTuple):
    """A promise that a workload broke.

    Attributes:
        broken: The promise.
        step: The step during or after which the power was cut; 0 before the first.
        disk: The last calls of the disk and the loss, one line each.
    """

    broken: Broken
    step: int
    disk: tuple[str, ...]

    def told(self, workload: WorkloadT) -> BrokenPromise:
        """Return the promise with its story."""
        story = (*replace(workload, steps=workload.steps[: self.step]).story(), *self.disk)
        return BrokenPromise(self.broken.promise, self.broken.found, story)


class Examined(NamedTuple):
    """The result of one workload: the number of checked states, other counts, and the first failure."""

    cycles: int
    counts: Mapping[str, int]
    failure: WorkloadFailure | None


def outcome(seed: int, workload: WorkloadT, examine: Callable[[WorkloadT], Examined], *, tries: int = 25) -> RunOutcome:
    """Examine a workload and, if it fails, the shortest that fails like it.

    Args:
        seed: The seed of the run.
        workload: The workload.
        examine: Executes a workload and checks its crash states.
        tries: Most shorter workloads to try.
    """
    examined = examine(workload)
    if examined.failure is None:
        return RunOutcome(seed, examined.cycles, counts=examined.counts)
    workload, failure = _shortest(workload, examined.failure, examine, tries=tries)
    return RunOutcome(
        seed,
        examined.cycles,
        **counts([failure.broken]),
        broken=(failure.told(workload),),
        counts=examined.counts,
    )


def _shortest(
    workload: WorkloadT, failure: WorkloadFailure, examine: Callable[[WorkloadT], Examined], *, tries: int
) -> tuple[WorkloadT, WorkloadFailure]:
    """Remove steps as long as the same promise is broken."""

    def attempt(steps: tuple[Any, ...]) -> Failing[Any, WorkloadFailure] | None:
        found = examine(replace(workload, steps=steps)).failure
        is_same = found is not None and found.broken.promise is failure.broken.promise
        return Failing(steps[: found.step], found) if found is not None and is_same else None

    found = shortest(Failing(workload.steps[: failure.step], failure), attempt, tries=tries)
    return replace(workload, steps=found.steps), found.evidence
