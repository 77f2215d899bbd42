"""What may happen in a schedule, by name, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.crash.model import broker_events, client_events

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
    "publish": Event(14, client_events.publish),
    "fall_behind": Event(4, client_events.fall_behind),
    "dispatch": Event(34, client_events.dispatch),
    "ack_some": Event(34, client_events.ack_some),
    "ack_late": Event(3, client_events.ack_late),
    "ack_cumulative": Event(1, client_events.ack_cumulative),
    "ack_many": Event(2, client_events.ack_many),
    "ack_into_batch": Event(3, client_events.ack_into_batch),
    "nack": Event(6, client_events.nack),
    "close_consumer": Event(2, client_events.close_consumer),
    "persist": Event(7, broker_events.persist),
    "persist_in_vain": Event(5, broker_events.persist_in_vain),
    "promote": Event(2, broker_events.promote),
    "tick": Event(6, broker_events.tick),
    "persist_together": Event(5, broker_events.persist_together),
    "set_cursor_properties": Event(2, broker_events.set_cursor_properties),
    "go_on_before": Event(3, broker_events.go_on_before),
    "wait": Event(8, broker_events.wait),
    "change_limits": Event(2, broker_events.change_limits),
    "change_broker_limit": Event(1, broker_events.change_broker_limit),
    "break_ledgers": Event(1.5, broker_events.break_ledgers),
    "mend_ledgers": Event(3, broker_events.mend_ledgers),
    "crash": Event(0, broker_events.crash),
    "reopen": Event(1, broker_events.reopen),
    "seek": Event(1, broker_events.seek),
    "seek_in_vain": Event(2, broker_events.seek_in_vain),
    "skip": Event(1, client_events.skip),
    "clear_backlog": Event(0.3, client_events.clear_backlog),
    "wait_for_gate": Event(2, broker_events.wait_for_gate),
    "open_damaged_copy": Event(1, broker_events.open_damaged_copy),
    "ack": Event(0, client_events.ack),
    "ack_up_to": Event(0, client_events.ack_up_to),
    "give_back": Event(0, client_events.give_back),
}
"""By name; those of weight 0 are called by whoever tells a story."""
