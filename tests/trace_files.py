"""Files that traces are made from, and the contents of a trace."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.trace.chunks import TRACE_SCHEMA, events_of, named_entries, pack
from ackstate.analysis.trace.events import EVENT_COLUMNS, FILES_KEY, ONLY, SCALAR_COLUMNS, Event, EventKind
from ackstate.analysis.trace.generate import TracePlan
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recording import Frame

_LEDGERS = ("ledger_id", "entry_count", "published", "acked")


def write_acks(path, key, entries, *, begin_ms=0):
    """Write the trace of one subscription, (topic, name), which acks entry N after N ms."""
    events = [Event(begin_ms + entry, EventKind.ACK, 3, entry, entry) for entry in entries]
    write_trace([Frame(*key, events)], path)
    return path


def plan_of(workload="key_shared", events=25_000, **settings):
    """Return the plan of a trace of one subscription that is persisted often."""
    settings = {"subscriptions": 1, "topics": 1, "flush_interval_ms": 100} | settings
    return TracePlan(workload, events, **settings)


def lines_of(rows):
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def write(path, rows):
    path.write_bytes(rows if isinstance(rows, bytes) else lines_of(rows))
    return path


def read_back(path):
    """Return every subscription's events, having made sure that chunks and seqs follow one another."""
    events = {}
    rows = read_rows(path)
    for row in sorted(rows, key=lambda row: (row["topic"], row["subscription"], row["chunk"])):
        mine = events.setdefault((row["topic"], row["subscription"]), [])
        assert row["first_seq"] == len(mine)
        columns = [row[name] for name in Event._fields]
        mine += [Event(ts, EventKind(kind), *rest) for ts, kind, *rest in zip(*columns, strict=True)]
        assert (row["first_ts_ms"], row["last_ts_ms"]) == (row["ts_ms"][0], row["ts_ms"][-1])
    return events


def read_rows(trace):
    """Return the rows of a trace, each a mapping whose events are lists of numbers."""
    table = pq.read_table(trace).combine_chunks()
    rows = table.select(list(SCALAR_COLUMNS)).to_pylist()
    (batch,) = table.to_batches()
    offsets, columns = events_of(batch, list(EVENT_COLUMNS))
    for row, begin, end in zip(rows, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        row |= {name: column[begin:end].tolist() for name, column in zip(EVENT_COLUMNS, columns, strict=True)}
    return rows


def table_of_rows(rows, *, files=ONLY):
    """Return rows as `read_rows` has them as those of a trace; their `event_count` and `ledgers` stay."""
    schema = TRACE_SCHEMA.with_metadata({**TRACE_SCHEMA.metadata, FILES_KEY: files})
    return pa.Table.from_pylist([_packed(row) for row in rows], schema)


def write_rows(rows, file, *, files=ONLY):
    """Write rows as a Parquet file of a trace; see `table_of_rows`."""
    pq.write_table(table_of_rows(rows, files=files), file, compression="zstd")


def empty_kinds(file):
    """Take the bytes of the kinds away from each chunk of a file."""
    table = pq.read_table(file)
    at = table.schema.get_field_index("kind")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array([b""] * len(table), pa.binary())), file)


def _packed(row):
    columns = {name: np.array(row[name], np.int64) for name in EVENT_COLUMNS}
    named = named_entries(*(columns[name] for name in ("kind", "ledger_id", "last_entry")))
    ledgers = [dict(zip(_LEDGERS, each, strict=True)) for each in named.T.tolist()]
    columns["last_entry"] = columns["last_entry"] - columns["first_entry"]
    plain = {name: row[name] for name in SCALAR_COLUMNS}
    told = {"event_count": len(row["kind"]), "ledgers": ledgers}
    return plain | told | {name: row.get(name) for name in told if name in row} | {
        name: pack(column) for name, column in columns.items()
    }  # fmt: skip


def subscriptions_of(trace, policies=(None,), **options):
    """Return the estimates of a trace's subscriptions, computed in this process."""
    rows = estimates(LocalSource.of(trace), policies, **options).collect()
    return [row for row in rows if row["scope"] == "subscription"]


def crashes_of(row):
    """Return the crashes of an estimate: (when, (redelivered, redelivered if written, whether it persisted))."""
    each = iter(row["crashes"] or ())
    return list(zip(row["crash_ms"] or (), zip(each, each, each, strict=True), strict=True))
