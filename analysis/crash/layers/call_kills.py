"""L2 for any subject: SIGKILL before its n-th system call, for every n.

A kill at a random moment rarely hits between two system calls that follow each other at once; here each such gap has
its turn. The first life of a run goes to its end and its calls are counted; each other life is killed before another
call of as many, in an order that the seed decides, while it starts, works or persists. It is blind to a missing sync,
as all kills are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.call_tracer import NEVER, CallTracer
from ackstate.analysis.crash.layers.kills import SHRINK_TRIES, KillPlan, Kills
from ackstate.analysis.crash.process_layer import RunSize
from ackstate.analysis.crash.subject_launch import subject_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.subject_launch import Launch
    from ackstate.analysis.crash.subject_process import SubjectProcess

SIZE = RunSize(lives=16, operations=24)
"""Of a run: lives are short, so that few of them meet every call."""


@final
class CallKill:
    """SIGKILL before one system call after the other.

    Args:
        tracer: Runs the subject.
        chance: Decides the order of the calls.
    """

    def __init__(self, tracer: CallTracer, chance: Random) -> None:
        self._tracer = tracer
        self._chance = chance
        self._call_count = 0
        self._left: list[int] = []
        self._how = ""

    def prepare(self) -> None:
        """See `Crash`."""
        if not self._left:
            self._left = list(range(1, self._call_count + 1))
            self._chance.shuffle(self._left)
        self._tracer.begin(self._left.pop() if self._left else NEVER)

    def __call__(self, process: SubjectProcess) -> Sequence[Answer]:
        """See `Crash`; kills a process that never met its call, too. All that it has said counts."""
        try:
            return process.kill()
        finally:
            met, count = self._tracer.met, self._tracer.count
            self._how = f"SIGKILL before its call {count}, {met}" if met else f"SIGKILL after its call {count}"
            self._call_count = max(self._call_count, count)
            # Those that judge it are to live.
            self._tracer.begin(NEVER)

    def __str__(self) -> str:
        return self._how


def call_kills_of(
    make_launch: Callable[[CallTracer], Launch], *, recording: Path | None = None, shrink_tries: int = SHRINK_TRIES
) -> Kills:
    """Return the layer on a subject.

    Args:
        make_launch: Returns how to begin the subject under a tracer.
        recording: As of `Kills`.
        shrink_tries: As of `Kills`.

    Raises:
        LayerSkippedError: This system cannot trace programs.
    """
    tracer = CallTracer()
    plan = KillPlan("call-kills", lambda chance: CallKill(tracer, chance), early_s=None, shares=(1,))
    return Kills(make_launch(tracer), recording=recording, size=SIZE, plan=plan, shrink_tries=shrink_tries)


def call_kills(first_seed: int, *, subject: str, recording: Path | None = None) -> Iterator[RunOutcome]:
    """Run the layer on a subject by its name, as `subject_launch` has it.

    Args:
        first_seed: As for any `Layer`.
        subject: Whom to kill.
        recording: Gets every life, for `ackstate trace`.

    Raises:
        ValueError: There is no such subject.
        LayerSkippedError, SubjectError, OSError: As `call_kills_of` and `Kills`.
    """
    return call_kills_of(lambda tracer: subject_launch(subject, tracer=tracer), recording=recording)(first_seed)
