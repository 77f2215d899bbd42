"""Begins a cursor with its durable state, or creates it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.journal.pulsar import reopened
from ackstate.cursor.journal.recovery import report_of
from ackstate.cursor.persist.persist_all import execute, result_of
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import Position, check_position
from ackstate.wire.native_pointer import check_cursor_properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.cursor.journal.recovery import StoredCursor
    from ackstate.cursor.persist.persister import Persister
    from ackstate.cursor.results import RecoveryReport


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a new cursor begins; a stored one is not changed by it.

    Attributes:
        start: The position that it reads first; None for the first entry of the log.
        properties: Its cursor properties.

    Raises:
        TypeError, ValueError: The start is no position, or no record can hold a property.
    """

    start: Position | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.start is not None:
            check_position(self.start)
        check_cursor_properties(self.properties)


def recover_or_create(
    persister: Persister, found: StoredCursor | None, beginning: Beginning, *, now_ms: int
) -> RecoveryReport:
    """Begin with the stored cursor, and make necessary changes of it durable; create it if there is none."""
    state, form = persister.state, persister.journal.form
    if found is None:
        _create(persister, beginning, now_ms=now_ms)
        return report_of(None, form.name, state.mark_delete)
    report, content = report_of(found, form.name, state.mark_delete), found.recovered.content
    if not form.has_deltas:
        content = reopened(content, state.ledgers)
    is_changed = found.is_repaired or content.mark_delete != report.mark_delete
    state.restore(content.mark_delete, content.deleted, batch=content.batch, properties=content.properties)
    if is_changed or found.form.name is not form.name:
        state.require_persist()  # A cursor in another format is converted by its next persist.
    if is_changed:
        (outcome,) = execute([persister], lambda each: each.begin(now_ms=now_ms))
        result_of(outcome)
    return report


def _create(persister: Persister, beginning: Beginning, *, now_ms: int) -> None:
    """Make a new cursor durable.

    One with a start goes to the metadata store, as every new one does in Pulsar's format. A ledger of it, left over by
    a crash before its record was written, would look like a journal whose record was lost.
    """
    state, start = persister.state, beginning.start
    persister.journal.cursor_properties = dict(beginning.properties)
    if start is not None:
        first = state.ledgers.next_valid(Position(start[0], start[1] - 1))
        state.restore(state.ledgers.previous(first), DeletedRanges(), batch=BatchIndexes(), properties={})
    (outcome,) = execute([persister], lambda each: each.begin_creation(in_metadata=start is not None, now_ms=now_ms))
    result_of(outcome)
