"""A queue of deliveries blocked by the gate, and of the acks that are postponed with them."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, final

from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.analysis.replay.state_fields import Fields

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

    def to_record(self) -> dict[str, Any]:
        """Return the fields for a state."""
        return {
            "waiting": _record((ts_ms, position) for position, ts_ms in self._since_ms.items()),
            "waiting_acked": _by_position(self._acked_ms),
            "moved_by": _by_position(self._waited_ms),
            "moved_acks": _record(sorted(self._moved_acks)),
        }

    def restore(self, fields: Fields) -> None:
        """Continue from fields that `to_record` returned."""
        self._since_ms = OrderedDict((position, ts_ms) for ts_ms, position in fields.one("waiting", _times))
        self._acked_ms = {position: ts_ms for ts_ms, position in fields.one("waiting_acked", _times)}
        self._waited_ms = {position: ts_ms for ts_ms, position in fields.one("moved_by", _times)}
        self._moved_acks = fields.one("moved_acks", _times)
        heapify(self._moved_acks)


def _by_position(times_ms: dict[Position, int]) -> dict[str, list[int]]:
    return _record((ts_ms, position) for position, ts_ms in sorted(times_ms.items()))


def _record(times: Iterable[tuple[int, Position]]) -> dict[str, list[int]]:
    rows = [(ts_ms, *position) for ts_ms, position in times]
    return {name: [row[at] for row in rows] for at, name in enumerate(("ts_ms", "ledger_id", "entry_id"))}


def _times(fields: Fields) -> list[tuple[int, Position]]:
    ts_ms = fields.integers("ts_ms")
    ledger_ids = fields.integers("ledger_id", least=0, most=LEDGER_ID_MAX, count=len(ts_ms))
    entry_ids = fields.integers("entry_id", least=0, most=ENTRY_ID_MAX, count=len(ts_ms))
    positions = list(map(Position, ledger_ids, entry_ids))
    if len(set(positions)) < len(positions):
        fields.refuse("entry_id", "of distinct messages", "a duplicate")
    return list(zip(ts_ms, positions, strict=True))
