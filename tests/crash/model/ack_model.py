"""The expected state of one subscription, in plain sets: acked entries, durable ones, and messages in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.crash.promises import Promise, hold
from crash.model.properties import Properties

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from crash.model.numbered_log import NumberedLog


class AckModel:
    """The expected state of one subscription, by the numbers of a log; shares no code with the product.

    Attributes:
        acked: Entries that count as acked, though a crash may lose them.
        durable: The acked entries that are certainly on the disk, unless the disk has one of the resets.
        resets: Resets whose outcome is unknown: the disk may have any of them instead.
        unacked_of_batch: For each partly acked batch, its unacked messages.
        last_unacked_of_batch: For each batch that was acked in parts, the messages of its last ack.
        durable_unacked_of_batch: The durable state of partly acked batches.
        in_flight: The consumer of each message in flight, in the order of sending.
        not_before: When messages that were given back with a delay may be sent again.
        properties: Those of the cursor and of its mark-delete position.
        sent_count: How often each was sent since the subscription was opened.
        counts_entries: Whether the limit on ranges counts acked entries, as by a rule of Pulsar's; see `changed`.
    """

    def __init__(self, log: NumberedLog) -> None:
        self.log = log
        self.acked: set[int] = set()
        self.durable: set[int] = set()
        self.resets: list[set[int]] = []
        self.unacked_of_batch: dict[int, set[int]] = {}
        self.last_unacked_of_batch: dict[int, set[int]] = {}
        self.durable_unacked_of_batch: dict[int, set[int]] = {}
        self.properties = Properties()
        self.counts_entries = False
        self._floor = 0
        self._counted: tuple[int, int] | None = None
        self.begin_reading()

    def begin_reading(self) -> None:
        """Clear the messages in flight: the reader restarts."""
        self.in_flight: dict[int, str] = {}
        self.not_before: dict[int, int] = {}
        self.sent_count: dict[int, int] = {}

    def changed(self) -> None:
        """Called after the log or one of the sets has changed."""
        self._counted = None

    def counted(self, also: Collection[int] = ()) -> tuple[int, int]:
        """Return the bytes of acked entries that are not durable, and the runs of all acks above mark-delete.

        If the disk may have several states, the one that excludes most bytes counts. With `also`: the numbers if those
        entries were acked as well.
        """
        if not also and self._counted is not None:
            return self._counted
        acked, floor, log = self.acked.union(also), self._floor, self.log
        while floor in acked:
            floor += 1
        above = [number for number in range(floor, len(log)) if number in acked]
        left_out = ([number for number in above if number not in held] for held in (self.durable, *self.resets))
        counted = (
            max(log.record_bytes(log.runs(numbers)) for numbers in left_out),
            len(above if self.counts_entries else log.runs(above)),
        )
        if not also:
            self._floor, self._counted = floor, counted
        return counted

    def first_unacked(self) -> int:
        """Return the lowest unacked number, or that of the next entry if all are acked."""
        self.counted()
        return self._floor

    def ack(self, numbers: Collection[int]) -> None:
        """Ack entries."""
        self.acked.update(numbers)
        for number in numbers:
            self.in_flight.pop(number, None)
            self.not_before.pop(number, None)
            if (left := self.unacked_of_batch.pop(number, None)) is not None:
                self.last_unacked_of_batch[number] = left
        self.changed()

    def ack_part(self, number: int, left: set[int]) -> None:
        """Ack all messages of a batch except some; ack the entry if none is left."""
        if left:
            self.unacked_of_batch[number] = left
        else:
            self.ack([number])

    def sent(self, number: int, consumer: str, redelivery_count: int, *, now_ms: int) -> None:
        """Record a delivery.

        Raises:
            PromiseBrokenError: It should not have been sent, not now, or not with this count.
        """
        position, message = self.log.positions[number], self.log.messages[number]
        hold(Promise.I12, number not in self.acked, f"{position} was acked and is sent again")
        hold(Promise.I12, number not in self.in_flight, f"{position} is with two consumers")
        hold(Promise.I12, self.not_before.pop(number, 0) <= now_ms, f"{position} was sent before its time")
        is_early = message is not None and message.deliver_at_ms > now_ms
        hold(Promise.I12, not is_early, f"{position} was a delayed message and was sent early")
        expected = self.sent_count.get(number, 0)
        hold(Promise.I4, redelivery_count == expected, f"{position} was sent {expected} times, not {redelivery_count}")
        self.sent_count[number] = redelivery_count + 1
        self.in_flight[number] = consumer

    def give_back(self, number: int, *, until_ms: int = 0) -> None:
        """Record that a message was given back, to be sent again, not before a time."""
        del self.in_flight[number]
        if until_ms:
            self.not_before[number] = until_ms

    def restart(self, first: int) -> None:
        """Reset: exactly the entries below a number are acked, and all of them are durable."""
        self.recovered(set(range(first)), {})

    def recreate(self, first: int) -> None:
        """Forget everything, as of a deleted subscription: a new one begins at a number."""
        self.properties = Properties()
        self.restart(first)

    def recovered(self, acked: set[int], unacked_of_batch: dict[int, set[int]]) -> None:
        """Continue from the state of a disk."""
        self.acked, self.durable, self.resets = acked, set(acked), []
        self.unacked_of_batch, self.last_unacked_of_batch = unacked_of_batch, {}
        self.durable_unacked_of_batch = {number: set(left) for number, left in unacked_of_batch.items()}
        self._floor = 0
        self.begin_reading()
        self.changed()

    def wrote(self, held: set[int], unacked_of_batch: dict[int, set[int]]) -> None:
        """Set the durable state to that of the disk."""
        self.durable, self.durable_unacked_of_batch, self.resets = held, unacked_of_batch, []
        self.changed()

    def may_have_restarted(self, first: int) -> None:
        """Remove from the durable state everything excluded by a reset that may be on the disk."""
        self.resets.append(set(range(first)))
        self.changed()

    def may_have_lost(self, held: set[int], unacked_of_batch: dict[int, set[int]]) -> None:
        """Remove from the durable state everything excluded by a whole state that may be on the disk."""
        self.durable &= held
        kept = self.durable_unacked_of_batch
        both = {
            number: left | unacked_of_batch.get(number, left)
            for number, left in kept.items()
            if number in unacked_of_batch or number in held
        }
        self.durable_unacked_of_batch = both
        self.changed()

    @property
    def lost_count(self) -> int:
        """The number of acked messages that the worst crash redelivers."""
        return max(len(self.acked - held) for held in (self.durable, *self.resets))

    def is_durable(self, numbers: Collection[int]) -> bool:
        """Return whether all of some entries are certain to survive."""
        return all(held.issuperset(numbers) for held in (self.durable, *self.resets))

    def is_part_durable(self, number: int, left: set[int]) -> bool:
        """Return whether a partial ack of a batch, which leaves some messages, is certain to survive."""
        if not all(number in reset for reset in self.resets):
            return False
        if number in self.durable:
            return True
        known = self.durable_unacked_of_batch.get(number)
        return known is not None and known <= left

    def unacked(self, consumer: str | None = None) -> int:
        """Return the number of messages in flight, to one consumer or all, counting those of batches individually."""
        return sum(
            self.weight(number) for number, holder in self.in_flight.items() if consumer is None or holder == consumer
        )

    def weight(self, number: int) -> int:
        """Return the number of unacked messages of an entry."""
        left = self.unacked_of_batch.get(number)
        return self.log.message_count(number) if left is None else len(left)

    def sendable(self, *, now_ms: int, tick_ms: int) -> Iterator[int]:
        """Yield the entries that are neither acked nor in flight, and are certainly due."""
        first, log = self.first_unacked(), self.log
        for number in range(first, len(log)):
            if number in self.acked or number in self.in_flight or self.not_before.get(number, 0) > now_ms:
                continue
            message = log.messages[number]
            if message is None or message.deliver_at_ms < 0 or message.deliver_at_ms + tick_ms <= now_ms:
                yield number
