"""L3: SIGKILL of a live process, receipts reported over a pipe before they count.

The kernel keeps the writes of a killed process, so this cannot detect a missing sync; it detects errors of threads,
buffers and the order of writes. A run is one directory and the processes of one subscription in it, each ended by a
kill at a moment drawn from the seed: while it starts, after a number of answers, or a little later, in the middle of
any work. Each is checked by the recovery of the next process, which is either the next one that works, or one that only
recovers and may be killed meanwhile; if there was no request in between, the next must recover the same state.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.process_layer import ProcessLayer, RunSize
from ackstate.analysis.crash.process_runs import CrashTiming, Sigkill
from ackstate.analysis.crash.scratch import scratch_directory
from ackstate.analysis.crash.subject_process import PATIENCE_S, subject_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from random import Random

    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.process_runs import Crash
    from ackstate.analysis.crash.subject_process import Launch

OURS = ("ours", "ours-limited")
"""The subjects, crashed in turn by seed."""
SIZE = RunSize(lives=10, operations=120)
"""The size of a run."""
SHRINK_TRIES = 24


@dataclass(frozen=True, slots=True)
class KillPlan:
    """How processes are killed.

    Attributes:
        run_name: Names the directories in which processes work.
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
class Kills(ProcessLayer):
    """The layer.

    Args:
        launch: See `ProcessLayer`; ours are without and under a rate limit.
        directory: Where subjects work; None for memory if there is such a file system: SIGKILL needs no disk.
        size: See `ProcessLayer`.
        patience_s: Time limit for an answer of a subject.
        shrink_tries: See `ProcessLayer`.
        plan: How processes are killed.
    """

    ours = OURS
    chance_name = "run"
    shrink_seconds = 5.0

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
        timing = CrashTiming(early_s=plan.early_s, patience_s=patience_s)
        super().__init__(launch, size=size, timing=timing, shrink_tries=shrink_tries)
        self._parent, self._plan = directory, plan

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`.

        Raises:
            SubjectError, OSError: See `ProcessLayer.runs`.
        """
        return self.runs(first_seed)

    @contextmanager
    def stage(self, chance: Random) -> Iterator[tuple[Path, Crash]]:
        with scratch_directory(self._plan.run_name, self._parent) as directory:
            yield directory, self._plan.make_crash(chance)

    def operation_count(self, size: RunSize, chance: Random) -> int:
        return max(size.operations // chance.choice(self._plan.shares), 1)


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
