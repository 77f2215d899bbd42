"""Imports ack states into topics of a cluster that no broker owns: the cursors are opened and written in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.pulsar.transfer.fit import check_fingerprints, fitted
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Format
from ackstate.cursor.managed import ManagedCursor
from ackstate.errors import AckStateError
from ackstate.stores.pulsar_ownership import hold_topic

if TYPE_CHECKING:
    from ackstate.analysis.pulsar.transfer.ack_state_file import ExportedCursor
    from ackstate.cursor.journal.format import CursorState
    from ackstate.position import Position
    from ackstate.stores.pulsar_layout import PulsarLayout

_COUNT_MAX = 2**31


@dataclass(frozen=True, slots=True)
class ImportedCursor:
    """The outcome of an import for one cursor.

    Attributes:
        topic: Its topic.
        subscription: Its subscription, under the name that it now has.
        is_new: Whether the import created it; None if that is not known.
        newly_acked: How many entries were not acked before; None if that is not known.
        mark_delete: Its mark-delete position, if it is known.
        range_count: Its individually deleted ranges, if they are known.
        batch_count: How many partly acked batches of the file it now has.
        remarks: Parts of the file that were not imported.
        missing_acks: How many acks of the file it does not have; None if that was not checked.
    """

    topic: str
    subscription: str
    is_new: bool | None
    newly_acked: int | None
    mark_delete: Position | None
    range_count: int | None
    batch_count: int
    remarks: tuple[str, ...] = ()
    missing_acks: int | None = None


def import_in_place(
    cluster: PulsarLayout, cursor: ExportedCursor, *, topic: str, subscription: str, now_ms: int
) -> ImportedCursor:
    """Add the acks of an exported cursor to a subscription, which is created if it does not exist; durable at return.

    Acks that the subscription already has are kept. Idempotent.

    Args:
        cluster: Where; opened for writing.
        cursor: The exported cursor.
        topic: The topic to import into: the one that was exported, or the same under another name.
        subscription: The subscription to import into.
        now_ms: The present.

    Raises:
        TopicOwnedError: A broker owns the topic; nothing was changed.
        OtherTopicError: The topic is another one; nothing was changed.
        CursorFencedError: A broker has opened the cursor meanwhile.
        AckStateError: There is no such topic; or the state cannot be read or written.
    """
    with hold_topic(cluster.nodes, topic):
        log = cluster.find_message_log(topic)
        if log is None:
            raise AckStateError(
                f"{cluster.nodes.name} has no topic {topic}, or its size is unknown; nothing was changed"
            )
        state = fitted(cursor, log.ledgers)
        check_fingerprints(cursor, log.ledgers, cluster.ledgers)
        opened = ManagedCursor.open(
            cluster,
            topic=topic,
            subscription=subscription,
            ledgers=log.ledgers,
            # The cursor ledger holds everything: 4.2.4 does not read batches back from a record.
            config=CursorConfig(format=Format.PULSAR, range_count_max=_COUNT_MAX, batch_count_max=None),
            properties=cursor.cursor_properties,
            now_ms=now_ms,
        )
        is_new = opened.recovery_report.records_replayed == 0 and opened.recovery_report.source.value == "new"
        newly_acked = apply_state(opened, state, now_ms=now_ms)
        result = opened.persist(now_ms=now_ms)
        if result.messages_cut or result.batches_cut:
            raise AckStateError(
                f"{topic}, {subscription}: {result.messages_cut} acks and {result.batches_cut} batches did not fit"
            )
        return ImportedCursor(
            topic,
            subscription,
            is_new,
            newly_acked,
            opened.mark_delete_position,
            opened.deleted.range_count,
            len(state.batch),
        )


def apply_state(cursor: ManagedCursor, state: CursorState, *, now_ms: int) -> int:
    """Ack everything that a state has acked, and return how many entries were not acked before."""
    newly_acked = 0
    if state.mark_delete >= cursor.mark_delete_position:
        newly_acked += cursor.mark_delete(state.mark_delete, properties=state.properties, now_ms=now_ms).newly_acked
    for ledger_id, bitmap in state.deleted.bitmaps():
        newly_acked += cursor.ack_entries(ledger_id, bitmap, now_ms=now_ms).newly_acked
    for position, words in state.batch.items():
        if not cursor.is_acked(position):
            newly_acked += cursor.ack_batch(position, words, now_ms=now_ms).newly_acked
    return newly_acked
