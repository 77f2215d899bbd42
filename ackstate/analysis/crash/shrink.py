"""Shortens the steps that led to a broken promise: removes steps while the promise is still broken.

Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002, without its tests of subsets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Repeat = Callable[[tuple["StepT", ...]], "Failing[StepT, EvidenceT] | None"]

StepT = TypeVar("StepT")
EvidenceT = TypeVar("EvidenceT")


class Failing(NamedTuple, Generic[StepT, EvidenceT]):
    """Steps that break a promise.

    Attributes:
        steps: The steps in order.
        evidence: The broken promises.
    """

    steps: tuple[StepT, ...]
    evidence: EvidenceT


def shortest(
    failing: Failing[StepT, EvidenceT],
    attempt: Repeat[StepT, EvidenceT],
    *,
    tries: float = float("inf"),
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Failing[StepT, EvidenceT]:
    """Return the shortest known steps that still fail: first, many neighbours are removed, then one step at a time.

    Args:
        failing: The steps to shorten.
        attempt: Repeats some of the steps. Returns those that happened until the same promise was broken, or None if it
            was not, because crashes of real processes are not repeatable.
        tries: The maximum number of attempts.
        seconds: The time in which attempts may start.
        clock: Measures the seconds.
    """
    until = clock() + seconds
    size = len(failing.steps) // 2 or 1
    while size:
        end = len(failing.steps)
        # From the end, because steps after the cause are irrelevant.
        while end > 0:
            if not tries or clock() > until:
                return failing
            tries -= 1
            first = max(end - size, 0)
            failing = attempt(failing.steps[:first] + failing.steps[end:]) or failing
            end = min(first, len(failing.steps))
        size //= 2
    return failing
