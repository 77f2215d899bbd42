"""How a cursor persists: the settings, with their units in their names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CursorConfig:
    """Settings of one cursor.

    Attributes:
        flush_interval_ms: `ManagedCursor.tick` persists what is not yet durable when the last persist is at least this
            long ago; what a crash redelivers is at most what was acked in such an interval. 0 persists at every tick.
            Pulsar: ``managedLedgerCursorPositionFlushSeconds``.
        compaction_bytes_min: The journal is compacted into a snapshot when the deltas since the last one outweigh it,
            but not before they take this many bytes: a tiny state is not rewritten at every persist.
    """

    flush_interval_ms: int = 1_000
    compaction_bytes_min: int = 64 * 1024

    def __post_init__(self) -> None:
        for name in ("flush_interval_ms", "compaction_bytes_min"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise TypeError(f"{name} is a whole number, found {value!r}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, found {value}")
