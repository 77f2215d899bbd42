"""Finds the positions that were certainly delivered at least a given time ago.

Apache Pulsar has nothing like it; its issue 19966 sketches the idea: store the delivery time of a few entries instead
of all, and use their positions as a ruler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, final

from ackstate.checks import check_count, integer
from ackstate.position import Position, check_position

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARKS_MAX_MIN = 128
_MARKS_PER_CELL_OF_A_DOUBLING = 64
_ANSWERS_MAX = 32
_INSTANTS_MAX = 4


@final
class DeliveryRuler:
    """Marks (time, position), rising in both: by that time, dispatch had sent everything up to the position, inclusive.

    >>> ruler = DeliveryRuler()
    >>> for second, ledger_id in ((0, 3), (2, 4), (4, 5), (5, 6)):
    ...     ruler.record(Position(ledger_id, 1), second * 1000)
    >>> ruler.old_up_to(3000, now_ms=5000)
    Position(ledger_id=4, entry_id=1)

    A position is *old* for an age if it is at or below `old_up_to` of that age, else *young*. Times are milliseconds of
    any clock, possibly negative. Not safe for concurrent mutation.

    At most `marks_max` marks are stored, 128 or more. Beyond that they are thinned: a position sent t ms ago counts as
    sent up to t / D ms later than it was, with D = `marks_max` // 64, so none becomes old too early.

    Raises:
        ValueError: `marks_max` is below 128.
        TypeError: `marks_max` is not an integer.
    """

    # Why thinning is late by little. A mark of age a, relative to the newest, is in a cell of w ms: the largest power
    # of two that is at most a / D, or 1. Only the last mark of a cell stays, and the positions of the others count as
    # sent at its time. Cells start at multiples of w: as marks age, two cells merge into one, so a mark passes its
    # positions on only within a cell that always contained it. Counted back from the newest mark, cells would move with
    # it, and positions could be passed on for ever. So a position becomes old at most D / (D - 1) times the age, plus
    # one ms, after it was sent. How many marks are left: ages below 2D have a cell for each ms, each doubling above
    # touches at most D + 1, which makes 2D + k * (D + 1) below 2D * 2**k. The newest 7/8 of `marks_max` are kept, so
    # that a record costs amortised O(1); for ages beyond, 4 years with 128 marks, 2,000 with 256, `old_up_to` may be
    # later, or None.

    def __init__(self, *, marks_max: int = 256) -> None:
        self._marks_max = integer("marks_max", marks_max)
        if self._marks_max < _MARKS_MAX_MIN:
            raise ValueError(f"marks_max must be at least {_MARKS_MAX_MIN}, got {marks_max}")
        self._cells_per_doubling = self._marks_max // _MARKS_PER_CELL_OF_A_DOUBLING
        # Invariant: both rise strictly; _positions[i] belongs to _times[i].
        self._times: list[int] = []
        self._positions: list[Position] = []
        # Age -> instants that were queried, rising, with the position known to be sent by each; the last queried age is
        # at the end. There are several instants if the clock went back.
        self._answers: dict[int, list[tuple[int, Position]]] = {}

    @property
    def mark_count(self) -> int:
        """The number of marks."""
        return len(self._times)

    @property
    def room(self) -> int:
        """The number of marks that can be added before thinning; 0 or more."""
        return self._marks_max - len(self._times)

    def marks(self) -> tuple[Sequence[int], Sequence[Position]]:
        """Return the times of the marks and their positions, both rising; the caller must not change them."""
        return self._times, self._positions

    def __repr__(self) -> str:
        return f"<DeliveryRuler of {self.mark_count} marks>"

    def record(self, position: Position, now_ms: int) -> None:
        """Record that dispatch has sent everything up to a position, inclusive, by now. Amortised O(1).

        A position at or below the last mark's changes nothing: it is a redelivery, or a delayed message. If the clock
        went back, the last mark's time counts: later, so younger, so safe.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id or the time is not an integer.
        """
        check_position(position)
        now_ms = integer("now_ms", now_ms)
        if self._positions and position <= self._positions[-1]:
            return
        if self._times and now_ms <= self._times[-1]:
            self._positions[-1] = Position(*position)
            return
        self._times.append(now_ms)
        self._positions.append(Position(*position))
        if len(self._times) > self._marks_max:
            self._thin()

    def record_many(self, positions: Sequence[Position], times_ms: Sequence[int]) -> None:
        """Do as `record` for each of some valid positions, strictly rising like their times, which are not checked."""
        begin = 0
        if self._times:
            begin = bisect_right(positions, self._positions[-1])
            late = bisect_right(times_ms, self._times[-1], begin)
            if late > begin:
                self._positions[-1] = positions[late - 1]
                begin = late
        while begin < len(times_ms):
            end = begin + self.room + 1
            self._times += times_ms[begin:end]
            self._positions += positions[begin:end]
            if len(self._times) > self._marks_max:
                self._thin()
            begin = end

    def old_up_to(self, age_ms: int, now_ms: int) -> Position | None:
        """Return the highest position up to which everything was certainly sent at least `age_ms` ago, or None.

        For one age it never goes back while time does not: an answer stays true, so it is stored, for the 32 ages that
        were queried last, in case its mark is dropped. O(log marks).

        Raises:
            ValueError: The age is negative.
            TypeError: The age or the time is not an integer.
        """
        age_ms, now_ms = integer("age_ms", age_ms), integer("now_ms", now_ms)
        if age_ms < 0:
            raise ValueError(f"age_ms must be at least 0, got {age_ms}")
        instant = now_ms - age_ms
        counted = bisect_right(self._times, instant)
        found = self._positions[counted - 1] if counted else None
        for known_at, known in self._answers.get(age_ms, ()):
            if known_at <= instant and (found is None or found < known):
                found = known
        if found is not None:
            self._keep_answer(age_ms, instant, found)
        return found

    def set_back(self, by_ms: int) -> None:
        """Move every mark back in time by 0 ms or more, like a clock that was set back; their ages do not change.

        Cells do not move, so the positions of a mark may be passed on once more than stated above.
        """
        check_count("by_ms", by_ms, least=0)
        self._times = [time - by_ms for time in self._times]
        self._answers = {
            age_ms: [(instant - by_ms, position) for instant, position in answers]
            for age_ms, answers in self._answers.items()
        }

    def clear(self) -> None:
        """Remove every mark, as after a reset of the cursor: earlier deliveries are irrelevant then."""
        self._times.clear()
        self._positions.clear()
        self._answers.clear()

    def _keep_answer(self, age_ms: int, instant: int, position: Position) -> None:
        answers = self._answers.pop(age_ms, [])
        later = [answer for answer in answers if answer[0] > instant]
        # It replaces answers for earlier instants; some answers for later instants, before the clock went back, stay.
        self._answers[age_ms] = [(instant, position), *later[: _INSTANTS_MAX - 1]]
        if len(self._answers) > _ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]

    def _thin(self) -> None:
        kept: list[int] = []
        last = len(self._times) - 1
        while last >= 0 and len(kept) < self._marks_max - self._marks_max // 8:
            kept.append(last)
            last = bisect_left(self._times, self._cell_begin(self._times[last]), 0, last) - 1
        kept.reverse()
        self._times = [self._times[i] for i in kept]
        self._positions = [self._positions[i] for i in kept]

    def _cell_begin(self, time: int) -> int:
        """Return the lowest time in the cell of a mark."""
        newest = self._times[-1]
        width_bits = max(((newest - time) // self._cells_per_doubling).bit_length() - 1, 0)
        lowest_of_width = newest - (self._cells_per_doubling << (width_bits + 1)) + 1
        return max(time >> width_bits << width_bits, lowest_of_width)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(marks)."""
        assert len(self._times) == len(self._positions) <= self._marks_max
        assert all(before < after for before, after in pairwise(self._times))
        assert all(before < after for before, after in pairwise(self._positions))
        assert len(self._answers) <= _ANSWERS_MAX
