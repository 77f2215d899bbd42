"""Decides, with the gate, whether a message may be sent and whether an ack may be accepted."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, final

from ackstate.dispatch.deliveries import Deliveries, Sent, first_deliveries
from ackstate.dispatch.limit_usage import LimitUsage
from ackstate.dispatch.round_waiter import RoundWaiter
from ackstate.entry_bitmap import bitmaps_of
from ackstate.errors import AckStateError
from ackstate.limits.rules import Rule
from ackstate.record_size import isolated_range_bytes, isolated_ranges_bytes
from ackstate.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyroaring import BitMap

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import Receipt
    from ackstate.dispatch.deliveries import Reservations
    from ackstate.limits.gate import DispatchGate, Verdict
    from ackstate.position import Position

_PROMOTION_RETRY_MS = 1_000


class AckRefusedError(AckStateError):
    """An ack would exceed a limit, and too little was reserved for it. Nothing was changed.

    Nothing was reserved if the message had been given back before: it will be sent again, and then its ack has room.
    The same happens if it was sent to join ranges at a full limit and these became durable meanwhile: its consumer may
    ack it later or give it back.
    """


@final
class Admission:
    """Admits messages and acks within the limits, and reserves room for the acks of sent messages.

    Args:
        cursor: The ack state.
        gate: Its limits; None if none applies.
        promotes_young: Whether young acks are persisted early before they would close the gate.
        sent: Where messages in flight are noted instead of in `deliveries`.

    Attributes:
        gate: The limits.
    """

    def __init__(
        self,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None,
        promotes_young: bool,
        sent: Reservations | None = None,
    ) -> None:
        self.deliveries = Deliveries()
        self.refused_by: Rule | None = None
        """The rule that refused the last refused message."""
        self.refusals: set[Rule] = set()
        """The rules that have refused a message in this round."""
        self.has_refused_again = False
        """Whether this round refused a message that a closed rule would admit."""
        self.round_waiter = RoundWaiter()
        """Called when the usage decreases."""
        self.store_error: AckStateError | None = None
        """Why the last persist failed; None if it did not."""
        self._cursor = cursor
        self.gate = gate
        self._promotes_young = promotes_young and cursor._persister.young_age.is_on
        self._promote_again_ms = 0
        self._sent: Reservations = self.deliveries if sent is None else sent
        self.usage = LimitUsage(cursor, gate, self._sent)

    def begin_round(self) -> None:
        """Forget the refusals of the last round of dispatches."""
        self.refusals.clear()
        self.has_refused_again = False

    def record_bytes_max(self) -> int | None:
        """Return how much may be un-persisted beside the reservations; None if there is no limit."""
        limit = self.usage.bytes_limit
        return None if limit is None else limit - self._sent.reserved_bytes

    def promote_young(self, *, now_ms: int) -> None:
        """Persist young acks early if they keep the next unread message back."""
        if self.usage.bytes_limit is not None and self._promotes_young:
            self._promote_for(self.usage.next_cost, now_ms=now_ms)

    def send_new(self, position: Position, sent: Sent, *, now_ms: int) -> bool:
        """Note a message as sent for the first time and return True, unless a rule holds new messages back."""
        gate = self.gate
        if gate is None:
            self._sent.add(position, sent)
            return True
        cost = isolated_range_bytes(*position)
        self._promote_for(cost, now_ms=now_ms)
        weights = None if sent.message_count == 1 else (sent.message_count,)
        # With the cursor's lock, so that no persist uses the same room.
        with self._cursor.lock:
            verdict = gate.request(
                (cost,), usage=self.usage.of(sent.consumer), consumer=sent.consumer, weights=weights, now_ms=now_ms
            )
            return self._concluded(verdict, position, sent._replace(record_bytes=cost, range_count=1, is_covered=True))

    def send_all_new(
        self,
        consumer: str,
        positions: Sequence[Position],
        message_counts: Sequence[int],
        *,
        keys: Sequence[bytes | None] | bytes | None,
        now_ms: int,
    ) -> int:
        """Note messages as sent for the first time: as many of the first ones as the rules have room for now.

        Young acks are persisted early for the first message only, and only that one closes a rule. So another call for
        the rest of them has the result that a call for each message would have.

        Args:
            consumer: Receives them.
            positions: The messages, at least one, in rising order.
            message_counts: How many messages of each entry are not acked.
            keys: The key of each that assigns it to the consumer, or the one of all of them.
            now_ms: The present.

        Returns:
            Their number; 0 if a rule holds new messages back.
        """
        gate = self.gate
        if gate is None:
            self._sent.add_all(consumer, positions, first_deliveries(consumer, keys, message_counts, None))
            return len(positions)
        costs = isolated_ranges_bytes(positions)
        self._promote_for(costs[0], now_ms=now_ms)
        weights = None if message_counts.count(1) == len(message_counts) else message_counts
        with self._cursor.lock:
            verdict = gate.request(
                costs, usage=self.usage.of(consumer), consumer=consumer, weights=weights, now_ms=now_ms
            )
            granted = verdict.granted
            if not granted:
                self._refuse(verdict)
                return 0
            if granted < len(positions):
                positions, message_counts = positions[:granted], message_counts[:granted]
            self._sent.add_all(consumer, positions, first_deliveries(consumer, keys, message_counts, costs))
            gate.count_unacked(granted if weights is None else sum(message_counts))
            return granted

    def request_new(self, consumer: str, *, now_ms: int) -> None:
        """Show the gate that a message could be read now, so that it reports how long it keeps the message back."""
        if self.gate is not None:
            self.gate.request((self.usage.next_cost,), usage=self.usage.of(consumer), consumer=consumer, now_ms=now_ms)

    def send_again(self, position: Position, sent: Sent, *, now_ms: int) -> bool:
        """Note a message as sent, also while new ones are held back, unless its ack could exceed a limit."""
        if self.gate is None:
            self._sent.add(position, sent)
            return True
        cost = isolated_range_bytes(*position)
        if not self.usage.has_bytes_for(cost):
            self._promote_for(cost, now_ms=now_ms)
        with self._cursor.lock:
            reserved = full = sent._replace(record_bytes=cost, range_count=1)
            verdict = self._request_again(reserved)
            if verdict.rule is Rule.UNACKED_RANGES:
                reserved = reserved._replace(range_count=max(0, self.usage.added_by(position)[1]))
                verdict = self._request_again(reserved)
            if verdict.rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
                added, _ = self.usage.added_by(position)
                reserved = reserved._replace(record_bytes=max(0, min(reserved.record_bytes, added)))
                verdict = self._request_again(reserved)
            self.has_refused_again |= not verdict.granted
            return self._concluded(verdict, position, reserved._replace(is_covered=reserved == full))

    def ack(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack a message if that exceeds no limit.

        Raises:
            AckRefusedError: As `make_room`.
            As `ManagedCursor.ack`.
        """
        sent = self._sent.get(position)
        if self.gate is None or (sent is not None and sent.is_covered):
            return self._cursor.ack(position, now_ms=now_ms)
        with self._checked_room({position: sent}, now_ms=now_ms):
            return self._cursor.ack(position, now_ms=now_ms)

    def ack_batch(self, position: Position, unacked_words: Sequence[int], *, now_ms: int) -> Receipt:
        """Ack messages of a batch, the last ones of it, if that exceeds no limit.

        Raises:
            AckRefusedError: As `make_room`.
            As `ManagedCursor.ack_batch`.
        """
        with self._room_for([position], now_ms=now_ms):
            return self._cursor.ack_batch(position, unacked_words, now_ms=now_ms)

    def ack_all(self, positions: Sequence[Position], entries: Mapping[int, BitMap], *, now_ms: int) -> Receipt:
        """Ack messages, all of them or, if one is refused, none; `entries` are the same as `positions`, by ledger.

        Raises:
            AckRefusedError: As `make_room`, for all of them together.
            As `ManagedCursor.ack_many`.

        Complexity: O(messages); with one for which too little is reserved, as `LimitUsage.added_by_all`, too.
        """
        with self._room_for(positions, now_ms=now_ms):
            return self._cursor.intake.ack_bitmaps(entries, now_ms=now_ms)

    def make_room(self, position: Position, *, now_ms: int) -> None:
        """Make sure that the ack of a message exceeds no limit, although too little may be reserved for it.

        Raises:
            AckRefusedError: There is no room for it, and a persist made none.
            CursorFencedError: Another owner has the cursor.
        """
        sent = self._sent.get(position)
        if self._may_lack_room([sent]):
            self._check_room({position: sent}, now_ms=now_ms)

    def complete(self, position: Position) -> Sent | None:
        """Forget a message and its reservation; return how it was sent, None if it was not in flight."""
        sent = self._sent.complete(position)
        gate = self.gate
        if gate is not None and gate.has_broker_limit and sent is not None:
            gate.count_unacked(-sent.message_count)
        return sent

    def complete_all(self, positions: Sequence[Position], entries: Mapping[int, BitMap]) -> list[tuple[Position, Sent]]:
        completed, gate = self._sent.complete_all(positions, entries), self.gate
        if completed and gate is not None and gate.has_broker_limit:
            gate.count_unacked(-sum([sent.message_count for _, sent in completed]))
        return completed

    def reduce(self, position: Position, message_count: int) -> None:
        """Note how many messages of a batch in flight are still unacked."""
        taken_off = self._sent.reduce(position, message_count)
        if taken_off and self.gate is not None:
            self.gate.count_unacked(-taken_off)

    def clear(self) -> None:
        """Forget all messages in flight."""
        unacked = self._sent.unacked_messages
        self._sent.clear()
        if self.gate is not None:
            self.gate.count_unacked(-unacked)

    def observe(self, *, now_ms: int) -> None:
        """Show the gate the present usage without a request: after a restart, or under other limits."""
        if self.gate is not None:
            self.gate.observe(self.usage.of(), next_record_bytes=self.usage.next_cost, now_ms=now_ms)
            self.usage_decreased(now_ms=now_ms)

    def refresh(self, *, of: str | None = "") -> None:
        """Open the gate, and wake its waiters, if the usage fell enough."""
        if self.gate is not None and self.gate.is_closed:
            self.gate.refresh(self.usage.of(), None if of is None else self._sent.unacked_of, of or "")

    @property
    def promote_again_ms(self) -> int | None:
        """When to try again to persist young acks that keep the gate closed; None if they do not."""
        is_missing = self.gate is not None and self.gate.is_closed and self.store_error is not None
        return self._promote_again_ms or None if is_missing else None

    def usage_decreased(self, *, now_ms: int, of: str | None = "") -> None:
        """Open the gate as `refresh` does; also wake its waiters if a dispatch could open it now."""
        if self.gate is not None and self.gate.is_closed:
            self.refresh(of=of)
            if self.gate.is_closed and self._could_promote(now_ms=now_ms):
                self.gate.wake()
        self.round_waiter.room_made()

    def persisted(self, error: AckStateError | None, *, now_ms: int) -> None:
        """Note the outcome of a persist: an error or None."""
        if error is None:
            self._promote_again_ms = 0  # The store works.
        self.store_error = error
        self.usage_decreased(now_ms=now_ms, of=None)

    def _request_again(self, sent: Sent) -> Verdict:
        assert self.gate is not None
        return self.gate.request_redelivery(
            (sent.record_bytes,),
            usage=self.usage.of(sent.consumer),
            consumer=sent.consumer,
            weights=None if sent.message_count == 1 else (sent.message_count,),
            range_costs=(sent.range_count,),
        )

    def _refuse(self, verdict: Verdict) -> None:
        self.refused_by = verdict.rule
        if verdict.rule is not None:
            self.refusals.add(verdict.rule)

    def _concluded(self, verdict: Verdict, position: Position, sent: Sent) -> bool:
        assert self.gate is not None
        if not verdict.granted:
            self._refuse(verdict)
            return False
        self._sent.add(position, sent)
        self.gate.count_unacked(sent.message_count)
        return True

    def _promote_for(self, cost: int, *, now_ms: int) -> None:
        """Persist young acks early, the oldest first, if they would close the gate, or keep it closed."""
        limit = self.usage.bytes_limit
        if limit is None or not self._promotes_young:
            return
        assert self.gate is not None
        reserved = self._sent.reserved_bytes
        if self.usage.has_bytes_for(cost):
            if not self.gate.is_closed or not self._could_promote(now_ms=now_ms):
                return
        elif reserved + cost > limit or not self._may_promote(now_ms=now_ms):
            return  # To persist everything would not make room, or there is no young ack.
        mark = int(limit * self.gate.limits.unpersisted_release_ratio)
        try:
            self._cursor.promote(max(0, mark - reserved - cost), now_ms=now_ms)
        except StoreError as error:
            self.store_error = error
            self._promote_again_ms = now_ms + _PROMOTION_RETRY_MS

    def _could_promote(self, *, now_ms: int) -> bool:
        """Return whether the byte rule is closed and would open if all young acks were durable."""
        limit = self.usage.bytes_limit
        if limit is None or not self._promotes_young:
            return False
        assert self.gate is not None
        mark = int(limit * self.gate.limits.unpersisted_release_ratio)
        if self._sent.reserved_bytes > mark or not self._may_promote(now_ms=now_ms):
            return False
        return Rule.UNPERSISTED_ACK_RECORD_BYTES in self.usage.closed_by(self.usage.of(), "")

    def _may_promote(self, *, now_ms: int) -> bool:
        # A clock that went back by more than the pause ends it.
        is_paused = 0 < self._promote_again_ms - now_ms <= _PROMOTION_RETRY_MS
        return not is_paused and self._cursor.view.has_young(now_ms=now_ms)

    def _room_for(self, positions: Sequence[Position], *, now_ms: int) -> AbstractContextManager[None]:
        """Return a context in which acks of messages exceed no limit, and no persist takes the room that they need."""
        sent = list(map(self._sent.get, positions))
        if not self._may_lack_room(sent):
            return nullcontext()
        return self._checked_room(dict(zip(positions, sent, strict=True)), now_ms=now_ms)

    @contextmanager
    def _checked_room(self, sent: Mapping[Position, Sent | None], *, now_ms: int) -> Iterator[None]:
        """Check, and keep the room meanwhile; `sent` is message -> how it was sent, None if it is not in flight."""
        self._check_room(sent, now_ms=now_ms)
        with self._cursor.lock:
            self._check_room(sent, now_ms=None)
            yield

    def _may_lack_room(self, sent: Iterable[Sent | None]) -> bool:
        """Return whether too little may be reserved for one of some acks, given how each message was sent."""
        short = [each for each in sent if each is None or not each.is_covered]
        return self.gate is not None and len(short) > 0

    def _check_room(self, sent: Mapping[Position, Sent | None], *, now_ms: int | None) -> None:
        """Refuse acks that exceed a limit, after a persist of young acks if the time is given and it may make room."""
        refused_by = self._refused_by(sent)
        if refused_by is Rule.UNPERSISTED_ACK_RECORD_BYTES and now_ms is not None:
            try:
                self._cursor.promote(0, now_ms=now_ms)
            except StoreError as error:
                self.store_error = error
            refused_by = self._refused_by(sent)
        self.refused_by = refused_by
        if refused_by is not None:
            first, *others = sent
            raise AckRefusedError(
                f"too little is reserved for the ack of {first}{f' and {len(others)} others' * bool(others)}, and it "
                f"would pass a limit of the ack state: {refused_by.value}"
            ) from self.store_error

    def _refused_by(self, sent: Mapping[Position, Sent | None]) -> Rule | None:
        """Return the limit of the ack state that has no room for acks; None if all have. Argument as in `_room_for`."""
        reserved = [each for each in sent.values() if each is not None]
        own = sum(each.record_bytes for each in reserved), sum(each.range_count for each in reserved)
        if len(sent) > 1:
            return self.usage.refusal(added=self.usage.added_by_all(bitmaps_of(sent)), reserved=own)
        (position,) = sent
        if self._cursor.is_acked(position):
            return None
        return self.usage.refusal(added=self.usage.added_by(position), reserved=own)
