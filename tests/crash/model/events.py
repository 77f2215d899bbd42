"""The events of a schedule, by name, with their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from crash.model import broker_events, client_events, deletion, round_events, trims

if TYPE_CHECKING:
    from collections.abc import Callable


class ModelEvent(NamedTuple):
    """An event of a schedule.

    Attributes:
        weight: Relative frequency.
        happen: Applies the event to a subscription of a simulation.
    """

    weight: float
    happen: Callable[..., Any]


EVENTS = {
    "publish": ModelEvent(14, client_events.publish),
    "fall_behind": ModelEvent(4, client_events.fall_behind),
    "dispatch": ModelEvent(34, round_events.dispatch_some),
    "ack_some": ModelEvent(34, client_events.ack_some),
    "ack_late": ModelEvent(3, client_events.ack_late),
    "ack_cumulative": ModelEvent(1, client_events.ack_cumulative),
    "ack_many": ModelEvent(2, client_events.ack_many),
    "ack_into_batch": ModelEvent(3, client_events.ack_into_batch),
    "nack": ModelEvent(6, client_events.nack),
    "close_consumer": ModelEvent(2, client_events.close_consumer),
    "persist": ModelEvent(7, broker_events.persist),
    "persist_in_vain": ModelEvent(5, broker_events.persist_in_vain),
    "promote": ModelEvent(2, broker_events.promote),
    "tick": ModelEvent(6, broker_events.tick),
    "persist_together": ModelEvent(5, broker_events.persist_together),
    "set_cursor_properties": ModelEvent(2, broker_events.set_cursor_properties),
    "go_on_before": ModelEvent(3, broker_events.go_on_before),
    "wait": ModelEvent(8, broker_events.wait),
    "change_limits": ModelEvent(2, broker_events.change_limits),
    "change_broker_limit": ModelEvent(1, broker_events.change_broker_limit),
    "break_ledgers": ModelEvent(1.5, broker_events.break_ledgers),
    "mend_ledgers": ModelEvent(3, broker_events.mend_ledgers),
    "crash": ModelEvent(0, broker_events.crash),
    "reopen": ModelEvent(1, broker_events.reopen),
    "seek": ModelEvent(1, broker_events.seek),
    "seek_in_vain": ModelEvent(2, broker_events.seek_in_vain),
    "skip": ModelEvent(1, client_events.skip),
    "clear_backlog": ModelEvent(0.3, client_events.clear_backlog),
    "wait_for_gate": ModelEvent(2, broker_events.wait_for_gate),
    "open_damaged_copy": ModelEvent(1, broker_events.open_damaged_copy),
    "delete": ModelEvent(0.7, deletion.delete),
    "trim": ModelEvent(2, trims.trim),
    "lose_ledger": ModelEvent(0.4, trims.lose_ledger),
    "ack": ModelEvent(0, client_events.ack),
    "ack_up_to": ModelEvent(0, client_events.ack_up_to),
    "give_back": ModelEvent(0, client_events.give_back),
}
"""The events by name; those of weight 0 are only called by explicit stories."""
