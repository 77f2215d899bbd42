"""L2 for any subject: SIGKILL before its n-th system call, for every n.

A kill at a random moment rarely hits between two consecutive system calls; here each such gap is tried. The first
process of a run completes and its calls are counted; each other process is killed before one of that many calls, in an
order drawn from the seed, while it starts, works or persists. Like all kills, this cannot detect a missing sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.call_tracer import NEVER, CallTracer
from ackstate.analysis.crash.layers.kills import SHRINK_TRIES, KillPlan, Kills
from ackstate.analysis.crash.process_layer import RunSize
from ackstate.analysis.crash.subject_process import subject_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.subject_process import Launch, SubjectProcess

SIZE = RunSize(lives=16, operations=24)
"""Size of a run: processes are short, so that a few of them cover every call."""


@final
class CallKill:
    """SIGKILL before each system call in turn.

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
            # The processes that check the recovery must not be killed.
            self._tracer.begin(NEVER)

    def __str__(self) -> str:
        return self._how


def call_kills_of(make_launch: Callable[[CallTracer], Launch], *, shrink_tries: int = SHRINK_TRIES) -> Kills:
    """Return the layer on a subject.

    Raises:
        LayerSkippedError: This system cannot trace programs.
    """
    tracer = CallTracer()
    plan = KillPlan("call-kills", lambda chance: CallKill(tracer, chance), early_s=None, shares=(1,))
    return Kills(make_launch(tracer), size=SIZE, plan=plan, shrink_tries=shrink_tries)


def call_kills(first_seed: int, *, subject: str) -> Iterator[RunOutcome]:
    """Run the layer on a subject by its name; see `subject_launch`.

    Raises:
        ValueError: The subject is unknown.
        LayerSkippedError, SubjectError, OSError: See `call_kills_of` and `Kills`.
    """
    return call_kills_of(lambda tracer: subject_launch(subject, tracer=tracer))(first_seed)
