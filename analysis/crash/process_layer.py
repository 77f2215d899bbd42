"""A run is some lives in one place: what the layers that crash live processes have in common."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.analysis.crash.promises import gravest
from ackstate.analysis.crash.shrink import Failing, shortest
from ackstate.analysis.crash.subject_trace import SubjectTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from random import Random

    from ackstate.analysis.crash.layer import BrokenPromise, RunOutcome
    from ackstate.analysis.crash.process_runs import ProcessRuns

_RECOVERED_TWICE_SHARE = 0.3


class RunSize(NamedTuple):
    """How long a run is: so many lives, and so many operations that a life is asked unless it is crashed before."""

    lives: int
    operations: int


class ProcessLayer(Protocol):
    """A layer whose runs are lives."""

    @property
    def run_name(self) -> str:
        """Of its runs in a trace, before the seed."""
        ...

    def check_beginning(self) -> None:
        """Make sure that every subject can do its work unhurt, where it will be crashed.

        Raises:
            SubjectError: It cannot.
        """
        ...

    @property
    def size(self) -> RunSize:
        """Of a run."""
        ...

    @property
    def shrink_tries(self) -> int:
        """How often a run that broke a promise is repeated at most, to find a shorter story."""
        ...

    @property
    def shrink_seconds(self) -> float:
        """No repeat begins later."""
        ...

    def lived(self, seed: int, size: RunSize) -> ProcessRuns:
        """Return the lives of a seed's run of a size, over."""
        ...


def process_layer_runs(layer: ProcessLayer, first_seed: int, recording: Path | None) -> Iterator[RunOutcome]:
    """Yield the runs of a layer for ever, as `Layer`.

    Args:
        layer: Whose.
        first_seed: Of the first run.
        recording: Gets every life, for `ackstate trace` and Spark; not the repeats for a shorter story.

    Raises:
        SubjectError: A subject cannot even do its work unhurt.
        OSError: The trace cannot be written.
    """
    with nullcontext() if recording is None else SubjectTrace(recording) as trace:
        layer.check_beginning()
        for seed in count(first_seed):
            lives = layer.lived(seed, layer.size)
            if trace is not None:
                for lived in lives.lived:
                    trace.record(f"{layer.run_name}-{seed}", lived)
            outcome = lives.outcome()
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
    """Go through so many lives, or fewer if a promise is broken, and return them.

    A process that recovers and no more judges the last of them, and others by chance.

    Args:
        lives: Just begun.
        life_count: How many.
        length: Drawn before each: how many operations it is asked at most.
        chance: Decides, after each, whether it is recovered before the next begins.
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
    """Repeat a run with fewer lives and operations while it breaks its gravest promise; return what the shortest broke.

    Args:
        broken: By the run.
        size: Of the run.
        repeat: Makes a run of a size, and returns what it broke.
        tries: As of `shortest`; so are the seconds.
        seconds: See above.
    """

    def attempt(steps: tuple[str, ...]) -> Failing[str, tuple[BrokenPromise, ...]] | None:
        smaller = RunSize(steps.count("life"), steps.count("operation"))
        again = repeat(smaller) if all(smaller) else ()
        return Failing(steps, again) if any(each.promise is promise for each in again) else None

    promise = gravest(each.promise for each in broken)
    steps = ("life",) * size.lives + ("operation",) * size.operations
    return shortest(Failing(steps, broken), attempt, tries=tries, seconds=seconds).evidence
