"""What one subscription should hold, in plain sets: what is acked, what of it is durable, who has which message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.crash.model.properties import Properties
from ackstate.analysis.crash.promises import Promise, hold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ackstate.analysis.crash.model.numbered_log import NumberedLog


class AckModel:
    """One subscription, by the numbers of a log; shares no code with what it judges.

    Attributes:
        acked: What counts as acked, though a crash may forget it.
        durable: What of it is certain to be on the disk, unless that holds one of the resets.
        resets: What the disk may hold instead: resets whose outcome is unknown.
        unacked_of_batch: Of a partly acked batch, the messages that are not.
        last_unacked_of_batch: Of a batch that was acked in parts, the messages that its last ack was for.
        durable_unacked_of_batch: What the disk says of them.
        in_flight: Who has what, in the order in which it was sent.
        not_before: When what was given back with a delay may be sent again.
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
        """Forget whom what was sent: the reader begins anew."""
        self.in_flight: dict[int, str] = {}
        self.not_before: dict[int, int] = {}
        self.sent_count: dict[int, int] = {}

    def changed(self) -> None:
        """Note that the log or one of the sets has changed."""
        self._counted = None

    def counted(self, also: int | None = None) -> tuple[int, int]:
        """Return bytes of what is acked and not durable, and ranges or entries of all acks above the mark-delete.

        Of what the disk may hold, that counts which leaves most bytes out. With a number given: what they would be if
        that were acked as well.
        """
        if also is None and self._counted is not None:
            return self._counted
        acked, floor, log = self.acked if also is None else self.acked | {also}, self._floor, self.log
        while floor in acked:
            floor += 1
        above = [number for number in range(floor, len(log)) if number in acked]
        left_out = ([number for number in above if number not in held] for held in (self.durable, *self.resets))
        counted = (
            max(log.record_bytes(log.runs(numbers)) for numbers in left_out),
            len(above if self.counts_entries else log.runs(above)),
        )
        if also is None:
            self._floor, self._counted = floor, counted
        return counted

    def first_unacked(self) -> int:
        """Return the lowest number that is not acked, that of the next entry if all are."""
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
        """Ack all messages of a batch but some; the entry if none is left."""
        if left:
            self.unacked_of_batch[number] = left
        else:
            self.ack([number])

    def sent(self, number: int, consumer: str, redelivery_count: int, *, now_ms: int) -> None:
        """Note a delivery.

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
        """Note that a message is nobody's any more, and is to be sent again; not before a time."""
        del self.in_flight[number]
        if until_ms:
            self.not_before[number] = until_ms

    def begin_anew(self, first: int) -> None:
        """Reset: everything below a number is acked, and nothing else; all of it is durable."""
        self.recovered(set(range(first)), {})

    def recovered(self, acked: set[int], unacked_of_batch: dict[int, set[int]]) -> None:
        """Go on from what a disk held."""
        self.acked, self.durable, self.resets = acked, set(acked), []
        self.unacked_of_batch, self.last_unacked_of_batch = unacked_of_batch, {}
        self.durable_unacked_of_batch = {number: set(left) for number, left in unacked_of_batch.items()}
        self._floor = 0
        self.begin_reading()
        self.changed()

    def wrote(self, held: set[int], unacked_of_batch: dict[int, set[int]]) -> None:
        """Take for durable what the disk holds."""
        self.durable, self.durable_unacked_of_batch, self.resets = held, unacked_of_batch, []
        self.changed()

    def may_have_begun_anew(self, first: int) -> None:
        """Take nothing for durable any more that a reset which may be on the disk leaves out."""
        self.resets.append(set(range(first)))
        self.changed()

    def may_have_lost(self, held: set[int], unacked_of_batch: dict[int, set[int]]) -> None:
        """Take nothing for durable any more that a whole state leaves out which may be on the disk."""
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
        """How many acked entries the worst crash brings back."""
        return max(len(self.acked - held) for held in (self.durable, *self.resets))

    def is_durable(self, numbers: Collection[int]) -> bool:
        """Tell whether all of some entries are certain to survive."""
        return all(held.issuperset(numbers) for held in (self.durable, *self.resets))

    def is_part_durable(self, number: int, left: set[int]) -> bool:
        """Tell whether it is certain to survive that at most some messages of a batch are not acked."""
        if not all(number in reset for reset in self.resets):
            return False
        if number in self.durable:
            return True
        known = self.durable_unacked_of_batch.get(number)
        return known is not None and known <= left

    def unacked(self, consumer: str | None = None) -> int:
        """Return how many messages are on their way, to one consumer or all; those of batches one by one."""
        return sum(
            self.weight(number) for number, holder in self.in_flight.items() if consumer is None or holder == consumer
        )

    def weight(self, number: int) -> int:
        """Return how many messages of an entry are not acked."""
        left = self.unacked_of_batch.get(number)
        return self.log.message_count(number) if left is None else len(left)

    def sendable(self, *, now_ms: int, tick_ms: int) -> Iterator[int]:
        """Yield what is neither acked nor on its way, and whose time has certainly come."""
        first, log = self.first_unacked(), self.log
        for number in range(first, len(log)):
            if number in self.acked or number in self.in_flight or self.not_before.get(number, 0) > now_ms:
                continue
            message = log.messages[number]
            if message is None or message.deliver_at_ms < 0 or message.deliver_at_ms + tick_ms <= now_ms:
                yield number
