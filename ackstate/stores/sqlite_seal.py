"""Seals rows with a checksum, so that a changed row is noticed; SQLite stores no checksums.

The checksum is at the end of a row's data. It covers the data, the row's key, and a random number of the store: so a
flipped bit is noticed when the row is read, and so is a row of another place or another store.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, final

import google_crc32c

from ackstate.wire.native import SEALED

if TYPE_CHECKING:
    from collections.abc import Iterable

SEAL_BYTES = 4
"""The size of a seal in bytes."""

_ENTRY = struct.Struct("<cqq")  # row kind, ledger id, entry id
_VALUE = struct.Struct("<cq")  # row kind, version; then the path


@final
class RowSeal:
    """Seals and checks the rows of one store; frozen.

    Args:
        salt: The store's random number.
    """

    def __init__(self, salt: bytes) -> None:
        self._checksum = google_crc32c.value(salt)

    def entry(self, ledger_id: int, entry_id: int, data: bytes) -> bytes:
        """Return the row of an entry, sealed. Complexity: O(size), as of all that follow."""
        return data + self._seal(_ENTRY.pack(b"E", ledger_id, entry_id), data)

    def entries(self, entries: Iterable[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Return the rows of entries, each a ledger id, an entry id and the data, with the data sealed."""
        # In one loop, here and below: three calls for each entry would take longer than its checksum.
        salted, extend, pack = self._checksum, google_crc32c.extend, _ENTRY.pack
        return [
            (
                ledger_id,
                entry_id,
                data + extend(extend(salted, pack(b"E", ledger_id, entry_id)), data).to_bytes(4, "little"),
            )
            for ledger_id, entry_id, data in entries
        ]

    def value(self, path: str, version: int, data: bytes) -> bytes:
        """Return the row of a metadata value, sealed."""
        return data + self._seal(_VALUE.pack(b"V", version) + path.encode(), data)

    def data_of_entries(self, ledger_id: int, first: int, rows: Iterable[object]) -> list[bytes]:
        """Return the data of the rows of consecutive entries, up to the first row that is damaged or is no bytes."""
        salted, extend, pack = self._checksum, google_crc32c.extend, _ENTRY.pack
        found: list[bytes] = []
        for entry_id, row in enumerate(rows, first):
            if not isinstance(row, bytes) or extend(extend(salted, pack(b"E", ledger_id, entry_id)), row) != SEALED:
                break
            found.append(row[:-SEAL_BYTES])
        return found

    def data_of_value(self, path: str, version: int, row: bytes) -> bytes | None:
        """Return the data of a metadata value's row; None if it is damaged."""
        data = row[:-SEAL_BYTES]
        return data if self._seal(_VALUE.pack(b"V", version) + path.encode(), data) == row[len(data) :] else None

    def _seal(self, key: bytes, data: bytes) -> bytes:
        checksum: int = google_crc32c.extend(google_crc32c.extend(self._checksum, key), data)
        return checksum.to_bytes(SEAL_BYTES, "little")
