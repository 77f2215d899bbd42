"""The messages in flight, their consumers, and the reservations for their acks."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.delay.position_set import PositionSet
from ackstate.position import check_position
from ackstate.record_size import isolated_range_bytes

if TYPE_CHECKING:
    from ackstate.position import Position


class Sent(NamedTuple):
    """A message on its way.

    Attributes:
        consumer: Who has it.
        key: What it sticks to a consumer by; None where that does not matter.
        delivery_count: How often it was sent, this time included.
        message_count: How many messages of the entry are not acked.
        record_bytes: What is reserved for its ack of the limit on un-persisted ack records.
        range_count: What is reserved of the limit on ranges: 1 or 0.
    """

    consumer: str
    key: bytes | None = None
    delivery_count: int = 1
    message_count: int = 1
    record_bytes: int = 0
    range_count: int = 0

    def is_covered(self, position: Position) -> bool:
        """Tell whether the worst that the ack of the message at a position can add is reserved."""
        return self.range_count == 1 and self.record_bytes == isolated_range_bytes(*position)


@final
class Deliveries:
    """The messages that were sent and neither acked nor given back."""

    def __init__(self) -> None:
        self._sent: dict[Position, Sent] = {}
        self._in_order = PositionSet()
        # Invariant: what _sent says, by consumer; nobody has an empty set.
        self._of: dict[str, dict[Position, None]] = {}
        self._unacked_of: dict[str, int] = {}
        # Invariant: sums over _sent.
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, position: object) -> bool:
        return position in self._sent

    def get(self, position: Position) -> Sent | None:
        """Return how a message was sent; None if it is not on its way."""
        return self._sent.get(position)

    def of(self, consumer: str) -> list[Position]:
        """Return what a consumer has, in the order it was sent."""
        return list(self._of.get(consumer, ()))

    def unacked_of(self, consumer: str) -> int:
        """Return how many messages a consumer has, those of a batch counted one by one."""
        return self._unacked_of.get(consumer, 0)

    def at_most(self, position: Position) -> list[Position]:
        """Return what was sent up to a position, included, in order. Complexity: O(them)."""
        return list(takewhile(lambda each: each <= position, self._in_order))

    def in_order(self) -> PositionSet:
        """Return all positions: to be read, not changed."""
        return self._in_order

    def add(self, position: Position, sent: Sent) -> None:
        """Note a message that goes out now; it is not on its way yet."""
        assert position not in self._sent
        self._sent[position] = sent
        self._in_order.add(position)
        self._of.setdefault(sent.consumer, {})[position] = None
        self._count(sent, 1)

    def complete(self, position: Position) -> Sent | None:
        """Forget a message and what was reserved for it; None if it was not on its way.

        Raises:
            TypeError: It was, but an id is no integer, such as 2.0, which is found where 2 is.
        """
        sent = self._sent.get(position)
        if sent is None:
            return None
        position = check_position(position)
        del self._sent[position]
        self._in_order.discard(position)
        held = self._of[sent.consumer]
        del held[position]
        if not held:
            del self._of[sent.consumer]
        self._count(sent, -1)
        return sent

    def reduce(self, position: Position, message_count: int) -> int:
        """Note how many messages of a batch are still unacked, and return by how many that is less; never below 1."""
        sent = self._sent.get(position)
        if sent is None or not 1 <= message_count < sent.message_count:
            return 0
        self._count(sent, -1)
        self._sent[position] = sent._replace(message_count=message_count)
        self._count(self._sent[position], 1)
        return sent.message_count - message_count

    def clear(self) -> None:
        """Forget everything."""
        self._sent.clear()
        self._in_order.clear()
        self._of.clear()
        self._unacked_of.clear()
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0

    def _count(self, sent: Sent, sign: int) -> None:
        self.reserved_bytes += sign * sent.record_bytes
        self.reserved_ranges += sign * sent.range_count
        self.unacked_messages += sign * sent.message_count
        unacked = self._unacked_of.get(sent.consumer, 0) + sign * sent.message_count
        if unacked:
            self._unacked_of[sent.consumer] = unacked
        else:
            self._unacked_of.pop(sent.consumer, None)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(in flight)."""
        assert list(self._in_order) == sorted(self._sent)
        assert self.reserved_bytes == sum(sent.record_bytes for sent in self._sent.values())
        assert self.reserved_ranges == sum(sent.range_count for sent in self._sent.values())
        assert self.unacked_messages == sum(self._unacked_of.values())
        assert self.unacked_messages == sum(sent.message_count for sent in self._sent.values())
        assert {position: consumer for consumer, held in self._of.items() for position in held} == {
            position: sent.consumer for position, sent in self._sent.items()
        }
