"""Judges what a recovery found by what a program did before the crash: acks, receipts, readings of the gauge, in order.

All layers that crash something use this; they differ in how they run a program, and in what they excuse. An excuse is
an alternative: what a recovery may find instead, because a step was under way or the media were damaged.

A gauge is judged from both sides. It is too low if a crash redelivers more than it said. It is too high if it counts
entries that cannot be redelivered by the program's own receipts. A crash alone proves no gauge too high, unless it was
the worst possible one: bytes that were written and not synced survive SIGKILL, and often a power cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict, final

from ackstate.analysis.crash.layer import BrokenPromise
from ackstate.analysis.crash.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.crash.acked_set import AckedSet


class State(NamedTuple):
    """What a cursor holds.

    Attributes:
        acked: What it will not deliver again.
        marked: What its mark-delete position covers.
        rest: What else a persist writes with that.
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
        promise: Which.
        found: What was found instead.
        entry_count: How many entries, or messages of batches, are lost or invented.
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
    """What a recovery may find.

    Attributes:
        asked: What may be acked.
        accepted: What was acked.
        durable: What must be acked.
        marked: What the mark-delete position must cover.
        names: The cursor's properties: one of these.
        gauge_max: How many entries may be redelivered; None where no gauge was read.
        overstated: The reading of the gauge that was too high by most, and how many entries could be redelivered at
            most; None if none was.
        states: What was written as a whole; empty where that is not known.
        holds_parts: Whether a part of one of these may be found that covers the mark-delete position.
        exists: Whether there is a cursor.
    """

    asked: AckedSet
    accepted: AckedSet
    durable: AckedSet
    marked: AckedSet
    names: tuple[object, ...]
    gauge_max: int | None = None
    overstated: tuple[int, int] | None = None
    states: tuple[State, ...] = ()
    holds_parts: bool = False
    exists: bool = False


def judge(found: State, alternatives: Sequence[Expected], *, is_worst: bool = False) -> tuple[Broken, ...]:
    """Return the promises that a recovery broke by the first alternative; nothing if it kept all by any of them.

    Args:
        found: What it found.
        alternatives: What it may find.
        is_worst: Whether all was lost that could be: then the gauge must be exact, unless a step was under way, whose
            write may be certain and not yet reported.
    """
    first: tuple[Broken, ...] = ()
    for expected in alternatives:
        broken = tuple(_broken(found, expected, is_exact=is_worst and len(alternatives) == 1))
        if not broken:
            return ()
        first = first or broken
    return first


def differing(first: State, again: State) -> tuple[Broken, ...]:
    """Return the promise that two recoveries in a row break if they found different states."""
    if first._replace(is_new=False) == again._replace(is_new=False):
        return ()
    lacking, new = first.acked - again.acked, again.acked - first.acked
    found = f"nothing was asked between two recoveries; lacking now: {lacking}; new: {new}"
    return (Broken(Promise.I5, found if lacking or new else f"first {first}, then {again}"),)


def told(broken: Iterable[Broken], story: tuple[str, ...] = ()) -> tuple[BrokenPromise, ...]:
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
        # That it holds nothing is no second finding.
        yield Broken(Promise.I10, "it opens as a new cursor")
        return
    if not found.acked <= expected.asked:
        invented = found.acked - expected.asked
        yield Broken(Promise.I1, f"acked, and nobody had asked: {invented}", _size(invented))
    if not expected.durable <= found.acked:
        lost = expected.durable - found.acked
        yield Broken(Promise.I2, f"lost: {lost}", _size(lost))
    if expected.gauge_max is not None:
        again = expected.accepted - found.acked
        if again.entry_count > expected.gauge_max or (is_exact and again.entry_count != expected.gauge_max):
            most = f"{'exactly' if is_exact else 'at most'} {expected.gauge_max} by the gauge"
            yield Broken(Promise.I3, f"{most}, {again.entry_count} come again: {again}")
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
    """Follows one cursor from when it was opened until it is crashed.

    Args:
        opened: What it held when it was opened: that must survive.
        knows_states: Whether all is reported that a persist writes; then a recovery must find one of these states.

    Attributes:
        expected: What a recovery may find now.
    """

    def __init__(self, opened: State, *, knows_states: bool = False) -> None:
        self._knows_states = knows_states
        self._reset: State | None = None
        self.expected = self._opened(opened)

    def asked(self, acked: AckedSet) -> None:
        """Note what is sent to be acked; before it is sent. An entry is acked with the last message of its batch."""
        self._change(asked=(self.expected.asked | acked).completed())

    def accepted(self, acked: AckedSet) -> None:
        """Note what was accepted; it may be redelivered beside what the gauge said, once."""
        expected = self.expected
        accepted = (expected.accepted | acked).completed()
        more = accepted.entry_count - expected.accepted.entry_count
        gauge_max = None if expected.gauge_max is None else expected.gauge_max + more
        self._change(accepted=accepted, gauge_max=gauge_max)

    def durable(self, acked: AckedSet) -> None:
        """Note a receipt."""
        self._change(durable=self.expected.durable | acked)

    def gauged(self, reading: int, *, durable: AckedSet | None = None) -> None:
        """Note what the gauge said.

        Args:
            reading: How many entries a crash redelivers.
            durable: What had a receipt when it was read at the latest; what has one now by default.
        """
        expected = self.expected
        possible = (expected.asked - (expected.durable if durable is None else durable)).entry_count
        overstated = expected.overstated
        excess = reading - possible
        # A reset that failed may have happened: then what is durable may be redelivered.
        if self._reset is None and excess > (0 if overstated is None else overstated[0] - overstated[1]):
            overstated = reading, possible
        self._change(gauge_max=reading, overstated=overstated)

    def marked(self, marked: AckedSet) -> None:
        """Note what the durable mark-delete position covers."""
        self._change(marked=marked)

    def naming(self, names: object) -> None:
        """Note that the cursor's properties are set."""
        self._change(names=(*self.expected.names, names))

    def named(self, names: object) -> None:
        """Note that they were."""
        self._change(names=(names,))

    def writing(self, state: State, *, excludes: bool = False, displaces: bool = False) -> None:
        """Note that a persist begins.

        Args:
            state: All that it may write.
            excludes: Whether it may leave acks above the mark-delete position out.
            displaces: Whether these may take the place of durable ones.
        """
        expected = self.expected
        self._change(states=(*expected.states, state), holds_parts=expected.holds_parts or excludes)
        if displaces:
            self._change(durable=expected.durable & state.marked, gauge_max=None)

    def written(self) -> None:
        """Note that it succeeded."""
        self._reset = None
        self._change(states=self.expected.states[-1:])

    def resetting(self, state: State) -> None:
        """Note that a reset begins; if it fails, it may have happened, until the next persist."""
        self._reset = state

    def reset(self) -> None:
        """Note that it succeeded: nothing from before it counts."""
        assert self._reset is not None
        self.expected, self._reset = self._opened(self._reset)._replace(names=self.expected.names), None

    def judge(self, found: State) -> tuple[Broken, ...]:
        """Return the promises that a recovery broke which found this."""
        alternatives = [self.expected]
        if self._reset is not None:
            alternatives.append(self._opened(self._reset)._replace(names=self.expected.names))
        return judge(found, alternatives)

    def _opened(self, state: State) -> Expected:
        acked, states = state.acked, (state,) if self._knows_states else ()
        return Expected(acked, acked, acked, state.marked, (state.names,), states=states, exists=not state.is_new)

    def _change(self, **fields: object) -> None:
        self.expected = self.expected._replace(**fields)  # type: ignore[arg-type]
