"""Failures that Spark reports: each becomes one line with the trace's name."""

from pathlib import Path

import pytest

from ackstate.analysis.spark import session as of_spark
from ackstate.analysis.spark.session import readable_failures
from ackstate.analysis.trace.events import TraceError


def test_spark_is_told_of_an_archive_if_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(of_spark, "CLASS_ARCHIVE", tmp_path / "a b.jsa")
    names = ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions")
    assert not any("Archive" in of_spark._settings("local[2]")[name] for name in names)
    (tmp_path / "a b.jsa").write_bytes(b"")
    assert all(f'"-XX:SharedArchiveFile={tmp_path}/a b.jsa"' in of_spark._settings("local[2]")[name] for name in names)
    assert "spark.executor.extraJavaOptions" not in of_spark._settings("spark://elsewhere:7077")


errors = pytest.importorskip("pyspark.errors")
NO_ROOM = "Caused by: java.io.IOException: No space left on device"
SPARK = ": org.apache.spark.SparkException: "


@pytest.mark.parametrize(("lines", "told"), [
    (["Job aborted due to stage failure", NO_ROOM],
     "the disk is full: Spark's temporary files, which SPARK_LOCAL_DIRS can put elsewhere"),
    (["An error occurred", f"{SPARK}Task failed while writing rows to file:/mnt/state/000001: stopped", NO_ROOM],
     "the disk is full: /mnt/state/000001"),
    (["An error occurred", f"{SPARK}job failed.", "Caused by: java.io.IOException: no memory"],
     "Spark cannot read it, job failed: no memory"),
])  # fmt: skip
def test_a_failure_of_spark_is_told_in_one_line(lines, told):
    import py4j.protocol  # noqa: F401 - without it, no exception can be Spark's

    with pytest.raises(TraceError) as raised, readable_failures(Path("days")):
        raise errors.PySparkException("\n".join(lines))
    assert str(raised.value) == f"days: {told}"
