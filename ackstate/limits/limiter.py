"""The ack state of one subscription, kept within limits, for a broker with its own storage and its own dispatcher."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.ack_hole import ack_effect
from ackstate.deleted_ranges import DeletedRanges, isolated_range_bytes
from ackstate.limits.gate import DispatchGate
from ackstate.limits.rules import GateLimits, Rule, Usage
from ackstate.position import Position
from ackstate.wire.native import Record, RecordKind, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ackstate.ledger_map import LedgerMap
    from ackstate.limits.broker import BrokerLimit
    from ackstate.limits.rules import Verdict


class _InFlight(NamedTuple):
    """A message that was sent, and what is reserved for its ack."""

    consumer: str
    weight: int
    record_bytes: int
    ranges: int


@final
class AckLimiter:
    """Decides which messages may be sent, so that no order of acks exceeds a limit, and holds what is acked.

    >>> from ackstate import LedgerMap
    >>> limiter = AckLimiter(LedgerMap.from_counts({7: 5}), GateLimits(max_unacked_messages=2))
    >>> sent = limiter.admit([Position(7, entry_id) for entry_id in range(5)])
    >>> [str(position) for position in sent]
    ['7:0', '7:1']
    >>> limiter.ack([Position(7, 1)]), str(limiter.deleted), limiter.redelivery_if_crashed
    ([], '[(7:0..7:1]]', 1)
    >>> data = limiter.begin_persist()  # write and sync them wherever you like
    >>> limiter.end_persist(written=True)
    >>> limiter.redelivery_if_crashed
    0

    It is asked before messages are sent (`admit`) and told of acks (`ack`), of messages that come back (`give_back`)
    and of persists. For each message that it admits it reserves the most that its ack can add to the un-persisted
    ranges. While a limit keeps new messages back, messages that fill ack holes are still admitted, if their acks cannot
    exceed it: filling holes is what opens the limit.

    It never sticks if you persist again and again, send the messages that it admits, those with the lowest positions
    first, and if each message that was sent is acked or given back in the end.

    Safe for any number of threads. No storage works under its lock.

    Args:
        ledgers: The ledgers of the message log, which you append to; it finds the mark-delete position over their ends.
        limits: The limits; None for Pulsar's defaults.
        stored: The last bytes of `begin_persist` that were written; None for a new subscription, which starts at the
            first entry of the log.
        broker: A limit that this subscription shares with others.

    Attributes:
        mark_delete: Every entry up to it, included, is acked.
        deleted: The acked entries above it: to be read, not changed.

    Raises:
        CorruptStateError: The stored bytes are damaged, or something else.
        UnsupportedVersionError: They are of another version.
    """

    def __init__(
        self,
        ledgers: LedgerMap,
        limits: GateLimits | None = None,
        *,
        stored: bytes | None = None,
        broker: BrokerLimit | None = None,
    ) -> None:
        self._ledgers = ledgers
        self._gate = DispatchGate(GateLimits() if limits is None else limits, broker=broker)
        self._lock = RLock()
        self.mark_delete = ledgers.first_position
        self.deleted = DeletedRanges()
        if stored is not None:
            record = decode(stored)
            self.mark_delete, self.deleted = record.mark_delete, record.deleted
        # Acked and not durable, in no write, and in the write under way: each part of `deleted`, or passed since.
        self._fresh, self._writing = DeletedRanges(), DeletedRanges()
        self._is_writing = False
        self._acked_count = self._writing_count = self._durable_count = 0
        # Invariant: the sums over the messages in flight.
        self._in_flight: dict[Position, _InFlight] = {}
        self._unacked_of: dict[str, int] = {}
        self._reserved_bytes = self._reserved_ranges = self._unacked = 0

    def admit(
        self,
        candidates: Iterable[Position],
        *,
        consumer: str = "",
        weights: Mapping[Position, int] | None = None,
        now_ms: int = 0,
    ) -> list[Position]:
        """Return the messages that you may send now, and count them as sent.

        Those below the highest acked entry fill holes, and are admitted one by one as there is room; the others, in
        their order, up to the first that a limit has no room for. Acked ones and those in flight are left out.

        Args:
            candidates: The messages that you would send: unread ones, and those that were given back.
            consumer: Receives them; only needed with a limit for each consumer.
            weights: How many messages an entry holds, where it is a batch of more than one.
            now_ms: The present, for `Verdict.since_ms`.

        Raises:
            InvalidPositionError: The log does not have one of them; those before it were admitted.

        Complexity: O(1) a message; more for one that fills a hole at a full limit, as `ack_effect`.
        """
        with self._lock:
            highest = self.deleted.last_range()
            admitted = []
            is_refused = False
            for candidate in candidates:
                position = Position(*candidate)
                if self.is_acked(position) or position in self._in_flight:
                    continue
                self._ledgers.check_written(position)
                weight = 1 if weights is None else weights.get(position, 1)
                if highest is not None and position < highest[1]:
                    is_sent = self._fills_hole(position, consumer, weight)
                else:
                    is_sent = not is_refused and self._is_admitted(position, consumer, weight, now_ms)
                    is_refused = not is_sent
                if is_sent:
                    admitted.append(position)
            return admitted

    def ack(self, positions: Iterable[Position]) -> list[Position]:
        """Ack messages, in any order, repeated or not, and return those whose acks are refused: usually none.

        Nothing, or less than its ack adds, is reserved for a message that was given back, or that was sent to fill a
        hole at a full limit. If its ack would exceed a limit now, it is refused: nothing has happened, and it may be
        acked after a persist, or sent again.

        Raises:
            InvalidPositionError: The log does not have one of them; those before it were acked.
        """
        with self._lock:
            try:
                return [position for each in positions if not self._is_taken(position := Position(*each))]
            finally:
                self._refresh()

    def give_back(self, positions: Iterable[Position]) -> int:
        """Note that messages will be sent again, as after a nack or when a consumer is gone; return how many were sent.

        They are candidates of `admit` from now on.
        """
        with self._lock:
            count = sum(self._take_back(Position(*each)) for each in positions)
            self._refresh()
            return count

    def begin_persist(self) -> bytes:
        """Return the bytes to persist: the whole ack state, with a checksum. Acks from now on wait for the next one.

        Call `end_persist` when they are synced, or could not be written.

        Raises:
            RuntimeError: A persist is under way.

        Complexity: O(bytes).
        """
        with self._lock:
            if self._is_writing:
                raise RuntimeError("a persist is under way: end it first")
            self._is_writing = True
            self._fresh, self._writing = DeletedRanges(), self._fresh
            self._writing_count = self._acked_count
            return encode(Record(RecordKind.SNAPSHOT, 0, 0, 0, self.mark_delete, self.deleted))

    def end_persist(self, *, written: bool) -> None:
        """Note that the bytes of `begin_persist` are synced, or that the write failed: then the next one has all acks.

        Raises:
            RuntimeError: No persist is under way.
        """
        with self._lock:
            if not self._is_writing:
                raise RuntimeError("no persist is under way")
            self._is_writing = False
            if written:
                self._durable_count = self._writing_count
            else:
                self._fresh.update(self._writing)
            self._writing = DeletedRanges()
            self._fresh.remove_at_most(self.mark_delete)
            self._refresh()

    def is_acked(self, position: Position) -> bool:
        """Return whether an entry is acked, by itself or by the mark-delete."""
        return position <= self.mark_delete or position in self.deleted

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages that the persisted bytes do not have, and that a restart would send again."""
        return self._acked_count - self._durable_count

    def usage(self, consumer: str = "") -> Usage:
        """Return the present usage of the limits; a named consumer's unacked messages count as its own."""
        return Usage(
            self._fresh.settle().record_bytes + self._writing.record_bytes,
            self._reserved_bytes,
            self._unacked,
            self.deleted.settle().range_count,
            self._reserved_ranges,
            self._unacked_of.get(consumer, 0),
        )

    def why_blocked(self, consumer: str = "") -> tuple[Verdict, ...]:
        """Return a verdict for each rule that keeps new messages from a consumer; empty if none does."""
        with self._lock:
            return self._gate.why_blocked(self.usage(consumer), consumer)

    def when_open(self, waiter: Callable[[], object], consumer: str = "") -> None:
        """Call a waiter once when no rule keeps new messages from a consumer; see `DispatchGate.when_open`."""
        self._gate.when_open(waiter, consumer)

    def change_limits(self, limits: GateLimits) -> None:
        """Put other limits in force; below the present usage they keep new messages back, and none is lost."""
        with self._lock:
            self._gate.change_limits(limits)
            self._refresh()

    def consumer_closed(self, consumer: str) -> list[Position]:
        """Give back the messages of a consumer that is gone, and return them."""
        with self._lock:
            positions = [position for position, sent in self._in_flight.items() if sent.consumer == consumer]
            self.give_back(positions)
            self._gate.consumer_closed(consumer)
            return positions

    def close(self) -> None:
        """Leave the limit of the broker and call all waiters."""
        self._gate.close()

    def _is_admitted(self, position: Position, consumer: str, weight: int, now_ms: int) -> bool:
        cost = isolated_range_bytes(*position)
        verdict = self._gate.request(
            (cost,), usage=self.usage(consumer), consumer=consumer, weights=_weights(weight), now_ms=now_ms
        )
        return bool(verdict.granted) and self._sent(position, _InFlight(consumer, weight, cost, 1))

    def _fills_hole(self, position: Position, consumer: str, weight: int) -> bool:
        """Admit a message also while rules are closed, with what its ack adds now if there is no room for the most."""
        most = isolated_range_bytes(*position)
        cost, ranges = most, 1
        for _ in range(3):
            verdict = self._gate.request_redelivery(
                (cost,), usage=self.usage(consumer), consumer=consumer, weights=_weights(weight), range_costs=(ranges,)
            )
            if verdict.granted:
                return self._sent(position, _InFlight(consumer, weight, cost, ranges))
            added_bytes, added_ranges = self._added_by(position)
            if verdict.rule is Rule.UNACKED_RANGES:
                ranges = max(0, added_ranges)
            elif verdict.rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
                cost = max(0, min(most, added_bytes))
            else:
                break
        return False

    def _sent(self, position: Position, sent: _InFlight) -> bool:
        self._in_flight[position] = sent
        self._count(sent, 1)
        return True

    def _take_back(self, position: Position) -> bool:
        """Take a message out of flight; return whether it was."""
        sent = self._in_flight.pop(position, None)
        if sent is not None:
            self._count(sent, -1)
        return sent is not None

    def _count(self, sent: _InFlight, sign: int) -> None:
        self._reserved_bytes += sign * sent.record_bytes
        self._reserved_ranges += sign * sent.ranges
        self._unacked += sign * sent.weight
        self._unacked_of[sent.consumer] = self._unacked_of.get(sent.consumer, 0) + sign * sent.weight
        if not self._unacked_of[sent.consumer]:
            del self._unacked_of[sent.consumer]
        self._gate.count_unacked(sign * sent.weight)

    def _is_taken(self, position: Position) -> bool:
        """Ack a message; return False if that would exceed a limit."""
        if not self.is_acked(position):
            self._ledgers.check_written(position)
            if not self._has_room_for(position, self._in_flight.get(position)):
                return False
            self.deleted.add(position)
            self._fresh.add(position)
            self._acked_count += 1
            self._advance()
        self._take_back(position)
        return True

    def _has_room_for(self, position: Position, sent: _InFlight | None) -> bool:
        """Return whether an ack exceeds no limit, although less than the most may be reserved for it."""
        if sent is not None and (sent.record_bytes, sent.ranges) == (isolated_range_bytes(*position), 1):
            return True
        usage, limits = self.usage(), self._gate.limits
        added_bytes, added_ranges = self._added_by(position)
        own_bytes, own_ranges = (0, 0) if sent is None else (sent.record_bytes, sent.ranges)
        used_bytes = usage.unpersisted_record_bytes + usage.reserved_bytes - own_bytes
        used_ranges = usage.range_count + usage.reserved_ranges - own_ranges
        bytes_max, ranges_max = limits.max_unpersisted_ack_record_bytes, limits.max_unacked_ranges
        return (bytes_max < 1 or added_bytes <= 0 or used_bytes + added_bytes <= bytes_max) and (
            ranges_max < 1 or added_ranges <= 0 or used_ranges + added_ranges <= ranges_max
        )

    def _added_by(self, position: Position) -> tuple[int, int]:
        """Return how many un-persisted bytes and how many ranges an ack adds now; below 0 it frees some."""
        of_fresh = ack_effect(position, self._fresh, self._ledgers, self.mark_delete)
        return of_fresh.record_bytes, ack_effect(position, self.deleted, self._ledgers, self.mark_delete).range_count

    def _advance(self) -> None:
        """Move the mark-delete over every acked entry that follows it, across the ends of ledgers."""
        reached = self.deleted.reach(self.mark_delete, self._ledgers)
        if reached != self.mark_delete:
            self.mark_delete = reached
            self.deleted.remove_at_most(reached)
            self._fresh.remove_at_most(reached)

    def _refresh(self) -> None:
        self._gate.refresh(self.usage(), lambda name: self._unacked_of.get(name, 0))


def _weights(weight: int) -> tuple[int] | None:
    return None if weight == 1 else (weight,)
