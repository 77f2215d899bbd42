"""The common part of the layers that crash real processes: a run is a sequence of process runs in one directory."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.analysis.crash.promises import gravest
from ackstate.analysis.crash.shrink import Failing, shortest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from ackstate.analysis.crash.layer import BrokenPromise, RunOutcome
    from ackstate.analysis.crash.process_runs import ProcessRuns

_RECOVERED_TWICE_SHARE = 0.3


class RunSize(NamedTuple):
    """The length of a run: the number of process runs, and of the operations of each unless it is crashed earlier."""

    lives: int
    operations: int


class ProcessLayer(Protocol):
    """A layer whose runs consist of process runs."""

    def check_beginning(self) -> None:
        """Check that every subject works without a crash.

        Raises:
            SubjectError: A subject does not.
        """
        ...

    @property
    def size(self) -> RunSize:
        """The size of a run."""
        ...

    @property
    def shrink_tries(self) -> int:
        """The maximum number of repeats of a run that broke a promise, to find a shorter story."""
        ...

    @property
    def shrink_seconds(self) -> float:
        """The time in which repeats may start."""
        ...

    def lived(self, seed: int, size: RunSize) -> ProcessRuns:
        """Execute the run of a seed with a size and return it."""
        ...


def process_layer_runs(layer: ProcessLayer, first_seed: int) -> Iterator[RunOutcome]:
    """Yield the runs of a layer without end, as `Layer`.

    Args:
        layer: The layer.
        first_seed: The seed of the first run.

    Raises:
        SubjectError: A subject does not work even without a crash.
    """
    layer.check_beginning()
    for seed in count(first_seed):
        outcome = layer.lived(seed, layer.size).outcome()
        yield replace(outcome, broken=_shortened(layer, outcome)) if outcome.broken else outcome


def _shortened(layer: ProcessLayer, outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
    return shorter_run(
        outcome.broken,
        layer.size,
        lambda size: layer.lived(outcome.seed, size).broken,
        tries=layer.shrink_tries,
        seconds=layer.shrink_seconds,
    )


def live_through(lives: ProcessRuns, life_count: int, *, length: Callable[[], int], chance: Random) -> ProcessRuns:
    """Execute `life_count` process runs, or fewer if a promise is broken, and return them.

    The last of them is judged by a process that only recovers; so are others, chosen at random.

    Args:
        lives: Process runs without any executed.
        life_count: The number of process runs.
        length: Called before each; returns its maximum number of operations.
        chance: Determines after each whether it is recovered before the next starts.
    """
    for number in range(life_count):
        lives.live_once(length())
        if not lives.broken and (number + 1 == life_count or chance.random() < _RECOVERED_TWICE_SHARE):
            lives.recover()
        if lives.broken:
            break
    return lives


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
