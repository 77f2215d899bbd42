"""Reads the entries of a message log that are not acked, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.position import Position, positions_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator

    from ackstate.cursor.state.ack_state import CursorAckState


@final
class EntryReader:
    """A cursor's read position, and the entries from there on. Safe for any number of threads.

    Args:
        state: The acks.
        lock: The cursor's.
        check_open: Raises `CursorClosedError` if the cursor is closed.
    """

    def __init__(self, state: CursorAckState, *, lock: threading.RLock, check_open: Callable[[], None]) -> None:
        self._state = state
        self._ledgers = state.ledgers
        self._lock = lock
        self._check_open = check_open
        self._position = state.ledgers.next_valid(state.mark_delete)

    @property
    def position(self) -> Position:
        """Where the next `read` begins; always above the mark-delete position.

        After the last entry of a ledger it may be the one that would follow there, as in Pulsar.
        """
        with self._lock:
            if self._position <= self._state.mark_delete:
                self._position = self._ledgers.next_valid(self._state.mark_delete)
            return self._position

    @property
    def has_unread(self) -> bool:
        """Whether the log has entries at or above the position, acked or not."""
        return self._ledgers.last_confirmed >= self.position

    @property
    def next_unread(self) -> Position:
        """The entry that `read` would return first, or that will be written next.

        Complexity: O(log ledgers), and that of `DeletedRanges.run_containing` for each acked run in between.
        """
        with self._lock:
            ledger_id, entry_id = self.position
            position = self._ledgers.next_valid(Position(ledger_id, entry_id - 1))
            while (run := self._state.deleted.run_containing(position)) is not None:
                position = self._ledgers.next_valid(Position(run.ledger_id, run.end - 1))
            return position

    def read(self, count_max: int) -> list[Position]:
        """Return up to `count_max` entries from the position on that are not acked, and move past them.

        Raises:
            CursorClosedError: The cursor is closed.
        """
        with self._lock:
            self._check_open()
            positions: list[Position] = []
            # The log may have rolled since: then the expected next entry was never written.
            ledger_id, entry_id = self.position
            position = self._ledgers.next_valid(Position(ledger_id, entry_id - 1))
            last = self._ledgers.last_confirmed
            while len(positions) < count_max and position <= last:
                run = self._state.deleted.run_containing(position)
                if run is None:
                    ledger_id, first = position
                    end = min(first + count_max - len(positions), self._ledgers.entry_count(ledger_id))
                    positions += self._unacked(ledger_id, first, end)
                else:
                    ledger_id, end = run.ledger_id, run.end
                self._position = Position(ledger_id, end)
                position = self._ledgers.next_valid(Position(ledger_id, end - 1))
            return positions

    def _unacked(self, ledger_id: int, first: int, end: int) -> Iterator[Position]:
        """Return the unacked entries of a ledger from `first` (included) to `end` (excluded)."""
        acked = self._state.deleted.entries(ledger_id)
        entries: Iterable[int] = range(first, end)
        if acked.range_cardinality(first, end):
            entries = BitMap(entries) - acked
        return positions_of(ledger_id, entries)

    def rewind(self, position: Position | None = None) -> None:
        """Read again from a position, or from the first entry that the mark-delete does not cover."""
        with self._lock:
            first = self._ledgers.next_valid(self._state.mark_delete)
            self._position = first if position is None else max(first, Position(*position))

    def reset(self, position: Position) -> None:
        """Read from a position next, wherever the mark-delete position is."""
        self._position = position
