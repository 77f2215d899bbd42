"""Seals rows with a checksum, so that a changed row is noticed; SQLite stores no checksums.

The checksum is at the end of a row's data. It covers the data, the row's key, and a random number of the store: so a
flipped bit is noticed when the row is read, and so is a row of another place or another store.
"""

from __future__ import annotations

import struct
from typing import final

import google_crc32c

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

    def value(self, path: str, version: int, data: bytes) -> bytes:
        """Return the row of a metadata value, sealed."""
        return data + self._seal(_VALUE.pack(b"V", version) + path.encode(), data)

    def data_of_entry(self, ledger_id: int, entry_id: int, row: bytes) -> bytes | None:
        """Return the data of an entry's row; None if it is damaged."""
        data = row[:-SEAL_BYTES]
        return data if self._seal(_ENTRY.pack(b"E", ledger_id, entry_id), data) == row[len(data) :] else None

    def data_of_value(self, path: str, version: int, row: bytes) -> bytes | None:
        """Return the data of a metadata value's row; None if it is damaged."""
        data = row[:-SEAL_BYTES]
        return data if self._seal(_VALUE.pack(b"V", version) + path.encode(), data) == row[len(data) :] else None

    def _seal(self, key: bytes, data: bytes) -> bytes:
        checksum: int = google_crc32c.extend(google_crc32c.extend(self._checksum, key), data)
        return checksum.to_bytes(SEAL_BYTES, "little")
