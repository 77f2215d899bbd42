"""Spark gets an archive of its classes where there is one; one that does not fit does no harm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ackstate.analysis.spark import java as of_java
from ackstate.analysis.spark import session as of_spark
from ackstate.analysis.spark.java import CLASS_ARCHIVE

pytestmark = pytest.mark.skipif("JAVA_HOME" not in os.environ, reason="needs JAVA_HOME")


def java(archive, *options):
    words = [Path(os.environ["JAVA_HOME"], "bin", "java"), f"-XX:SharedArchiveFile={archive}", *options, "-version"]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_spark_is_told_of_an_archive_if_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(of_java, "CLASS_ARCHIVE", tmp_path / "a b.jsa")
    names = ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions")
    assert not any("Archive" in of_spark._settings("local[2]")[name] for name in names)
    (tmp_path / "a b.jsa").write_bytes(b"")
    assert all(f'"-XX:SharedArchiveFile={tmp_path}/a b.jsa"' in of_spark._settings("local[2]")[name] for name in names)
    assert "spark.executor.extraJavaOptions" not in of_spark._settings("spark://elsewhere:7077")


def test_an_archive_that_does_not_fit_is_not_used(tmp_path):
    (tmp_path / "other.jsa").write_bytes(b"no archive" * 1_000)
    assert java(tmp_path / "other.jsa").returncode == 0


@pytest.mark.spark
@pytest.mark.skipif(not CLASS_ARCHIVE.is_file(), reason="needs `python -m ackstate.analysis.spark.class_archive`")
def test_the_archive_of_this_environment_fits_its_spark(spark):
    classes = spark.sparkContext._jvm.java.lang.System.getProperty("java.class.path")
    fits = java(CLASS_ARCHIVE, "-Xshare:on", "-cp", classes)
    assert fits.returncode == 0, fits.stdout
    assert java(CLASS_ARCHIVE, "-Xshare:on", "-cp", "/elsewhere").returncode
