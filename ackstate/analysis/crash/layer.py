"""Crash layers: each is an endless sequence of runs, determined by a seed and judged at its end.

A layer has no access to budgets, progress or totals: the caller stops the iteration
(`ackstate.analysis.crash.campaign`). The runs of a `ProcessLayer` crash real processes in one directory, which is
removed at the end of the run; that of a killed harness is removed by a later run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.analysis.crash.oracle import gravest
from ackstate.analysis.crash.runs import CrashTiming, ProcessRuns, check_beginning
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ackstate.analysis.crash.oracle import BrokenPromise, RunOutcome
    from ackstate.analysis.crash.process import Launch
    from ackstate.analysis.crash.runs import Crash

_MEMORY = Path("/dev/shm")  # noqa: S108 - only the parent of private directories
_RECOVERED_TWICE_SHARE = 0.3


class LayerSkippedError(AckStateError):
    """This layer cannot run here; the message names the missing requirement."""


class Layer(Protocol):
    """Yields the runs of the seeds `first_seed`, `first_seed` + 1, ... for ever.

    Closing the iterator removes everything that it set up (a mount, a server, a child process). A run takes well under
    a second where possible, to keep a budget.
    """

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """Start with the run of `first_seed`."""
        ...


class RunSize(NamedTuple):
    """The length of a run: the number of process runs, and of the operations of each unless it is crashed earlier."""

    lives: int
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayer:
    """A layer whose runs are process runs, one after the other in one directory."""

    name: str  # seeds the randomness of a run
    launches: Sequence[Launch]  # of the subjects, which are crashed in turn by seed
    # Provides an empty directory, and the crash of the processes that work in it.
    stage: Callable[[Random], AbstractContextManager[tuple[Path, Crash]]]
    size: RunSize
    shares: tuple[int, ...] = (1,)  # the operations of each process are divided by one of these
    timing: CrashTiming = field(default_factory=CrashTiming)
    shrink_tries: int = 24  # most repeats of a run that broke a promise, to find a shorter story
    shrink_seconds: float = 5.0

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`; first checks that every subject works without a crash."""
        for launch in self.launches:
            with self.stage(Random("beginning")) as (directory, _):  # noqa: S311 - no secret
                check_beginning(launch, directory, patience_s=self.timing.patience_s)
        for seed in count(first_seed):
            outcome = self._lived(seed, self.size).outcome()
            yield replace(outcome, broken=self._shortened(outcome)) if outcome.broken else outcome

    def _lived(self, seed: int, size: RunSize) -> ProcessRuns:
        """Execute the run of a seed: its process runs, or fewer if a promise is broken.

        The last of them is judged by a process that only recovers; so are others, chosen at random.
        """
        chance = Random(f"{self.name} {seed}")  # noqa: S311 - a workload, not a secret
        with self.stage(chance) as (directory, crash):
            lives = ProcessRuns(self.launches[seed % len(self.launches)], directory, seed, crash, self.timing)
            for number in range(size.lives):
                lives.live_once(max(size.operations // chance.choice(self.shares), 1))
                if not lives.broken and (number + 1 == size.lives or chance.random() < _RECOVERED_TWICE_SHARE):
                    lives.recover()
                if lives.broken:
                    break
            return lives

    def _shortened(self, outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
        return shorter_run(
            outcome.broken,
            self.size,
            lambda size: self._lived(outcome.seed, size).broken,
            tries=self.shrink_tries,
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
    """Repeat a run with fewer processes, then fewer operations, while it breaks its gravest promise.

    Return what the last such run broke: crashes of real processes are not repeatable.
    """
    promise, until = gravest(each.promise for each in broken), time.monotonic() + seconds
    for name in RunSize._fields:
        step = getattr(size, name) // 2
        while step and tries and time.monotonic() < until:
            smaller = size._replace(**{name: getattr(size, name) - step})
            again = repeat(smaller) if all(smaller) else ()
            tries -= 1
            if any(each.promise is promise for each in again):
                size, broken = smaller, again
            else:
                step //= 2
    return broken


@contextmanager
def scratch_directory(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory ``ackstate-PURPOSE-PID-*``, in memory unless told otherwise; remove it with its content.

    First, those of the same purpose whose process has ended are removed.
    """
    parent = parent or fast_parent()
    for left in leftovers(purpose, parent):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(purpose, os.getpid()), dir=parent) as directory:
        yield Path(directory).resolve()


def fast_parent() -> Path:
    """Return a directory in memory if the system has one, otherwise the one for temporary files."""
    is_usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return _MEMORY if is_usable else Path(tempfile.gettempdir())


def scratch_prefix(purpose: str, pid: int) -> str:
    """Return the prefix of the names of a process's directories for a purpose."""
    return f"ackstate-{purpose}-{pid}-"


def leftovers(purpose: str, parent: Path) -> Iterator[Path]:
    """Yield the directories of a purpose, named by `scratch_prefix`, whose process has ended."""
    for left in parent.glob(f"ackstate-{purpose}-*-*"):
        pid = left.name.removeprefix(f"ackstate-{purpose}-").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield left
