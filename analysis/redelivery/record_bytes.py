"""Varint and range sizes of many entries at once: `ackstate.record_size` over arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ackstate.record_size import MINUS_ONE_BYTES, range_fixed_bytes

if TYPE_CHECKING:
    from ackstate.analysis.redelivery.acked import Int64s

# From these numbers on a varint is one byte longer.
_LONGER_FROM = np.array([2**digits for digits in range(7, 63, 7)])
_FIXED_BUT_LEDGER_BYTES = range_fixed_bytes(0) - 2


def varint_bytes(numbers: Int64s) -> Int64s:
    """Return `ackstate.record_size.varint_bytes` of some numbers."""
    return np.searchsorted(_LONGER_FROM, numbers, "right") + 1


def fixed_bytes(ledger_ids: Int64s) -> Int64s:
    """Return `range_fixed_bytes` of some ledgers."""
    return _FIXED_BUT_LEDGER_BYTES + 2 * varint_bytes(ledger_ids)


def first_bytes(firsts: Int64s) -> Int64s:
    """Return `range_first_bytes` of some entries."""
    return np.where(firsts == 0, MINUS_ONE_BYTES, varint_bytes(firsts - 1))


def isolated_bytes(ledger_ids: Int64s, entry_ids: Int64s) -> Int64s:
    """Return `isolated_range_bytes` of some entries."""
    isolated: Int64s = fixed_bytes(ledger_ids) + first_bytes(entry_ids) + varint_bytes(entry_ids)
    return isolated
