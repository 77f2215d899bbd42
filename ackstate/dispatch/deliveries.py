"""The messages in flight, their consumers, and the reservations for their acks."""

from __future__ import annotations

from itertools import repeat, takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from ackstate.entry_bitmap import bitmaps_of
from ackstate.position_set import PositionSet
from ackstate.record_size import isolated_range_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.position import Position


# How many settled messages are taken out of a bitmap at once at most, and how many faster one by one.
_SETTLED_MAX = 1_000
_FEW_MAX = 16


class Sent(NamedTuple):
    """A message in flight.

    Attributes:
        consumer: The consumer that has it.
        key: The key that assigns it to a consumer; None if any may have it.
        delivery_count: How often it was sent, this time included.
        message_count: How many messages of the entry are not acked.
        record_bytes: The bytes reserved for its ack, of the limit on un-persisted ack records.
        range_count: The ranges reserved for its ack: 1 or 0.
        is_covered: Whether the worst case of its ack is reserved.
    """

    consumer: str
    key: bytes | None = None
    delivery_count: int = 1
    message_count: int = 1
    record_bytes: int = 0
    range_count: int = 0
    is_covered: bool = False


def first_deliveries(
    consumer: str,
    keys: Sequence[bytes | None] | bytes | None,
    message_counts: Sequence[int],
    costs: Sequence[int] | None,
) -> list[Sent]:
    """Return how messages are sent for the first time, with the worst cases of their acks reserved, if any is."""
    new = tuple.__new__  # a quarter of the time of the constructor
    is_covered = costs is not None
    range_count = int(is_covered)
    if costs is None:
        costs = [0] * len(message_counts)
    if keys is None or isinstance(keys, bytes):
        # Neighbours usually cost the same: they share an object.
        shared: dict[tuple[int, int], Sent] = {}
        found = []
        for each in zip(message_counts, costs, strict=False):
            sent = shared.get(each)
            if sent is None:
                sent = shared[each] = new(Sent, (consumer, keys, 1, *each, range_count, is_covered))
            found.append(sent)
        return found
    return [
        new(Sent, (consumer, key, 1, count, cost, range_count, is_covered))
        for key, count, cost in zip(keys, message_counts, costs, strict=False)
    ]


