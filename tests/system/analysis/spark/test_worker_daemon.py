"""Workers on this machine are forked from a process that has their imports, and nothing that takes long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ackstate.analysis.spark.worker_daemon import _without_archives


def test_archives_of_the_same_installation_are_left_out(tmp_path):
    ours, archives = tmp_path / "site-packages", tmp_path / "site-packages" / "pyspark" / "python" / "lib"
    for name in ("pyspark", "py4j"):
        (ours / name).mkdir(parents=True)
        (ours / name / "__init__.py").touch()
    path = [str(archives / "pyspark.zip"), str(tmp_path / "mine.zip"), str(ours)]
    assert _without_archives(path) == path[1:]
    elsewhere = ["/opt/spark/python/lib/pyspark.zip", str(ours)]
    assert _without_archives(elsewhere) == elsewhere
    assert _without_archives(path[:2]) == path[:2]


LEFT_OUT = """
from ackstate.analysis.spark.without_pandas import without_pandas
with without_pandas():
    try:
        import pandas
    except ModuleNotFoundError as error:
        print(error)
import pandas
print(pandas.__file__)
"""


def test_pandas_is_missing_inside_and_there_after(tmp_path):
    (tmp_path / "pandas.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-P", "-c", LEFT_OUT]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["pandas is hidden", str(tmp_path / "pandas.py")]


@pytest.mark.spark
def test_workers_find_our_modules_imported(spark):
    def modules(begun):
        import sys

        imported = dict.fromkeys(sys.modules) | {"spark": sys.modules["pyspark"].__file__}
        return [(list(begun), imported)]

    ((_, found),) = spark.sparkContext.parallelize([0], 1).mapPartitions(modules).collect()
    assert {"ackstate.analysis.estimate.estimates", "pyarrow"} <= found.keys()
    assert "pandas" not in found
    assert ".zip" not in found["spark"]
