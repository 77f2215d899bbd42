"""The peers of the estimate find the same."""

from __future__ import annotations

import random

import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recorder import Frame

pytest.importorskip("duckdb")

from benchmarks.scale import limit, rows
from benchmarks.scale.bench_scale import check_equal


def events_of(seed, *, begin_ms):
    """Ack every entry once, in some order, and persist now and then."""
    chance = random.Random(seed)
    entries = chance.sample(range(400), 400)
    ts_ms, found, persists = begin_ms, [], 0
    while entries:
        ts_ms += chance.choice((0, 0, 1, 7))
        if chance.random() < 0.05:
            persists += 1
            found.append(Event(ts_ms, EventKind.PERSIST_BEGUN, -1, -1, -1, persists))
            found += [Event(ts_ms, EventKind.ACK, 1, each, each) for each in entries[-3:]]
            del entries[-3:]
            found.append(Event(ts_ms + 2, EventKind.PERSIST_ENDED, -1, -1, -1, persists))
            ts_ms += 2
        else:
            entry = entries.pop()
            found.append(Event(ts_ms, EventKind.ACK, 1, entry, entry))
    return found


def test_duckdb_and_the_limit_answer_as_the_estimate_does(tmp_path):
    topic = "persistent://a/b/t"
    published = [Event(900, EventKind.PUBLISH, 1, 0, 399)]
    frames = [Frame(topic, f"s{seed}", events_of(seed, begin_ms=1_000 + 50 * seed)) for seed in range(3)]
    write_trace([Frame(topic, "", published), *frames], tmp_path / "trace")
    found = estimates(LocalSource.of(tmp_path / "trace"), [None], scopes=("subscription",)).collect()
    ours = sorted(rows.Summary(*(row[name] for name in rows.Summary._fields)) for row in found)
    rows.write_rows(tmp_path / "trace", tmp_path / "rows.parquet")
    assert len({each.max for each in ours}) == 3
    check_equal(ours, rows.summaries(tmp_path / "rows.parquet", threads=2))
    check_equal(ours, limit.summaries(tmp_path / "trace"))
