"""The numbers of a subscription at one instant: its messages by where they are, its rules, and its cursor's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ackstate.limits.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import CursorStats
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.limit_usage import LimitUsage
    from ackstate.dispatch.unacked_messages import UnackedMessages
    from ackstate.limits.gate import DispatchGate
    from ackstate.limits.rules import Verdict
    from ackstate.position import Position

_ON_UNACKED_MESSAGES = frozenset({Rule.UNACKED_MESSAGES, Rule.BROKER_UNACKED_MESSAGES})


class RuleStats(NamedTuple):
    """One rule of a subscription's gate.

    Attributes:
        rule: The rule.
        is_closed: Whether it keeps new messages back, from all consumers or from at least one.
        since_ms: When it closed; None while it is open. After a restart above a limit, when the cursor was opened. If
            the rule closes for each consumer by itself, the earliest of these times.
        closed_count: How often it has closed since the gate was created, for any consumer.
    """

    rule: Rule
    is_closed: bool
    since_ms: int | None
    closed_count: int


class ConsumerUse(NamedTuple):
    """One consumer of a subscription.

    Attributes:
        name: Its name.
        unacked_messages: The messages that it has in flight, those of a batch one by one.
        is_blocked: Whether its own limit keeps new messages back.
    """

    name: str
    unacked_messages: int
    is_blocked: bool


@dataclass(frozen=True, slots=True)
class DispatchStats:
    """A subscription at one instant. Messages of a batch count one by one, unless entries are mentioned.

    Attributes:
        cursor: The numbers of its cursor.
        unacked_messages: Messages in flight.
        replay_entries: Entries that wait to be sent although the reader has passed them: given back, due, or, with
            Key_Shared, read for a consumer that cannot take them yet.
        delayed_entries: Entries that the reader has passed and that wait until they are due.
        consumer_count: Open consumers.
        sent_messages: Messages sent since the subscription was opened, each time that they were.
        redelivered_messages: Those of them that had been sent before.
        dead_lettered_messages: Messages handed over as dead letters since the subscription was opened.
        rules: The rules of its gate; empty if it has none.
        oldest_unacked: The lowest entry that is not acked; None if all are.
    """

    cursor: CursorStats
    unacked_messages: int
    replay_entries: int
    delayed_entries: int
    consumer_count: int
    sent_messages: int
    redelivered_messages: int
    dead_lettered_messages: int
    rules: tuple[RuleStats, ...]
    oldest_unacked: Position | None

    @property
    def backlog_not_delayed(self) -> int:
        """Entries of the log that are neither acked nor known to be delayed."""
        return max(0, self.cursor.backlog - self.delayed_entries)

    @property
    def is_blocked_on_unacked_messages(self) -> bool:
        """Whether the limit on unacked messages of the subscription or of the broker keeps new messages back."""
        return any(each.is_closed and each.rule in _ON_UNACKED_MESSAGES for each in self.rules)


def dispatch_stats(
    cursor: ManagedCursor, admission: Admission, messages: UnackedMessages, *, consumer_count: int
) -> DispatchStats:
    """Return the numbers of a subscription; the caller holds its lock.

    Complexity: O(log ledgers + closed consumers), and counting the delayed messages: `delayed_message_count`.
    """
    # May take the lock of a delay index, which comes before that of the cursor.
    delayed_entries = messages.delayed.message_count
    deliveries, gate = admission.deliveries, admission.gate
    with cursor.lock:
        oldest = cursor.view.lowest_unacked(1)
        return DispatchStats(
            cursor=cursor.stats(),
            unacked_messages=deliveries.unacked_messages,
            replay_entries=len(messages.waiting),
            delayed_entries=delayed_entries,
            consumer_count=consumer_count,
            sent_messages=deliveries.sent_messages,
            redelivered_messages=deliveries.redelivered_messages,
            dead_lettered_messages=messages.dead_lettered_messages,
            rules=() if gate is None else tuple(_rules(gate, admission.usage)),
            oldest_unacked=oldest[0] if oldest else None,
        )


def consumer_uses(admission: Admission, names: Iterable[str]) -> list[ConsumerUse]:
    """Return the numbers of consumers; the caller holds the lock of the subscription."""
    gate, unacked_of = admission.gate, admission.deliveries.unacked_of
    blocked = frozenset() if gate is None else frozenset(gate.closed_consumers)
    return [ConsumerUse(name, unacked_of(name), name in blocked) for name in names]


def _rules(gate: DispatchGate, usage: LimitUsage) -> Iterator[RuleStats]:
    closed = {verdict.rule: verdict for verdict in gate.why_blocked(usage.of())} if gate.is_closed else {}
    for rule in Rule:
        verdict = _of_consumers(gate, usage) if rule is Rule.CONSUMER_UNACKED_MESSAGES else closed.get(rule)
        since_ms = None if verdict is None else verdict.since_ms
        yield RuleStats(rule, verdict is not None, since_ms, gate.blocked_count(rule))


def _of_consumers(gate: DispatchGate, usage: LimitUsage) -> Verdict | None:
    """Return the verdict of the consumer whose own limit has been closed longest; None if none is."""
    for consumer in gate.closed_consumers:  # the longest closed first
        for verdict in gate.why_blocked(usage.of(consumer), consumer):
            if verdict.rule is Rule.CONSUMER_UNACKED_MESSAGES:
                return verdict
    return None
