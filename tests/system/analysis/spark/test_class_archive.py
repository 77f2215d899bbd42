"""Spark gets an archive of its classes where there is one."""

import os
import subprocess
from pathlib import Path

import pytest

from ackstate.analysis.spark import session as of_spark
from ackstate.analysis.spark.session import CLASS_ARCHIVE


def test_spark_is_told_of_an_archive_if_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(of_spark, "CLASS_ARCHIVE", tmp_path / "a b.jsa")
    names = ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions")
    assert not any("Archive" in of_spark._settings("local[2]")[name] for name in names)
    (tmp_path / "a b.jsa").write_bytes(b"")
    assert all(f'"-XX:SharedArchiveFile={tmp_path}/a b.jsa"' in of_spark._settings("local[2]")[name] for name in names)
    assert "spark.executor.extraJavaOptions" not in of_spark._settings("spark://elsewhere:7077")


@pytest.mark.spark
@pytest.mark.skipif(not CLASS_ARCHIVE.is_file(), reason="needs `python -m ackstate.analysis.spark.class_archive`")
def test_the_archive_of_this_environment_fits_its_spark(spark):
    java, archive = Path(os.environ["JAVA_HOME"], "bin", "java"), f"-XX:SharedArchiveFile={CLASS_ARCHIVE}"
    classes = spark.sparkContext._jvm.java.lang.System.getProperty("java.class.path")
    for path, fits in ((classes, True), ("/elsewhere", False)):
        done = subprocess.run([java, archive, "-Xshare:on", "-cp", path, "-version"], check=False)
        assert (done.returncode == 0) == fits
