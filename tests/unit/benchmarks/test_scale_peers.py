"""The peers of the estimate find the same, and its CPU seconds are those of all processes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.estimate.trace_source import LocalSource
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recorder import Frame
from waiting import wait_until

pytest.importorskip("duckdb")

from benchmarks.scale import limit, rows
from benchmarks.scale.bench_scale import check_equal
from benchmarks.scale.cpu import cpu_s


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


WORKING = "import time\nwhile time.process_time() < 0.3: pass"


def test_the_work_of_a_child_counts_while_it_runs_and_after():
    before = cpu_s()
    with subprocess.Popen([sys.executable, "-c", f"{WORKING}\ninput()"], stdin=subprocess.PIPE) as child:
        wait_until(lambda: cpu_s() - before >= 0.29)
        child.communicate(b"\n")
    assert cpu_s() - before >= 0.29


def test_the_work_of_what_outlives_a_command_counts():
    leaving = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WORKING!r}]); print('left')"
    code = (
        f"from benchmarks.whole_process import cost_of\nimport sys\nprint(cost_of([sys.executable, '-c', {leaving!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split("cpu_s=")[1].split(",")[0]
    assert float(found) >= 0.3


def test_a_command_that_fails_is_an_error():
    code = "from benchmarks.whole_process import cost_of\ncost_of(['false'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CalledProcessError: Command '['false']' returned non-zero exit status 1" in done.stderr
