"""Failures that Spark reports: each becomes one line with the trace's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ackstate.analysis.spark.session import readable_failures
from ackstate.analysis.trace.events import TraceError

errors = pytest.importorskip("pyspark.errors")


NO_ROOM = "Caused by: java.io.IOException: No space left on device"


def told(*lines):
    """Return the line for an exception of Spark's."""
    import py4j.protocol  # noqa: F401 - without it, no exception can be Spark's

    with pytest.raises(TraceError) as raised, readable_failures(Path("days")):
        raise errors.PySparkException("\n".join(lines))
    return str(raised.value)


def test_a_full_disk_for_the_temporary_files_is_told_with_the_setting_that_moves_them():
    line = told("Job aborted due to stage failure", NO_ROOM)
    assert line == "days: the disk is full: Spark's temporary files, which SPARK_LOCAL_DIRS can put elsewhere"


def test_a_full_disk_for_the_results_is_told_with_their_path():
    aborted = ": org.apache.spark.SparkException: Task failed while writing rows to file:/mnt/state/000001: stopped"
    assert told("An error occurred", aborted, NO_ROOM) == "days: the disk is full: /mnt/state/000001"


def test_another_failure_is_told_with_its_root_cause():
    first, root = ": org.apache.spark.SparkException: job failed.", "Caused by: java.io.IOException: no memory"
    assert told("An error occurred", first, root) == "days: Spark cannot read it, job failed: no memory"
