"""Opens a cursor: takes it over with its durable state, or creates it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Repair
from ackstate.cursor.journal.journal import Journal
from ackstate.cursor.journal.pulsar import reopened
from ackstate.cursor.journal.recovery import report_of
from ackstate.deleted_ranges import DeletedRanges
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position, check_position
from ackstate.wire.native import check_cursor_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ackstate.cursor.journal.recovery import StoredCursor
    from ackstate.cursor.persist.persister import Persister
    from ackstate.cursor.persist.round import Round
    from ackstate.cursor.results import RecoveryReport
    from ackstate.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorOpening:
    """A cursor to be opened or created.

    Attributes:
        topic: Not empty.
        subscription: Not empty.
        ledgers: The message log's ledgers; the caller continues to append to it.
        config: How to persist.
        repair: How to repair the stored cursor if it cannot be read. The repair is durable when the cursor is open.
        start: The position that a new cursor reads first, as in `ManagedCursor.reset`; None for the first entry.
        properties: Those of a new cursor, of the application and of the broker.
        check: Raises an error, before anything is written, unless the caller may open the cursor.

    Raises:
        TypeError, ValueError: The log is no `LedgerMap`, the start no position, or no record can hold a property.
    """

    topic: str
    subscription: str
    ledgers: LedgerMap
    config: CursorConfig = field(default_factory=CursorConfig)
    repair: Repair = Repair.NONE
    start: Position | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        if not isinstance(self.ledgers, LedgerMap):
            raise TypeError(f"ledgers must be a LedgerMap, such as log.ledgers, got a {type(self.ledgers).__name__}")
        if self.start is not None:
            check_position(self.start)
        check_cursor_properties(self.properties)

    def journal(self, store: Store) -> tuple[Journal, StoredCursor | None]:
        """Take the journal over, as `Journal.open`."""
        return Journal.open(
            store, topic=self.topic, subscription=self.subscription, form=self.config.journal_format,
            metadata_bytes_max=self.config.metadata_bytes_max,
            ledgers=self.ledgers, repair=self.repair, check=self.check,
        )  # fmt: skip


def recover_or_create(
    persister: Persister, found: StoredCursor | None, opening: CursorOpening, *, now_ms: int
) -> RecoveryReport:
    """Begin with the stored cursor, and make necessary changes of it durable; create it if there is none."""
    state, form = persister.state, persister.journal.form
    if found is None:
        _create(persister, opening, now_ms=now_ms)
        return report_of(None, form.name, state.mark_delete)
    report, content = report_of(found, form.name, state.mark_delete), found.recovered.content
    if not form.has_deltas:
        content = reopened(content, state.ledgers)
    is_changed = found.is_repaired or content.mark_delete != report.mark_delete or found.recovered.is_idle
    state.restore(content.mark_delete, content.deleted, batch=content.batch, properties=content.properties)
    if is_changed or found.form.name is not form.name:
        state.require_persist()  # A cursor in another format is converted by its next persist.
    if is_changed:
        _write(persister, lambda: persister.begin(now_ms=now_ms))
    return report


def _create(persister: Persister, opening: CursorOpening, *, now_ms: int) -> None:
    """Make a new cursor durable.

    One with a start goes to the metadata store, as every new one does in Pulsar's format. A ledger of it, left over by
    a crash before its record was written, would look like a journal whose record was lost.
    """
    state, start = persister.state, opening.start
    persister.journal.check_room_for(opening.properties)
    persister.journal.cursor_properties = dict(opening.properties)
    if start is not None:
        first = state.ledgers.next_valid(Position(start[0], start[1] - 1))
        state.restore(state.ledgers.previous(first), DeletedRanges(), batch=BatchIndexes(), properties={})
    _write(persister, lambda: persister.begin_creation(in_metadata=start is not None, now_ms=now_ms))


def _write(persister: Persister, begin: Callable[[], Round | None]) -> None:
    """Write a round of a cursor that no one else has yet."""
    with persister.writing:
        begun = begin()
        if begun is not None:
            assert not begun.appends, "a cursor that is being opened has no ledger yet"
            begun.write()
