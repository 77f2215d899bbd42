"""The messages in flight as bitmaps, which can be read one by one or thousands at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.deleted_ranges import firsts_bytes, isolated_range_bytes, lasts_bytes, range_fixed_bytes
from ackstate.dispatch.admission import Sent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.position import Position

CONSUMER = "replayed"
"""The consumer of all messages."""


@final
class InFlightSet:
    """See `ackstate.dispatch.admission.Reservations`: single messages of one consumer, all fully reserved.

    Memory: a bitmap of the messages.
    """

    def __init__(self) -> None:
        self._entries: dict[int, BitMap] = {}
        # Invariant: the most that the acks of all entries can add, and the number of entries.
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0

    def __contains__(self, position: Position) -> bool:
        ledger_id, entry_id = position
        return ledger_id in self._entries and entry_id in self._entries[ledger_id]

    def entries(self, ledger_id: int) -> BitMap:
        """Return the messages of a ledger; the caller must not change them."""
        return self._entries.get(ledger_id, _NONE)

    def get(self, position: Position) -> Sent | None:
        if position not in self:
            return None
        return Sent(CONSUMER, record_bytes=isolated_range_bytes(*position), range_count=1, is_covered=True)

    def unacked_of(self, consumer: str) -> int:
        return self.unacked_messages if consumer == CONSUMER else 0

    def add(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        assert consumer == CONSUMER
        for position, each in zip(positions, sent, strict=True):
            self.add_one(position, each.record_bytes)

    def add_one(self, position: Position, record_bytes: int) -> None:
        """Note a message that is sent now, and the bytes reserved for its ack."""
        ledger_id, entry_id = position
        assert position not in self
        self._entries.setdefault(ledger_id, BitMap()).add(entry_id)
        self._count(1, record_bytes)

    def complete(self, position: Position) -> None:
        """Forget a message in flight and its reservation."""
        self._entries[position[0]].remove(position[1])
        self._count(-1, -isolated_range_bytes(*position))

    def change(self, sent: Mapping[int, BitMap], settled: Mapping[int, BitMap]) -> None:
        """Add messages that were sent, then remove messages that were settled, by ledger.

        Complexity: bitmap operations over the ledgers' messages in flight.
        """
        for ledger_id in {*sent, *settled}:
            before = self._entries.get(ledger_id, _NONE)
            after = before | sent.get(ledger_id, _NONE)
            after -= settled.get(ledger_id, _NONE)
            self._count(len(after) - len(before), worst_case(ledger_id, after) - worst_case(ledger_id, before))
            self._entries[ledger_id] = after

    def by_ledger(self) -> Mapping[int, BitMap]:
        """Return all messages; the caller must not change them."""
        return self._entries

    def _count(self, messages: int, record_bytes: int) -> None:
        self.unacked_messages += messages
        self.reserved_ranges += messages
        self.reserved_bytes += record_bytes

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(ledgers)."""
        assert self.reserved_bytes == sum(worst_case(*each) for each in self._entries.items())
        assert self.unacked_messages == self.reserved_ranges == sum(map(len, self._entries.values()))


def worst_case(ledger_id: int, entries: BitMap) -> int:
    """Return the most that the acks of some entries can add to the ranges' size: one range for each."""
    return len(entries) * range_fixed_bytes(ledger_id) + firsts_bytes(entries) + lasts_bytes(entries)


_NONE = BitMap()
