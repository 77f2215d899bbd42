"""Messages whose delivery waits for the gate, and acks that move because their message waited."""

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
    """A queue (FIFO) of blocked deliveries. The ack of a message moves by as long as its delivery waited.

    Memory: O(messages that wait, and delayed messages that are not acked).
    """

    def __init__(self) -> None:
        self._since_ms: OrderedDict[Position, int] = OrderedDict()
        # When the trace acks messages that still wait.
        self._acked_ms: dict[Position, int] = {}
        # How long messages waited that are sent, and that the trace has not acked yet.
        self._waited_ms: dict[Position, int] = {}
        # A heap of acks that the trace had earlier.
        self._moved_acks: list[tuple[int, Position]] = []

    def __len__(self) -> int:
        return len(self._since_ms)

    def __contains__(self, position: Position) -> bool:
        return position in self._since_ms

    @property
    def moves_acks(self) -> bool:
        """Whether an ack is due at another time than in the trace."""
        return bool(self._moved_acks)

    @property
    def first(self) -> Position:
        """The message that goes first; there is one."""
        return next(iter(self._since_ms))

    def positions(self) -> Iterable[Position]:
        """Return the messages that wait, in order."""
        return self._since_ms

    def join(self, position: Position, *, now_ms: int) -> None:
        """Append a message that is not in the queue."""
        self._since_ms[position] = now_ms

    def leave(self, *, now_ms: int) -> Position:
        """Take out the first message, and move its ack by as long as it waited."""
        position, since_ms = self._since_ms.popitem(last=False)
        acked_ms = self._acked_ms.pop(position, None)
        if acked_ms is not None:
            heappush(self._moved_acks, (acked_ms + now_ms - since_ms, position))
        elif now_ms > since_ms:
            self._waited_ms[position] = now_ms - since_ms
        return position

    def ack_in_trace(self, position: Position, *, now_ms: int) -> bool:
        """Record an ack of the trace; return whether it happens later.

        What is acked twice is acked with the second ack if that comes first.
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
        """Return the messages that waited and that the trace has not acked yet."""
        return self._waited_ms

    @property
    def next_ack_ms(self) -> int:
        """When the next moved ack is due; far in the future if there is none."""
        return self._moved_acks[0][0] if self._moved_acks else NEVER_MS

    def pop_ack(self) -> Position:
        """Take out the moved ack that is due first; of the same time that of the lowest position."""
        return heappop(self._moved_acks)[1]

    def moved_acks(self) -> Iterable[Position]:
        """Return the messages of moved acks, in any order."""
        return (position for _, position in self._moved_acks)

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them."""
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
        fields.refuse("entry_id", "of messages that are named once each", "one that is named twice")
    return list(zip(ts_ms, positions, strict=True))
