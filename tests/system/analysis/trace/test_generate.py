"""Traces that Spark generates."""

import pytest

from ackstate.analysis.trace import generate
from ackstate.analysis.trace.events import CHUNK_EVENTS, TraceError
from ackstate.analysis.trace.generate import TracePlan, make_trace
from ackstate.analysis.trace.parquet import check_trace, trace_files
from trace_files import plan_of, read_rows


def rows_of(path):
    tables = [read_rows(file) for file in trace_files(path)]
    return sorted((row for table in tables for row in table), key=lambda row: tuple(row.values())[:3])


@pytest.mark.spark
@pytest.mark.slow
def test_the_number_of_cores_changes_nothing(spark, tmp_path, monkeypatch):
    plan = TracePlan("mixed_delays", 60_000, subscriptions=3, topics=2, flush_interval_ms=200)
    for cores in (1, 2):
        monkeypatch.setattr(generate, "_cores", lambda _, cores=cores: cores)
        monkeypatch.setattr(generate, "_FILES_PER_CORE", 1)
        made = make_trace(spark, plan, tmp_path / str(cores))
        assert (made.events, made.files) == (60_000, cores)
        check_trace(tmp_path / str(cores))
    rows = rows_of(tmp_path / "1")
    assert rows == rows_of(tmp_path / "2")
    assert sum(len(row["kind"]) for row in rows if row["subscription"]) == 60_000
    assert all(len(row["kind"]) == CHUNK_EVENTS for row in rows if row["chunk"] == 0 and row["subscription"])
    assert all(row["first_seq"] == CHUNK_EVENTS * row["chunk"] for row in rows)


@pytest.mark.spark
@pytest.mark.slow
def test_a_worker_that_fails_leaves_what_stood_there(spark, tmp_path, monkeypatch):
    from ackstate.analysis.spark.session import readable_failures

    plan = plan_of("in_order", 20_000)
    make_trace(spark, plan, tmp_path / "trace")
    before = rows_of(tmp_path / "trace")

    def fails(_batches, **_settings):
        raise OSError("no room")

    monkeypatch.setattr(generate, "_make", fails)
    with pytest.raises(TraceError, match=r"cannot write it.*no room"), readable_failures(tmp_path, work="write"):
        make_trace(spark, plan_of("in_order", 30_000), tmp_path / "trace")
    assert rows_of(tmp_path / "trace") == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
