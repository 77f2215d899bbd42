"""Decides, with the gate, whether a message may be sent and whether an ack may be accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from ackstate.cursor.dispatch.deliveries import Deliveries, Sent
from ackstate.cursor.store import StoreError
from ackstate.errors import AckStateError
from ackstate.limits.gate import Usage
from ackstate.limits.rules import Accounting, Rule
from ackstate.record_size import isolated_range_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import Receipt
    from ackstate.limits.gate import DispatchGate, Verdict
    from ackstate.position import Position

ACK_STATE_RULES = frozenset({Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES})
"""The limits on the ack state: acks that fill holes reduce it."""

_PROMOTION_RETRY_MS = 1_000


class AckRefusedError(AckStateError):
    """An ack would exceed a limit, and too little was reserved for it. Nothing was changed.

    Nothing was reserved if the message had been given back before: it will be sent again, and then its ack has room.
    The same happens if it was sent to join ranges at a full limit and these became durable meanwhile: its consumer may
    ack it later or give it back.
    """


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

    def complete(self, position: Position) -> Sent | None:
        """Forget a message and its reservation; return how it was sent, None if it was not in flight."""
        ...

    def reduce(self, position: Position, message_count: int) -> int:
        """Note how many messages of a batch are still unacked, and return by how many that is less."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


