"""What one subscription should hold, in plain sets: what is acked, what of it is durable, who has which message.

Messages are numbered in the order of the log. Sizes are counted from scratch, byte by byte, with no code of ours.
"""

from __future__ import annotations

from bisect import bisect_right

from ackstate import Position


def varint_bytes(number):
    length = 1
    while number >= 128:
        number >>= 7
        length += 1
    return length


def range_bytes(ledger_id, first, last):
    """Return the size of one `MessageRange`, whose lower end is the entry before the first; -1 takes ten bytes."""
    lower = 2 + varint_bytes(ledger_id) + (varint_bytes(first - 1) if first else 10)
    upper = 2 + varint_bytes(ledger_id) + varint_bytes(last)
    return 2 + 2 + lower + 2 + upper


class NumberedLog:
    """The entries of a log in order, from one of them on."""

    def __init__(self, ledger_id=None, first=0, end=0):
        self.positions = []
        self.numbers = {}
        self.offsets = {}  # of each ledger: the number that its entry 0 has or would have
        self.messages = []
        if ledger_id is not None:
            self.append([Position(ledger_id, entry_id) for entry_id in range(first, end)], [None] * (end - first))

    def __len__(self):
        return len(self.positions)

    def append(self, positions, messages):
        for position in positions:
            self.offsets.setdefault(position.ledger_id, len(self.positions) - position.entry_id)
            self.numbers[position] = len(self.positions)
            self.positions.append(position)
        self.messages += messages

    def isolated_bytes(self, number):
        ledger_id, entry_id = self.positions[number]
        return range_bytes(ledger_id, entry_id, entry_id)

    def message_count(self, number):
        message = self.messages[number]
        return 1 if message is None else message.message_count

    def runs(self, numbers):
        """Return the ranges of rising numbers, first and last, none of which goes on in another ledger."""
        runs, last = [], None
        for number in numbers:
            if last is not None and number == last + 1 and self.positions[number].entry_id:
                runs[-1][1] = number
            else:
                runs.append([number, number])
            last = number
        return runs

    def record_bytes(self, runs):
        total = 0
        for first, last in runs:
            ledger_id, first_id = self.positions[first]
            total += range_bytes(ledger_id, first_id, first_id + last - first)
        return total

    def held_by(self, content):
        """Return the numbers of all that a durable state says is acked."""
        held = set(range(bisect_right(self.positions, content.mark_delete)))
        for ledger_id, first, end in content.deleted.runs():
            offset = self.offsets[ledger_id]
            held.update(range(offset + first, offset + end))
        return held


class AckModel:
    """One subscription. `acked` counts what a crash would forget, `durable` what is certainly on the disk."""

    def __init__(self, log):
        self.log = log
        self.acked, self.durable = set(), set()
        self.unacked_of_batch = {}
        self._floor = 0
        self.begin_reading()
        self.changed()

    def begin_reading(self):
        self.in_flight = {}
        self.not_before = {}
        self.sent_count = {}

    def changed(self):
        self._counted = None

    def counted(self, also=None):
        """Return bytes of what is acked and not durable, and ranges of what is acked, above the mark-delete.

        With a number given: what they would be if that were acked as well.
        """
        if also is None and self._counted is not None:
            return self._counted
        acked, floor, log = self.acked if also is None else self.acked | {also}, self._floor, self.log
        while floor in acked:
            floor += 1
        above = [number for number in range(floor, len(log)) if number in acked]
        undurable = [number for number in above if number not in self.durable]
        counted = log.record_bytes(log.runs(undurable)), len(log.runs(above))
        if also is None:
            self._floor, self._counted = floor, counted
        return counted

    def first_unacked(self):
        self.counted()
        return self._floor

    def ack(self, numbers):
        self.acked.update(numbers)
        for number in numbers:
            self.in_flight.pop(number, None)
            self.not_before.pop(number, None)
            self.unacked_of_batch.pop(number, None)
        self.changed()

    def ack_part(self, number, left):
        if left:
            self.unacked_of_batch[number] = left
        else:
            self.ack([number])

    def sent(self, number, consumer, redelivery_count, *, now_ms):
        assert number not in self.acked, f"{self.log.positions[number]} was acked and is sent again"
        assert number not in self.in_flight, f"{self.log.positions[number]} is with two consumers"
        assert self.not_before.pop(number, 0) <= now_ms, "sent before its time"
        message = self.log.messages[number]
        assert message is None or message.deliver_at_ms <= now_ms, "a delayed message was sent early"
        assert redelivery_count == self.sent_count.get(number, 0)
        self.sent_count[number] = redelivery_count + 1
        self.in_flight[number] = consumer

    def give_back(self, number, *, until_ms=0):
        del self.in_flight[number]
        if until_ms:
            self.not_before[number] = until_ms

    def begin_anew(self, first):
        self.recovered(set(range(first)))

    def recovered(self, acked):
        self.acked, self.durable = acked, set(acked)
        self.unacked_of_batch = {}
        self._floor = 0
        self.begin_reading()
        self.changed()

    def unacked(self, consumer=None):
        """Return how many messages are on their way, those of batches one by one."""
        return sum(
            self.weight(number) for number, holder in self.in_flight.items() if consumer is None or holder == consumer
        )

    def weight(self, number):
        left = self.unacked_of_batch.get(number)
        return self.log.message_count(number) if left is None else len(left)

    def sendable(self, *, now_ms, tick_ms):
        """Return what is neither acked nor on its way, and whose time has certainly come."""
        first, log = self.first_unacked(), self.log
        for number in range(first, len(log)):
            if number in self.acked or number in self.in_flight or self.not_before.get(number, 0) > now_ms:
                continue
            message = log.messages[number]
            if message is None or message.deliver_at_ms < 0 or message.deliver_at_ms + tick_ms <= now_ms:
                yield number
