"""What may a cursor say after a power cut at some moment, and which promise does it break if it says something else?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.layers.crash_states.workload import entries_in
from ackstate.analysis.crash.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate import Position
    from ackstate.analysis.crash.layers.crash_states.workload import View


class Expected(NamedTuple):
    """What is promised of one cursor at one moment.

    Attributes:
        durable: The bits of the entries that have a durable receipt.
        accepted: The bits of the entries that were acked.
        durable_messages: The bits of the messages of batches that have a durable receipt.
        accepted_messages: The bits of those that were acked.
        redelivery_if_crashed: The gauge.
        mark_delete_min: The durable mark-delete position.
        properties: The cursor properties.
        exists: Whether it was created.
    """

    durable: int
    accepted: int
    durable_messages: int
    accepted_messages: int
    redelivery_if_crashed: int
    mark_delete_min: Position
    properties: tuple[tuple[str, str], ...]
    exists: bool


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


@final
class BrokenError(Exception):
    """A promise was broken while a workload was carried out.

    Args:
        broken: Which.
    """

    def __init__(self, broken: Broken) -> None:
        super().__init__(broken.found)
        self.broken = broken


def broken_by_error(error: Exception) -> Broken:
    """Return the promise that is broken by an error, where nothing may escape."""
    if isinstance(error, BrokenError):
        return error.broken
    return Broken(Promise.I10, f"{type(error).__name__}: {error}")


class Broken(NamedTuple):
    """A promise that one cursor breaks.

    Attributes:
        promise: Which.
        found: What was found instead.
        lost: How many durable entries, or messages of batches, are not known.
        invented: How many are known that were not acked.
        is_gauge_wrong: Whether the gauge said something else.
    """

    promise: Promise
    found: str
    lost: int = 0
    invented: int = 0
    is_gauge_wrong: bool = False


def judge(views: Mapping[str, View], moment: Moment, *, is_worst: bool) -> Broken | None:
    """Return the first promise that a recovery broke, None if it kept all.

    Args:
        views: What each cursor says.
        moment: When the power went.
        is_worst: Whether everything unsynced was lost.
    """
    for subscription, view in views.items():
        alternatives = moment.alternatives[subscription]
        # The gauge is exact between steps; in the middle of one its write may be certain and not yet reported.
        is_exact = is_worst and len(alternatives) == 1
        found = [_first_broken(view, expected, is_exact=is_exact) for expected in alternatives]
        if all(found) and found[0] is not None:
            return found[0]._replace(found=f"{subscription}: {found[0].found}")
    return None


def broken_by_opening(view: View, expected: Expected) -> Broken | None:
    """Return the first promise that a cursor breaks by what it says when it is opened, None if it keeps all."""
    return _first_broken(view, expected, is_exact=False)


def _first_broken(view: View, expected: Expected, *, is_exact: bool) -> Broken | None:
    return next(_broken(view, expected, is_exact=is_exact), None)


def _broken(view: View, expected: Expected, *, is_exact: bool) -> Iterator[Broken]:
    if view.is_new and expected.exists:
        lost = expected.durable.bit_count()
        yield Broken(Promise.I10, "it opens as a new cursor", lost=lost)
    if lost := expected.durable & ~view.entries:
        yield Broken(Promise.I2, f"not acked: {entries_in(lost)}", lost=lost.bit_count())
    if invented := view.entries & ~expected.accepted:
        yield Broken(Promise.I1, f"acked: {entries_in(invented)}", invented=invented.bit_count())
    if lost := expected.durable_messages & ~view.messages:
        yield Broken(Promise.I2, f"{lost.bit_count()} messages of batches", lost=lost.bit_count())
    if invented := view.messages & ~expected.accepted_messages:
        count = invented.bit_count()
        yield Broken(Promise.I1, f"{count} messages of batches are acked", invented=count)
    redelivered, gauge = (expected.accepted & ~view.entries).bit_count(), expected.redelivery_if_crashed
    if redelivered > gauge or (is_exact and redelivered != gauge):
        found = f"{redelivered} entries are redelivered, and the gauge said {gauge}"
        yield Broken(Promise.I3, found, is_gauge_wrong=True)
    if view.mark_delete < expected.mark_delete_min:
        yield Broken(Promise.I7, f"at {view.mark_delete}, and {expected.mark_delete_min} was durable")
    if view.properties != expected.properties:
        found = f"properties {dict(view.properties)}, not {dict(expected.properties)}"
        yield Broken(Promise.I2, found)
