"""Checks that an offered repair has exactly the announced effect, and that the cursor works after it."""

from __future__ import annotations

from contextlib import closing

from ackstate.cursor.formats import Repair
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import decode_record
from ackstate.position import Position
from crash.damage.story import SUBSCRIPTION, open_story
from crash.observed_cursor import NUMBERING, TOPIC
from crash.steps import LEDGERS

_PATH = cursor_path(TOPIC, SUBSCRIPTION)


def repaired(medium, files, repair):
    """Open a damaged copy with a repair, and return the cursor's state, and the acks that it must have."""
    with closing(medium.open(files)) as store:
        least = _least(store, repair)
        return open_story(store, repair=repair)[1].state, least


def what_fails_after(medium, state):
    """Open a just repaired cursor again, and return an error text; empty if it works.

    Its state must be unchanged, and one ack written there must survive another opening.
    """
    with closing(medium.reopen()) as store:
        cursor, opened = open_story(store)
        if opened.state != state._replace(is_new=False):
            return f"{opened.state} when it is opened again, but it was {state}"
        position = _first_unacked(cursor)
        receipt = cursor.ack(position, now_ms=600_000)
        cursor.persist(now_ms=600_000)
        if not cursor.durable(receipt):
            return f"the ack of {position} cannot be made durable"
    with closing(medium.reopen()) as store:
        cursor, opened = open_story(store)
        is_there = not opened.state.is_new and not opened.is_reported and cursor.is_acked(position)
        return (
            ""
            if is_there and state.acked <= opened.state.acked
            else f"{opened.state} after {position} was acked on top of {state}"
        )


def what_it_gave_up(repair, state, least, story):
    """Check that a repaired state gives up exactly the announced acks; return an error text, empty if it does."""
    if lost := least - state.acked:
        return f"{lost} below the mark-delete of the record are lost"
    if repair is Repair.START_ANEW:
        return f"it starts with {state}" if state.acked else ""
    is_older = repair in {Repair.DISCARD_DAMAGED_RECORDS, Repair.USE_ORPHAN_JOURNAL}
    was_durable = any(state.acked == earlier.acked for earlier in story.states)
    return f"{state}, which never was durable" if is_older and not was_durable else ""


def _least(store, repair):
    value = store.metadata.get(_PATH) if repair is Repair.USE_METADATA_SNAPSHOT else None
    mark_delete = None if value is None else decode_record(value.data).record.mark_delete
    return NUMBERING.nothing if mark_delete is None else NUMBERING.up_to(*mark_delete)


def _first_unacked(cursor):
    positions = (Position(ledger_id, entry_id) for ledger_id, count in LEDGERS.items() for entry_id in range(count))
    return next(position for position in positions if not cursor.is_acked(position))