@final
class Admission:
    """Admits messages and acks within the limits, and reserves room for the acks of sent messages.

    Args:
        cursor: The ack state.
        gate: Its limits; None if none applies.
        promotes_young: Whether young acks are persisted early before they would close the gate.
        sent: Where messages in flight are noted instead of in `deliveries`.
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
        self.store_error: AckStateError | None = None
        """Why the last persist failed; None if it did not."""
        self._cursor = cursor
        self._gate = gate
        self._promotes_young = promotes_young and cursor._persister.young_age.is_on
        self._promote_again_ms = 0
        self._sent: Reservations = self.deliveries if sent is None else sent

    def usage(self, consumer: str = "") -> Usage:
        """Return the present usage of the subscription."""
        sent = self._sent
        return Usage(
            self._cursor.view.unpersisted_record_bytes,
            sent.reserved_bytes,
            sent.unacked_messages,
            self._range_count(),
            sent.reserved_ranges,
            sent.unacked_of(consumer),
        )

    def record_bytes_max(self) -> int | None:
        """Return how much may be un-persisted beside the reservations; None if there is no limit."""
        limit = self._bytes_limit
        return None if limit is None else limit - self._sent.reserved_bytes

    def binding(self, consumer: str) -> set[Rule]:
        """Return the limits on the ack state that keep new messages back: closed, or without room for one more."""
        if self._gate is None:
            return set()
        usage = self.usage(consumer)
        rules = self._closed_by(usage, consumer) & ACK_STATE_RULES if self._gate.is_closed else set()
        if self._bytes_limit is not None and not self._has_bytes_for(self._next_cost):
            rules.add(Rule.UNPERSISTED_ACK_RECORD_BYTES)
        ranges_max = self._ranges_limit
        if ranges_max is not None and usage.range_count + usage.reserved_ranges >= ranges_max:
            rules.add(Rule.UNACKED_RANGES)
        return rules

    def promote_young(self, *, now_ms: int) -> None:
        """Persist young acks early if they keep the next unread message back."""
        if self._bytes_limit is not None and self._promotes_young:
            self._promote_for(self._next_cost, now_ms=now_ms)

    def send_new(self, position: Position, sent: Sent, *, now_ms: int) -> bool:
        """Note a message as sent for the first time and return True, unless a rule holds new messages back."""
        gate = self._gate
        if gate is None:
            self._sent.add(position, sent)
            return True
        cost = isolated_range_bytes(*position)
        self._promote_for(cost, now_ms=now_ms)
        weights = None if sent.message_count == 1 else (sent.message_count,)
        # With the cursor's lock, so that no persist uses the same room.
        with self._cursor.lock:
            verdict = gate.request(
                (cost,), usage=self.usage(sent.consumer), consumer=sent.consumer, weights=weights, now_ms=now_ms
            )
            return self._concluded(verdict, position, sent._replace(record_bytes=cost, range_count=1))

    def ask_for_new(self, consumer: str, *, now_ms: int) -> None:
        """Show the gate that a message could be read now, so that it reports how long it keeps the message back."""
        if self._gate is not None:
            self._gate.request((self._next_cost,), usage=self.usage(consumer), consumer=consumer, now_ms=now_ms)

    def send_again(self, position: Position, sent: Sent, *, now_ms: int) -> bool:
        """Note a message as sent that may be sent while new ones may not, unless its ack could exceed a limit."""
        if self._gate is None:
            self._sent.add(position, sent)
            return True
        cost = isolated_range_bytes(*position)
        if not self._has_bytes_for(cost):
            self._promote_for(cost, now_ms=now_ms)
        with self._cursor.lock:
            reserved = sent._replace(record_bytes=cost, range_count=1)
            verdict = self._ask_again(reserved)
            if verdict.rule is Rule.UNACKED_RANGES:
                reserved = reserved._replace(range_count=max(0, self._ranges_added(position)))
                verdict = self._ask_again(reserved)
            if verdict.rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
                added = self._cursor.view.unpersisted_bytes_added(position)
                reserved = reserved._replace(record_bytes=max(0, min(reserved.record_bytes, added)))
                verdict = self._ask_again(reserved)
            return self._concluded(verdict, position, reserved)

    def ack(self, position: Position, ack: Callable[[], Receipt], *, now_ms: int) -> Receipt:
        """Accept an ack if it exceeds no limit: neither it nor a persist in between takes what the other needs.

        Args:
            position: The message.
            ack: Acks it; its errors are passed on.
            now_ms: The present.

        Raises:
            AckRefusedError: As `make_room`.
        """
        sent = self._sent.get(position)
        if self._gate is None or (sent is not None and sent.is_covered(position)):
            return ack()
        self.make_room(position, now_ms=now_ms)
        with self._cursor.lock:
            self._check_room(position)
            return ack()

    def make_room(self, position: Position, *, now_ms: int) -> None:
        """Make sure that the ack of a message exceeds no limit, although too little may be reserved for it.

        Raises:
            AckRefusedError: There is no room for it, and a persist made none.
            CursorFencedError: Another owner has the cursor.
        """
        sent = self._sent.get(position)
        if self._gate is None or (sent is not None and sent.is_covered(position)):
            return
        if self._refused_by(position) is Rule.UNPERSISTED_ACK_RECORD_BYTES:
            try:
                self._cursor.promote(0, now_ms=now_ms)
            except StoreError as error:
                self.store_error = error
        self._check_room(position)

    def complete(self, positions: Sequence[Position]) -> list[tuple[Position, Sent]]:
        """Forget messages that are no longer in flight; return those that were, with how they were sent."""
        completed = []
        for position in positions:
            sent = self._sent.complete(position)
            if sent is not None:
                completed.append((position, sent))
        if completed and self._gate is not None:
            self._gate.count_unacked(-sum(sent.message_count for _, sent in completed))
        return completed

    def reduce(self, position: Position, message_count: int) -> None:
        """Note how many messages of a batch in flight are still unacked."""
        taken_off = self._sent.reduce(position, message_count)
        if taken_off and self._gate is not None:
            self._gate.count_unacked(-taken_off)

    def clear(self) -> None:
        """Forget all messages in flight."""
        unacked = self._sent.unacked_messages
        self._sent.clear()
        if self._gate is not None:
            self._gate.count_unacked(-unacked)

    def observe(self, *, now_ms: int) -> None:
        """Show the gate the present usage without a request: after a restart, or under other limits."""
        if self._gate is not None:
            self._gate.observe(self.usage(), next_record_bytes=self._next_cost, now_ms=now_ms)
            self.usage_decreased(now_ms=now_ms)

    def refresh(self, *, of: str | None = "") -> None:
        """Let the gate open, and wake its waiters, if the usage fell enough.

        Args:
            of: The one consumer that has fewer messages now; empty if it may be any, None if none has.
        """
        if self._gate is not None and self._gate.is_closed:
            self._gate.refresh(self.usage(), None if of is None else self._sent.unacked_of, of or "")

    @property
    def promote_again_ms(self) -> int | None:
        """When to try again to persist young acks that keep the gate closed; None if they do not."""
        is_missing = self._gate is not None and self._gate.is_closed and self.store_error is not None
        return self._promote_again_ms or None if is_missing else None

    def usage_decreased(self, *, now_ms: int, of: str | None = "") -> None:
        """Let the gate open, as `refresh` does; wake its waiters also if a dispatch could open it now."""
        self.refresh(of=of)
        if self._gate is not None and self._gate.is_closed and self._could_promote(now_ms=now_ms):
            self._gate.wake()

    def persisted(self, error: AckStateError | None, *, now_ms: int) -> None:
        """Note the outcome of a persist: an error or None."""
        if error is None:
            self._promote_again_ms = 0  # The store works.
        self.store_error = error
        if self._gate is not None:
            self._gate.mark_persisted(self._cursor.view.unpersisted_record_bytes)
        self.usage_decreased(now_ms=now_ms, of=None)

    @property
    def _next_cost(self) -> int:
        """The worst case of the next unread message."""
        return isolated_range_bytes(*self._cursor.reader.next_unread)

    @property
    def _bytes_limit(self) -> int | None:
        """The value of `maxUnPersistAckRecordsBytes`, if it is on and exact."""
        if self._gate is None or self._gate.limits.accounting is not Accounting.EXACT:
            return None
        limit = self._gate.limits.max_unpersisted_ack_record_bytes
        return limit if limit > 0 else None

    @property
    def _ranges_limit(self) -> int | None:
        """The limit on ranges, if that rule is on and exact."""
        if self._gate is None or self._gate.limits.accounting is not Accounting.EXACT:
            return None
        return self._gate.limits.max_unacked_ranges or None

    def _ask_again(self, sent: Sent) -> Verdict:
        assert self._gate is not None
        return self._gate.request_redelivery(
            (sent.record_bytes,),
            usage=self.usage(sent.consumer),
            consumer=sent.consumer,
            weights=None if sent.message_count == 1 else (sent.message_count,),
            range_costs=(sent.range_count,),
        )

    def _concluded(self, verdict: Verdict, position: Position, sent: Sent) -> bool:
        assert self._gate is not None
        if not verdict.granted:
            self.refused_by = verdict.rule
            return False
        self._sent.add(position, sent)
        self._gate.count_unacked(sent.message_count)
        return True

    def _has_bytes_for(self, cost: int) -> bool:
        limit = self._bytes_limit
        return limit is None or self._cursor.view.unpersisted_record_bytes + self._sent.reserved_bytes + cost <= limit

    def _promote_for(self, cost: int, *, now_ms: int) -> None:
        """Persist young acks early, the oldest first, if they would close the gate, or keep it closed."""
        limit = self._bytes_limit
        if limit is None or not self._promotes_young:
            return
        assert self._gate is not None
        reserved = self._sent.reserved_bytes
        if self._has_bytes_for(cost):
            if not self._gate.is_closed or not self._could_promote(now_ms=now_ms):
                return
        elif reserved + cost > limit or not self._may_promote(now_ms=now_ms):
            return  # To persist everything would not make room, or there is no young ack.
        mark = int(limit * self._gate.limits.unpersisted_release_ratio)
        try:
            self._cursor.promote(max(0, mark - reserved - cost), now_ms=now_ms)
        except StoreError as error:
            self.store_error = error
            self._promote_again_ms = now_ms + _PROMOTION_RETRY_MS

    def _could_promote(self, *, now_ms: int) -> bool:
        """Return whether the byte rule is closed and would open if all young acks were durable."""
        limit = self._bytes_limit
        if limit is None or not self._promotes_young:
            return False
        assert self._gate is not None
        mark = int(limit * self._gate.limits.unpersisted_release_ratio)
        if self._sent.reserved_bytes > mark or not self._may_promote(now_ms=now_ms):
            return False
        return Rule.UNPERSISTED_ACK_RECORD_BYTES in self._closed_by(self.usage(), "")

    def _may_promote(self, *, now_ms: int) -> bool:
        # A clock that went back by more than the pause ends it.
        is_paused = 0 < self._promote_again_ms - now_ms <= _PROMOTION_RETRY_MS
        return not is_paused and self._cursor.view.has_young(now_ms=now_ms)

    def _check_room(self, position: Position) -> None:
        self.refused_by = self._refused_by(position)
        if self.refused_by is not None:
            raise AckRefusedError(
                f"too little is reserved for the ack of {position}, and it would pass a limit of the ack state: "
                f"{self.refused_by.value}"
            ) from self.store_error

    def _refused_by(self, position: Position) -> Rule | None:
        """Return the limit of the ack state that has no room for the ack of a message; None if all have."""
        if self._cursor.is_acked(position):
            return None
        sent = self._sent.get(position)
        reserved_bytes, reserved_ranges = (sent.record_bytes, sent.range_count) if sent is not None else (0, 0)
        usage = self.usage()
        ranges_max, bytes_max = self._ranges_limit, self._bytes_limit
        if bytes_max is not None:
            added = self._cursor.view.unpersisted_bytes_added(position)
            used = usage.unpersisted_record_bytes + usage.reserved_bytes - reserved_bytes
            if added > 0 and used + added > bytes_max:
                return Rule.UNPERSISTED_ACK_RECORD_BYTES
        if ranges_max is not None:
            added = self._ranges_added(position)
            used = usage.range_count + usage.reserved_ranges - reserved_ranges
            if added > 0 and used + added > ranges_max:
                return Rule.UNACKED_RANGES
        return None

    def _range_count(self) -> int:
        """Return how many ranges count: at the limit, ranges that only shared holes divide count as one."""
        range_count, limit = self._cursor.deleted.range_count, self._ranges_limit
        if limit is None or (range_count < limit and not self._cursor.view.counts_entries_to_persist):
            return range_count
        return self._cursor.view.range_count_to_persist(limit)

    def _ranges_added(self, position: Position) -> int:
        """Return at most how much acking an entry now would add to `_range_count`; below 0 it frees some."""
        effect = self._cursor.view.ack_effect(position)
        if self._cursor.view.counts_entries_to_persist:
            return 0 if effect.mark_delete_advance else 1
        return effect.range_count

    def _closed_by(self, usage: Usage, consumer: str) -> set[Rule]:
        assert self._gate is not None
        return {verdict.rule for verdict in self._gate.why_blocked(usage, consumer) if verdict.rule is not None}
