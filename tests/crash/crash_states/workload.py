"""The workload before a power cut, the promises at each of its moments, and its shortest failing story."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ackstate import CursorConfig
from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.layer import shortest
from ackstate.analysis.crash.oracle import Broken, BrokenPromise, Promise, RunOutcome, counts
from ackstate.cursor.formats import Format
from crash.observed_cursor import SUBSCRIPTIONS
from crash.promises import PromiseBrokenError
from crash.steps import Step, StepKind, steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.crash.oracle import Expected
    from crash.crash_states.log_trims import LogWorkload


_WEIGHTS = {
    StepKind.ACK: 10,
    StepKind.ACK_BATCH: 2,
    StepKind.MARK_DELETE: 1.5,
    StepKind.PERSIST: 8,
    StepKind.PERSIST_ALL: 1.5,
    StepKind.FALL_BACK: 0.5,
    StepKind.RESET: 0.7,
    StepKind.PROPERTIES: 0.7,
    StepKind.REOPEN: 0.6,
    StepKind.REOPEN_STORE: 0.6,
    StepKind.KILL: 1.2,
}
_DELETE_SHARE = 0.25


class ProcessKilledError(BaseException):
    """The process that has the store open was killed; no `Exception`, so that none of its code continues."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of one run.

    Attributes:
        subscriptions: Each has a cursor; all share a store.
        config: Configuration of the cursors.
        steps: In order.
    """

    subscriptions: tuple[str, ...]
    config: CursorConfig
    steps: tuple[Step, ...]

    def story(self):
        config = self.config
        yield (
            f"cursors {', '.join(self.subscriptions)} in the {config.format.value} format, compacted from"
            f" {config.compaction_bytes_min} bytes on, {config.ledger_entry_count_max} entries a ledger"
        )
        for number, step in enumerate(self.steps, start=1):
            yield f"{number}. {step}"


def draw_workload(random, *, step_count):
    subscriptions = SUBSCRIPTIONS if random.random() < 0.3 else SUBSCRIPTIONS[:1]
    format_ = Format.NATIVE if random.random() < 0.7 else Format.PULSAR
    config = CursorConfig(
        format=format_,
        compaction_bytes_min=random.choice((40, 90, 200)),
        ledger_entry_count_max=random.choice((3, 5, 50)),
        ledger_rollover_ms=0,
        range_count_max=random.choice((4, 8)) if format_ is Format.NATIVE and random.random() < 0.15 else None,
    )
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=step_count)
    drawn = steps(random, kinds, cursor_count=len(subscriptions))
    if random.random() < _DELETE_SHARE:
        deletion = Step(StepKind.DELETE, random.randrange(len(subscriptions)))
        drawn.insert(random.randrange(len(drawn) // 2, len(drawn) + 1), deletion)
    return Workload(subscriptions, config, tuple(drawn))


class Moment(NamedTuple):
    """The promises during some calls of the disk.

    Attributes:
        first_call: First call count of the moment.
        last_call: Last call count, inclusive.
        step: The number of the step, from 1; 0 before the first.
        alternatives: For each subscription, the expected states at the start and at the end of a step in progress:
            either is right. Only one for a completed step.
    """

    first_call: int
    last_call: int
    step: int
    alternatives: Mapping[str, tuple[Expected, ...]]


def broken_by_error(error):
    if isinstance(error, PromiseBrokenError):
        return Broken(error.promise, error.found, error.entry_count)
    return Broken(Promise.I10, f"{type(error).__name__}: {error}")


def judge(views, moment, *, is_worst):
    for subscription, view in views.items():
        for broken in oracle.judge(view, moment.alternatives[subscription], is_worst=is_worst):
            return broken._replace(found=f"{subscription}: {broken.found}")
    return None


def differing(first, again):
    for subscription, view in first.items():
        for broken in oracle.differing(view, again[subscription]):
            return broken._replace(found=f"{subscription}: {broken.found}")
    return None


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

    def told(self, workload):
        story = (*replace(workload, steps=workload.steps[: self.step]).story(), *self.disk)
        return BrokenPromise(self.broken.promise, self.broken.found, story)


class Examined(NamedTuple):
    """The result of one workload: the number of checked states, other counts, and the first failure."""

    cycles: int
    counts: Mapping[str, int]
    failure: WorkloadFailure | None


def outcome(seed, workload, examine, *, tries=25):
    examined = examine(workload)
    if examined.failure is None:
        return RunOutcome(seed, examined.cycles, counts=examined.counts)
    workload, failure = _shortest(workload, examined.failure, examine, tries=tries)
    return RunOutcome(
        seed, examined.cycles, **counts([failure.broken]), broken=(failure.told(workload),), counts=examined.counts
    )


def _shortest(workload, failure, examine, *, tries):
    def attempt(steps):
        found = examine(replace(workload, steps=steps)).failure
        is_same = found is not None and found.broken.promise is failure.broken.promise
        return (steps[: found.step], found) if found is not None and is_same else None

    steps, failure = shortest(workload.steps[: failure.step], failure, attempt, tries=tries)
    return replace(workload, steps=steps), failure
