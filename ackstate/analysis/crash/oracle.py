"""Judges a recovered state by the events before the crash: acks, receipts and readings of the gauge, in order.

All layers that crash something use this; they differ in how they run a program, and in the violations that they permit.
A permission is an alternative: another state that a recovery may find, because a step was in progress or the media were
damaged.

A gauge is judged from both sides. It is too low if a crash redelivers more than it reported. It is too high if it
counts entries that cannot be redelivered by the program's own receipts. A crash alone proves no gauge too high, unless
it was the worst possible one: bytes that were written and not synced survive SIGKILL, and often a power cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypedDict, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Promise(StrEnum):
    """A promise; its text begins with its number, where design and documentation give it one."""

    I1 = "I1: an unacked message is never treated as acked"
    I2 = "I2: a durable receipt survives any crash"
    I3 = "I3: no crash redelivers more than the gauge, and the gauge counts nothing that cannot be redelivered"
    I4 = "I4: incremental counters agree with a full recount, and no limit is exceeded, not even by a byte"
    I5 = "I5: a store can be opened after any crash, also one of the recovery, and recovering twice gives the same"
    I6 = "I6: a snapshot and its deltas give the same state as a replay of everything"
    I7 = "I7: the durable mark-delete position never goes back, except by a reset"
    I8 = "I8: blocked is never stuck"
    I9 = "I9: a persist is of one instant, and is stored as a whole or not at all"
    I10 = "I10: unreadable is not absent, and written data can be read"
    I11 = "I11: stored data is bounded by the live state, and nothing is left behind"
    I12 = "I12: a message is never early, never lost, never with two consumers"
    I13 = "I13: an ack from before a reset does not count after it"
    I14 = "I14: a fenced owner changes nothing, and receives an error"
    I15 = "I15: accepted acks are written when due, and excluded only for a reason"
    I16 = "I16: a persist writes no more than its state needs"
    I17 = "I17: a deleted subscription leaves nothing, and a later one of its name is new"
    ERRORS = "nothing fails by itself, and a fault causes one of our errors"
    CONVERSATION = "a program that is not crashed continues, and answers as the conversation allows"
    REPAIRS = "a repair that is offered works, and gives up no more than announced"


def gravest(promises: Iterable[Promise]) -> Promise:
    """Return the first of some promises by number, which is the one to report."""
    return min(promises, key=list(Promise).index)


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that was broken in a run."""

    promise: Promise
    found: str  # The observation that contradicts it
    story: tuple[str, ...] = ()  # The shortest known sequence of steps that leads there, one line each


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of one run."""

    seed: int  # Determines the run: the same layer with this seed starts with the same run
    cycles: int  # Crashes that were survived and judged: crash states, kills, power cuts, damaged copies
    lost_durable: int = 0  # Entries whose ack had a durable receipt and that are not acked after a recovery
    invented: int = 0  # Entries acked after a recovery that were never acked
    # Cycles in which the redelivery gauge was wrong: not equal where it must be equal, or lower than the number of
    # redelivered entries.
    gauge_mismatch: int = 0
    broken: tuple[BrokenPromise, ...] = ()  # Every promise seen broken, these three among them; empty for a clean run
    # Further counts by name, summed over runs: ``{"distinct_states": 40}``.
    counts: Mapping[str, int] = field(default_factory=dict)


_LISTED_MAX = 8


@final
class Numbering:
    """The bits of the entries of a message log, and of the messages of their batches."""

    def __init__(self, ledgers: Mapping[int, int], *, batch_size: int = 0) -> None:
        self.ledgers, self.batch_size = ledgers, batch_size
        self.entry_count = 0
        self._first: dict[int, int] = {}
        for ledger_id, count in ledgers.items():
            self._first[ledger_id] = self.entry_count
            self.entry_count += count
        self.every_entry = (1 << self.entry_count) - 1
        self.nothing = AckedSet(self)

    def runs(self, runs: Iterable[Iterable[int]]) -> AckedSet:
        """Return the entries of runs ``(ledger_id, first, end)``, `end` excluded, with their messages."""
        found = self.nothing
        for ledger_id, first, end in runs:
            found |= self.run(ledger_id, first, end)
        return found

    def run(self, ledger_id: int, first: int, end: int) -> AckedSet:
        """Return one run, as `runs`; entries that the log does not have are part of it."""
        end_inside = max(first, min(end, self.ledgers.get(ledger_id, 0)))
        bits = self._bits(self._first[ledger_id] + first, end_inside - first) if end_inside > first else 0
        return AckedSet(self, bits, frozenset([(ledger_id, end_inside, end)] if end > end_inside else ()))

    def up_to(self, ledger_id: int, entry_id: int) -> AckedSet:
        """Return every entry up to one, included, those of lower ledgers too."""
        lower = [(lower_id, 0, count) for lower_id, count in self.ledgers.items() if lower_id < ledger_id]
        return self.runs([*lower, (ledger_id, 0, entry_id + 1)])

    def messages(self, ledger_id: int, entry_id: int, messages: int) -> AckedSet:
        """Return messages of an entry, one bit each, without the entry itself."""
        return AckedSet(self, messages << self._first_message(self._first[ledger_id] + entry_id))

    def runs_of(self, bits: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of the entries among some bits, in order."""
        for ledger_id, count in self.ledgers.items():
            left, end = bits >> self._first[ledger_id] & (1 << count) - 1, 0
            while left:
                gap = (left & -left).bit_length() - 1
                left >>= gap
                length = (~left & left + 1).bit_length() - 1
                yield ledger_id, end + gap, end + gap + length
                left, end = left >> length, end + gap + length

    def _bits(self, first: int, count: int) -> int:
        messages = (1 << count * self.batch_size) - 1
        return ((1 << count) - 1 << first) | messages << self._first_message(first)

    def _first_message(self, number: int) -> int:
        return self.entry_count + number * self.batch_size


