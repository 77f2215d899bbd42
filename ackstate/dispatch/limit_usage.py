"""The usage of a subscription's limits: the acks that are not durable, and the messages in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.limits.gate import Usage
from ackstate.limits.rules import Rule
from ackstate.record_size import isolated_range_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyroaring import BitMap

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.dispatch.deliveries import Reservations
    from ackstate.limits.gate import DispatchGate
    from ackstate.position import Position

_RULES = (Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES)
ACK_STATE_RULES = frozenset(_RULES)
"""The limits on the ack state: acks that fill holes reduce it."""


@final
class LimitUsage:
    """Compares the present usage of a subscription with its limits, and changes nothing.

    Args:
        cursor: The ack state.
        gate: Its limits; None if none applies.
        sent: The messages in flight.
    """

    def __init__(self, cursor: ManagedCursor, gate: DispatchGate | None, sent: Reservations) -> None:
        self._cursor = cursor
        self._gate = gate
        self._sent = sent

    def of(self, consumer: str = "") -> Usage:
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

    @property
    def bytes_limit(self) -> int | None:
        """The value of `maxUnPersistAckRecordsBytes`, if it is on."""
        if self._gate is None:
            return None
        limit = self._gate.limits.max_unpersisted_ack_record_bytes
        return limit if limit > 0 else None

    @property
    def ranges_limit(self) -> int | None:
        """The limit on ranges, if that rule is on."""
        if self._gate is None:
            return None
        return self._gate.limits.max_unacked_ranges or None

    @property
    def next_cost(self) -> int:
        """The worst case of the next unread message."""
        return isolated_range_bytes(*self._cursor.reader.next_unread)

    def has_bytes_for(self, cost: int) -> bool:
        """Return whether the limit on bytes has room for the worst case of one more message."""
        limit = self.bytes_limit
        return limit is None or self._cursor.view.unpersisted_record_bytes + self._sent.reserved_bytes + cost <= limit

    def binding(self, consumer: str) -> set[Rule]:
        """Return the limits on the ack state that keep new messages back: closed, or without room for one more."""
        if self._gate is None:
            return set()
        usage = self.of(consumer)
        rules = self.closed_by(usage, consumer) & ACK_STATE_RULES if self._gate.is_closed else set()
        if self.bytes_limit is not None and not self.has_bytes_for(self.next_cost):
            rules.add(Rule.UNPERSISTED_ACK_RECORD_BYTES)
        ranges_max = self.ranges_limit
        if ranges_max is not None and usage.range_count + usage.reserved_ranges >= ranges_max:
            rules.add(Rule.UNACKED_RANGES)
        return rules

    def closed_by(self, usage: Usage, consumer: str) -> set[Rule]:
        """Return the rules that are closed for a consumer and stay so at a usage."""
        assert self._gate is not None
        return {verdict.rule for verdict in self._gate.why_blocked(usage, consumer) if verdict.rule is not None}

    def refusal(self, *, added: tuple[int, int], reserved: tuple[int, int]) -> Rule | None:
        """Return the limit of the ack state that has no room for acks; None if all have.

        Args:
            added: The un-persisted bytes and the ranges that the acks add; 0 or below always fits.
            reserved: The bytes and the ranges that are reserved for these acks.
        """
        usage, limits = self.of(), (self.bytes_limit, self.ranges_limit)
        used = (
            usage.unpersisted_record_bytes + usage.reserved_bytes,
            usage.range_count + usage.reserved_ranges,
        )
        for rule, limit, each, more, own in zip(_RULES, limits, used, added, reserved, strict=True):
            if limit is not None and more > 0 and each - own + more > limit:
                return rule
        return None

    def added_by(self, position: Position) -> tuple[int, int]:
        """Return at most how many un-persisted bytes and ranges an ack now would add; below 0 it frees some."""
        effect = self._cursor.view.ack_effect(position)
        ranges = effect.range_count
        if self._cursor.view.counts_entries_to_persist:
            ranges = 0 if effect.mark_delete_advance else 1
        return self._cursor.view.unpersisted_bytes_added(position), ranges

    def added_by_all(self, entries: Mapping[int, BitMap]) -> tuple[int, int]:
        """Return the same for acks of many entries, ledger id -> entries. Complexity: O(bytes of the bitmaps)."""
        effect = self._cursor.view.effect_of_all(entries)
        counts_entries = self._cursor.view.counts_entries_to_persist
        return effect.unpersisted_bytes, effect.entry_count if counts_entries else effect.range_count

    def _range_count(self) -> int:
        """Return how many ranges count, or entries where a limit of Pulsar's counts them."""
        return (
            self._cursor.deleted.range_count if self.ranges_limit is None else self._cursor.view.range_count_to_persist
        )
