"""Judges a recovered state by the events before the crash: acks, receipts and readings of the gauge, in order.

All layers that crash something use this; they differ in how they run a program, and in the violations that they permit.
A permission is an alternative: another state that a recovery may find, because a step was in progress or the media were
damaged.

A gauge is judged from both sides. It is too low if a crash redelivers more than it reported. It is too high if it
counts entries that cannot be redelivered by the program's own receipts. A crash alone proves no gauge too high, unless
it was the worst possible one: bytes that were written and not synced survive SIGKILL, and often a power cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict, final

from ackstate.analysis.crash.layer import BrokenPromise
from ackstate.analysis.crash.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.crash.acked_set import AckedSet


class State(NamedTuple):
    """The state of a cursor.

    Attributes:
        acked: The entries that are not delivered again.
        marked: The entries that the mark-delete position covers.
        rest: Further state that a persist writes with them.
        names: The cursor's properties.
        is_new: Whether there was no cursor before it was opened.
    """

    acked: AckedSet
    marked: AckedSet
    rest: object = ()
    names: object = ()
    is_new: bool = False

    def __str__(self) -> str:
        return f"{self.acked}, {self.rest}" if self.rest else str(self.acked)


class Broken(NamedTuple):
    """A promise that a recovery broke.

    Attributes:
        promise: The promise.
        found: The observation that contradicts it.
        entry_count: The number of lost or invented entries, or messages of batches.
    """

    promise: Promise
    found: str
    entry_count: int = 0


class EntryCounts(TypedDict):
    """As of `RunOutcome`."""

    lost_durable: int
    invented: int
    gauge_mismatch: int


class Expected(NamedTuple):
    """The states that a recovery may find.

    Attributes:
        requested: Entries whose ack was requested: they may be acked.
        accepted: Entries whose ack was accepted.
        durable: Entries that must be acked.
        marked: Entries that the mark-delete position must cover.
        names: The cursor's properties: one of these values.
        gauge_max: The number of entries that may be redelivered; None if no gauge was read.
        overstated: The reading of the gauge that was too high by most, and the number of entries that could be
            redelivered; None if none was too high.
        states: The states that were written as a whole; empty if unknown.
        holds_parts: Whether a part of one of these that covers the mark-delete position may be found.
        exists: Whether there must be a cursor.
        is_deleted: Whether there must be none.
    """

    requested: AckedSet
    accepted: AckedSet
    durable: AckedSet
    marked: AckedSet
    names: tuple[object, ...]
    gauge_max: int | None = None
    overstated: tuple[int, int] | None = None
    states: tuple[State, ...] = ()
    holds_parts: bool = False
    exists: bool = False
    is_deleted: bool = False


def judge(found: State, alternatives: Sequence[Expected], *, is_worst: bool = False) -> tuple[Broken, ...]:
    """Return the promises that a recovery broke by the first alternative; none if it satisfies any alternative."""
    first: tuple[Broken, ...] = ()
    for expected in alternatives:
        # If all that could be lost was lost, the gauge is exact, unless a write in progress may be stored or not.
        broken = tuple(_broken(found, expected, is_exact=is_worst and len(alternatives) == 1))
        if not broken:
            return ()
        first = first or broken
    return first


def differing(first: State, again: State) -> tuple[Broken, ...]:
    """Return the broken promise if two recoveries in a row found different states."""
    if first._replace(is_new=False) == again._replace(is_new=False):
        return ()
    lacking, new = first.acked - again.acked, again.acked - first.acked
    found = f"no request was made between two recoveries; lacking now: {lacking}; new: {new}"
    return (Broken(Promise.I5, found if lacking or new else f"first {first}, then {again}"),)


def with_story(broken: Iterable[Broken], story: tuple[str, ...] = ()) -> tuple[BrokenPromise, ...]:
    """Return broken promises with the same story."""
    return tuple(BrokenPromise(each.promise, each.found, story) for each in broken)


def counts(broken: Iterable[Broken]) -> EntryCounts:
    """Return how many entries were lost or invented, and whether the gauge was wrong."""
    entries, wrong = {Promise.I1: 0, Promise.I2: 0}, 0
    for promise, _, entry_count in broken:
        wrong |= promise is Promise.I3
        if promise in entries:
            entries[promise] += entry_count
    return {"lost_durable": entries[Promise.I2], "invented": entries[Promise.I1], "gauge_mismatch": int(wrong)}


def _broken(found: State, expected: Expected, *, is_exact: bool) -> Iterator[Broken]:
    if found.is_new and expected.exists:
        # Its empty state is not a second violation.
        yield Broken(Promise.I10, "it opens as a new cursor")
        return
    if expected.is_deleted and not found.is_new:
        yield Broken(Promise.I17, f"it opens with {found}")
    if not found.acked <= expected.requested:
        invented = found.acked - expected.requested
        yield Broken(Promise.I1, f"acked without a request: {invented}", _size(invented))
    if not expected.durable <= found.acked:
        lost = expected.durable - found.acked
        yield Broken(Promise.I2, f"lost: {lost}", _size(lost))
    if expected.gauge_max is not None:
        again = expected.accepted - found.acked
        if again.entry_count > expected.gauge_max or (is_exact and again.entry_count != expected.gauge_max):
            most = f"{'exactly' if is_exact else 'at most'} {expected.gauge_max} by the gauge"
            yield Broken(Promise.I3, f"{most}, {again.entry_count} redelivered: {again}")
    if expected.overstated is not None:
        gauge, possible = expected.overstated
        yield Broken(Promise.I3, f"{gauge} by the gauge, and at most {possible} without a receipt")
    if not expected.marked <= found.marked:
        lacking = expected.marked - found.marked
        yield Broken(Promise.I7, f"it was durable that the mark-delete position covers {lacking}")
    if found.names not in expected.names:
        yield Broken(Promise.I9, f"cursor properties {found.names}, after {expected.names}")
    if expected.states and not _is_written(found, expected):
        written = "; ".join(map(str, expected.states[-2:]))
        yield Broken(Promise.I9, f"{found}, after these were to be written last: {written}")


def _size(some: AckedSet) -> int:
    return some.entry_count or some.message_count


def _is_written(found: State, expected: Expected) -> bool:
    return any(
        (found.rest == state.rest and found.acked == state.acked) or (expected.holds_parts and _is_part(found, state))
        for state in expected.states
    )


def _is_part(found: State, state: State) -> bool:
    return state.marked <= found.acked <= state.acked


@final
class Oracle:
    """Follows one cursor from its opening to its crash.

    Args:
        opened: The state of the opened cursor, which must survive.
        knows_states: Whether every persisted state is reported; then a recovery must find one of them.

    Attributes:
        expected: The states that a recovery may find now.
    """

    def __init__(self, opened: State, *, knows_states: bool = False) -> None:
        self._knows_states = knows_states
        self._reset: State | None = None
        self.expected = self._opened(opened)

    def requested(self, acked: AckedSet) -> None:
        """Record an ack before it is sent. An entry is acked with the last message of its batch."""
        self._change(requested=(self.expected.requested | acked).completed())

    def accepted(self, acked: AckedSet) -> None:
        """Record an accepted ack; it may be redelivered once in addition to the gauge."""
        expected = self.expected
        accepted = (expected.accepted | acked).completed()
        more = accepted.entry_count - expected.accepted.entry_count
        gauge_max = None if expected.gauge_max is None else expected.gauge_max + more
        self._change(accepted=accepted, gauge_max=gauge_max)

    def durable(self, acked: AckedSet) -> None:
        """Record a receipt."""
        self._change(durable=self.expected.durable | acked)

    def gauged(self, reading: int, *, durable: AckedSet | None = None) -> None:
        """Record a reading of the gauge."""
        expected = self.expected
        possible = (expected.requested - (expected.durable if durable is None else durable)).entry_count
        overstated = expected.overstated
        excess = reading - possible
        # A failed reset may have happened: then durable acks may be redelivered.
        if self._reset is None and excess > (0 if overstated is None else overstated[0] - overstated[1]):
            overstated = reading, possible
        self._change(gauge_max=reading, overstated=overstated)

    def marked(self, marked: AckedSet) -> None:
        """Record the entries that the durable mark-delete position covers."""
        self._change(marked=marked)

    def naming(self, names: object) -> None:
        """Record a request to set the cursor's properties."""
        self._change(names=(*self.expected.names, names))

    def named(self, names: object) -> None:
        """Record that the properties were set."""
        self._change(names=(names,))

    def writing(self, state: State, *, excludes: bool = False, displaces: bool = False) -> None:
        """Record the start of a persist."""
        expected = self.expected
        self._change(states=(*expected.states, state), holds_parts=expected.holds_parts or excludes)
        if displaces:
            self._change(durable=expected.durable & state.marked, gauge_max=None)

    def written(self) -> None:
        """Record that the persist succeeded."""
        self._reset = None
        self._change(states=self.expected.states[-1:])

    def resetting(self, state: State) -> None:
        """Record the start of a reset; if it fails, it may have happened, until the next persist."""
        self._reset = state

    def reset(self) -> None:
        """Record that the reset succeeded: earlier acks no longer count."""
        assert self._reset is not None
        self.expected, self._reset = self._opened(self._reset)._replace(names=self.expected.names), None

    def deleted(self) -> None:
        """Record that the subscription was deleted."""
        self._change(is_deleted=True)

    def judge(self, found: State) -> tuple[Broken, ...]:
        """Return the promises that a recovery with this state broke."""
        alternatives = [self.expected]
        if self._reset is not None:
            alternatives.append(self._opened(self._reset)._replace(names=self.expected.names))
        return judge(found, alternatives)

    def _opened(self, state: State) -> Expected:
        acked, states = state.acked, (state,) if self._knows_states else ()
        return Expected(acked, acked, acked, state.marked, (state.names,), states=states, exists=not state.is_new)

    def _change(self, **fields: object) -> None:
        self.expected = self.expected._replace(**fields)  # type: ignore[arg-type]
