"""How a cursor persists: the settings, with their units in their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.selection import Keep
from cursor.pulsar_conf import cursor_settings, read_properties

if TYPE_CHECKING:
    from pathlib import Path


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

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> CursorConfig:
        """Return the settings by which a Pulsar broker's cursors would persist; what it leaves out is the default.

        `flush_interval_ms` is the longest that Pulsar leaves an ack unwritten: the shorter of what
        ``managedLedgerDefaultMarkDeleteRateLimit`` (writes a second; 0 or less for no limit, so for an interval of 0)
        and ``managedLedgerCursorPositionFlushSeconds`` say. Keys that do not concern a cursor are ignored.

        Args:
            source: The keys and their values, or the path of a ``broker.conf``.

        Raises:
            ValueError: A value that concerns a cursor is malformed, or a key is misspelt; the text names both.
            TypeError: A value that concerns a cursor is not text.
            OSError: The file cannot be read.
        """
        return cls(**cursor_settings(source if isinstance(source, Mapping) else read_properties(source)))


def _check_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
