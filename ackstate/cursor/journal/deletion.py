"""Deletes a subscription: its record and its journals.

A record that marks the deletion of the subscription takes the place of the cursor's by compare-and-set. From then on
there is no cursor: an owner that has it open can write no record any more, and an open creates a new cursor in place of
that record. Then the ledgers are deleted, which were listed before the record was put, and last the record. So a crash
between any two steps leaves the subscription as it was or no subscription, and leftovers that the next open of that
name or the next deletion deletes.

The terms of later cursors are above that of the deleted one (`term_floor`), so that its owner cannot take the record of
a new cursor of the same name for its own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.journal.cursor_properties import DELETED_PROPERTY
from ackstate.cursor.journal.format import CursorRecord, CursorState
from ackstate.cursor.journal.journal import cursor_owner, cursor_path
from ackstate.cursor.journal.native import NativeFormat
from ackstate.cursor.journal.recovery import decode_record
from ackstate.cursor.journal.term_floor import raise_term_floor, term_after_loss
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CorruptStateError
from ackstate.position import Position
from ackstate.stores.base import ABSENT, DamagedValueError, StoreError, VersionMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import MetadataStore, Store

_ATTEMPTS = 10


class _Found(NamedTuple):
    """The record of a subscription: its term, its version, and whether it marks a deletion."""

    term: int
    version: int
    is_deleted: bool


def delete_subscription(store: Store, *, topic: str, subscription: str) -> bool:
    """Delete a subscription, also one that cannot be read, or the leftovers of one after a crash.

    If it is open, its owner is fenced: every later persist of it raises `CursorFencedError`. A subscription that is
    opened under this name afterwards is new.

    Args:
        store: Where.
        topic: The name of the topic.
        subscription: The name of the subscription.

    Returns:
        Whether there was anything to delete.

    Raises:
        TypeError, ValueError: A name is no text, or is empty.
        UnsupportedVersionError: Its record has another version; nothing was deleted.
        StoreError, CorruptStateError: The storage failed. The subscription is as it was, or there is none and some of
            its bytes are left: call again, or open a new subscription of that name.

    Complexity: O(its ledgers); in some stores O(ledgers of the store).
    """
    return delete_cursor(store, cursor_path(topic, subscription))


def delete_cursor(store: Store, path: str, *, check: Callable[[], object] = lambda: None) -> bool:
    """Delete the cursor of a path as `delete_subscription`."""
    is_marked = False
    for _ in range(_ATTEMPTS):
        # Listed before the record is put. If another owner creates the cursor again and these include a ledger of it,
        # then its record cannot be put after this one, or this one fails.
        leftovers = store.ledgers.owned_by(cursor_owner(path))
        found = _find(store.metadata, path)
        if found is None and not leftovers:
            return is_marked
        check()
        if is_marked and found is not None and not found.is_deleted:
            return True  # A new subscription was created meanwhile.
        version = _mark_deleted(store, path, found)
        if version is None:
            continue
        is_marked = True
        for ledger_id in leftovers:
            store.ledgers.delete(ledger_id)
        if not store.ledgers.owned_by(cursor_owner(path)):
            with suppress(VersionMismatchError):  # Else a new subscription was created meanwhile.
                store.metadata.delete(path, expected_version=version)
            return True
    raise StoreError(f"{path}: the record kept changing while the subscription was deleted")


def _find(metadata: MetadataStore, path: str) -> _Found | None:
    """Return the content of the record; None without one. A record that cannot be read is replaced like any other.

    Raises:
        UnsupportedVersionError: It has another version.
        StoreError: The storage failed.
    """
    try:
        value = metadata.get(path)
    except DamagedValueError as error:
        return _Found(term_after_loss(metadata, error.version), error.version, is_deleted=False)
    if value is None:
        return None
    try:
        record = decode_record(value.data).record
    except CorruptStateError:
        return _Found(term_after_loss(metadata, value.version), value.version, is_deleted=False)
    return _Found(record.term, value.version, record.is_deleted)


def _mark_deleted(store: Store, path: str, found: _Found | None) -> int | None:
    """Put the record of a deleted subscription, and return its version; None if the record was changed meanwhile."""
    metadata = store.metadata
    term, version = (term_after_loss(metadata, ABSENT), ABSENT) if found is None else found[:2]
    raise_term_floor(metadata, term + 1)
    nothing = CursorState(Position(0, -1), DeletedRanges(), BatchIndexes(), {})
    record = CursorRecord(None, 0, term + 1, nothing.mark_delete, nothing, {DELETED_PROPERTY: ""})
    try:
        return metadata.put(path, NativeFormat().encode_record(record), expected_version=version)
    except VersionMismatchError:
        return None
