"""Spark's classes as a Java virtual machine has them in memory: with that archive one starts in half the time.

``python -m ackstate.analysis.spark.class_archive`` makes it for this environment; whoever has none does without.
It fits the Java and the Spark that it was made with, and a virtual machine that it does not fit does not use it.

Source: class-data sharing of the HotSpot virtual machine, JEP 310 and 350.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pyspark import SparkContext

from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.estimate.trace_source import LocalSource
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.spark.java import CLASS_ARCHIVE, SparkUnavailableError
from ackstate.analysis.spark.one_task import OneTaskSource
from ackstate.analysis.spark.session import local_session
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import check_trace, write_trace
from ackstate.analysis.trace.recorder import Frame
from ackstate.errors import AckStateError

_EXIT_S = 300


def make_class_archive() -> Path:
    """Make the archive anew, of what a virtual machine loads for small estimates, and return where it is.

    It has 190 MB. To be called before Spark is started in this process, which cannot start it again.

    Raises:
        SparkUnavailableError: Spark does not start, or its virtual machine keeps no archive.
        OSError: It cannot be written.
    """
    CLASS_ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    CLASS_ARCHIVE.unlink(missing_ok=True)
    unfinished = CLASS_ARCHIVE.with_suffix(".unfinished")
    os.environ["SPARK_SUBMIT_OPTS"] = f'"-XX:ArchiveClassesAtExit={unfinished}"'
    with tempfile.TemporaryDirectory() as directory:
        _estimate_some(Path(directory, "trace"))
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    # At the end of its input the virtual machine exits, and writes.
    gateway.proc.communicate(timeout=_EXIT_S)
    if not unfinished.exists():
        raise SparkUnavailableError("this Java keeps no archive of classes: Spark starts without one")
    return unfinished.replace(CLASS_ARCHIVE)


def _estimate_some(trace: Path) -> None:
    acks = [Event(entry, EventKind.ACK, 1, entry, entry) for entry in range(100)]
    write_trace([Frame("persistent://public/default/orders", "billing", acks)], trace)
    spark = local_session()
    source = SparkSource.of(spark, trace, check_trace(trace))
    for each in (source, OneTaskSource(spark, LocalSource.of(trace, source.covered))):
        found = estimates(each, [None, Policy()]).collect()
        assert found
    spark.stop()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{make_class_archive()}\n")
    except (AckStateError, OSError) as error:
        sys.exit(f"ackstate: {error}")
