"""Opens the cursors of a store after a power cut, and finds what is left over of them."""

from __future__ import annotations

from functools import cache

from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.cursor.recovery import decode_record
from crash.observed_cursor import TOPIC, open_cursor, state_of

_LATER_MS = 10_000_000


def open_cursors(store, workload):
    config = workload.config
    return {
        subscription: state_of(open_cursor(store, subscription, config=config, now_ms=_LATER_MS))
        for subscription in workload.subscriptions
    }


@cache
def _names_of(subscription):
    path = cursor_path(TOPIC, subscription)
    return path, cursor_owner(path)


def broken_by_leftovers(store, subscriptions):
    """Check that each just opened cursor has exactly the ledger that its record names; return what is wrong."""
    for subscription in subscriptions:
        path, owner = _names_of(subscription)
        value, owned = store.metadata.get(path), store.ledgers.owned_by(owner)
        named = None if value is None else decode_record(value.data).record.cursor_ledger_id
        if owned != ([] if named is None else [named]):
            return f"{subscription}: ledgers {owned}, but the record names {named}"
    return None


def left_of(store, subscription):
    """Return the parts of a subscription that a store has, in words; None for nothing."""
    path, owner = _names_of(subscription)
    if store.metadata.get(path) is not None:
        return "its record"
    owned = store.ledgers.owned_by(owner)
    return f"ledgers {owned}" if owned else None
