"""The changes of some calls: done in the index at once, written to the log together, undone until they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import google_crc32c

from cursor.store import ABSENT, LedgerFencedError, Versioned, VersionMismatchError
from cursor.stores.file_log import HEADER
from cursor.stores.file_records import (
    APPEND_SIZE,
    append_record,
    create_record,
    delete_record,
    fence_record,
    put_record,
    remove_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cursor.stores.file_records import Index, IndexedLedger


@final
class Draft:
    """A group in the making. A call that is refused has changed nothing.

    Args:
        index: What it changes.
        offset: Where the group will stand in the log.
    """

    def __init__(self, index: Index, offset: int) -> None:
        self._index = index
        self._end = offset + HEADER.size
        # Each record with the bytes that follow it, and how to undo it.
        self._records: list[tuple[bytes, bytes, Callable[[], object]]] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def body(self) -> bytes:
        """The records, in order."""
        return b"".join(part for record, data, _ in self._records for part in (record, data))

    def keep(self, count: int) -> None:
        """Undo all records but the first so many."""
        while len(self._records) > count:
            record, data, undo = self._records.pop()
            self._end -= len(record) + len(data)
            undo()

    def create(self, owner: str) -> int:
        """See `LedgerStore.create`."""
        index = self._index
        ledger_id = index.next_ledger_id
        record = create_record(ledger_id, owner.encode())
        index.add_ledger(ledger_id, owner, len(record))

        def undo() -> None:
            index.remove_ledger(ledger_id)
            index.next_ledger_id = ledger_id

        self._add(undo, record)
        return ledger_id

    def append_all(self, batch: Sequence[tuple[int, bytes]]) -> list[int]:
        """See `LedgerStore.append_all`."""
        ledgers = [self._open_ledger(ledger_id) for ledger_id, _ in batch]
        ids = []
        for ledger, (ledger_id, entry) in zip(ledgers, batch, strict=True):
            count, checksum = len(ledger.sizes), google_crc32c.value(entry)
            record = append_record(ledger_id, len(entry), checksum)
            self._index.add_entry(ledger, self._end + APPEND_SIZE, len(entry), checksum)
            self._add(partial(self._index.keep_entries, ledger, count), record, entry)
            ids.append(count)
        return ids

    def delete(self, ledger_id: int) -> None:
        """See `LedgerStore.delete`."""
        if ledger_id not in self._index.ledgers:
            return
        ledger = self._index.remove_ledger(ledger_id)
        self._add(partial(self._index.insert_ledger, ledger_id, ledger), delete_record(ledger_id))

    def fence(self, ledger_id: int) -> int:
        """See `LedgerStore.fence`."""
        ledger = self._index.ledger(ledger_id)
        if not ledger.fenced:
            ledger.fenced = True
            self._add(partial(setattr, ledger, "fenced", False), fence_record(ledger_id))
        return len(ledger.sizes) - 1

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`."""
        before = self._expect(path, expected_version)
        version = self._index.first_version if before is None else before.version + 1
        value = Versioned(data, version)
        record = put_record(path, value)
        self._index.set_value(path, value)
        self._add(partial(self._index.set_value, path, before), record)
        return version

    def remove(self, path: str, *, expected_version: int) -> None:
        """See `MetadataStore.delete`."""
        index = self._index
        before, first_version = self._expect(path, expected_version), index.first_version
        if before is None:
            raise VersionMismatchError(f"{path} holds no value to delete")
        index.set_value(path, None)
        index.first_version = max(first_version, before.version + 1)

        def undo() -> None:
            index.set_value(path, before)
            index.first_version = first_version

        self._add(undo, remove_record(path))

    def _add(self, undo: Callable[[], object], record: bytes, data: bytes = b"") -> None:
        self._records.append((record, data, undo))
        self._end += len(record) + len(data)

    def _open_ledger(self, ledger_id: int) -> IndexedLedger:
        ledger = self._index.ledger(ledger_id)
        if ledger.fenced:
            raise LedgerFencedError(f"ledger {ledger_id} was fenced")
        return ledger

    def _expect(self, path: str, version: int) -> Versioned | None:
        """Return the value if it is at a version, None if it is `ABSENT` and should be."""
        value = self._index.values.get(path)
        found = ABSENT if value is None else value.version
        if found != version:
            raise VersionMismatchError(f"{path} is at version {found}, not {version}")
        return value
