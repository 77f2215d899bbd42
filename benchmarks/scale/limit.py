"""The same answer from the trace itself by pyarrow and numpy on one thread: a lower bound for any engine.

It supports only these traces: every entry is acked once, and no process dies.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.analysis.trace.events import EventKind
from benchmarks.scale.rows import Summary, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt


class Columns(NamedTuple):
    """The part of a chunk for a summary.

    Attributes:
        topic: Its topic.
        subscription: Its subscription; empty for events of the topic.
        first_seq: The number of its first event.
        ts_ms: When each event was.
        kind: The `EventKind` of each event.
    """

    topic: str
    subscription: str
    first_seq: int
    ts_ms: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]


def decoded_columns(trace: Path) -> Iterator[Columns]:
    """Yield the chunks of a trace in any order."""
    for batch, offsets, (ts_ms, kind) in unpacked(trace, ("ts_ms", "kind")):
        keys = zip(*(batch[name].to_pylist() for name in ("topic", "subscription", "first_seq")), strict=True)
        for key, (begin, end) in zip(keys, pairwise(offsets.tolist()), strict=True):
            yield Columns(*key, ts_ms[begin:end], kind[begin:end])


def summaries(trace: Path) -> list[Summary]:
    """Return every subscription's summary."""
    chunks: dict[tuple[str, str], list[Columns]] = defaultdict(list)
    for chunk in decoded_columns(trace):
        chunks[chunk.topic, chunk.subscription].append(chunk)
    times = [chunk.ts_ms for each in chunks.values() for chunk in each]
    begin_ms, end_ms = min(int(each[0]) for each in times), max(int(each[-1]) for each in times)
    return [_summary(*key, mine, begin_ms, end_ms) for key, mine in sorted(chunks.items()) if key[1]]


def _summary(topic: str, subscription: str, chunks: list[Columns], begin_ms: int, end_ms: int) -> Summary:
    chunks.sort(key=lambda chunk: chunk.first_seq)
    ts_ms = np.concatenate([chunk.ts_ms for chunk in chunks])
    kind = np.concatenate([chunk.kind for chunk in chunks])
    acked = np.cumsum(kind == EventKind.ACK, dtype=np.int32)
    begun = np.maximum.accumulate(np.where(kind == EventKind.PERSIST_BEGUN, acked, 0))
    redelivery = acked - np.maximum.accumulate(np.where(kind == EventKind.PERSIST_ENDED, begun, 0))
    weights = np.bincount(redelivery, weights=np.diff(ts_ms, append=end_ms))
    weights[0] += ts_ms[0] - begin_ms
    shares = np.cumsum(weights) / weights.sum()
    p50, p99 = (int(np.searchsorted(shares, share)) for share in (0.5, 0.99))
    expected = float((weights * np.arange(len(weights))).sum() / weights.sum())
    return Summary(topic, subscription, expected, p50, p99, int(redelivery.max()))
