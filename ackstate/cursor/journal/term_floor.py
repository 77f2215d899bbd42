"""Keeps the terms of a new cursor above those of every deleted cursor of the store.

An owner finds out by the term of the record whether the record is its own. The record of a deleted cursor is gone, so a
cursor that is created under the same name must not begin with a term that an owner of the deleted one may still have.
One value serves the whole store.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ackstate.stores.base import ABSENT, DamagedValueError, StoreError, VersionMismatchError

if TYPE_CHECKING:
    from ackstate.stores.base import MetadataStore

PATH = "/cursor-terms"
TERM_AFTER_LOSS = 2**40
"""Above the number of times that any cursor was opened: added if the last term is lost."""

_ATTEMPTS = 10
_DIGITS_MAX = 18


def term_floor(metadata: MetadataStore) -> int:
    """Return the highest term of any deleted cursor, or more; 0 if none was deleted.

    Raises:
        StoreError: The storage failed.
    """
    return _read(metadata)[0]


def raise_term_floor(metadata: MetadataStore, term: int) -> None:
    """Keep the terms of later cursors above one; durable when this returns.

    Raises:
        StoreError: The storage failed.
    """
    for _ in range(_ATTEMPTS):
        floor, version = _read(metadata)
        if floor >= term:
            return
        with suppress(VersionMismatchError):
            metadata.put(PATH, b"%d" % term, expected_version=version)
            return
    raise StoreError(f"{PATH}: the value kept changing")


def term_after_loss(metadata: MetadataStore, version: int) -> int:
    """Return a term above that of any owner of a cursor whose record, at a version, is lost or damaged."""
    return term_floor(metadata) + TERM_AFTER_LOSS + max(version, 0)


def _read(metadata: MetadataStore) -> tuple[int, int]:
    """Return the floor and the version of the value; for a damaged value, a floor above any that it can have had."""
    try:
        found = metadata.get(PATH)
    except DamagedValueError as error:
        return 2 * TERM_AFTER_LOSS + error.version, error.version
    if found is None:
        return 0, ABSENT
    if not found.data.isdigit() or len(found.data) > _DIGITS_MAX:
        return 2 * TERM_AFTER_LOSS + found.version, found.version
    return int(found.data), found.version
