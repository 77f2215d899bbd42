"""The due log: messages that have fallen due, in order, for every view of a topic to read at its own pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from ackstate.delay.position_set import PositionSet

if TYPE_CHECKING:
    from collections.abc import Iterator


DUE_LOG_BYTES_MAX = 1 << 20


class DueLogReader(Protocol):
    """A reader of the log.

    Attributes:
        unread: The first batch not read yet; the empty one at the end of the log if there is none.
        mark_delete_ledger_id: It has acked everything in the ledgers before this one.
    """

    unread: DueBatch
    mark_delete_ledger_id: int

    def catch_up(self) -> None:
        """Move to the end of the log now, even while the reader is busy."""
        ...


@final
class DueBatch:
    """A link of the log: the messages that fell due at one moment. The last link is empty and waits to be filled.

    Attributes:
        number: Rises by one from link to link.
        positions: The messages; not changed once `next` is set.
        next: The link behind; None for the last.
    """

    __slots__ = ("next", "number", "positions")

    def __init__(self, number: int) -> None:
        self.number = number
        self.positions = PositionSet()
        self.next: DueBatch | None = None


@final
class DueLog:
    """Batches in a linked list, of which the log itself holds only the end: batches that all have read are gone.

    A reader that lags would keep all later batches alive. So once they may take more than a bound, all readers must
    catch up: from then on the messages that such a reader has not handed out are in its own memory.

    Args:
        bytes_max: About how much memory batches may take before readers that lag must catch up.
    """

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0  # of the batches since all were made to catch up, also of those that are gone since
        self.end = DueBatch(0)
        self.readers: set[DueLogReader] = set()

    @property
    def memory_bytes(self) -> int:
        """About how much memory the batches take that some reader has yet to read. Complexity: O(readers + bitmaps)."""
        return sum(batch.positions.memory_bytes for batch in batches_from(self._first_unread()))

    def append(self, positions: PositionSet) -> None:
        """Append messages that have fallen due; the set belongs to the log from now on.

        Complexity: O(ledgers), and O(readers) each time that the batches reach the bound.
        """
        batch = self.end
        batch.positions = positions
        self.end = batch.next = DueBatch(batch.number + 1)
        self._bytes += positions.memory_bytes_max
        if self._bytes > self._bytes_max:
            for reader in tuple(self.readers):
                reader.catch_up()
            self._bytes = 0

    def _first_unread(self) -> DueBatch:
        # A copy, since a view of this topic may be opened meanwhile.
        unread = (reader.unread for reader in tuple(self.readers))
        return min(unread, key=lambda batch: batch.number, default=self.end)


def batches_from(batch: DueBatch) -> Iterator[DueBatch]:
    """Yield the batches from one on that are filled."""
    while batch.next is not None:
        yield batch
        batch = batch.next
