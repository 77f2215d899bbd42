"""One cell of the kill matrix: a layer, with one bug planted or none, until it breaks a promise or the budget is over.

In a process of its own: a bug may hang, or take the harness down with it, and neither counts as seen by the layer.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, astuple, dataclass
from enum import Enum
from multiprocessing import get_context

from ackstate.analysis.crash.runs import LayerSkippedError

_UNDER_WAY = "under way"
_DIRECTORY = re.compile(r"/(?:tmp|dev/shm)/[^\s:']*/")  # One that was made for a run, and is gone.
_GRACE_SECONDS = 60.0  # A run that has begun is always finished, and its story is told.


class CellFate(Enum):
    """The result of a cell."""

    KILLED = "killed"
    """The layer saw a promise broken."""
    SURVIVED = "survived"
    """The budget was over before."""
    HUNG = "hung"
    """A run did not end."""
    DIED = "died"
    """The layer itself failed."""
    SKIPPED = "skipped"
    """The layer cannot run here."""


@dataclass(frozen=True, slots=True)
class CellBudget:
    """When a layer may give up; a run that has begun is finished."""

    seconds: float
    cycles_max: int = 10_000_000
    first_seed: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of a layer for a bug."""

    fate: CellFate
    cycles: int = 0  # Crashes that were judged, those of the last run included
    runs: int = 0  # Seeds that were run
    seconds: float = 0.0
    promise: str = ""  # The first that was seen broken, or why the layer did not run to the end
    found: str = ""  # The outcome that was found instead
    story: tuple[str, ...] = ()  # The steps that lead there; for a person who watches, and not stored

    def plain(self):
        """Return it as JSON has it."""
        found = _DIRECTORY.sub("", self.found)[:200]
        plain = asdict(self) | {"fate": self.fate.value, "seconds": round(self.seconds, 1), "found": found}
        del plain["story"]
        return plain

    @classmethod
    def of(cls, plain):
        """Return a cell from JSON."""
        return cls(**{**plain, "fate": CellFate(plain["fate"]), "story": tuple(plain.get("story", ()))})


def run_cell(layer, exhibit, budget):
    begun = time.monotonic()
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_live, args=(layer, exhibit, budget, theirs))
    child.start()
    theirs.close()
    deadline = begun + budget.seconds + _GRACE_SECONDS
    last = {"fate": _UNDER_WAY}
    try:
        while last["fate"] == _UNDER_WAY and ours.poll(max(deadline - time.monotonic(), 0)):
            last = ours.recv()
    except EOFError:
        pass
    finally:
        _end(child)
    seconds = time.monotonic() - begun
    if last["fate"] == _UNDER_WAY:
        is_late = time.monotonic() >= deadline
        last |= (
            {"fate": CellFate.HUNG.value} if is_late else {"fate": CellFate.DIED.value, "promise": "it ended by itself"}
        )
    return Cell.of({**last, "seconds": seconds})


def _live(layer, exhibit, budget, pipe):
    os.setpgid(0, 0)
    logging.disable()
    try:
        with nullcontext() if exhibit is None else exhibit.plant():
            for progress in _runs(layer, budget):
                pipe.send(progress)
    except BaseException as error:
        fate = CellFate.SKIPPED if isinstance(error, LayerSkippedError) else CellFate.DIED
        lines = traceback.format_exception(error)[-4:]
        pipe.send({"fate": fate.value, "promise": str(error) or repr(error), "story": lines})
    sys.stderr.flush()
    os._exit(0)


def _runs(layer, budget):
    """Yield the cell after each run; the last one is the result."""
    begun, cycles, runs = time.monotonic(), 0, 0
    with closing(layer(budget.first_seed)) as outcomes:
        for outcome in outcomes:
            runs, cycles = runs + 1, cycles + outcome.cycles
            progress = {"fate": _UNDER_WAY, "cycles": cycles, "runs": runs}
            if outcome.broken:
                (promise, found, story), fate = astuple(outcome.broken[0]), CellFate.KILLED.value
                story = [f"seed {outcome.seed}", *story]
                yield {**progress, "fate": fate, "promise": promise, "found": found, "story": story}
                return
            if time.monotonic() - begun >= budget.seconds or cycles >= budget.cycles_max:
                yield {**progress, "fate": CellFate.SURVIVED.value}
                return
            yield progress


def _end(child):
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()
