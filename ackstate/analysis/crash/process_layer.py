"""The common part of the layers that crash real processes: a run is a sequence of process runs in one directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ackstate.analysis.crash.process_runs import ProcessRuns, check_beginning
from ackstate.analysis.crash.promises import gravest
from ackstate.analysis.crash.shrink import Failing, shortest
from ackstate.analysis.crash.subject_process import subject_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ackstate.analysis.crash.layer import BrokenPromise, RunOutcome
    from ackstate.analysis.crash.process_runs import Crash, CrashTiming
    from ackstate.analysis.crash.subject_process import Launch

_RECOVERED_TWICE_SHARE = 0.3


class RunSize(NamedTuple):
    """The length of a run: the number of process runs, and of the operations of each unless it is crashed earlier."""

    lives: int
    operations: int


class ProcessLayer(ABC):
    """A layer whose runs consist of process runs.

    Args:
        launch: Starts the subject; None for ours, each of `ours` in turn by seed.
        size: The size of a run.
        timing: The times of the crashes, and the time limit for an answer of a subject.
        shrink_tries: Most repeats of a run that broke a promise, to find a shorter story.
    """

    ours: ClassVar[tuple[str, ...]]
    chance_name: ClassVar[str]
    shrink_seconds: ClassVar[float]

    def __init__(self, launch: Launch | None, *, size: RunSize, timing: CrashTiming, shrink_tries: int) -> None:
        self._launches = [subject_launch(name) for name in self.ours] if launch is None else [launch]
        self._size, self._timing, self._shrink_tries = size, timing, shrink_tries

    @abstractmethod
    def stage(self, chance: Random) -> AbstractContextManager[tuple[Path, Crash]]:
        """Provide an empty directory, and the crash of the processes that work in it."""

    def operation_count(self, size: RunSize, chance: Random) -> int:  # noqa: ARG002 - for subclasses
        """Return the maximum number of operations of the next process."""
        return size.operations

    def runs(self, first_seed: int) -> Iterator[RunOutcome]:
        """Yield the runs without end, as `Layer`; first check that every subject works without a crash.

        Raises:
            SubjectError: A subject does not work even without a crash.
            OSError: There is no room for another process.
        """
        for launch in self._launches:
            with self.stage(Random("beginning")) as (directory, _):  # noqa: S311 - no secret
                check_beginning(launch, directory, patience_s=self._timing.patience_s)
        for seed in count(first_seed):
            outcome = self._lived(seed, self._size).outcome()
            yield replace(outcome, broken=self._shortened(outcome)) if outcome.broken else outcome

    def _lived(self, seed: int, size: RunSize) -> ProcessRuns:
        """Execute the run of a seed: its process runs, or fewer if a promise is broken.

        The last of them is judged by a process that only recovers; so are others, chosen at random.
        """
        chance = Random(f"{self.chance_name} {seed}")  # noqa: S311 - a workload, not a secret
        with self.stage(chance) as (directory, crash):
            lives = ProcessRuns(self._launches[seed % len(self._launches)], directory, seed, crash, self._timing)
            for number in range(size.lives):
                lives.live_once(self.operation_count(size, chance))
                if not lives.broken and (number + 1 == size.lives or chance.random() < _RECOVERED_TWICE_SHARE):
                    lives.recover()
                if lives.broken:
                    break
            return lives

    def _shortened(self, outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
        return shorter_run(
            outcome.broken,
            self._size,
            lambda size: self._lived(outcome.seed, size).broken,
            tries=self._shrink_tries,
            seconds=self.shrink_seconds,
        )


def shorter_run(
    broken: tuple[BrokenPromise, ...],
    size: RunSize,
    repeat: Callable[[RunSize], tuple[BrokenPromise, ...]],
    *,
    tries: int,
    seconds: float,
) -> tuple[BrokenPromise, ...]:
    """Repeat a run with fewer process runs and operations while it breaks its gravest promise; return the last breaks.

    Args:
        broken: The promises that the run broke.
        size: The size of the run.
        repeat: Executes a run of a size and returns the broken promises.
        tries: As of `shortest`; as are the seconds.
        seconds: See above.
    """

    def attempt(steps: tuple[str, ...]) -> Failing[str, tuple[BrokenPromise, ...]] | None:
        smaller = RunSize(steps.count("life"), steps.count("operation"))
        again = repeat(smaller) if all(smaller) else ()
        return Failing(steps, again) if any(each.promise is promise for each in again) else None

    promise = gravest(each.promise for each in broken)
    steps = ("life",) * size.lives + ("operation",) * size.operations
    return shortest(Failing(steps, broken), attempt, tries=tries, seconds=seconds).evidence
