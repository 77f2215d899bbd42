"""Counts a cursor's writes since it was opened."""

from __future__ import annotations

from dataclasses import dataclass

from ackstate.cursor.results import PersistTarget


@dataclass(slots=True)
class PersistCounters:
    """Totals since the cursor was opened; each field is described in `CursorStats`."""

    bytes_persisted: int = 0
    persist_count: int = 0
    truncation_count: int = 0
    snapshot_count: int = 0
    ledger_write_count: int = 0
    ledger_bytes_written: int = 0
    ledger_error_count: int = 0
    metadata_write_count: int = 0
    metadata_error_count: int = 0
    promotion_count: int = 0
    promoted_message_count: int = 0

    def wrote(self, target: PersistTarget, byte_count: int) -> None:
        """Count a write that succeeded."""
        self.bytes_persisted += byte_count
        self.persist_count += 1
        if target is PersistTarget.METADATA:
            self.metadata_write_count += 1
            return
        self.ledger_write_count += 1
        self.ledger_bytes_written += byte_count
        self.snapshot_count += target is PersistTarget.SNAPSHOT

    def promoted(self, message_count: int) -> None:
        """Count a promotion of `message_count` messages; no-op for 0."""
        self.promotion_count += message_count > 0
        self.promoted_message_count += message_count