class Reservations(Protocol):
    """The messages in flight and the reservations for their acks; `Deliveries` is one."""

    reserved_bytes: int
    reserved_ranges: int
    unacked_messages: int

    def get(self, position: Position) -> Sent | None:
        """Return how a message was sent; None if it is not in flight."""
        ...

    def unacked_of(self, consumer: str) -> int:
        """Return how many messages a consumer has."""
        ...

    def add(self, position: Position, sent: Sent) -> None:
        """Note a message that is sent now; it is not in flight yet."""
        ...

    def add_all(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        """Note messages that are sent to a consumer now; none of them is in flight yet."""
        ...

    def complete(self, position: Position) -> Sent | None:
        """Forget a message and its reservation; return how it was sent, None if it was not in flight."""
        ...

    def complete_all(self, positions: Sequence[Position], entries: Mapping[int, BitMap]) -> list[tuple[Position, Sent]]:
        """Forget messages and their reservations; return those that were in flight, with how they were sent."""
        ...

    def reduce(self, position: Position, message_count: int) -> int:
        """Note how many messages of a batch are still unacked, and return by how many that is less."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


@final
class Deliveries:
    """The messages that were sent and neither acked nor given back.

    Attributes:
        sent_messages: How many messages were ever sent, those of a batch one by one, and each time that they were.
        redelivered_messages: Those of them that had been sent before.
    """

    def __init__(self) -> None:
        self._sent: dict[Position, Sent] = {}
        # Invariant: the same positions as in _sent, and those in _settled, which are taken out many at once.
        self._in_order = PositionSet()
        self._settled: list[Position] = []
        # Invariant: the same as _sent, by consumer; no consumer has an empty set.
        self._of: dict[str, dict[Position, None]] = {}
        self._unacked_of: dict[str, int] = {}
        self.get: Callable[[Position], Sent | None] = self._sent.get
        """Returns how a message was sent; None if it is not in flight."""
        # Invariant: sums over _sent.
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0
        self.sent_messages = self.redelivered_messages = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, position: object) -> bool:
        return position in self._sent

    def of(self, consumer: str) -> list[Position]:
        """Return the messages of a consumer, in the order they were sent."""
        return list(self._of.get(consumer, ()))

    def unacked_of(self, consumer: str) -> int:
        """Return how many messages a consumer has, those of a batch counted one by one."""
        return self._unacked_of.get(consumer, 0)

    def at_most(self, position: Position) -> list[Position]:
        """Return the messages up to a position, included, in order. Complexity: O(them)."""
        return list(takewhile(lambda each: each <= position, self.in_order()))

    def in_order(self) -> PositionSet:
        """Return all positions: to be read at once, not changed."""
        if self._settled:
            self._forget_settled()
        return self._in_order

    def add(self, position: Position, sent: Sent) -> None:
        """Note a message that is sent now; it is not in flight yet."""
        assert position not in self._sent
        self._sent[position] = sent
        self.in_order().add(position)
        self._of.setdefault(sent.consumer, {})[position] = None
        self._count(sent, 1)
        self.sent_messages += sent.message_count
        if sent.delivery_count > 1:
            self.redelivered_messages += sent.message_count

    def add_all(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        """Note messages that are sent to a consumer now, for the first time; none of them is in flight yet.

        Complexity: bitmap operations over the messages; no call for each.
        """
        assert self._sent.keys().isdisjoint(positions)
        self._sent.update(zip(positions, sent, strict=True))
        in_order = self.in_order()
        for ledger_id, entries in bitmaps_of(positions).items():
            in_order.update_entries(ledger_id, entries)
        self._of.setdefault(consumer, {}).update(zip(positions, repeat(None), strict=False))
        _, _, _, message_counts, record_bytes, range_counts, _ = zip(*sent, strict=True)
        unacked = sum(message_counts)
        self.reserved_bytes += sum(record_bytes)
        self.reserved_ranges += sum(range_counts)
        self.unacked_messages += unacked
        self.sent_messages += unacked
        self._unacked_of[consumer] = self._unacked_of.get(consumer, 0) + unacked

    def complete(self, position: Position) -> Sent | None:
        """Forget a message and its reservation; return how it was sent, None if it was not in flight."""
        sent = self._sent.pop(position, None)
        if sent is None:
            return None
        self._settled.append(position)
        if len(self._settled) > _SETTLED_MAX:
            self.in_order()
        consumer, _, _, message_count, record_bytes, range_count, _ = sent
        held = self._of[consumer]
        del held[position]
        # Written out, since each ack comes here.
        self.reserved_bytes -= record_bytes
        self.reserved_ranges -= range_count
        self.unacked_messages -= message_count
        self._unacked_of[consumer] -= message_count
        if not held:
            self._drop(consumer)
        return sent

    def complete_all(self, positions: Sequence[Position], entries: Mapping[int, BitMap]) -> list[tuple[Position, Sent]]:
        take, of, unacked_of = self._sent.pop, self._of, self._unacked_of
        completed = [(position, sent) for position in positions if (sent := take(position, None)) is not None]
        for ledger_id, each in entries.items():
            self._in_order.discard_entries(ledger_id, each)
        reserved_bytes = reserved_ranges = unacked = 0
        for position, (consumer, _, _, message_count, record_bytes, range_count, _) in completed:
            held = of[consumer]
            del held[position]
            reserved_bytes += record_bytes
            reserved_ranges += range_count
            unacked += message_count
            unacked_of[consumer] -= message_count
            if not held:
                self._drop(consumer)
        self.reserved_bytes -= reserved_bytes
        self.reserved_ranges -= reserved_ranges
        self.unacked_messages -= unacked
        return completed

    def uncount(self, sent: Sent) -> None:
        """Count a message as not sent, because it never reached its consumer."""
        self.sent_messages -= sent.message_count
        if sent.delivery_count > 1:
            self.redelivered_messages -= sent.message_count

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
        self._settled.clear()
        self._of.clear()
        self._unacked_of.clear()
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0

    def _forget_settled(self) -> None:
        if len(self._settled) <= _FEW_MAX:
            for position in self._settled:
                self._in_order.discard(position)
        else:
            for ledger_id, entries in bitmaps_of(self._settled).items():
                self._in_order.discard_entries(ledger_id, entries)
        self._settled.clear()

    def _drop(self, consumer: str) -> None:
        """Forget a consumer that has no message."""
        del self._of[consumer], self._unacked_of[consumer]

    def _count(self, sent: Sent, sign: int) -> None:
        self.reserved_bytes += sign * sent.record_bytes
        self.reserved_ranges += sign * sent.range_count
        self.unacked_messages += sign * sent.message_count
        self._unacked_of[sent.consumer] = self._unacked_of.get(sent.consumer, 0) + sign * sent.message_count

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(in flight)."""
        assert list(self.in_order()) == sorted(self._sent)
        assert self.reserved_bytes == sum(sent.record_bytes for sent in self._sent.values())
        assert self.reserved_ranges == sum(sent.range_count for sent in self._sent.values())
        assert all(
            (sent.record_bytes, sent.range_count) == (isolated_range_bytes(*position), 1)
            for position, sent in self._sent.items()
            if sent.is_covered
        )
        assert self.unacked_messages == sum(self._unacked_of.values())
        assert self.unacked_messages == sum(sent.message_count for sent in self._sent.values())
        assert {position: consumer for consumer, held in self._of.items() for position in held} == {
            position: sent.consumer for position, sent in self._sent.items()
        }
