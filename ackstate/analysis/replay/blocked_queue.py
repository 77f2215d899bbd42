"""A queue of deliveries blocked by the gate, and of the acks that are postponed with them."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.position import Position


NEVER_MS = 2**62
"""Later than any time of a trace."""


@final
class BlockedQueue:
    """A queue (FIFO) of blocked deliveries. The ack of a message is postponed by the time that its delivery waited.

    Memory: O(messages that wait, and delayed messages that are not acked).
    """

    def __init__(self) -> None:
        self._since_ms: OrderedDict[Position, int] = OrderedDict()
        # Times at which the trace acks messages that are still waiting.
        self._acked_ms: dict[Position, int] = {}
        # Waiting times of sent messages that the trace has not acked yet.
        self._waited_ms: dict[Position, int] = {}
        # A heap of postponed acks.
        self._moved_acks: list[tuple[int, Position]] = []

    def __len__(self) -> int:
        return len(self._since_ms)

    def __contains__(self, position: Position) -> bool:
        return position in self._since_ms

    @property
    def moves_acks(self) -> bool:
        """Whether the time of an ack differs from the trace."""
        return bool(self._moved_acks)

    @property
    def first(self) -> Position:
        """The first message; the queue must not be empty."""
        return next(iter(self._since_ms))

    def positions(self) -> Iterable[Position]:
        """Return the waiting messages, in order."""
        return self._since_ms

    def join(self, position: Position, *, now_ms: int) -> None:
        """Append a message that is not in the queue."""
        self._since_ms[position] = now_ms

    def leave(self, *, now_ms: int) -> Position:
        """Remove the first message, and postpone its ack by its waiting time."""
        position, since_ms = self._since_ms.popitem(last=False)
        acked_ms = self._acked_ms.pop(position, None)
        if acked_ms is not None:
            heappush(self._moved_acks, (acked_ms + now_ms - since_ms, position))
        elif now_ms > since_ms:
            self._waited_ms[position] = now_ms - since_ms
        return position

    def ack_in_trace(self, position: Position, *, now_ms: int) -> bool:
        """Record an ack of the trace; return whether it is postponed.

        A message that is acked twice is acked by the second ack if that is earlier.
        """
        waited_ms = self._waited_ms.pop(position, None)
        if waited_ms is not None:
            heappush(self._moved_acks, (now_ms + waited_ms, position))
            return True
        if position in self._since_ms:
            self._acked_ms.setdefault(position, now_ms)
            return True
        return False

    def waited(self) -> Iterable[Position]:
        """Return the messages that had waited and that the trace has not acked yet."""
        return self._waited_ms

    @property
    def next_ack_ms(self) -> int:
        """The time of the next postponed ack; far in the future if there is none."""
        return self._moved_acks[0][0] if self._moved_acks else NEVER_MS

    def pop_ack(self) -> Position:
        """Remove and return the earliest postponed ack; ties go to the lowest position."""
        return heappop(self._moved_acks)[1]

    def moved_acks(self) -> Iterable[Position]:
        """Return the messages of postponed acks, in any order."""
        return (position for _, position in self._moved_acks)
