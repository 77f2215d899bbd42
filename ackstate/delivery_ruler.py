"""Finds the positions that were certainly delivered at least a given time ago.

Apache Pulsar has nothing like it; its issue 19966 sketches the idea: store the delivery time of a few entries instead
of all, and use their positions as a ruler.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, final

from ackstate.checks import integer

if TYPE_CHECKING:
    from ackstate.position import Position

MARKS_MAX = 256
_CELLS = 128


@final
class DeliveryRuler:
    """Marks (time, position), rising in both: by that time, dispatch had sent everything up to the position, inclusive.

    >>> from ackstate import Position
    >>> ruler = DeliveryRuler(3000)
    >>> for second, ledger_id in ((0, 3), (2, 4), (4, 5), (5, 6)):
    ...     ruler.record(Position(ledger_id, 1), second * 1000)
    >>> ruler.old_up_to(5000)
    Position(ledger_id=4, entry_id=1)

    A position is *old* if it is at or below `old_up_to`, else *young*. Times are milliseconds of any clock, possibly
    negative. Not safe for concurrent mutation.

    At most 256 marks are stored. Beyond that they are thinned: a position counts as sent less than 1/128 of the age, or
    1 ms, later than it was; so none becomes old too early.

    Attributes:
        age_ms: The age, in milliseconds.
        times: Of the marks, in milliseconds; to be read only, like the next one.
        positions: Of the marks.
    """

    def __init__(self, age_ms: int) -> None:
        self.age_ms = age_ms
        # Invariant: both rise strictly; positions[i] belongs to times[i].
        self.times: list[int] = []
        self.positions: list[Position] = []
        # The latest instant that was asked about, and the position known to be sent by then.
        self._answer: tuple[int, Position] | None = None

    def record(self, position: Position, now_ms: int) -> None:
        """Record that dispatch has sent everything up to a valid position, inclusive, by now. Amortised O(1).

        A position at or below the last mark's changes nothing: it is a redelivery, or a delayed message. If the clock
        went back, the last mark's time counts: later, so younger, so safe.

        Raises:
            TypeError: The time is not an integer.
        """
        now_ms = integer("now_ms", now_ms)
        if self.positions and position <= self.positions[-1]:
            return
        if self.times and now_ms <= self.times[-1]:
            self.positions[-1] = position
            return
        self.times.append(now_ms)
        self.positions.append(position)
        if len(self.times) > MARKS_MAX:
            self._thin()

    def old_up_to(self, now_ms: int) -> Position | None:
        """Return the highest position up to which everything was certainly sent at least the age ago, or None.

        It never goes back while time does not: an answer stays true, so it is stored in case its mark is dropped.
        O(log marks).
        """
        instant = now_ms - self.age_ms
        counted = bisect_right(self.times, instant)
        found = self.positions[counted - 1] if counted else None
        if self._answer is not None:
            if self._answer[0] > instant:
                return found
            found = self._answer[1] if found is None else max(found, self._answer[1])
        if found is not None:
            self._answer = instant, found
        return found

    def set_back(self, by_ms: int) -> None:
        """Move every mark back in time by 0 ms or more, like a clock that was set back; their ages do not change."""
        self.times = [time - by_ms for time in self.times]
        if self._answer is not None:
            self._answer = self._answer[0] - by_ms, self._answer[1]

    def clear(self) -> None:
        """Remove every mark, as after a reset of the cursor: earlier deliveries are irrelevant then."""
        self.times.clear()
        self.positions.clear()
        self._answer = None

    def _thin(self) -> None:
        """Keep the last mark of each cell of time; cells do not move, so that no position is passed on for ever."""
        # Of those that are old now, only the last one can be an answer.
        first = max(bisect_right(self.times, self.times[-1] - self.age_ms) - 1, 0)
        width = max(-(-self.age_ms // _CELLS), 1)
        cells = [time // width for time in self.times[first:]]
        kept = [at for at, (cell, after) in enumerate(pairwise([*cells, None]), first) if cell != after]
        self.times = [self.times[at] for at in kept]
        self.positions = [self.positions[at] for at in kept]

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(marks)."""
        assert len(self.times) == len(self.positions) <= MARKS_MAX
        assert all(before < after for before, after in pairwise(self.times))
        assert all(before < after for before, after in pairwise(self.positions))
