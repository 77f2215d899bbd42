"""Converts generated events into parallel arrays, the columns of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ackstate.analysis.trace.rows import Events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.trace.generate.clock import Int64s

# Near Pulsar's 50,000, and a multiple of every block of a workload.
ENTRIES_PER_LEDGER = 51_200
_LEDGER_FIRST = 1_000


def columns_of(ts_ms: Int64s, kinds: Int64s, first: Int64s, length: Int64s, number: Int64s) -> Events:
    """Split entries counted over all ledgers, -1 for none, into ledger and entry."""
    is_none = first < 0
    ledgers = first // ENTRIES_PER_LEDGER
    entries = np.where(is_none, -1, first - ledgers * ENTRIES_PER_LEDGER)
    ledger_ids = np.where(is_none, -1, _LEDGER_FIRST + ledgers)
    lasts = np.where(is_none, -1, entries + length - 1)
    return Events(ts_ms, kinds, ledger_ids, entries, lasts, number)


def joined(parts: Sequence[Events]) -> Events:
    """Return the concatenated events."""
    return Events(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
