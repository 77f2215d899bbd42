"""Delayed messages: every message of the log is delayed, by any time up to an hour with equal probability."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyroaring import BitMap

from ackstate import Position
from ackstate.analysis.workloads.traffic import HOUR_MS
from benchmarks.acked_entries import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

TICK_MS = 1_000
LEDGER_COUNT_MAX = 50_000  # managedLedgerMaxEntriesPerLedger


class LedgerOfMessages(NamedTuple):
    """Messages of one ledger, in order.

    Attributes:
        ledger_id: The ledger.
        entry_ids: Their entries, from 0 on.
        deliver_at_ms: The delivery time of each.
    """

    ledger_id: int
    entry_ids: NDArray[np.int64]
    deliver_at_ms: NDArray[np.int64]

    def one_by_one(self) -> Iterator[tuple[Position, int]]:
        """Yield each position with its time."""
        for entry_id, deliver_at_ms in zip(self.entry_ids.tolist(), self.deliver_at_ms.tolist(), strict=True):
            yield Position(self.ledger_id, entry_id), deliver_at_ms

    def as_bitmap(self) -> BitMap:
        """Return the entries."""
        return BitMap(array("I", self.entry_ids.astype(np.uint32).tobytes()))


def mixed_delays(
    count: int, *, now_ms: int = 0, first_ledger_id: int = 1, ledger_size: int = LEDGER_COUNT_MAX, seed: int = SEED
) -> Iterator[LedgerOfMessages]:
    """Yield messages, uniform over the next hour, with Pulsar's default number of entries per ledger."""
    random = np.random.default_rng(seed)
    for at, first in enumerate(range(0, count, ledger_size)):
        size = min(ledger_size, count - first)
        times = now_ms + random.integers(1, HOUR_MS + 1, size)
        yield LedgerOfMessages(first_ledger_id + at, np.arange(size, dtype=np.int64), times)
