"""Which positions were certainly delivered at least an age ago?

Apache Pulsar has no such thing; its issue 19966 sketches one: keep the delivery time of a few entries, not of all, and
use their positions as a ruler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, final

from pyroaring import AbstractBitMap

from ackstate.integers import check_count, integer
from ackstate.position import Position, check_position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MARKS_MAX_MIN = 128
_MARKS_PER_CELL_OF_A_DOUBLING = 64
_ANSWERS_MAX = 32
_INSTANTS_MAX = 4


@final
class DeliveryRuler:
    """Marks (time, position), rising in both: by the time, dispatch had sent everything up to the position, included.

    >>> ruler = DeliveryRuler()
    >>> for second, ledger_id in ((0, 3), (2, 4), (4, 5), (5, 6)):
    ...     ruler.record(Position(ledger_id, 1), second * 1000)
    >>> ruler.frontier(3000, now_ms=5000)
    Position(ledger_id=4, entry_id=1)

    A position is *old* at an age when it lies at or below `frontier` of that age, else *young*. Times are milliseconds
    of any clock, negative or not. Not safe for concurrent mutation.

    **Few marks for any traffic.** When there are more than `marks_max`, they are thinned. Let D be `marks_max` // 64. A
    mark of age a, counted back from the newest, lies in a cell of w ms, where w is the largest power of two that is at
    most a / D, or 1; of the marks of one cell the last stays. The positions of a dropped mark then count as sent at the
    time of the next: later, so nothing becomes old too early. Cells begin at multiples of w, so that, as marks age, two
    cells become one, and a mark hands its positions on within a cell that it was in from the start. Counted back from
    the newest mark, cells would move on with it, and positions could be handed on for ever and never become old.

    **How late.** A position sent t ms ago counts as sent at most t / D ms later than it was. So it becomes old at most
    D / (D - 1) times the age, and a ms, after it was sent; as long as nothing was dropped, at the age exactly.

    **How many are left.** Ages below 2D have a cell for each ms. Every doubling of the age above is D cells long and
    touches at most D + 1, so the marks of ages below 2D * 2**k are at most 2D + k * (D + 1). Of all marks the newest
    7/8 of `marks_max` are kept at most, so that a record costs amortised O(1). For ages that these do not reach,
    beyond 4 years with 128 marks and 2,000 with 256, `frontier` may be later still, or None.

    Args:
        marks_max: The most marks ever held; at least 128. More marks: finer, D grows with it.

    Raises:
        ValueError: `marks_max` is below 128.
        TypeError: `marks_max` is not an integer.
    """

    def __init__(self, *, marks_max: int = 256) -> None:
        self._marks_max = integer("marks_max", marks_max)
        if self._marks_max < _MARKS_MAX_MIN:
            raise ValueError(f"marks_max is {marks_max}, and a ruler has at least {_MARKS_MAX_MIN} marks")
        self._cells_per_doubling = self._marks_max // _MARKS_PER_CELL_OF_A_DOUBLING
        # Invariant: both rise strictly; _positions[i] belongs to _times[i].
        self._times: list[int] = []
        self._positions: list[Position] = []
        # Age -> instants that were asked for, rising, with the position known to be sent by each; the last asked age
        # at the end. There are several where the clock went back.
        self._answers: dict[int, list[tuple[int, Position]]] = {}

    @property
    def mark_count(self) -> int:
        """How many marks are held."""
        return len(self._times)

    @property
    def room(self) -> int:
        """How many more marks there may be before they are thinned, which changes what `sent_by` says; 0 or more."""
        return self._marks_max - len(self._times)

    def marks(self) -> tuple[Sequence[int], Sequence[Position]]:
        """Return the times of the marks and their positions, both rising: to be read, not changed."""
        return self._times, self._positions

    def __repr__(self) -> str:
        return f"<DeliveryRuler of {self.mark_count} marks>"

    def record(self, position: Position, now_ms: int) -> None:
        """Say that dispatch has sent everything up to a position, included, by now.

        Args:
            position: At or below the last mark's it changes nothing: a redelivery, or a delayed message that left after
                later ones. Its stretch of the log was dispatched before.
            now_ms: Below the last mark's, because a clock went back, it counts as that: later, so younger, so safe.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id or the time is not an integer.

        Complexity: amortised O(1).
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
        """Say when dispatch had sent everything up to some positions: as `record` of each.

        Args:
            positions: Rising strictly, each as `check_position` returns it: nothing is checked again.
            times_ms: As many whole numbers, rising strictly.

        Complexity: amortised O(1) for each, with little for those that thinning drops again.
        """
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

    def frontier(self, age_ms: int, now_ms: int) -> Position | None:
        """Return the highest position such that everything up to it was certainly sent at least `age_ms` ago, or None.

        For one age it never goes back while time does not: an answer stays true, so it is kept, for the 32 ages that
        were asked for last, in case that the mark it came from is dropped.

        Raises:
            ValueError: The age is negative.
            TypeError: The age or the time is not an integer.

        Complexity: O(log marks).
        """
        age_ms, now_ms = integer("age_ms", age_ms), integer("now_ms", now_ms)
        if age_ms < 0:
            raise ValueError(f"age_ms is {age_ms}, and an age is 0 or more")
        instant = now_ms - age_ms
        counted = bisect_right(self._times, instant)
        found = self._positions[counted - 1] if counted else None
        for known_at, known in self._answers.get(age_ms, ()):
            if known_at <= instant and (found is None or found < known):
                found = known
        if found is not None:
            self._keep_answer(age_ms, instant, found)
        return found

    def sent_by(self, position: Position) -> int | None:
        """Return the time by which a position was certainly sent, or None if no mark is at or above it.

        That of the lowest mark at or above it, as for `frontier`; but when marks are dropped it rises, while `frontier`
        keeps its last answers. So a position may be old before its age by this.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id is not an integer.

        Complexity: O(log marks).
        """
        check_position(position)
        found = bisect_left(self._positions, position)
        return self._times[found] if found < len(self._times) else None

    def sent_counts(self, ledger_id: int, bitmap: AbstractBitMap) -> Iterator[tuple[int, int]]:
        """Return the times by which entries of a ledger were certainly sent, rising, and how many at each; none is 0.

        Each entry counts at what `sent_by` says of it; entries above the last mark are left out.

        Args:
            ledger_id: The ledger.
            bitmap: Its entries. What is returned is of this instant, whatever becomes of it or of the ruler.

        Raises:
            ValueError: The ledger id is out of range.
            TypeError: The ledger id is not an integer, or the entries are not in a bitmap.

        Complexity: O(marks that entries fall to), for each three look-ups.
        """
        check_position(Position(ledger_id, -1))
        if not isinstance(bitmap, AbstractBitMap):
            raise TypeError(f"the entries are a bitmap, found {bitmap!r}")
        sent: list[tuple[int, int]] = []
        counted, count = 0, len(bitmap)
        while counted < count:
            found = bisect_left(self._positions, (ledger_id, bitmap[counted]))
            if found == len(self._positions):
                break
            mark = self._positions[found]
            counted_before = counted
            counted = bitmap.rank(mark.entry_id) if mark.ledger_id == ledger_id else count
            sent.append((self._times[found], counted - counted_before))
        return iter(sent)

    def set_back(self, by_ms: int) -> None:
        """Move every mark back in time, as a clock that was set back: their ages stay as they are.

        Cells stay where they are, so that the positions of a mark may be handed on once more than said above.

        Args:
            by_ms: By how much; 0 or more.

        Raises:
            ValueError: It is negative.
            TypeError: It is not an integer.

        Complexity: O(marks).
        """
        check_count("by_ms", by_ms, least=0)
        self._times = [time - by_ms for time in self._times]
        self._answers = {
            age_ms: [(instant - by_ms, position) for instant, position in answers]
            for age_ms, answers in self._answers.items()
        }

    def clear(self) -> None:
        """Forget every mark, as after a reset of the cursor: what it delivered before says nothing any more."""
        self._times.clear()
        self._positions.clear()
        self._answers.clear()

    def _keep_answer(self, age_ms: int, instant: int, position: Position) -> None:
        answers = self._answers.pop(age_ms, [])
        later = [answer for answer in answers if answer[0] > instant]
        # It is as good as those of instants before; of later ones, from which the clock has gone back, some are kept.
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
        """Return the lowest time in the cell of a mark that has its width."""
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
