"""Keeps a delay bucket from being deleted while a cursor's record refers to it.

Before a cursor writes a record that refers to a bucket, it puts a *pin*:
``/delay-references/<bucket id>/<cursor path>``. It deletes the pin only after a record without the bucket has taken the
place of that one. So whenever a crash comes, every bucket that a record refers to is pinned. A pin that no record needs
is deleted by the next open of its cursor.

Before a bucket is deleted, `BucketReferences.is_needed` closes it, ``/delay-references/<bucket id>``, and then looks
for pins. A cursor puts its pin and then looks whether the bucket is closed. So either the pin is seen or the bucket is
not referred to, also between processes. A cursor without acks releases buckets that are no longer live when its journal
is as old as ``ledger_rollover_ms``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, final
from urllib.parse import quote

from ackstate.cursor.store import ABSENT, DamagedValueError, LedgerNotFoundError, StoreError, VersionMismatchError
from ackstate.cursor.writes import DeleteValue, PutValue
from ackstate.errors import CorruptStateError
from ackstate.integers import check_within
from ackstate.position import LEDGER_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ackstate.cursor.steps import Steps
    from ackstate.cursor.store import LedgerStore, MetadataStore, Store

ROOT = "/delay-references"


@final
class BucketReferences:
    """Reports whether a bucket may be deleted, for all cursors of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_needed(self, bucket_id: int) -> bool:
        """Close a bucket to new references, and return whether a record may refer to it.

        To be called right before the bucket is deleted, and again later if it was needed. The marks of earlier calls
        for deleted buckets are removed.

        Raises:
            StoreError: The storage failed: the bucket must stay.

        Complexity: O(buckets that are pinned or closed).
        """
        check_within("bucket_id", bucket_id, least=0, most=LEDGER_ID_MAX)
        self._forget_deleted()
        with suppress(VersionMismatchError):
            self._store.metadata.put(_bucket_path(bucket_id), b"closed", expected_version=ABSENT)
        return bool(self._store.metadata.children(_bucket_path(bucket_id)))

    def _forget_deleted(self) -> None:
        metadata = self._store.metadata
        for bucket_id in _named_buckets(metadata):
            closed = metadata.get(_bucket_path(bucket_id))
            if closed is not None and not _exists(self._store.ledgers, bucket_id):
                with suppress(VersionMismatchError):
                    metadata.delete(_bucket_path(bucket_id), expected_version=closed.version)


@final
class HolePins:
    """The pins of one cursor, with those of its earlier owners, which can no longer write a record.

    One owner, one call at a time.

    Args:
        store: Where the pins are.
        path: The cursor's path in the metadata store.
        term: The owner's term, above that of any earlier owner.
        needed: The buckets that the cursor's record refers to.
    """

    def __init__(self, store: Store, path: str, *, term: int, needed: Collection[int] = ()) -> None:
        self._store = store
        self._path = path
        self._term = str(term).encode()
        # Pins that are there or may be, by bucket, and the version of each: None if it is unknown whether it is.
        self._versions: dict[int, int | None] = {}
        # The pins that a record of ours may need, now or after the next swing: their buckets cannot be deleted.
        self._usable = set(needed)
        # Pins that cannot be listed now are left to the next open; a pin that the record needs exists in any case.
        with suppress(StoreError, CorruptStateError):
            self._find()

    @property
    def bucket_ids(self) -> frozenset[int]:
        """The buckets that are or may be pinned."""
        return frozenset(self._versions)

    def pin(self, bucket_id: int) -> Steps[bool]:
        """Keep a bucket from being deleted; False if it is about to be, or is gone.

        Raises:
            StoreError: The storage failed; whether it is pinned is unknown.
        """
        if bucket_id in self._usable:
            return True
        version = self._versions.get(bucket_id)
        self._versions[bucket_id] = None
        self._versions[bucket_id] = yield from self._put(
            self._pin_path(bucket_id), ABSENT if version is None else version
        )
        is_closed = self._store.metadata.get(_bucket_path(bucket_id)) is not None
        if is_closed or not _exists(self._store.ledgers, bucket_id):
            return False
        self._usable.add(bucket_id)
        return True

    def keep_only(self, needed: Collection[int]) -> Steps[None]:
        """Release the other buckets: the record that the store holds refers to these at most.

        A pin is garbage, not state: where the storage refuses, the next call or the next open tries again.
        """
        self._usable.intersection_update(needed)
        for bucket_id in self._versions.keys() - set(needed):
            with suppress(StoreError, CorruptStateError):
                yield from self._unpin(bucket_id)
                del self._versions[bucket_id]

    def _find(self) -> None:
        for bucket_id in _named_buckets(self._store.metadata):
            found = self._store.metadata.get(self._pin_path(bucket_id))
            if found is not None:
                self._versions[bucket_id] = found.version

    def _put(self, path: str, version: int) -> Steps[int]:
        # The version becomes ours, so that an earlier owner can no longer delete the pin.
        try:
            return (yield PutValue(path, self._term, version))
        except VersionMismatchError:
            found = self._store.metadata.get(path)
            return (yield PutValue(path, self._term, ABSENT if found is None else found.version))

    def _unpin(self, bucket_id: int) -> Steps[None]:
        path, version = self._pin_path(bucket_id), self._versions[bucket_id]
        if version is None:
            found = self._store.metadata.get(path)
            if found is None or found.data != self._term:
                return
            version = found.version
        # Another version belongs to another owner.
        with suppress(VersionMismatchError):
            yield DeleteValue(path, version)

    def _pin_path(self, bucket_id: int) -> str:
        return _pin_path(bucket_id, self._path)


def find_pins(metadata: MetadataStore, path: str) -> dict[str, int]:
    """Return the pins of a cursor, of all its owners: the version of each by its path.

    Raises:
        StoreError: The storage failed.

    Complexity: O(buckets that are pinned or closed).
    """
    pins = {}
    for bucket_id in _named_buckets(metadata):
        pin_path = _pin_path(bucket_id, path)
        try:
            found = metadata.get(pin_path)
        except DamagedValueError as error:
            pins[pin_path] = error.version
            continue
        if found is not None:
            pins[pin_path] = found.version
    return pins


def _pin_path(bucket_id: int, path: str) -> str:
    return f"{_bucket_path(bucket_id)}/{quote(path, safe='')}"


def _bucket_path(bucket_id: int) -> str:
    return f"{ROOT}/{bucket_id}"


def _named_buckets(metadata: MetadataStore) -> Iterator[int]:
    """Yield the buckets that are pinned or closed; other names are ignored."""
    return (int(name) for name in metadata.children(ROOT) if name.isdecimal())


def _exists(ledgers: LedgerStore, bucket_id: int) -> bool:
    try:
        return ledgers.last(bucket_id) >= 0
    except LedgerNotFoundError:
        return False
