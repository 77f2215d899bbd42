"""The same trace with one row an event, and the same result from it by SQL, for comparison with a trace in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.trace.chunks import ROWS_AT_ONCE, events_of, packed_columns
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.parquet import trace_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ackstate.analysis.trace.chunks import Int64s

_KEY = ("topic", "subscription", "first_seq")
_ROWS = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("seq", pa.int64()), ("ts_ms", pa.int64()),
    ("kind", pa.int8()), ("ledger_id", pa.int64()), ("first_entry", pa.int64()), ("last_entry", pa.int64()),
])  # fmt: skip

# Numbers instead of names, which DuckDB would compare row by row.
_PREPARED = """
CREATE VIEW rows AS SELECT * FROM read_parquet('{rows}');
CREATE TABLE subscriptions AS
    SELECT (row_number() OVER (ORDER BY topic, subscription))::INTEGER AS id, topic, subscription
    FROM (SELECT DISTINCT topic, subscription FROM rows WHERE subscription <> '');
CREATE VIEW events AS
    SELECT id, seq::INTEGER AS seq, ts_ms, kind::UTINYINT AS kind
    FROM rows JOIN subscriptions USING (topic, subscription);
CREATE TABLE span AS SELECT min(ts_ms) AS begin_ms, max(ts_ms) AS end_ms FROM rows
"""

# The fastest query known: one window over the events, and an ASOF join with the few persists for the durable acks.
# Every entry of these traces is acked once, which spares SQL the work of looking for those that are acked again.
_SUMMARY = f"""
WITH counted AS (
    SELECT id, seq, ts_ms, kind, sum((kind = {int(EventKind.ACK)})::INT) OVER w AS acked, lead(ts_ms) OVER w AS next_ms
    FROM events WINDOW w AS (PARTITION BY id ORDER BY seq)
), persists AS (
    SELECT id, seq, kind, max(CASE WHEN kind = {int(EventKind.PERSIST_BEGUN)} THEN acked END)
        OVER (PARTITION BY id ORDER BY seq) AS begun
    FROM counted WHERE kind IN ({int(EventKind.PERSIST_BEGUN)}, {int(EventKind.PERSIST_ENDED)})
), ended AS (
    SELECT id, seq, max(begun) OVER (PARTITION BY id ORDER BY seq) AS durable
    FROM persists WHERE kind = {int(EventKind.PERSIST_ENDED)}
), steps AS (
    SELECT counted.id, counted.acked - coalesce(ended.durable, 0) AS redelivery,
        coalesce(counted.next_ms, (SELECT end_ms FROM span)) - counted.ts_ms AS duration_ms
    FROM counted ASOF LEFT JOIN ended ON counted.id = ended.id AND counted.seq >= ended.seq
    UNION ALL
    SELECT id, 0, min(ts_ms) - (SELECT begin_ms FROM span) FROM events GROUP BY id
), by_value AS (
    SELECT id, redelivery, sum(duration_ms) AS duration_ms FROM steps GROUP BY ALL
), ranked AS (
    SELECT *, sum(duration_ms) OVER (PARTITION BY id ORDER BY redelivery)
        / sum(duration_ms) OVER (PARTITION BY id) AS share
    FROM by_value
)
SELECT topic, subscription, sum(redelivery * duration_ms) / sum(duration_ms) AS expected,
    min(CASE WHEN share >= 0.50 THEN redelivery END)::BIGINT AS p50,
    min(CASE WHEN share >= 0.99 THEN redelivery END)::BIGINT AS p99, max(redelivery)::BIGINT AS max
FROM ranked JOIN subscriptions USING (id) GROUP BY topic, subscription ORDER BY topic, subscription
"""


class Summary(NamedTuple):
    """The redelivery of one subscription, as `ackstate.analysis.estimate.estimates.estimates` has it."""

    topic: str
    subscription: str
    expected: float
    p50: int
    p99: int
    max: int


def write_rows(trace: Path, out: Path) -> None:
    """Write a trace in chunks as one row an event."""
    names = _ROWS.names[3:]
    with pq.ParquetWriter(out, _ROWS, compression="zstd") as writer:
        for batch, offsets, columns in unpacked(trace, names):
            counts = np.diff(offsets)
            seq = np.repeat(batch["first_seq"].to_numpy() - offsets[:-1], counts) + np.arange(offsets[-1])
            names_of = [batch[name].take(np.repeat(np.arange(len(counts)), counts)) for name in _KEY[:2]]
            arrays = [*names_of, seq, *columns]
            cast = [pa.array(each).cast(field.type) for each, field in zip(arrays, _ROWS, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(cast, schema=_ROWS))


def unpacked(trace: Path, names: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, Int64s, list[Int64s]]]:
    """Yield a few chunks of a trace at a time, in any order: their keys, and the results of `events_of`."""
    for file in trace_files(trace):
        parquet = pq.ParquetFile(file, memory_map=True)
        columns = [*_KEY, "chunk", *packed_columns(names)]
        for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False):
            yield (batch, *events_of(batch, names))


def summaries(rows: Path, *, threads: int) -> list[Summary]:
    """Return every subscription's summary, computed by DuckDB from one row an event."""
    with duckdb.connect(config={"threads": threads}) as connection:
        connection.execute(_PREPARED.format(rows=rows))
        found = connection.execute(_SUMMARY).fetchall()
    return [Summary(*row) for row in found]
