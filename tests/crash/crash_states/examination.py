"""Executes a workload, opens each state that a power cut could leave, and shortens a workload that breaks a promise."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ackstate.analysis.crash.oracle import Broken, BrokenPromise, RunOutcome, counts
from crash.crash_states.sqlite import RecordedStorage, Recoveries, broken_by_error, states_of, temporary_place
from crash.shrink import shortest

_TRIES = 12


class Moment(NamedTuple):
    """The promises during some calls of the storage, from the first to the last, both included.

    During a step either those before it or those after it hold; of a completed step there is one.
    """

    first_call: int
    last_call: int
    step: int  # from 1; 0 before the first
    promised: tuple[Any, ...]


class WorkloadRun:
    """A workload during its execution.

    A subclass does the steps: `begin`, `do`; says what is `promised` now; and `recover`s a store, returns what is
    `differing` between two recoveries, and can `judge` one.
    """

    def __init__(self, workload, storage):
        self.moments, self.counts, self.step = [], Counter(), 0
        self.workload, self.storage = workload, storage

    def run(self):
        """Execute the workload. Errors of the store or a cursor escape."""
        self.begin()
        for step in self.workload.steps:
            self.step += 1
            self.do(step)

    @contextmanager
    def noted(self):
        """Record the promises during the block and after it."""
        first, before = self.storage.count_calls(), self.promised()
        yield
        last, after = self.storage.count_calls(), self.promised()
        if last > first:
            self.moments.append(Moment(first + 1, last, self.step, (before, after)))
        self.moments.append(Moment(last, last, self.step, (after,)))


class WorkloadFailure(NamedTuple):
    """A promise that a workload broke, during or after a step, and the last lines of its story."""

    broken: Broken
    step: int
    disk: tuple[str, ...]


class Examined(NamedTuple):
    """The result of one workload: the number of checked states, other counts, and the first failure."""

    cycles: int
    counts: Counter[str]
    failure: WorkloadFailure | None


def examine(workload):
    """Execute a workload, and check its crash states up to the first that breaks a promise."""
    with temporary_place() as place:
        storage = RecordedStorage(place)
        execution, failure = workload.on(storage), None
        with storage.stores:
            try:
                execution.run()
            except Exception as error:  # On a disk without faults no error may escape.
                broken = broken_by_error(error)
                failure = WorkloadFailure(broken, execution.step, (f"recovery: {broken.found}",))
        recoveries = Recoveries(execution.recover, execution.differing)
        judged, found = _first_failure(storage.copies, execution, recoveries)
    counts = {
        "crash_states": judged,
        "recoveries": recoveries.opened_count,
        "states_of_recoveries": recoveries.crashed_count,
    }
    return Examined(judged + recoveries.crashed_count, execution.counts + Counter(counts), found or failure)


def _first_failure(copies, execution, recoveries):
    """Check the states that a power cut could leave; return their number, and the first failure."""
    judged = 0
    for made, state in states_of(copies):
        judged += 1
        found = recoveries.open(state.copy)
        for moment in execution.moments:
            if not moment.first_call <= made <= moment.last_call:
                continue
            broken = (
                found if isinstance(found, Broken) else execution.judge(found, moment.promised, is_worst=made % 2 == 0)
            )
            if broken is not None:
                told = (f"power cut: {state.lost}", f"recovery: {broken.found}")
                return judged, WorkloadFailure(broken, moment.step, told)
    return judged, None


def outcome(seed, workload):
    """Examine a workload and, if it fails, the shortest that fails like it."""
    examined = examine(workload)
    if (failure := examined.failure) is None:
        return RunOutcome(seed, examined.cycles, counts=examined.counts)
    promise = failure.broken.promise

    def attempt(steps):
        again = examine(replace(workload, steps=steps)).failure
        is_same = again is not None and again.broken.promise is promise
        return (steps[: again.step], again) if is_same else None

    steps, failure = shortest(workload.steps[: failure.step], failure, attempt, tries=_TRIES)
    story = (*replace(workload, steps=steps[: failure.step]).story(), *failure.disk)
    broken = (BrokenPromise(promise, failure.broken.found, story),)
    return RunOutcome(seed, examined.cycles, **counts([failure.broken]), broken=broken, counts=examined.counts)
