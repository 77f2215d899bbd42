"""Compares a subscription in a broker's memory with an exported cursor, after an import through the broker."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ackstate.analysis.admin_client import topic_path
from ackstate.analysis.pulsar.snapshot.internal_stats import SnapshotError, TopicInternals, acked, read_object
from ackstate.analysis.pulsar.transfer.fit import fitted
from ackstate.ledger_map import LedgerMap
from ackstate.topic_name import persistence_name

if TYPE_CHECKING:
    from ackstate.analysis.pulsar.snapshot.admin_rest import PulsarAdmin
    from ackstate.analysis.pulsar.snapshot.internal_stats import Acked
    from ackstate.analysis.pulsar.transfer.ack_state_file import ExportedCursor
    from ackstate.analysis.pulsar.transfer.through_broker import ImportedCursor

_LOOKS = 4


def checked(
    admin: PulsarAdmin, cursor: ExportedCursor, imported: ImportedCursor, *, pause_s: float = 0.5
) -> ImportedCursor:
    """Return the outcome of an import with the broker's numbers, and the acks that did not reach it.

    The broker handles acks after the client has sent them, so its state is read some times while acks are missing.

    Args:
        admin: The broker's admin interface.
        cursor: The exported cursor.
        imported: The outcome so far.
        pause_s: The time between two requests.

    Raises:
        AdminError: The broker does not answer.
        SnapshotError: The answer is malformed, or the subscription is not in it.
        OtherTopicError: The topic is not the one that was exported.
    """
    what = f"{imported.topic}, {imported.subscription}"
    for look in range(_LOOKS):
        if look:
            time.sleep(pause_s)
        answer = admin.get(f"{topic_path(imported.topic)}/internalStats")
        internals = read_object(TopicInternals, answer, what=f"{imported.topic}: internalStats")
        found = internals.cursors.get(persistence_name(imported.subscription))
        if found is None:
            raise SnapshotError(f"{what}: the broker has no such subscription")
        counts = internals.entry_counts()
        state = acked(found, counts, what=what)
        missing = missing_acks(cursor, state, LedgerMap.from_counts(counts))
        if not missing:
            break
    remarks = imported.remarks
    if missing:
        remarks = (*remarks, f"{missing:,} acks did not reach the broker: repeat the import")
    return replace(
        imported,
        mark_delete=state.mark_delete,
        range_count=state.deleted.range_count,
        missing_acks=missing,
        remarks=remarks,
    )


def missing_acks(cursor: ExportedCursor, found: Acked, log: LedgerMap) -> int:
    """Return the number of entries that an exported cursor has acked, and a broker has not.

    Raises:
        OtherTopicError: The topic is not the one that was exported.
    """
    state, missing = fitted(cursor, log), 0
    if state.mark_delete > found.mark_delete:
        acked_between = found.deleted.copy().take_at_most(state.mark_delete)
        acked_between.discard_missing(log)
        missing = log.count_between(found.mark_delete, state.mark_delete) - len(acked_between)
    above = state.deleted.copy()
    above.remove_at_most(max(state.mark_delete, found.mark_delete))
    above.difference_update(found.deleted)
    return missing + len(above)
