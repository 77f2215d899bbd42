"""The interface of a crash layer: an endless sequence of runs, each determined by a seed and judged at its end.

A layer has no access to budgets, progress or totals: the caller stops the iteration
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
    """This layer cannot run here; the message names the missing requirement."""


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that was broken in a run.

    Attributes:
        promise: The promise.
        found: The observation that contradicts it.
        story: The shortest known sequence of steps that leads there, one line each.
    """

    promise: Promise
    found: str
    story: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of one run.

    Attributes:
        seed: Determines the run: the same layer with this seed starts with the same run.
        cycles: Crashes that were survived and judged: crash states, kills, power cuts, damaged copies.
        lost_durable: Entries whose ack had a durable receipt and that are not acked after a recovery.
        invented: Entries acked after a recovery that were never acked.
        gauge_mismatch: Cycles in which the redelivery gauge was wrong: not equal where it must be equal, or lower than
            the number of redelivered entries.
        broken: Every promise seen broken, these three among them; empty for a clean run.
        counts: Further counts by name, summed over runs: ``{"distinct_states": 40}``.
        is_last: Whether the run of this seed is complete; a long run is reported in pieces, to keep a budget.
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

    Closing the iterator removes everything that it set up (a mount, a server, a child process). A run takes well under
    a second where possible, to keep a budget.

    Raises:
        LayerSkippedError: It cannot run here; before the first run.
    """

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """Start with the run of `first_seed`."""
        ...


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence some loggers in the block, because its faults are planned."""
    with ExitStack() as restored:
        for logger in map(logging.getLogger, names):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        yield
