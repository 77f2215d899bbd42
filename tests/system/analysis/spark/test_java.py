"""Java starts in the background, and none is left when no command came to use it."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from ackstate.analysis.spark.java import Java, SparkUnavailableError
from command_line import CommandOutcome, assert_one_line

pytest.importorskip("pyspark")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells when a process ends that is not a child"
)

SLEEPING = """#!/bin/sh
echo $$ >>"{pids}"
exec sleep 600
"""
# The trace is not looked at before Java has told that it runs.
SPYING = """
import os
from pathlib import Path
from ackstate.analysis.cli import main
from ackstate.analysis.trace import parquet

def after_java(*arguments, look=parquet.check_trace):
    os.environ["JAVA"] = Path(os.environ["JAVA_HOME"], "pids").read_text()
    return look(*arguments)

parquet.check_trace = after_java
main()
"""


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Make a Java that never gets anywhere, and return the pipe to which it writes its process id."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    os.mkfifo(tmp_path / "pids")
    program.write_text(SLEEPING.format(pids=tmp_path / "pids"))
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    return tmp_path / "pids"


def told(pids):
    """Wait until Java runs, and return a handle of it."""
    return os.pidfd_open(int(pids.read_text()))


def has_ended(java):
    ended, _, _ = select.select([java], [], [], 30)
    os.close(java)
    return bool(ended)


def test_java_that_nobody_used_is_ended(pids):
    with Java({}):
        java = told(pids)
    assert has_ended(java)


def test_java_is_ended_after_an_interrupt(pids):
    def interrupted():
        with Java({}):
            begun.append(told(pids))
            raise KeyboardInterrupt

    begun = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert has_ended(*begun)


def test_java_starts_before_the_trace_is_looked_at(pids, tmp_path):
    words = [sys.executable, "-P", "-c", SPYING, "redelivery", str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert_one_line(CommandOutcome(done.returncode, done.stdout, done.stderr), "none: no such trace")


def test_what_is_no_home_of_spark_is_named(pids, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "none"))
    with pytest.raises(SparkUnavailableError, match=r"no spark-submit in SPARK_HOME=.*none"):
        Java({})
