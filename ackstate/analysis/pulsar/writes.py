"""Computes the writes that a Pulsar broker may have made, when its clocks are known only as windows.

At each ACK command, a limiter decides whether the broker writes the state of the cursor, and a timer writes the refused
states. A recording has only windows for the clocks of both. So not one course of events is followed but all: courses
that have written the same and differ only in the time of the limiter's next grant are one `_Course` with a set of such
times, and every step maps intervals to intervals. Nothing is sampled, and only the last write matters for durability,
because each write has the whole state.

The first write waits for the cursor's ledger. It then has the mark-delete position of the last command that was granted
a write by then, and the ranges and batches of that moment: later commands are included, except for the mark-delete
position. Rarely that is included too.

Source: ``ManagedCursorImpl`` (``asyncDelete``, ``flush``, ``createNewMetadataLedger``) and
``ManagedLedgerFactoryImpl.flushCursors`` of Apache Pulsar 4.2, and ``SmoothBursty`` of Guava.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.pulsar.recorded_run import Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.analysis.pulsar.policy import BrokerPolicy

LEDGER_CREATION_MS_MAX = 400
"""How long the first write may wait for a new cursor ledger, if the run lacks the time when it was ready. Brokers on
busy machines took up to 200 ms."""

WRITE_MS_MAX = 50
"""A write that began less than this before the end might not have completed."""


TIMER_LATE_MS = 5
"""The tolerance of a timer that ticks at a fixed rate."""

_PARTS_MAX = 100


class LimiterCall(NamedTuple):
    """An ACK command: when it read the clock, and whether it called the limiter at all."""

    when: Window
    asks: bool


class Clocks(NamedTuple):
    """The clocks of a run; the time when the cursor's ledger was ready may be unknown."""

    calls: Sequence[LimiterCall]
    cursor_opened: Window
    broker_up: Window
    ended_ms: float
    cursor_ledger: Window | None = None


class LastWrite(NamedTuple):
    """The contents of the last record.

    Attributes:
        position: Number of commands before its mark-delete position; 0 is the position at the opening.
        contents: Number of commands before its ranges and batches; 0 is no record.
    """

    position: int
    contents: int


NO_WRITE = LastWrite(0, 0)


class _Course(NamedTuple):
    """The common state of possible courses of events that are equivalent from now on.

    Attributes:
        written: The last completed write. With `ready`, the first one, with its contents if it began now.
        is_dirty: Whether the limiter refused a write since the last flush.
        ready: When the cursor's ledger is ready, while the first write waits for it.
        has_ledger: Whether the cursor has its ledger.
    """

    written: LastWrite
    is_dirty: bool
    ready: Window | None
    has_ledger: bool


# When all granted permits are paid for, as disjoint, half-open intervals, in order.
_Paid = tuple[Window, ...]
_Courses = dict[_Course, _Paid]


def last_writes(
    clocks: Clocks, policy: BrokerPolicy, *, ledger_creation_ms: float = LEDGER_CREATION_MS_MAX
) -> set[LastWrite]:
    """Return every write that may have been the last one.

    Args:
        clocks: Windows in which each clock was read.
        policy: When the broker writes.
        ledger_creation_ms: Longest wait of the first write if `clocks` lacks the time of its ledger.

    Complexity: O(commands) for each relevant phase of the flush timer: one, unless it ticks while commands arrive, and
    then at most four per command and `_PARTS_MAX` more. Commands during the creation of the ledger each add a course,
    until the second write.
    """
    rules = _Rules(clocks, policy, ledger_creation_ms)
    found: set[LastWrite] = set()
    for phase in _phases(clocks, policy.flush_ms):
        courses: _Courses = {_Course(NO_WRITE, is_dirty=False, ready=None, has_ledger=False): (clocks.cursor_opened,)}
        for step in _steps(clocks, phase, policy.flush_ms):
            courses = _after(step, courses, rules)
            if step.handled == len(clocks.calls) and not any(course.is_dirty for course in courses):
                break
        for course in courses:
            found.update(_at_the_end(course, clocks))
    return found


