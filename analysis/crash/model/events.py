"""What may happen in a schedule, by name, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.crash.model import traffic, upkeep

if TYPE_CHECKING:
    from collections.abc import Callable


class Event(NamedTuple):
    """Something that may happen.

    Attributes:
        weight: How often, beside the others.
        happen: What, to a subscription of a schedule.
    """

    weight: float
    happen: Callable[..., Any]


EVENTS = {
    "publish": Event(14, traffic.publish),
    "fall_behind": Event(4, traffic.fall_behind),
    "dispatch": Event(34, traffic.dispatch),
    "ack_some": Event(34, traffic.ack_some),
    "ack_late": Event(3, traffic.ack_late),
    "ack_cumulative": Event(1, traffic.ack_cumulative),
    "ack_many": Event(2, traffic.ack_many),
    "ack_into_batch": Event(3, traffic.ack_into_batch),
    "nack": Event(6, traffic.nack),
    "close_consumer": Event(2, traffic.close_consumer),
    "persist": Event(7, upkeep.persist),
    "persist_in_vain": Event(5, upkeep.persist_in_vain),
    "promote": Event(2, upkeep.promote),
    "tick": Event(6, upkeep.tick),
    "persist_together": Event(5, upkeep.persist_together),
    "set_cursor_properties": Event(2, upkeep.set_cursor_properties),
    "go_on_before": Event(3, upkeep.go_on_before),
    "wait": Event(8, upkeep.wait),
    "change_limits": Event(2, upkeep.change_limits),
    "change_broker_limit": Event(1, upkeep.change_broker_limit),
    "break_ledgers": Event(1.5, upkeep.break_ledgers),
    "mend_ledgers": Event(3, upkeep.mend_ledgers),
    "crash": Event(0, upkeep.crash),
    "reopen": Event(1, upkeep.reopen),
    "seek": Event(1, upkeep.seek),
    "seek_in_vain": Event(2, upkeep.seek_in_vain),
    "skip": Event(1, traffic.skip),
    "clear_backlog": Event(0.3, traffic.clear_backlog),
    "wait_for_gate": Event(2, upkeep.wait_for_gate),
    "open_damaged_copy": Event(1, upkeep.open_damaged_copy),
    "ack": Event(0, traffic.ack),
    "ack_up_to": Event(0, traffic.ack_up_to),
    "give_back": Event(0, traffic.give_back),
}
"""By name; those of weight 0 are called by whoever tells a story."""
