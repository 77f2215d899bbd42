"""Times that no trace has are refused by every reader; sums of values times durations never wrap."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.estimate.parts import (
    ESTIMATE,
    Part,
    batches_of,
    narrow_sums,
    put_together,
    whole_sums,
)
from ackstate.analysis.replay.curves import weight_of
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recorder import Frame
from ackstate.analysis.trace.times import OWN_CLOCK_MS, WALL_CLOCK_MS, TraceClock
from trace_files import read_rows, write, write_rows

NOW_MS = 1_700_000_000_000
WRONG = [
    (1_700_000_000, "seconds"),
    (NOW_MS * 1_000, "microseconds"),
    (NOW_MS * 1_000_000, "nanoseconds"),
    (4_102_444_800_000, "write ms since 1970"),
    (946_684_799_999, "write ms since 1970"),
    (2**63 - 1, "write ms since 1970"),
    (5, "another clock"),
]


def acks(*times_ms):
    return [
        {"topic": "t", "subscription": "s", "ts_ms": ts_ms, "kind": "ack", "ledger_id": 3, "first_entry": number}
        for number, ts_ms in enumerate(times_ms)
    ]


@pytest.mark.parametrize("clock", [WALL_CLOCK_MS, OWN_CLOCK_MS])
def test_the_bounds_of_a_clock_are_part_of_a_trace(tmp_path, clock):
    source = write(tmp_path / "rows.jsonl", acks(clock.start, clock.stop - 1))
    assert convert([source], tmp_path / "trace").events == 2
    assert check_events(tmp_path / "trace").last_ts_ms == clock.stop - 1
    assert parquet.check_trace(tmp_path / "trace").end_ms == clock.stop - 1


@pytest.mark.parametrize(("ts_ms", "hint"), WRONG)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_time_of_another_unit_is_refused_with_its_row_and_unit(tmp_path, ts_ms, hint, suffix):
    rows = acks(NOW_MS, ts_ms)
    source = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        write(source, rows)
    row = "row" if suffix == "parquet" else "line"
    with pytest.raises(TraceError, match=rf"{row} 2 \(ts_ms {ts_ms}, .*{hint}"):
        convert([source], tmp_path / "trace")


@pytest.mark.parametrize(("ts_ms", "hint"), WRONG[:-1])
def test_a_trace_that_is_all_in_another_unit_is_refused(tmp_path, ts_ms, hint):
    with pytest.raises(TraceError, match=rf"line 1 \(ts_ms {ts_ms}, .*{hint}"):
        convert([write(tmp_path / "rows.jsonl", acks(ts_ms, ts_ms))], tmp_path / "trace")


@pytest.mark.parametrize(("ts_ms", "hint"), WRONG)
def test_a_trace_that_was_written_with_such_times_is_refused(tmp_path, monkeypatch, ts_ms, hint):
    frames = [Frame("t", "s", [Event(NOW_MS, EventKind.ACK, 3, 0, 0), Event(ts_ms, EventKind.ACK, 3, 1, 1)])]
    with pytest.raises(TraceError, match=f"s of t: ts_ms {ts_ms}, .*{hint}"):
        parquet.write_trace(frames, tmp_path / "trace")
    with monkeypatch.context() as without:
        without.setattr(TraceClock, "judge", lambda _, times: np.zeros(len(times), np.bool_))
        parquet.write_trace(frames, tmp_path / "trace")
    file = tmp_path / "trace" / parquet.FIRST_FILE
    write_rows(read_rows(file), file)
    with pytest.raises(TraceError, match=f"row 1, chunk 0 of subscription 's' of t: ts_ms {ts_ms}, .*{hint}"):
        parquet.check_trace(tmp_path / "trace")
    with pytest.raises(TraceError, match=rf"seq 1 of s of t \(ts_ms {ts_ms}, .*{hint}"):
        check_events(tmp_path / "trace")


def test_a_log_of_acks_has_a_clock_of_its_own(tmp_path):
    run = {"topic": "t", "subscription": "s", "entries": [[4, 0, 2]], "broker_acks_ms": [[0, 5, [0]], [0, 10**9, [1]]]}
    with pytest.raises(TraceError, match=r"line 1 .*looks like seconds"):
        convert([write(tmp_path / "log.jsonl", [run])], tmp_path / "trace")


def test_values_times_durations_are_exact_beyond_64_bits():
    chance = np.random.default_rng(7)
    for bits in (10, 31, 40, 62):
        values, durations = chance.integers(0, 2**bits, 50), chance.integers(0, 2**36, 50)
        exact = sum(value * ms for value, ms in zip(values.tolist(), durations.tolist(), strict=True))
        assert weight_of(values, durations) == exact
    assert weight_of(values, durations) > 2**63


def test_an_estimate_of_a_century_does_not_wrap():
    century_ms = WALL_CLOCK_MS.stop - WALL_CLOCK_MS.start
    lost, young = 4 * 2**32, 3 * 2**32
    sums = narrow_sums([lost, 5, young * century_ms, 0, 7, 0, 1, 2, 3, 4, 5])
    assert max(each for each in sums if each is not None) < 2**63
    assert whole_sums(sums) == [lost, 5, young * century_ms, 0, 7, 0, 1, 2, 3, 4, 5]
    names = ("total", "", "", "")
    parts = [Part(0, -1, *names, np.empty(0, np.int64), np.array([lost]), np.array([century_ms]), sums)]
    rows = put_together(batches_of(parts), duration_ms=century_ms, crashes_per_day=1)
    (row,) = [row for batch in rows for row in batch.to_pylist()]
    assert json.dumps(row["expected"]) == json.dumps(float(lost))
    assert row["young"] == pytest.approx(young)
    assert row["not_flushed"] == pytest.approx(lost - young)
    assert list(row) == ESTIMATE.names
