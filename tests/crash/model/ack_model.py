"""The expected state of one subscription, in plain sets: acked entries, durable ones, and messages in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash.oracle import Promise
from crash.promises import PromiseBrokenError, hold

if TYPE_CHECKING:
    from ackstate.cursor.results import Receipt


class AckModel:
    """The expected state of one subscription, by the numbers of a log; shares no code with the product.

    Attributes:
        acked: Entries that count as acked, though a crash may lose them.
        durable: The acked entries that are certainly on the disk, unless the disk has one of the resets.
        resets: Resets whose outcome is unknown: the disk may have any of them instead.
        unacked_of_batch: For each partly acked batch, its unacked messages; the next two, of its last ack and durable.
        in_flight: The consumer of each message in flight, in the order of sending.
        delivery_counts: How often each unacked message was sent that was given back or sent again, and until when it
            waits.
        durable_counts: Those that are certainly on the disk.
        deliveries_max: How often a message is sent by its count, before it is a dead letter.
        is_counted: Whether no message is sent again before all its deliveries are durable, so that a crash forgets one.
        cut: The messages for whose counts a limit may have had no room.
        counts_entries: Whether the limit on ranges counts acked entries, as by a rule of Pulsar's; see `changed`.
    """

    def __init__(self, log):
        self.log = log
        self.acked = set()
        self.durable = set()
        self.resets = []
        self.unacked_of_batch = {}
        self.last_unacked_of_batch = {}
        self.durable_unacked_of_batch = {}
        self.properties = Properties()
        self.counts_entries = self.is_counted = False
        self.deliveries_max = 2**62
        self._floor = 0
        self._counted = None
        self.begin_reading()

    def begin_reading(self):
        """Clear the messages in flight: the reader restarts."""
        self.in_flight = {}
        self.not_before = {}
        self.sent_count = {}
        self.delivery_counts, self.durable_counts, self.cut = {}, {}, ()

    def changed(self):
        self._counted = None

    def counted(self, also=()):
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

    def first_unacked(self):
        self.counted()
        return self._floor

    def ack(self, numbers):
        self.acked.update(numbers)
        for number in numbers:
            self.in_flight.pop(number, None)
            self.not_before.pop(number, None)
            self.delivery_counts.pop(number, None)
            if (left := self.unacked_of_batch.pop(number, None)) is not None:
                self.last_unacked_of_batch[number] = left
        self.changed()

    def ack_part(self, number, left):
        """Ack all messages of a batch except some; ack the entry if none is left."""
        if left:
            self.unacked_of_batch[number] = left
        else:
            self.ack([number])

    def sent(self, number, consumer, redelivery_count, *, now_ms):
        position, message = self.log.positions[number], self.log.messages[number]
        hold(Promise.I12, number not in self.acked, f"{position} was acked and is sent again")
        hold(Promise.I12, number not in self.in_flight, f"{position} is with two consumers")
        hold(Promise.I12, self.not_before.pop(number, 0) <= now_ms, f"{position} was sent before its time")
        is_early = message is not None and message.deliver_at_ms > now_ms
        hold(Promise.I12, not is_early, f"{position} was a delayed message and was sent early")
        expected = self.sent_count.get(number, 0)
        hold(Promise.I4, redelivery_count == expected, f"{position} was sent {expected} times, not {redelivery_count}")
        hold(Promise.I4, expected < self.deliveries_max, f"{position} is a dead letter, and was sent")
        durable = self.durable_counts.get(number, (0, 0))[0]
        is_counted = durable >= redelivery_count or number in self.cut or not self.is_counted
        found = f"{position} is sent again after {redelivery_count} deliveries, {durable} are durable"
        hold(Promise.I4, is_counted, found)
        self.sent_count[number] = redelivery_count + 1
        if redelivery_count:
            self.delivery_counts[number] = redelivery_count + 1, 0
        self.in_flight[number] = consumer

    def give_back(self, number, *, until_ms=0):
        """Record that a message was given back, to be sent again, not before a time."""
        del self.in_flight[number]
        self.delivery_counts[number] = self.sent_count[number], until_ms
        if until_ms:
            self.not_before[number] = until_ms

    def restart(self, first):
        """Reset: exactly the entries below a number are acked, and all of them are durable."""
        self.recovered(set(range(first)), {})

    def recreate(self, first):
        """Forget everything, as of a deleted subscription: a new one begins at a number."""
        self.properties = Properties()
        self.restart(first)

    def recovered(self, acked, unacked_of_batch, counts=None, *, is_closed=False):
        """Go on with a recovered state; without counts it is that of a reset."""
        if counts is not None:
            self._check_counts(acked, counts, is_closed=is_closed)
        self.acked, self.durable, self.resets = acked, set(acked), []
        self.unacked_of_batch, self.last_unacked_of_batch = unacked_of_batch, {}
        self.durable_unacked_of_batch = {number: set(left) for number, left in unacked_of_batch.items()}
        self._floor = 0
        self.begin_reading()
        self.adopt(counts or {})
        self.changed()

    def adopt(self, counts):
        self.delivery_counts, self.durable_counts = dict(counts), dict(counts)
        self.sent_count = {number: count for number, (count, _) in counts.items()}
        self.not_before = {number: until_ms for number, (_, until_ms) in counts.items() if until_ms}

    def _check_counts(self, acked, counts, *, is_closed):
        """Check the recovered counts: at least the durable ones and, after a close, all."""
        for number in self.sent_count.keys() | self.durable_counts.keys() | counts.keys():
            sent, (count, _) = self.sent_count.get(number, 0), counts.get(number, (0, 0))
            least = sent if is_closed else self.durable_counts.get(number, (0, 0))[0]
            is_right = number in acked or self.resets or least <= count <= sent
            hold(Promise.I4, is_right, f"{self.log.positions[number]} was sent {sent} times, {count} are known")

    def wrote(self, held, unacked_of_batch, counts):
        self.durable, self.durable_unacked_of_batch, self.resets = held, unacked_of_batch, []
        self.durable_counts = dict(counts)
        self.changed()

    def may_have_restarted(self, first):
        self.resets.append(set(range(first)))
        self.changed()

    def may_have_lost(self, held, unacked_of_batch):
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
    def lost_count(self):
        return max(len(self.acked - held) for held in (self.durable, *self.resets))

    def is_durable(self, numbers):
        """Return whether all of some entries are certain to survive."""
        return all(held.issuperset(numbers) for held in (self.durable, *self.resets))

    def is_part_durable(self, number, left):
        """Return whether a partial ack of a batch, which leaves some messages, is certain to survive."""
        if not all(number in reset for reset in self.resets):
            return False
        if number in self.durable:
            return True
        known = self.durable_unacked_of_batch.get(number)
        return known is not None and known <= left

    def unacked(self, consumer=None):
        """Return the number of messages in flight, to one consumer or all, counting those of batches individually."""
        return sum(
            self.weight(number) for number, holder in self.in_flight.items() if consumer is None or holder == consumer
        )

    def weight(self, number):
        left = self.unacked_of_batch.get(number)
        return self.log.message_count(number) if left is None else len(left)

    def sendable(self, *, now_ms, tick_ms):
        first, log = self.first_unacked(), self.log
        for number in range(first, len(log)):
            if number in self.acked or number in self.in_flight or self.not_before.get(number, 0) > now_ms:
                continue
            message = log.messages[number]
            if message is None or message.deliver_at_ms < 0 or message.deliver_at_ms + tick_ms <= now_ms:
                yield number


class Properties:
    """The properties of one cursor, those of the mark-delete position and its own.

    Attributes:
        marked: Properties of the latest mark-delete.
    """

    def __init__(self):
        self.marked = {}
        self._durable = [{}]  # the possible states of the disk
        self._attached = [{}]

    def mark(self, properties):
        self.marked = properties
        self._durable.append(properties)

    def attach(self, properties, *, is_certain):
        self._attached = [properties] if is_certain else [*self._attached, properties]

    def reset(self, *, is_certain):
        self._durable.append({})
        if is_certain:
            self.marked, self._durable = {}, [{}]

    def wrote(self, marked, instants):
        """Check the written properties of a persist against those of the possible instants."""
        hold(Promise.I9, marked in instants, f"mark-delete properties {marked} were written, there were {self.marked}")
        self._durable = [marked, self.marked]

    def check_attached(self, found):
        hold(Promise.I6, found in self._attached, f"cursor properties are {found}, not one of {self._attached}")

    def recovered(self, marked, attached):
        self.check_attached(attached)
        found = f"mark-delete properties are {dict(marked)}, not one of {self._durable}"
        hold(Promise.I2, dict(marked) in self._durable, found)
        self.marked = dict(marked)
        self._durable, self._attached = [self.marked], [dict(attached)]


class _Given(NamedTuple):
    receipt: Receipt
    numbers: frozenset[int]
    left: frozenset[int] | None  # of the one batch that it is for, if it is not for whole entries


class Receipts:
    """The receipts of one open cursor."""

    def __init__(self, log):
        self._log = log
        self._given = []
        self._pending = []  # the receipts that were not durable at the last check

    def add(self, receipt, numbers, *, left=None):
        given = _Given(receipt, frozenset(numbers), None if left is None else frozenset(left))
        self._given.append(given)
        self._pending.append(given)

    def check_none_lies(self, cursor, model, *, count_max=None):
        """Check the receipts that may have become durable: all, or a number of the earliest and of the latest.

        The earliest pending ones are those that persists have skipped.
        """
        asked = self._pending
        if count_max is not None and len(asked) > 2 * count_max:
            asked = asked[:count_max] + asked[-count_max:]
        for given in asked:
            says_durable, is_durable = cursor.durable(given.receipt), _is_durable(given, model)
            is_late = is_durable and not says_durable and not cursor.view.is_dirty
            hold(Promise.I15, not is_late, f"a receipt is late: {self._log.text(given.numbers)} is on the disk")
            if says_durable and not is_durable:
                found = f"a receipt lied: {self._log.text(given.numbers)} counts as durable and is not on the disk"
                raise PromiseBrokenError(Promise.I2, found, entry_count=len(given.numbers - model.durable) or 1)
        if count_max is None:
            self._pending = [given for given in self._pending if not cursor.durable(given.receipt)]

    def check_survivors(self, cursor, model):
        self._pending = list(self._given)
        self.check_none_lies(cursor, model)

    def check_void(self, cursor):
        for given in self._given:
            found = f"a receipt from before the reset counts: {self._log.text(given.numbers)}"
            hold(Promise.I13, not cursor.durable(given.receipt), found)
        self._given.clear()
        self._pending.clear()


def _is_durable(given, model):
    if given.left is None:
        return model.is_durable(given.numbers)
    return all(model.is_part_durable(number, set(given.left)) for number in given.numbers)