def _at_the_end(course: _Course, clocks: Clocks) -> Iterator[LastWrite]:
    if course.ready is None:
        yield course.written
        return
    handled = len(clocks.calls)
    if course.ready.first < clocks.ended_ms:
        yield from _first_writes(course, handled)
    if course.ready.end + WRITE_MS_MAX > clocks.ended_ms:
        yield NO_WRITE
        # A new ledger starts with its own record, which has the previous position.
        yield LastWrite(0, handled)


def _first_writes(course: _Course, handled: int) -> tuple[LastWrite, ...]:
    """Return the first write of a course if its ledger is ready after this number of commands.

    If a write completes before the cursor has registered its new ledger, it creates another ledger, which starts with
    the latest position. One of 70 cursors did so.
    """
    return tuple({course.written._replace(contents=handled), LastWrite(handled, handled)})


class _Rules(NamedTuple):
    clocks: Clocks
    policy: BrokerPolicy
    ledger_creation_ms: float

    def ready(self, when: Window) -> Window:
        """Return the window in which a ledger is ready, given the window in which its creation begins."""
        known = self.clocks.cursor_ledger
        return Window(when.first, when.end + self.ledger_creation_ms) if known is None else known


class _Step(NamedTuple):
    """Commands and flushes whose order is unknown: one of either, or one of both.

    Attributes:
        command: Number of the command, from 0, or None.
        tick: When the flush timer ticks, or None.
        handled: Number of commands handled before this step.
    """

    command: int | None
    tick: Window | None
    handled: int


