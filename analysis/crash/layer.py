"""What a crash layer is: an endless sequence of runs, each decided by one seed and judged before the next begins.

A layer knows nothing of budgets, progress or totals: whoever asks for the next run stops asking
(`ackstate.analysis.crash.campaign`).
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.crash.promises import Promise


class LayerSkippedError(AckStateError):
    """This layer cannot run here; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that a run saw broken.

    Attributes:
        promise: Which.
        found: What was found instead.
        story: The shortest sequence of steps that was found to lead there, one line each.
    """

    promise: Promise
    found: str
    story: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What became of one run.

    Attributes:
        seed: Decides the run: the same layer with this seed begins with the same run.
        cycles: Crashes that were survived and judged: crash states, kills, power cuts, damaged copies.
        lost_durable: Entries whose ack had a durable receipt and is not known after a recovery.
        invented: Entries known as acked after a recovery that nobody had acked.
        gauge_mismatch: Cycles in which the redelivery gauge was wrong: not equal where it must be equal, or below what
            came back.
        broken: Every promise seen broken, these three among them; empty for a clean run.
        counts: What else was counted, by name; summed over runs: ``{"distinct_states": 40}``.
        is_last: Whether the run of this seed is over; a long run is told in pieces, so that a budget can be kept.
    """

    seed: int
    cycles: int
    lost_durable: int = 0
    invented: int = 0
    gauge_mismatch: int = 0
    broken: tuple[BrokenPromise, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    is_last: bool = True


class Layer(Protocol):
    """Yields the runs of the seeds `first_seed`, `first_seed` + 1, ... for ever.

    What it sets up (a mount, a server, a child) it takes down when the iterator is closed. A run takes well under a
    second where that is possible, so that a budget can be kept.

    Raises:
        LayerSkippedError: It cannot run here; before the first run.
    """

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """Begin with the run of `first_seed`."""
        ...


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence some loggers meanwhile: faults are planned here, and nobody has to be warned of them."""
    with ExitStack() as restored:
        for logger in map(logging.getLogger, names):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        yield