@final
@dataclass(frozen=True, slots=True)
class AckedSet:
    """A set of entries, and of messages of batches."""

    numbering: Numbering = field(repr=False, compare=False)  # The meaning of the bits
    bits: int = 0  # The entries and messages that the log has
    elsewhere: frozenset[tuple[int, int, int]] = frozenset()  # Runs of entries that the log does not have

    def __or__(self, other: AckedSet) -> AckedSet:
        return AckedSet(self.numbering, self.bits | other.bits, self.elsewhere | other.elsewhere)

    def __sub__(self, other: AckedSet) -> AckedSet:
        return AckedSet(self.numbering, self.bits & ~other.bits, self.elsewhere - other.elsewhere)

    def __and__(self, other: AckedSet) -> AckedSet:
        return AckedSet(self.numbering, self.bits & other.bits, self.elsewhere & other.elsewhere)

    def __le__(self, other: AckedSet) -> bool:
        return not self.bits & ~other.bits and self.elsewhere <= other.elsewhere

    def __bool__(self) -> bool:
        return bool(self.bits or self.elsewhere)

    @property
    def entry_count(self) -> int:
        """How many entries are in it."""
        inside = (self.bits & self.numbering.every_entry).bit_count()
        return inside + sum(end - first for _, first, end in self.elsewhere) if self.elsewhere else inside

    @property
    def message_count(self) -> int:
        """How many messages of batches are in it."""
        return (self.bits >> self.numbering.entry_count).bit_count()

    def completed(self) -> AckedSet:
        """Return this with every entry of which it has all messages. Complexity: O(entries), O(1) without batches."""
        log, bits = self.numbering, self.bits
        if not log.batch_size:
            return self
        messages, whole = bits >> log.entry_count, (1 << log.batch_size) - 1
        for number in range(log.entry_count):
            bits |= (messages >> number * log.batch_size & whole == whole) << number
        return AckedSet(log, bits, self.elsewhere)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the entries as ``(ledger_id, first, end)``, `end` excluded; those of the log first, in order."""
        yield from self.numbering.runs_of(self.bits)
        yield from sorted(self.elsewhere)

    def __str__(self) -> str:
        """Return half-open runs ``ledger:[first, end)``, the first few of many, and a count of other messages."""
        texts = [listed(self.runs())] if self.entry_count else []
        if (parts := self.message_count - self.numbering.batch_size * self.entry_count) > 0:
            texts.append(f"{parts} messages of batches")
        return " ".join(texts) or "nothing"


def listed(some: Iterable[tuple[int, int, int]]) -> str:
    """Return runs as text, the first few of many."""
    runs = [f"{ledger_id}:[{first}, {end})" for ledger_id, first, end in islice(some, _LISTED_MAX + 1)]
    return " ".join(runs[:_LISTED_MAX] + ["..."] * (len(runs) > _LISTED_MAX)) or "nothing"


class State(NamedTuple):
    """The state of a cursor."""

    acked: AckedSet  # The entries that are not delivered again
    marked: AckedSet  # The entries that the mark-delete position covers
    rest: object = ()  # Further state that a persist writes with them
    names: object = ()  # The cursor's properties
    is_new: bool = False  # Whether there was no cursor before it was opened

    def __str__(self) -> str:
        return f"{self.acked}, {self.rest}" if self.rest else str(self.acked)


class Broken(NamedTuple):
    """A promise that a recovery broke."""

    promise: Promise
    found: str  # The observation that contradicts it
    entry_count: int = 0  # The number of lost or invented entries, or messages of batches


class EntryCounts(TypedDict):
    """As of `RunOutcome`."""

    lost_durable: int
    invented: int
    gauge_mismatch: int


class Expected(NamedTuple):
    """The states that a recovery may find."""

    requested: AckedSet  # Entries whose ack was requested: they may be acked
    accepted: AckedSet  # Entries whose ack was accepted
    durable: AckedSet  # Entries that must be acked
    marked: AckedSet  # Entries that the mark-delete position must cover
    names: tuple[object, ...]  # The cursor's properties: one of these values
    gauge_max: int | None = None  # The number of entries that may be redelivered; None if no gauge was read
    # The reading of the gauge that was too high by most, and the number of entries that could be redelivered; None if
    # none was too high.
    overstated: tuple[int, int] | None = None
    states: tuple[State, ...] = ()  # The states that were written as a whole; empty if unknown
    holds_parts: bool = False  # Whether a part of one of these that covers the mark-delete position may be found
    exists: bool = False  # Whether there must be a cursor
    is_deleted: bool = False  # Whether there must be none


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
    """Follows one cursor from its opening to its crash."""

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
