"""L3: SIGKILL of a live process, at random moments; L2: before its n-th system call, for every n.

Receipts are reported over a pipe before they count. The kernel keeps the writes of a killed process, so neither can
detect a missing sync; they detect errors of threads, buffers and the order of writes. A run is one directory and the
processes of one subscription in it, each ended by a kill. Each is checked by the recovery of the next process, which is
either the next one that works, or one that only recovers and may be killed meanwhile; if there was no request in
between, the next must recover the same state.

In L3 the moment of a kill is drawn from the seed: while a process starts, after a number of answers, or a little later,
in the middle of any work. That rarely hits between two consecutive system calls; in L2 each such gap is tried. The
first process of a run completes and its calls are counted; each other process is killed before one of that many calls,
in an order drawn from the seed, while it starts, works or persists, or right after one of its answers.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.call_tracer import NEVER, CallTracer
from ackstate.analysis.crash.process import PATIENCE_S, subject_launch
from ackstate.analysis.crash.runs import Crash, CrashTiming, ProcessLayer, RunSize, Sigkill, scratch_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.oracle import RunOutcome
    from ackstate.analysis.crash.process import Subject, SubjectProcess

_SIZE = RunSize(lives=10, operations=120)
# Processes are short, so that a few of them cover every call.
_CALLS_SIZE = RunSize(lives=16, operations=24)
_SHRINK_TRIES = 24
_AT_A_TURN_SHARE = 0.5


def kills(
    first_seed: int,
    *,
    subject: Subject = "ours",
    size: RunSize = _SIZE,
    patience_s: float = PATIENCE_S,
    shrink_tries: int = _SHRINK_TRIES,
) -> Iterator[RunOutcome]:
    """Run L3 in memory, because SIGKILL needs no disk; ``ours`` is both in turn, without and under a rate limit."""

    @contextmanager
    def stage(_: Random) -> Iterator[tuple[Path, Crash]]:
        with scratch_directory("kills") as directory:
            yield directory, Sigkill()

    subjects = ("ours", "ours-limited") if subject == "ours" else (subject,)
    layer = ProcessLayer(
        name="run",
        launches=[*map(subject_launch, subjects)],
        stage=stage,
        size=size,
        shares=(1, 2, 4, 8),  # Short processes give many kills, long ones a large state.
        timing=CrashTiming(patience_s=patience_s),
        shrink_tries=shrink_tries,
    )
    return layer(first_seed)


def call_kills(first_seed: int, *, subject: Subject, shrink_tries: int = _SHRINK_TRIES) -> Iterator[RunOutcome]:
    """Run L2."""
    tracer = CallTracer()

    @contextmanager
    def stage(chance: Random) -> Iterator[tuple[Path, Crash]]:
        with scratch_directory("call-kills") as directory:
            yield directory, CallKill(tracer, chance)

    layer = ProcessLayer(
        name="run",
        launches=[subject_launch(subject, tracer=tracer)],
        stage=stage,
        size=_CALLS_SIZE,
        timing=CrashTiming(early_s=None),
        shrink_tries=shrink_tries,
    )
    return layer(first_seed)


@final
class CallKill(Crash):
    """SIGKILL before each system call of a traced subject in turn, in random order."""

    def __init__(self, tracer: CallTracer, chance: Random) -> None:
        self._tracer = tracer
        self._chance = chance
        self._call_count = self._turn_count = 0
        self._left: list[int] = []
        self._how = ""

    def prepare(self) -> None:
        # A receipt that came too early is followed by its write. Most processes have the early turns.
        if self._turn_count and self._chance.random() < _AT_A_TURN_SHARE:
            turn = self._chance.randint(1, self._chance.randint(1, self._turn_count))
            self._tracer.begin(NEVER, kill_at_turn=turn)
            return
        if not self._left:
            self._left = list(range(1, self._call_count + 1))
            self._chance.shuffle(self._left)
        self._tracer.begin(self._left.pop() if self._left else NEVER)

    def __call__(self, process: SubjectProcess) -> Sequence[Answer]:
        """See `Crash`; also kills a process that never reached its call. All of its output counts."""
        try:
            return process.kill()
        finally:
            met, count = self._tracer.met, self._tracer.count
            self._how = f"SIGKILL before its call {count}, {met}" if met else f"SIGKILL after its call {count}"
            self._call_count = max(self._call_count, count)
            self._turn_count = max(self._turn_count, self._tracer.turn_count)
            # The processes that check the recovery must not be killed.
            self._tracer.begin(NEVER)

    def __str__(self) -> str:
        return self._how
