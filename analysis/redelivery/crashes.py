"""What each crash of a recording brought back: the number when the process died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ackstate.analysis.redelivery.fold import RedeliveryFold
from ackstate.analysis.redelivery.policy import AS_RECORDED
from ackstate.analysis.redelivery.sorted_chunks import by_subscription, sorted_chunks
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.analysis.redelivery.trace_source import TraceSource

_CRASHES = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("ts_ms", pa.int64()), ("at_crash", pa.int64()),
    ("at_crash_if_written", pa.int64()), ("persisting_at_crash", pa.bool_()),
])  # fmt: skip


def crashes(source: TraceSource) -> list[dict[str, Any]]:
    """Return a row for each crash of each subscription's process, sorted by topic, subscription and time.

    Returns:
        ``topic, subscription, ts_ms``; ``at_crash``: acked messages that the crash brought back;
        ``at_crash_if_written``: the same, had the persist under way been written; ``persisting_at_crash``: whether
        there was one. The last crash of a millisecond stands for the others.

    Complexity: O(events).

    Raises:
        TraceError: The trace is damaged.
    """
    rows = sorted_chunks(source, [AS_RECORDED]).through(_crashes, _CRASHES).collect()
    return sorted(rows, key=lambda row: (row["topic"], row["subscription"], row["ts_ms"]))


def _crashes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for key, _, chunks in by_subscription(batches):
        fold = RedeliveryFold()
        found: dict[int, tuple[int, int, bool]] = {}
        for chunk in chunks:
            folded = fold.fold(chunk)
            for at in np.flatnonzero(chunk.kind == EventKind.CRASH).tolist():
                found[int(chunk.ts_ms[at])] = (
                    int(folded.redelivery[at]), int(folded.if_written[at]), bool(folded.persisting[at]),
                )  # fmt: skip
        if found:
            columns = zip(*((*key, ts_ms, *numbers) for ts_ms, numbers in found.items()), strict=True)
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=_CRASHES)
