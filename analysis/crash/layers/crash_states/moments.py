"""What is promised at each moment of a workload, and what a power cut at that moment breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.oracle import Broken
from ackstate.analysis.crash.promises import Promise, PromiseBrokenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.crash.oracle import Expected, State


class Moment(NamedTuple):
    """What is promised while some calls of the disk are made.

    Attributes:
        first_call: From so many calls on ...
        last_call: ... up to so many, included.
        step: The number of the step, from 1 on; 0 for what comes before.
        alternatives: For each subscription, what a step that is under way began with and what it will end with: either
            is right. Only one for a step that is over.
    """

    first_call: int
    last_call: int
    step: int
    alternatives: Mapping[str, tuple[Expected, ...]]


def broken_by_error(error: Exception) -> Broken:
    """Return the promise that is broken by an error, where nothing may escape."""
    if isinstance(error, PromiseBrokenError):
        return Broken(error.promise, error.found, error.entry_count)
    return Broken(Promise.I10, f"{type(error).__name__}: {error}")


def judge(views: Mapping[str, State], moment: Moment, *, is_worst: bool) -> Broken | None:
    """Return the first promise that a recovery broke, None if it kept all.

    Args:
        views: What each cursor says.
        moment: When the power went.
        is_worst: Whether everything unsynced was lost.
    """
    for subscription, view in views.items():
        for broken in oracle.judge(view, moment.alternatives[subscription], is_worst=is_worst):
            return broken._replace(found=f"{subscription}: {broken.found}")
    return None


def differing(first: Mapping[str, State], again: Mapping[str, State]) -> Broken | None:
    """Return the promise that is broken unless two recoveries in a row found the same."""
    for subscription, view in first.items():
        for broken in oracle.differing(view, again[subscription]):
            return broken._replace(found=f"{subscription}: {broken.found}")
    return None
