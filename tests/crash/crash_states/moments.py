"""The promises at each moment of a workload, and the promises broken by a power cut at that moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.oracle import Broken
from ackstate.analysis.crash.promises import Promise, PromiseBrokenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.crash.oracle import Expected, State


class Moment(NamedTuple):
    """The promises during some calls of the disk.

    Attributes:
        first_call: First call count of the moment.
        last_call: Last call count, inclusive.
        step: The number of the step, from 1; 0 before the first.
        alternatives: For each subscription, the expected states at the start and at the end of a step in progress:
            either is right. Only one for a completed step.
    """

    first_call: int
    last_call: int
    step: int
    alternatives: Mapping[str, tuple[Expected, ...]]


def broken_by_error(error: Exception) -> Broken:
    """Return the promise that is broken by an escaped error."""
    if isinstance(error, PromiseBrokenError):
        return Broken(error.promise, error.found, error.entry_count)
    return Broken(Promise.I10, f"{type(error).__name__}: {error}")


def judge(views: Mapping[str, State], moment: Moment, *, is_worst: bool) -> Broken | None:
    """Return the first promise that a recovery broke, None if it kept all.

    Args:
        views: The state of each cursor.
        moment: The moment of the power cut.
        is_worst: Whether everything unsynced was lost.
    """
    for subscription, view in views.items():
        for broken in oracle.judge(view, moment.alternatives[subscription], is_worst=is_worst):
            return broken._replace(found=f"{subscription}: {broken.found}")
    return None


def differing(first: Mapping[str, State], again: Mapping[str, State]) -> Broken | None:
    """Return the broken promise if two successive recoveries differ."""
    for subscription, view in first.items():
        for broken in oracle.differing(view, again[subscription]):
            return broken._replace(found=f"{subscription}: {broken.found}")
    return None
