"""The keys of a calendar: the time of a message, then its place, in one integer.

Keys sort by time. The low 64 bits of a key are the *leaf* part: 24 bits of the time (4 h 40 min), then the place. The
bits above them, the *era*, are stored once for many keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.delay.entry_pages import ENTRY_BITS, PAGE_BITS

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray
    from pyroaring import BitMap

TIME_BITS = 24
POSITION_BITS = ENTRY_BITS + PAGE_BITS
PAGE_MASK = (1 << PAGE_BITS) - 1
PLACE_MASK = (1 << POSITION_BITS) - 1
TIME_MASK = (1 << TIME_BITS) - 1
ERA_BITS = POSITION_BITS + TIME_BITS
LEAF_MASK = (1 << ERA_BITS) - 1


class Due(NamedTuple):
    """Messages and their times: three arrays of one length, int64, by time, then by position.

    Attributes:
        due_ms: When each is due.
        ledger_ids: Its ledger.
        entry_ids: Its entry in that.
    """

    due_ms: NDArray[np.int64]
    ledger_ids: NDArray[np.int64]
    entry_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.due_ms)


class EraKeys(NamedTuple):
    """The keys of a leaf, sorted, and the era that they omit."""

    era: int
    keys: array[int] | memoryview


def first_of_each(
    entry_ids: NDArray[np.int64], due_ms: NDArray[np.int64], kept: BitMap
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the entries of one ledger that are in a bitmap, each once, in order, with its first time."""
    entry_ids, first_at = np.unique(entry_ids, return_index=True)
    is_kept = np.isin(entry_ids, np.array(kept.to_array(), dtype=np.int64), assume_unique=True)
    return entry_ids[is_kept], due_ms[first_at[is_kept]]


def times_of(chunk: EraKeys) -> NDArray[np.int64]:
    """Return the times of keys."""
    times = np.frombuffer(chunk.keys, dtype=np.uint64) >> np.uint64(POSITION_BITS)
    return times.astype(np.int64) | chunk.era << TIME_BITS


def places_of(chunks: list[EraKeys]) -> NDArray[np.int64]:
    """Return the places of keys."""
    return np.frombuffer(b"".join([chunk.keys for chunk in chunks]), dtype=np.int64) & PLACE_MASK
