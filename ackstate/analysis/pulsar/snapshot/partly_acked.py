"""Estimates the acked messages of partly acked batches, which a broker does not report.

A broker counts delivered and unacked messages, and it lists acks of whole entries. If its consumers acknowledge single
messages of batches, the difference is the number of acknowledged messages of incomplete batches: a write makes them
durable only together with entries above the mark-delete position, so all of them may be redelivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.position import Position

if TYPE_CHECKING:
    from ackstate.analysis.pulsar.snapshot.bounds import CursorLook
    from ackstate.analysis.pulsar.snapshot.internal_stats import SubscriptionStats, TopicInternals, TopicStats

# Brokers count unacked messages only if consumers share a subscription.
_COUNTED = frozenset({"Shared", "Key_Shared"})


class PartlyAcked(NamedTuple):
    """The known bounds of the partly acked batches of a subscription.

    Attributes:
        messages_per_entry: The mean; None if unknown.
        messages: An estimate of the acked messages of partly acked batches; None if it cannot be made.
        may_be: Whether there may be partly acked batches, so that a number of acked entries is a lower bound.
    """

    messages_per_entry: float | None
    messages: int | None
    may_be: bool


def partly_acked(
    look: CursorLook, stats: SubscriptionStats | None, internals: TopicInternals, topic: TopicStats | None
) -> PartlyAcked:
    """Return an estimate of partly acked batches from a broker's counts."""
    mean = _messages_per_entry(stats, internals, topic)
    if look.reported is not None and not look.reported.batches:
        return PartlyAcked(mean, 0, may_be=False)
    if mean is None or stats is None:
        return PartlyAcked(mean, None, may_be=mean is None or mean > 1)
    if mean <= 1:
        return PartlyAcked(mean, 0, may_be=False)
    if stats.type not in _COUNTED or look.read_position is None:
        return PartlyAcked(mean, None, may_be=True)
    waiting = stats.msg_in_replay + stats.msg_delayed
    last_read = Position(look.read_position.ledger_id, max(look.read_position.entry_id, 0) - 1)
    read = look.count_up_to(last_read) - look.count_up_to(look.mark_delete)
    delivered = max(read - len(look.deleted) - waiting, 0)
    return PartlyAcked(mean, max(round(delivered * mean) - max(stats.unacked_messages, 0), 0), may_be=True)


def _messages_per_entry(
    stats: SubscriptionStats | None, internals: TopicInternals, topic: TopicStats | None
) -> float | None:
    """Return the mean of the consumers, weighted by their messages, else the mean of the published messages."""
    consumers = [each for each in stats.consumers if each.avg_messages_per_entry > 0] if stats else []
    if consumers:
        weights = [max(each.unacked_messages, 1) for each in consumers]
        total = sum(weight * each.avg_messages_per_entry for weight, each in zip(weights, consumers, strict=True))
        return total / sum(weights)
    if topic is not None and topic.msg_in_counter > 0 and internals.entries_added_counter > 0:
        return max(topic.msg_in_counter / internals.entries_added_counter, 1.0)
    return None
