"""L3: SIGKILL of a live process, receipts reported over a pipe before they count.

The kernel keeps the writes of a killed process, so this cannot detect a missing sync; it detects errors of threads,
buffers and the order of writes. A run is one directory and the processes of one subscription in it, each ended by a
kill at a moment drawn from the seed: while it starts, after a number of answers, or a little later, in the middle of
any work. Each is checked by the recovery of the next process, which is either the next one that works, or one that only
recovers and may be killed meanwhile; if there was no request in between, the next must recover the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.process_layer import RunSize, live_through, process_layer_runs
from ackstate.analysis.crash.process_runs import CrashTiming, ProcessRuns, Sigkill, check_beginning
from ackstate.analysis.crash.scratch import scratch_directory
from ackstate.analysis.crash.subject_process import PATIENCE_S, subject_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.process_runs import Crash
    from ackstate.analysis.crash.subject_process import Launch

OURS = ("ours", "ours-limited")
"""The subjects, crashed in turn by seed."""
SIZE = RunSize(lives=10, operations=120)
"""The size of a run."""
SHRINK_TRIES = 24
_SHRINK_S = 5.0


@dataclass(frozen=True, slots=True)
class KillPlan:
    """How processes are killed.

    Attributes:
        run_name: Begins the names of its temporary directories.
        make_crash: Returns the killer of a run's processes, given the run's randomness.
        early_s: See `CrashTiming`.
        shares: The length of each process is the maximum divided by one of these.
    """

    run_name: str
    make_crash: Callable[[Random], Crash]
    early_s: float | None
    shares: tuple[int, ...]


# Short processes give many kills, long ones a large state.
AT_RANDOM_MOMENTS = KillPlan("kills", lambda _: Sigkill(), CrashTiming().early_s, (1, 2, 4, 8))


@final
class Kills:
    """The layer.

    Args:
        launch: Starts the subject; None for ours, in turn without and under a rate limit.
        directory: Where subjects work; None for memory if there is such a file system: SIGKILL needs no disk.
        size: The size of a run.
        patience_s: Time limit for an answer of a subject.
        shrink_tries: Most repeats of a run that broke a promise, to find a shorter story.
        plan: How processes are killed.
    """

    def __init__(  # noqa: PLR0913 - all but the first are named
        self,
        launch: Launch | None = None,
        *,
        directory: Path | None = None,
        size: RunSize = SIZE,
        patience_s: float = PATIENCE_S,
        shrink_tries: int = SHRINK_TRIES,
        plan: KillPlan = AT_RANDOM_MOMENTS,
    ) -> None:
        self._launches = [subject_launch(name) for name in OURS] if launch is None else [launch]
        self._parent = directory
        self.size = size
        self._settings = CrashTiming(early_s=plan.early_s, patience_s=patience_s)
        self.shrink_tries, self.shrink_seconds = shrink_tries, _SHRINK_S
        self._plan = plan

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`.

        Raises:
            SubjectError, OSError: See `process_layer_runs`.
        """
        return process_layer_runs(self, first_seed)

    def check_beginning(self) -> None:
        for launch in self._launches:
            with scratch_directory(self._plan.run_name, self._parent) as directory:
                check_beginning(launch, directory, patience_s=self._settings.patience_s)

    def lived(self, seed: int, size: RunSize) -> ProcessRuns:
        launch = self._launches[seed % len(self._launches)]
        chance = Random(f"run {seed}")  # noqa: S311 - a workload, not a secret
        with scratch_directory(self._plan.run_name, self._parent) as directory:
            lives = ProcessRuns(launch, directory, seed, self._plan.make_crash(chance), self._settings)
            return live_through(
                lives,
                size.lives,
                length=lambda: max(size.operations // chance.choice(self._plan.shares), 1),
                chance=chance,
            )


def kills(first_seed: int, *, subject: str = "ours") -> Iterator[RunOutcome]:
    """Run the layer on a subject by its name; see `subject_launch`. ``ours`` is both of ours in turn.

    Args:
        first_seed: See `Layer`.
        subject: The subject to kill.

    Raises:
        ValueError: The subject is unknown.
        SubjectError, OSError: See `Kills`.
    """
    launch = None if subject == OURS[0] else subject_launch(subject)
    return Kills(launch)(first_seed)
