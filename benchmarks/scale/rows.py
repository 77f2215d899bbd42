"""The same trace with one row an event, and the same answer from it by SQL: what a trace in chunks is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import duckdb

from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.parquet import trace_files

if TYPE_CHECKING:
    from pathlib import Path

_UNNEST = """
COPY (
    SELECT topic, subscription, first_seq + generate_subscripts(kind, 1) - 1 AS seq,
        unnest(ts_ms) AS ts_ms, unnest(kind) AS kind, unnest(ledger_id) AS ledger_id,
        unnest(first_entry) AS first_entry, unnest(last_entry) AS last_entry
    FROM read_parquet(?)
) TO '{out}' (FORMAT parquet, COMPRESSION zstd)
"""

# Every entry of these traces is acked once, which spares SQL the work of looking for those that are acked again.
# CASE, because with FILTER a window takes DuckDB 2.0 a hundred times as long.
_SUMMARY = f"""
WITH span AS (
    SELECT min(ts_ms) AS begin_ms, max(ts_ms) AS end_ms FROM read_parquet($rows)
), counted AS (
    SELECT topic, subscription, seq, ts_ms, kind,
        sum(CASE WHEN kind = {int(EventKind.ACK)} THEN 1 ELSE 0 END) OVER w AS acked
    FROM read_parquet($rows) WHERE subscription <> ''
    WINDOW w AS (PARTITION BY topic, subscription ORDER BY seq)
), covered AS (
    SELECT *, max(CASE WHEN kind = {int(EventKind.PERSIST_BEGUN)} THEN acked END) OVER w AS begun
    FROM counted WINDOW w AS (PARTITION BY topic, subscription ORDER BY seq)
), steps AS (
    SELECT topic, subscription,
        acked - coalesce(max(CASE WHEN kind = {int(EventKind.PERSIST_ENDED)} THEN begun END) OVER w, 0) AS redelivery,
        coalesce(lead(ts_ms) OVER w, (SELECT end_ms FROM span)) - ts_ms AS duration_ms
    FROM covered WINDOW w AS (PARTITION BY topic, subscription ORDER BY seq)
    UNION ALL
    SELECT topic, subscription, 0, min(ts_ms) - (SELECT begin_ms FROM span) FROM counted GROUP BY topic, subscription
), by_value AS (
    SELECT topic, subscription, redelivery, sum(duration_ms) AS duration_ms FROM steps GROUP BY ALL
), ranked AS (
    SELECT *, sum(duration_ms) OVER (PARTITION BY topic, subscription ORDER BY redelivery)
        / sum(duration_ms) OVER (PARTITION BY topic, subscription) AS share
    FROM by_value
)
SELECT topic, subscription, sum(redelivery * duration_ms) / sum(duration_ms) AS expected,
    min(CASE WHEN share >= 0.50 THEN redelivery END)::BIGINT AS p50,
    min(CASE WHEN share >= 0.99 THEN redelivery END)::BIGINT AS p99, max(redelivery)::BIGINT AS max
FROM ranked GROUP BY topic, subscription ORDER BY topic, subscription
"""


class Summary(NamedTuple):
    """What comes back of one subscription, as `ackstate.analysis.redelivery.estimates.estimates` has it."""

    topic: str
    subscription: str
    expected: float
    p50: int
    p99: int
    max: int


def write_rows(trace: Path, out: Path) -> None:
    """Write a trace in chunks as one row an event."""
    with duckdb.connect() as connection:
        connection.execute(_UNNEST.format(out=out), [[str(file) for file in trace_files(trace)]])


def summaries(rows: Path, *, threads: int) -> list[Summary]:
    """Return every subscription's summary, computed by DuckDB from one row an event."""
    with duckdb.connect(config={"threads": threads}) as connection:
        found = connection.execute(_SUMMARY, {"rows": str(rows)}).fetchall()
    return [Summary(*row) for row in found]
