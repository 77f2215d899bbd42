"""Rows of Arrow as the arrays that a replay takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.redelivery.acked import Int64s


def array_at(column: pa.Array, index: int) -> Int64s:
    """Return a row of a list column; it may share the column's memory."""
    values: Int64s = column[index].values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return values


def lists_of(arrays: Sequence[Int64s]) -> pa.ListArray:
    """Return a list for each array, of more dimensions row by row."""
    offsets = np.cumsum([0, *(each.size for each in arrays)], dtype=np.int32)
    flat = np.concatenate([each.ravel() for each in arrays]) if arrays else np.empty(0, np.int64)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(np.int64, copy=False)))
