"""L3: SIGKILL of a live process, receipts reported over a pipe before they count.

The kernel keeps what a killed process wrote, so this is blind to a missing sync; it sees what threads, buffers and the
order of writes do. A run is one directory and the lives of one subscription in it, each ended by a kill at a moment
drawn from the seed: while it starts, after so many answers, or a little later, in the middle of whatever it does then.
Each is judged by what the next process recovers, which is the next life, or one that recovers and no more and may be
killed doing so; where nothing was asked in between, the next must recover the same.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, NamedTuple, final

from analysis.crash.lives import Lives, LivesSettings, Sigkill, check_beginning
from analysis.crash.scratch import scratch_directory
from analysis.crash.subject_process import PATIENCE_S, subject_launch
from analysis.crash.subject_trace import SubjectTrace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from analysis.crash.layer import RunOutcome
    from analysis.crash.subject_process import Launch

OURS = ("ours", "ours-sqlite", "ours-limited")
"""Crashed in turn, by seed."""
_PURPOSE = "kills"
_RECOVERED_TWICE_SHARE = 0.3
# Short lives make many kills, long ones a large state: each life is asked the most divided by one of these.
_SHARES = (1, 2, 4, 8)
_SHRINK_TRIES = 24
_SHRINK_S = 5.0


class RunSize(NamedTuple):
    """How long a run is: so many lives, and so many operations that a life is asked at most."""

    lives: int = 10
    operations: int = 120


@final
class Kills:
    """The layer.

    Args:
        launch: Begins the subject; None for ours, in turn on files, on SQLite and under a rate limit.
        recording: Gets every life, for `ackstate trace` and Spark.
        directory: Where subjects work; None for memory if there is such a file system: SIGKILL needs no disk.
        size: Of a run.
        patience_s: How long a subject may take for an answer when it is its turn.
        shrink_tries: How often a run that broke a promise is repeated to find a shorter story.
    """

    def __init__(  # noqa: PLR0913 - all but the first are named
        self,
        launch: Launch | None = None,
        *,
        recording: Path | None = None,
        directory: Path | None = None,
        size: RunSize = RunSize(),  # noqa: B008 - a constant
        patience_s: float = PATIENCE_S,
        shrink_tries: int = _SHRINK_TRIES,
    ) -> None:
        self._launches = [subject_launch(name) for name in OURS] if launch is None else [launch]
        self._recording = recording
        self._parent = directory
        self._size = size
        self._settings = LivesSettings(patience_s=patience_s)
        self._shrink_tries = shrink_tries

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`.

        Raises:
            SubjectError: The subject cannot even do its work unhurt.
            OSError: The trace cannot be written.
        """
        with ExitStack() as opened:
            recording = self._recording
            trace = None if recording is None else opened.enter_context(SubjectTrace(recording))
            self._check_beginning()
            for seed in count(first_seed):
                outcome = self._run(seed, self._size, trace)
                yield self._shrunk(outcome) if outcome.broken else outcome

    def _check_beginning(self) -> None:
        for launch in self._launches:
            with scratch_directory(_PURPOSE, self._parent) as directory:
                check_beginning(launch, directory, patience_s=self._settings.patience_s)

    def _run(self, seed: int, size: RunSize, trace: SubjectTrace | None = None) -> RunOutcome:
        launch = self._launches[seed % len(self._launches)]
        with scratch_directory(_PURPOSE, self._parent) as directory:
            lives = Lives(launch, directory, seed, Sigkill(), self._settings)
            chance = _chance("run", seed)
            for number in range(size.lives):
                lives.live_once(max(size.operations // chance.choice(_SHARES), 1))
                if not lives.broken and (number + 1 == size.lives or chance.random() < _RECOVERED_TWICE_SHARE):
                    lives.recover()
                if lives.broken:
                    break
            if trace is not None:
                for lived in lives.lived:
                    trace.record(f"kills-{seed}", lived)
            return lives.outcome()

    def _shrunk(self, outcome: RunOutcome) -> RunOutcome:
        """Tell the story of the shortest of some repeats that break a promise, too: no kill hits the same again."""
        size, broken = self._size, outcome.broken
        until = time.monotonic() + _SHRINK_S
        for attempt in range(self._shrink_tries):
            if time.monotonic() > until:
                break
            lives, operations = size
            smaller = RunSize(lives, (operations + 1) // 2) if attempt % 2 else RunSize((lives + 1) // 2, operations)
            if smaller != size and (again := self._run(outcome.seed, smaller)).broken:
                size, broken = smaller, again.broken
        return replace(outcome, broken=broken)


def kills(first_seed: int, *, subject: str = "ours", recording: Path | None = None) -> Iterator[RunOutcome]:
    """Run the layer on a subject by its name, as `subject_launch` has it; ``ours`` is both of ours in turn.

    Args:
        first_seed: As for any `Layer`.
        subject: Whom to kill.
        recording: Gets every life, for `ackstate trace`.

    Raises:
        ValueError: There is no such subject.
        SubjectError, OSError: As `Kills`.
    """
    launch = None if subject == OURS[0] else subject_launch(subject)
    return Kills(launch, recording=recording)(first_seed)


def _chance(*what: str | int) -> Random:
    return Random(" ".join(map(str, what)))  # noqa: S311 - a workload, not a secret