def _phases(clocks: Clocks, flush_ms: int) -> Iterator[Window]:
    """Split the window of the flush timer's start so that within a part all ticks fall into the same gaps."""
    begun = _begun(clocks)
    up_first, up_end = clocks.broker_up
    # A broker is up before it receives any command. Ticks before that have no effect, so one of several timers that are
    # whole periods apart is enough.
    up_end = max(min(up_end, begun), up_first + 1)
    up = Window(max(up_first, min(up_end - flush_ms, begun - 2 * flush_ms)), up_end)
    events = [time for call in clocks.calls for time in call.when] + [clocks.ended_ms]
    cuts = {up.first, up.end}
    for time in events:
        # Starts for which a tick, the first one after one period, falls exactly on this time.
        start = time - flush_ms * max(1, -((up.end - time) // flush_ms))
        while start >= up.first:
            if start < up.end:
                cuts.add(start)
            start -= flush_ms
    # All ticks of one timer depend on each other; in a narrow part they can be treated as independent.
    width = max(TIMER_LATE_MS, flush_ms / _PARTS_MAX) if clocks.ended_ms - begun > flush_ms else up.end - up.first
    for first, end in pairwise(sorted(cuts)):
        count = ceil((end - first) / width)
        for part in range(count):
            yield Window(first + (end - first) * part / count, first + (end - first) * (part + 1) / count)


def _steps(clocks: Clocks, phase: Window, flush_ms: int) -> Iterator[_Step]:
    ticks = _ticks(clocks, phase, flush_ms)
    tick = next(ticks, None)
    for number, call in enumerate(clocks.calls):
        while tick is not None and tick.end <= call.when.first:
            yield _Step(None, tick, number)
            tick = next(ticks, None)
        within = None
        if tick is not None and tick.first < call.when.end:
            within, tick = tick, next(ticks, None)
        yield _Step(number, within, number)
    while tick is not None:
        yield _Step(None, tick, len(clocks.calls))
        tick = next(ticks, None)


def _ticks(clocks: Clocks, phase: Window, flush_ms: int) -> Iterator[Window]:
    """Yield the relevant ticks: none before the first command or after the end."""
    count = max(1, int((_begun(clocks) - phase.end) // flush_ms))
    while (tick := Window(phase.first + count * flush_ms, phase.end + count * flush_ms)).first < clocks.ended_ms:
        yield tick
        count += 1


def _begun(clocks: Clocks) -> float:
    return clocks.calls[0].when.first if clocks.calls else clocks.ended_ms


def _after(step: _Step, courses: _Courses, rules: _Rules) -> _Courses:
    if step.tick is None:
        return _after_command(step, courses, rules)
    if step.command is None:
        return _after_tick(step.tick, courses, rules, handled=step.handled)
    tick_first = _after_command(step, _after_tick(step.tick, courses, rules, handled=step.handled), rules)
    tick_last = _after_tick(step.tick, _after_command(step, courses, rules), rules, handled=step.handled + 1)
    return _merged([*tick_first.items(), *tick_last.items()])


def _after_command(step: _Step, courses: _Courses, rules: _Rules) -> _Courses:
    assert step.command is not None
    when, asks = rules.clocks.calls[step.command]
    reached: list[tuple[_Course, _Paid]] = []
    for before, paid in courses.items():
        for course in _until(when, before, handled=step.handled):
            if asks:
                reached += _asked(course, paid, when, rules, handled=step.handled + 1)
            else:
                reached.append((course, paid))
    return _merged(reached)


def _after_tick(tick: Window, courses: _Courses, rules: _Rules, *, handled: int) -> _Courses:
    reached: list[tuple[_Course, _Paid]] = []
    for before, paid in courses.items():
        for course in _until(tick, before, handled=handled):
            if course.is_dirty:
                reached += _asked(course._replace(is_dirty=False), paid, tick, rules, handled=handled)
            else:
                reached.append((course, paid))
    return _merged(reached)


def _until(when: Window, course: _Course, *, handled: int) -> Iterator[_Course]:
    """Yield the possible successors of a course by a time in a window: the first write is done, or waits, or both."""
    if course.ready is None:
        yield course
        return
    if course.ready.first < when.end:
        for written in _first_writes(course, handled):
            yield course._replace(written=written, ready=None)
    if when.first < course.ready.end:
        yield course


def _asked(
    course: _Course, paid: _Paid, when: Window, rules: _Rules, *, handled: int
) -> Iterator[tuple[_Course, _Paid]]:
    """Yield the possible results of a request to the limiter: a write, a refusal, or both."""
    granted = _granted(paid, when, rules.policy)
    if granted:
        ready = course.ready if course.has_ledger else rules.ready(when)
        yield course._replace(written=LastWrite(handled, handled), ready=ready, has_ledger=True), granted
        if course.has_ledger and ready is None and when.end + WRITE_MS_MAX > rules.clocks.ended_ms:
            yield course, granted
    refused = _refused(paid, when, rules.policy)
    if refused:
        yield course._replace(is_dirty=True), refused


def _granted(paid: _Paid, when: Window, policy: BrokerPolicy) -> _Paid:
    """Return when all is paid for after a permit, for those courses in which one can be granted in the window.

    At a time t, if all is paid for since p, a permit is granted if t >= p; then all is paid for at
    max(p, t - stored) + permit.
    """
    if not policy.writes_per_second:
        return paid
    stored, permit = policy.stored_ms_max, policy.permit_ms
    return tuple(
        Window(
            max(first, when.first - stored) + permit,
            max(min(end, when.end), when.end - stored) + permit,
        )
        for first, end in paid
        if first < when.end
    )


def _refused(paid: _Paid, when: Window, policy: BrokerPolicy) -> _Paid:
    if not policy.writes_per_second:
        return ()
    return tuple(Window(max(first, when.first), end) for first, end in paid if end > when.first)


def _merged(reached: list[tuple[_Course, _Paid]]) -> _Courses:
    """Merge the times of the same course into disjoint intervals."""
    intervals: dict[_Course, list[Window]] = {}
    for course, paid in reached:
        intervals.setdefault(course, []).extend(paid)
    return {course: _union(each) for course, each in intervals.items()}


def _union(intervals: list[Window]) -> _Paid:
    joined: list[Window] = []
    for interval in sorted(intervals):
        if joined and interval.first <= joined[-1].end:
            joined[-1] = Window(joined[-1].first, max(joined[-1].end, interval.end))
        else:
            joined.append(interval)
    return tuple(joined)
