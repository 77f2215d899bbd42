"""Files that traces are made from, and what is in a trace."""

from __future__ import annotations

import json

import pyarrow.parquet as pq

from ackstate.analysis.trace.events import Event, EventKind


def lines_of(rows):
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def write(path, rows):
    path.write_bytes(rows if isinstance(rows, bytes) else lines_of(rows))
    return path


def read_back(path):
    """Return every subscription's events, having made sure that chunks and seqs follow one another."""
    events = {}
    rows = pq.read_table(path).to_pylist()
    for row in sorted(rows, key=lambda row: (row["topic"], row["subscription"], row["chunk"])):
        mine = events.setdefault((row["topic"], row["subscription"]), [])
        assert row["first_seq"] == len(mine)
        columns = [row[name] for name in Event._fields]
        mine += [Event(ts, EventKind(kind), *rest) for ts, kind, *rest in zip(*columns, strict=True)]
        assert (row["first_ts_ms"], row["last_ts_ms"]) == (row["ts_ms"][0], row["ts_ms"][-1])
    return events
