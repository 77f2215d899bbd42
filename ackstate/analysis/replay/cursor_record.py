"""Encodes the cursor of a replay for a state: its persisted records, and the state in memory that is not persisted.

Records and pointer have the cursor's own format and are read by the library, as after a crash. The other fields hold
state that exists only in memory. Only acks of whole entries are stored: a replay has no others.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.replay.latest_entry_store import LatestEntryStore
from ackstate.analysis.replay.state_fields import exact_entries, text_of
from ackstate.cursor.journal.journal import Journal, cursor_owner, cursor_path
from ackstate.cursor.journal.recovery import Recovery
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.store import ABSENT
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.replay.state_fields import Fields
    from ackstate.cursor.journal.format import CursorState
    from ackstate.cursor.store import Store
    from ackstate.delivery_ruler import DeliveryRuler
    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.memory import MemoryStore

TOPIC, SUBSCRIPTION = "replayed", "replayed"
"""Names of every cursor of a replay."""


class RecordPlace(NamedTuple):
    """The place in which a cursor is restored.

    Attributes:
        policy: Its settings.
        ledgers: The message log.
        store: An empty store, which receives the persisted records.
        reached: The same store as seen by the cursor.
    """

    policy: Policy
    ledgers: LedgerMap
    store: MemoryStore | LatestEntryStore
    reached: Store


def cursor_record(cursor: ManagedCursor) -> dict[str, Any]:
    """Return the fields of a cursor between two persists for `cursor_of`, without those of the limiter."""
    state, persister = cursor._state, cursor._persister
    unpersisted, planner, trigger = state.unpersisted, persister.planner, persister.trigger
    assert not any((unpersisted.in_flight, state.batch, state.properties, state.resets_begun))
    return {
        "mark_delete": list(state.mark_delete),
        "acked": exact_entries(state.deleted.bitmaps()),
        "fresh": exact_entries(unpersisted.fresh.bitmaps()),
        "held_back": exact_entries(unpersisted.held.bitmaps()),
        "cut_off": exact_entries(unpersisted.cut.bitmaps()),
        "redelivery_if_crashed": cursor.redelivery_if_crashed,
        "is_dirty": state.is_dirty,
        "is_permit_refused": state.is_dirty and not trigger._is_new(),
        "last_persist_ms": trigger._last_persist_ms,
        "ledger_begun_ms": planner._ledger_begun_ms,
        "ledger_failure_count": planner._ledger_failures,
        "ledger_retry_at_ms": planner._retry_at_ms,
        "journal": _journal_record(persister.journal),
        "young_age": _ruler_record(persister.young_age.ruler),
    }


def cursor_of(fields: Fields, place: RecordPlace) -> ManagedCursor:
    """Restore a cursor and its store from fields that `cursor_record` returned under the same policy."""
    ledgers = place.ledgers
    journal, durable = fields.one("journal", lambda each: _journal_of(each, place))
    begun_ms = fields.signed("last_persist_ms")
    cursor = ManagedCursor(journal, ledgers, config=place.policy.cursor, now_ms=begun_ms)
    state, persister = cursor._state, cursor._persister
    planner, trigger = persister.planner, persister.trigger
    state.mark_delete, state.persisted_mark_delete = fields.position("mark_delete"), durable.mark_delete
    if state.mark_delete > ledgers.last_confirmed and state.mark_delete.entry_id >= 0:
        fields.refuse("mark_delete", f"at most the end of the message log, {ledgers.last_confirmed}", state.mark_delete)
    state.deleted = _ranges(fields, "acked", ledgers)
    unpersisted = state.unpersisted
    unpersisted.fresh = _ranges(fields, "fresh", ledgers)
    unpersisted.held = _ranges(fields, "held_back", ledgers)
    unpersisted.cut = _ranges(fields, "cut_off", ledgers)
    if unpersisted.held or unpersisted.cut:
        unpersisted._as_one = unpersisted.fresh.copy()
        unpersisted._as_one.update(unpersisted.held)
        unpersisted._as_one.update(unpersisted.cut)
        unpersisted.nothing_held_back = False
    _check_durable(fields, cursor, durable)
    state.acked_count = fields.integer("redelivery_if_crashed")
    persister.is_truncated = bool(unpersisted.cut)
    state.accepted_number = int(fields.flag("is_dirty"))
    trigger._decided_number = int(fields.flag("is_permit_refused"))
    planner._ledger_begun_ms = fields.signed("ledger_begun_ms")
    planner._ledger_failures = fields.integer("ledger_failure_count")
    planner._retry_at_ms = fields.signed("ledger_retry_at_ms")
    fields.one("young_age", lambda each: _restore_ruler(persister.young_age.ruler, each))
    cursor.reader.rewind()
    fields.check(cursor._check)
    return cursor


def _ranges(fields: Fields, name: str, ledgers: LedgerMap) -> DeletedRanges:
    entries = fields.entries(name)
    for ledger_id, bitmap in entries.items():
        if not bitmap:
            fields.refuse(name, "without empty bitmaps", ledger_id)
        ledgers.check_written(Position(ledger_id, bitmap.max()))
    return DeletedRanges.from_bitmaps(entries.items())


def _check_durable(fields: Fields, cursor: ManagedCursor, durable: CursorState) -> None:
    """Refuse acks that are neither persisted nor pending, and entries that are either but not acked."""
    known = durable.deleted.copy()
    known.remove_at_most(cursor.mark_delete_position)
    for ranges in cursor._state.unpersisted.sets():
        known.update(ranges)
    if dict(known.bitmaps()) != dict(cursor.deleted.bitmaps()):
        fields.refuse("acked", "the union of the journal, fresh, held_back and cut_off", str(cursor.deleted))


def _journal_record(journal: Journal) -> dict[str, Any]:
    value = journal.store.metadata.get(journal.path)
    assert value is not None
    ledger_id, ledgers = journal._pointed_at, journal.store.ledgers
    count = 0 if ledger_id is None else ledgers.last(ledger_id) + 1
    first = 0 if journal.form.has_deltas else max(count - 1, 0)
    entries = [] if ledger_id is None else ledgers.read(ledger_id, first, count)
    return {
        "pointer": text_of(value.data), "entry_count": count, "last_entries": [text_of(each) for each in entries],
        "is_open": not journal.needs_ledger, "snapshot_bytes": journal.snapshot_bytes,
        "delta_bytes": journal.delta_bytes,
    }  # fmt: skip


def _journal_of(fields: Fields, place: RecordPlace) -> tuple[Journal, CursorState]:
    """Return a journal, and the state that a recovery would read."""
    form = place.policy.cursor.journal_format
    journal = Journal(
        place.reached, topic=TOPIC, subscription=SUBSCRIPTION, form=form,
        metadata_bytes_max=place.policy.cursor.metadata_bytes_max,
    )  # fmt: skip
    pointer = fields.data("pointer")
    count, entries = fields.integer("entry_count"), fields.all_data("last_entries")
    ledger_id = form.decode_record(pointer, place.ledgers).cursor_ledger_id
    expected = 0 if ledger_id is None else count if form.has_deltas else 1
    if len(entries) != expected or (count > 0) != (ledger_id is not None):
        fields.refuse(
            "last_entries", f"{expected} of {count} entries, as the pointer and the format require", len(entries)
        )
    if ledger_id is not None:
        _put_ledger(place.store, ledger_id, entries, count)
    place.store.metadata.put(journal.path, pointer, expected_version=ABSENT)
    found = Recovery(place.store, journal.path, place.ledgers).find(())
    assert found is not None
    if found.recovered.discarded_offset >= 0:
        fields.refuse("last_entries", "undamaged records", found.recovered.discarded_reason)
    journal._version, journal._epoch, journal._term = found.version, found.record.epoch, found.record.term
    journal._mark_delete, journal._pointed_at = found.record.mark_delete, ledger_id
    if fields.flag("is_open"):
        if ledger_id is None:
            fields.refuse("is_open", "false without a ledger", True)
        journal._open_ledger, journal._sequence, journal._chain = ledger_id, count, form.chain(entries[-1])
    journal.snapshot_bytes, journal.delta_bytes = fields.integer("snapshot_bytes"), fields.integer("delta_bytes")
    return journal, found.recovered.content


def _put_ledger(store: MemoryStore | LatestEntryStore, ledger_id: int, entries: list[bytes], count: int) -> None:
    owner = cursor_owner(cursor_path(TOPIC, SUBSCRIPTION))
    if isinstance(store, LatestEntryStore):
        store.restore(ledger_id, owner, entries[-1], count=count)
        return
    store.disk.next_ledger_id = ledger_id
    store.ledgers.create(owner)
    store.ledgers.append_all([(ledger_id, entry) for entry in entries])


def _ruler_record(ruler: DeliveryRuler) -> dict[str, Any]:
    answers = [(age_ms, *each) for age_ms, found in ruler._answers.items() for each in found]
    times_ms, positions = ruler.marks()
    return {
        "marks": {"ts_ms": list(times_ms), **_columns(positions)},
        "answers": {
            "age_ms": [each[0] for each in answers], "ts_ms": [each[1] for each in answers],
            **_columns([each[2] for each in answers]),
        },
        "latencies": None,
    }  # fmt: skip


def _restore_ruler(ruler: DeliveryRuler, fields: Fields) -> None:
    fields.one("marks", lambda each: _restore_marks(ruler, each))
    fields.one("answers", lambda each: _restore_answers(ruler, each))
    if fields.optional("latencies", lambda _: True):
        fields.refuse("latencies", "null", "an object")
    fields.check(ruler._check)


def _restore_marks(ruler: DeliveryRuler, fields: Fields) -> None:
    times_ms = fields.integers("ts_ms")
    positions = _positions(fields, len(times_ms))
    if len(times_ms) > ruler.room:
        fields.refuse("ts_ms", f"a list of at most {ruler.room} times", len(times_ms))
    if any(before >= after for before, after in pairwise(times_ms)):
        fields.refuse("ts_ms", "rising with every mark", times_ms)
    if any(before >= after for before, after in pairwise(positions)):
        fields.refuse("entry_id", "of rising positions", positions)
    ruler.record_many(positions, times_ms)


def _restore_answers(ruler: DeliveryRuler, fields: Fields) -> None:
    ages_ms = fields.integers("age_ms", least=0)
    times_ms = fields.integers("ts_ms", count=len(ages_ms))
    for age_ms, ts_ms, position in zip(ages_ms, times_ms, _positions(fields, len(ages_ms)), strict=True):
        ruler._answers.setdefault(age_ms, []).append((ts_ms, position))


def _columns(positions: Sequence[Position]) -> dict[str, list[int]]:
    return {"ledger_id": [each.ledger_id for each in positions], "entry_id": [each.entry_id for each in positions]}


def _positions(fields: Fields, count: int) -> list[Position]:
    ledger_ids = fields.integers("ledger_id", least=0, most=LEDGER_ID_MAX, count=count)
    entry_ids = fields.integers("entry_id", least=-1, most=ENTRY_ID_MAX, count=count)
    return list(map(Position, ledger_ids, entry_ids))
