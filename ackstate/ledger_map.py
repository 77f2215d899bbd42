"""The ledgers of a message log, and their entry counts."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, final

from ackstate.errors import InvalidPositionError
from ackstate.position import ENTRY_ID_MAX, Position, check_position

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@final
class LedgerMap:
    """The ledgers of one message log in order, with their entry counts; the last one is open for appends.

    >>> log = LedgerMap.from_counts({3: 100, 5: 0, 6: 2})
    >>> log.last_confirmed
    Position(ledger_id=6, entry_id=1)
    >>> log.next_valid(Position(3, 99))
    Position(ledger_id=6, entry_id=0)

    Look-ups cost O(log ledgers). One thread at a time may change it; meanwhile, any thread may look things up: each
    call sees the log before or after a change.

    Source: ``ManagedLedgerImpl`` of Apache Pulsar (position arithmetic).
    """

    def __init__(self, first_ledger_id: int) -> None:
        check_position(Position(first_ledger_id, -1))
        self.current = _Ledgers([first_ledger_id], [0])
        """The ledgers from one roll or trim to the next, for a caller that cannot afford a call; to be read only."""
        self.last_confirmed = Position(first_ledger_id, -1)
        """The last entry of the log; with no entry at all, the position before the first. To be read only."""

    @classmethod
    def from_counts(cls, counts: Mapping[int, int]) -> LedgerMap:
        """Return the map of ledger id -> entry count; the last ledger is open.

        Raises:
            ValueError: No ledger, ids that do not rise, or a count outside 0..2**32.
        """
        if not counts:
            raise ValueError("a message log must have at least one ledger")
        for before, after in pairwise(counts):
            if before >= after:
                raise ValueError(f"ledger ids must rise, got {after} after {before}")
        log = cls(next(iter(counts)))
        starts, end = [], 0
        for ledger_id, given in counts.items():
            check_position(Position(ledger_id, -1))
            count = _check_room(ledger_id, 0, given)
            starts.append(end)
            end += count
            if count or log.last_confirmed.entry_id < 0:
                log.last_confirmed = Position(ledger_id, count - 1)
        log.current = _Ledgers([*counts], starts, end - starts[-1])
        return log

    @property
    def first_ledger_id(self) -> int:
        """The oldest ledger that was not trimmed."""
        return self.current.ids[0]

    @property
    def current_ledger_id(self) -> int:
        """The open ledger."""
        return self.current.ids[-1]

    @property
    def first_position(self) -> Position:
        """The position before the first entry that was not trimmed, in the first ledger even if that is empty."""
        return Position(self.first_ledger_id, -1)

    def counts(self) -> dict[int, int]:
        """Return ledger id -> entry count, in order, as `from_counts` accepts it."""
        ledgers = self.current
        ends = [*ledgers.starts[1:], ledgers.end]
        return {ledger_id: end - start for ledger_id, start, end in zip(ledgers.ids, ledgers.starts, ends, strict=True)}

    def append(self, count: int = 1) -> Position:
        """Add entries to the open ledger and return the last position of the log.

        Raises:
            ValueError: The count is negative, or the ledger would exceed entry id 2**32 - 1.
            TypeError: The count is not an integer.
        """
        ledgers = self.current
        count = _check_room(ledgers.ids[-1], ledgers.open_count, count)
        ledgers.open_count += count
        if count:
            self.last_confirmed = Position(ledgers.ids[-1], ledgers.open_count - 1)
        return self.last_confirmed

    def roll(self, ledger_id: int) -> None:
        """Close the open ledger and open a new one. Complexity: O(ledgers).

        Raises:
            ValueError: The id is not above the open ledger's.
        """
        check_position(Position(ledger_id, -1))
        if ledger_id <= self.current_ledger_id:
            raise ValueError(
                f"ledger id must be above that of the open ledger, {self.current_ledger_id}, got {ledger_id}"
            )
        ledgers = self.current
        self.current = _Ledgers([*ledgers.ids, ledger_id], [*ledgers.starts, ledgers.end])
        if self.last_confirmed.entry_id < 0:
            self.last_confirmed = Position(ledger_id, -1)

    def trim(self, before_ledger_id: int) -> None:
        """Remove every ledger below `before_ledger_id`, but never the open ledger."""
        ledgers = self.current
        kept_from = min(bisect_left(ledgers.ids, before_ledger_id), len(ledgers.ids) - 1)
        self.current = _Ledgers(ledgers.ids[kept_from:], ledgers.starts[kept_from:], ledgers.open_count)

    def has_ledger(self, ledger_id: int) -> bool:
        """Return whether the log has the ledger, empty or not; False for a trimmed one."""
        return self.current.index(ledger_id) is not None

    def find_next_ledger(self, ledger_id: int) -> int | None:
        """Return the first ledger above an id, empty or not, or None."""
        ids = self.current.ids
        at = bisect_right(ids, ledger_id)
        return ids[at] if at < len(ids) else None

    def entry_count(self, ledger_id: int) -> int:
        """Return the entry count of a ledger; 0 if it is unknown or trimmed."""
        ledgers = self.current
        if ledger_id == ledgers.open_id:
            return ledgers.open_count
        index = ledgers.index(ledger_id)
        return 0 if index is None else ledgers.count_at(index)

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, tuple):
            return False
        ledger_id, entry_id = position
        return bool(0 <= entry_id < self.entry_count(ledger_id))

    def __iter__(self) -> Iterator[int]:
        return iter(self.current.ids)

    def ledgers_between(self, lower_ledger_id: int, upper_ledger_id: int) -> list[int]:
        """Return the ledgers above the lower id and below the upper one, in order; both may be unknown."""
        ids = self.current.ids
        return ids[bisect_right(ids, lower_ledger_id) : bisect_left(ids, upper_ledger_id)]

    def runs_between(self, lower: Position, upper: Position) -> list[tuple[int, int, int]]:
        """Return the entries in ``(lower, upper]``, a run for each ledger: its id, the first and the last entry."""
        if upper <= lower:
            return []
        runs = []
        for ledger_id in self.ledgers_between(lower.ledger_id - 1, upper.ledger_id + 1):
            first = max(lower.entry_id + 1, 0) if ledger_id == lower.ledger_id else 0
            last = self.entry_count(ledger_id) - 1
            last = min(upper.entry_id, last) if ledger_id == upper.ledger_id else last
            if first <= last:
                runs.append((ledger_id, first, last))
        return runs

    def previous(self, position: Position) -> Position:
        """Return the previous position: in its ledger, or else the last entry of the nearest non-empty ledger before.

        If only empty ledgers precede, it is the position before the first of them; if none precedes, ``(ledger, -1)``.
        """
        ledger_id, entry_id = position
        if entry_id > 0:
            return Position(ledger_id, entry_id - 1)
        ledgers = self.current
        ids, starts = ledgers.ids, ledgers.starts
        earlier = bisect_left(ids, ledger_id)
        if earlier == 0:
            return Position(ledger_id, -1)
        end = starts[earlier] if earlier < len(starts) else ledgers.end
        # All ledgers whose start is below `end` come first; the last of them has the entry.
        holder = bisect_left(starts, end, 0, earlier) - 1
        if holder < 0:
            return Position(ids[0], -1)
        return Position(ids[holder], ledgers.count_at(holder) - 1)

    def next_valid(self, position: Position) -> Position:
        """Return the next position that exists or will be written next: over the ends of ledgers and empty ones.

        At the end of the log it is the first entry of the open ledger if it is empty, else its next entry.
        """
        (ledger_id, entry_id), ledgers = position, self.current
        ids, starts, open_count = ledgers.ids, ledgers.starts, ledgers.open_count
        if ledger_id == ids[-1] and -1 <= entry_id < open_count:
            return Position(ledger_id, entry_id + 1)
        index = bisect_left(ids, ledger_id)
        if index < len(ids) and ids[index] == ledger_id:
            if entry_id + 1 < ledgers.count_at(index):
                return Position(ledger_id, max(entry_id, -1) + 1)
            index += 1
        # The next entry after `start` entries is in the last ledger that starts there.
        if index < len(starts):
            return Position(ids[bisect_right(starts, starts[index]) - 1], 0)
        return Position(ids[-1], open_count)

    def is_beyond_end(self, position: Position) -> bool:
        """Return whether a position is above the last entry.

        The position before a ledger's first entry is not, unless the ledger's id is above that of the open ledger.
        """
        if position[1] < 0:
            return position[0] > self.current_ledger_id
        return position > self.last_confirmed

    def is_valid(self, position: Position) -> bool:
        """Return whether a position can be read next: its entry exists, or is the next one to be written."""
        ledgers = self.current
        return position in self or position == (ledgers.ids[-1], ledgers.open_count)

    def position_after(self, position: Position, count: int) -> Position:
        """Return the position that has `count` entries above `position` up to and with it; at most `last_confirmed`.

        With count 0 it is the position just before the next valid one.

        Raises:
            ValueError: The count is negative.

        Source: ``getPositionAfterN`` with its start excluded; pass `previous` to count the start.
        """
        if count < 0:
            raise ValueError(f"the number of entries after {Position(*position)} must be at least 0, got {count}")
        if count == 0:
            return min(self.previous(self.next_valid(position)), self.last_confirmed)
        ledgers = self.current
        wanted = ledgers.entries_up_to(position) + count
        if wanted >= ledgers.end:
            return self.last_confirmed
        holder = bisect_left(ledgers.starts, wanted) - 1
        return Position(ledgers.ids[holder], wanted - ledgers.starts[holder] - 1)

    def count_between(self, lower: Position, upper: Position) -> int:
        """Return the number of entries in ``(lower, upper]``: above `lower` and not above `upper`.

        Unknown or trimmed ledgers count 0, and an end beyond a ledger's last entry counts up to it.
        """
        ledgers = self.current
        return max(0, ledgers.entries_up_to(upper) - ledgers.entries_up_to(lower))

    def check_written(self, position: Position) -> Position:
        """Refuse a position without an entry in the log, and return any other as `check_position` does.

        Raises:
            InvalidPositionError: The log never had it, or not yet, or trimmed it.
            TypeError: An id is not an integer.
        """
        ledger_id, entry_id = position
        if type(position) is not Position or type(ledger_id) is not int or type(entry_id) is not int:
            ledger_id, entry_id = position = check_position(position)
        entry_count = self.entry_count(ledger_id)
        if not 0 <= entry_id < entry_count:
            raise InvalidPositionError(
                f"position {Position(*position)} is not in the message log: "
                f"ledger {ledger_id} has {entry_count} entries, "
                f"and the last entry is {self.last_confirmed}"
            )
        return position


@final
class _Ledgers:
    """The ledgers from one roll or trim to the next, so that a reader's ids and counts belong together."""

    __slots__ = ("ids", "open_count", "open_id", "starts")

    def __init__(self, ids: list[int], starts: list[int], open_count: int = 0) -> None:
        self.ids = ids  # rising
        # Of each, the entries in all ledgers before it, from the first ledger of all time, so that a trim changes none.
        self.starts = starts
        self.open_id = ids[-1]
        self.open_count = open_count  # all that ever changes

    @property
    def end(self) -> int:
        return self.starts[-1] + self.open_count

    def index(self, ledger_id: int) -> int | None:
        index = bisect_left(self.ids, ledger_id)
        found = index < len(self.ids) and self.ids[index] == ledger_id
        return index if found else None

    def count_at(self, index: int) -> int:
        end = self.starts[index + 1] if index + 1 < len(self.starts) else self.end
        return end - self.starts[index]

    def entries_up_to(self, position: Position) -> int:
        """Return the number of entries at or below a position, from the first ledger of all time."""
        ledger_id, entry_id = position
        index = bisect_right(self.ids, ledger_id) - 1
        if index < 0:
            return self.starts[0]
        if self.ids[index] != ledger_id:
            return self.starts[index] + self.count_at(index)
        return self.starts[index] + min(max(entry_id + 1, 0), self.count_at(index))


def _check_room(ledger_id: int, held: int, count: int) -> int:
    """Return the number of entries to add to a ledger that holds some; errors as `LedgerMap.append`."""
    count = operator.index(count)
    if count < 0 or held + count > ENTRY_ID_MAX + 1:
        raise ValueError(f"cannot append {count} entries to ledger {ledger_id}")
    return count
