"""The changes of a group of calls: applied to the index at once, written to the log together, undoable until then.

A thread can be interrupted anywhere, in a change and in its undoing (`KeyboardInterrupt`). So the way to undo a change
is recorded before the change begins. Undoing restores the earlier state instead of reversing a step, and may run twice.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, final

import google_crc32c

from ackstate.cursor.store import ABSENT, LedgerFencedError, Versioned, VersionMismatchError
from ackstate.stores.file_log import HEADER
from ackstate.stores.file_records import (
    APPEND_SIZE,
    create_record,
    delete_record,
    entry_records,
    fence_record,
    put_record,
    remove_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.stores.file_records import Index, IndexedLedger


@final
class Draft:
    """A group that is being built. A refused call has changed nothing.

    Args:
        index: The index to change.
        offset: The offset of the group in the log.
    """

    def __init__(self, index: Index, offset: int) -> None:
        self._index = index
        self._end = offset + HEADER.size
        # The records of each change in pieces, and the call that undoes it.
        self._records: list[tuple[Sequence[bytes], Callable[[], object]]] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def body(self) -> bytes:
        """The records, in order."""
        return b"".join([piece for pieces, _ in self._records for piece in pieces])

    def keep(self, count: int) -> None:
        """Undo all records but the first `count`."""
        while len(self._records) > count:
            pieces, undo = self._records[-1]
            undo()
            self._records.pop()
            self._end -= sum(map(len, pieces))

    def create(self, owner: str) -> int:
        """See `LedgerStore.create`."""
        index = self._index
        ledger_id, live_size = index.next_ledger_id, index.live_size

        def undo() -> None:
            index.ledgers.pop(ledger_id, None)
            index.forget_owner(ledger_id, owner)
            index.next_ledger_id, index.live_size = ledger_id, live_size

        record = create_record(ledger_id, owner.encode())
        self._add(undo, record)
        index.add_ledger(ledger_id, owner, len(record))
        return ledger_id

    def append(self, ledger_id: int, entry: bytes) -> int:
        """See `LedgerStore.append`."""
        return self._append_run(self._open_ledger(ledger_id), ledger_id, [entry])[0]

    def append_all(self, batch: Sequence[tuple[int, bytes]]) -> list[int]:
        """See `LedgerStore.append_all`."""
        ledgers = {ledger_id: self._open_ledger(ledger_id) for ledger_id in dict.fromkeys(map(itemgetter(0), batch))}
        return [
            entry_id
            for ledger_id, run in groupby(batch, key=itemgetter(0))
            for entry_id in self._append_run(ledgers[ledger_id], ledger_id, [entry for _, entry in run])
        ]

    def _append_run(self, ledger: IndexedLedger, ledger_id: int, entries: Sequence[bytes]) -> range:
        """Append entries to one ledger, as one change, and return their ids."""
        index, count = self._index, len(ledger.sizes)
        offset, live_size = self._end + APPEND_SIZE, index.live_size
        sizes, checksums = list(map(len, entries)), list(map(google_crc32c.value, entries))

        def undo() -> None:
            ledger.keep(count)
            index.live_size = live_size

        # The pieces are joined once, with those of the whole group: entries may be large.
        self._records.append((entry_records(ledger_id, entries, checksums), undo))
        self._end += APPEND_SIZE * len(entries) + sum(sizes)
        index.add_entries(ledger, offset, sizes, checksums)
        return range(count, count + len(entries))

    def delete(self, ledger_id: int) -> None:
        """See `LedgerStore.delete`."""
        index = self._index
        ledger, live_size = index.ledgers.get(ledger_id), index.live_size
        if ledger is None:
            return

        def undo() -> None:
            index.insert_ledger(ledger_id, ledger)
            index.live_size = live_size

        self._add(undo, delete_record(ledger_id))
        index.remove_ledger(ledger_id)

    def fence(self, ledger_id: int) -> int:
        """See `LedgerStore.fence`."""
        ledger = self._index.ledger(ledger_id)

        def undo() -> None:
            ledger.fenced = False

        if not ledger.fenced:
            self._add(undo, fence_record(ledger_id))
            ledger.fenced = True
        return len(ledger.sizes) - 1

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`."""
        before = self._expect(path, expected_version)
        version = self._index.first_version if before is None else before.version + 1
        value = Versioned(data, version)
        self._set(path, before, put_record(path, value), value)
        return version

    def remove(self, path: str, *, expected_version: int) -> None:
        """See `MetadataStore.delete`."""
        before = self._expect(path, expected_version)
        if before is None:
            raise VersionMismatchError(f"{path} holds no value to delete")
        self._set(path, before, remove_record(path), None)
        self._index.first_version = max(self._index.first_version, before.version + 1)

    def _set(self, path: str, before: Versioned | None, record: bytes, value: Versioned | None) -> None:
        index = self._index
        first_version, live_size = index.first_version, index.live_size

        def undo() -> None:
            index.set_value(path, before)
            index.first_version, index.live_size = first_version, live_size

        self._add(undo, record)
        index.set_value(path, value)

    def _add(self, undo: Callable[[], object], record: bytes) -> None:
        self._records.append(((record,), undo))
        self._end += len(record)

    def _open_ledger(self, ledger_id: int) -> IndexedLedger:
        ledger = self._index.ledger(ledger_id)
        if ledger.fenced:
            raise LedgerFencedError(f"ledger {ledger_id} was fenced")
        return ledger

    def _expect(self, path: str, version: int) -> Versioned | None:
        """Return the value if it is at a version; None if there is none and the version is `ABSENT`."""
        value = self._index.values.get(path)
        found = ABSENT if value is None else value.version
        if found != version:
            raise VersionMismatchError(f"{path} is at version {found}, not {version}")
        return value
