"""How a cursor persists: the settings, with their units in their names."""

from __future__ import annotations

from dataclasses import dataclass

from ackstate.selection import Keep


@dataclass(frozen=True, slots=True)
class CursorConfig:
    """Settings of one cursor.

    Attributes:
        flush_interval_ms: `ManagedCursor.tick` persists what is not yet durable when the last persist is at least this
            long ago; what a crash redelivers is at most what was acked in such an interval. 0 persists at every tick.
            Pulsar: ``managedLedgerCursorPositionFlushSeconds``.
        compaction_bytes_min: The journal is compacted into a snapshot when the deltas since the last one outweigh it,
            but not before they take this many bytes: a tiny state is not rewritten at every persist.
        ledger_entry_count_max: Nor is a journal continued beyond this many records: the next one is a snapshot in a new
            ledger. Pulsar: ``managedLedgerCursorMaxEntriesPerLedger``.
        range_count_max: How many ranges the durable state may hold; None, the default, for any number, because the
            journal makes them cheap. What is durable already stays so, even beyond a limit that was lowered.
            Pulsar: ``managedLedgerMaxUnackedRangesToPersist``.
        keep: Which ranges become durable first when there are more.
        become_old_ack_record_seconds: Above 0, only acks of messages that were sent at least so long ago are persisted,
            until the cursor is closed; the broker tells `ManagedCursor.delivered` what it sent. The mark-delete
            position is persisted in any case. Pulsar's issue 19966: ``becomeOldAckRecordSeconds``.
    """

    flush_interval_ms: int = 1_000
    compaction_bytes_min: int = 64 * 1024
    ledger_entry_count_max: int = 50_000
    range_count_max: int | None = None
    keep: Keep = Keep.LOWEST
    become_old_ack_record_seconds: int = 0

    def __post_init__(self) -> None:
        for name in ("flush_interval_ms", "compaction_bytes_min", "become_old_ack_record_seconds"):
            _check_count(name, getattr(self, name), least=0)
        _check_count("ledger_entry_count_max", self.ledger_entry_count_max, least=1)
        if self.range_count_max is not None:
            _check_count("range_count_max", self.range_count_max, least=0)
        if not isinstance(self.keep, Keep):
            raise TypeError(f"keep is a Keep, found {self.keep!r}")


def _check_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
