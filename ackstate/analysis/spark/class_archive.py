"""Creates an archive of Spark's classes, with which a Java virtual machine starts in half the time.

``python -m ackstate.analysis.spark.class_archive`` creates it for this environment; it is optional. It fits only the
Java and the Spark that created it; any other virtual machine ignores it.

Source: class-data sharing of the HotSpot virtual machine, JEP 310 and 350.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pyspark import SparkContext

from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.spark.session import CLASS_ARCHIVE, SparkUnavailableError, local_session
from ackstate.analysis.spark.source import SparkSource, one_task_source
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recording import Frame
from ackstate.errors import AckStateError

_EXIT_S = 300


def make_class_archive() -> Path:
    """Create the archive again, with the classes that small estimates load, and return its path.

    It has 190 MB. Call this before Spark is started in this process, which cannot start it again.
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
    # At the end of its input the virtual machine writes the archive and exits.
    gateway.proc.communicate(timeout=_EXIT_S)
    if not unfinished.exists():
        raise SparkUnavailableError("this Java does not support archives of classes: Spark starts without one")
    return unfinished.replace(CLASS_ARCHIVE)


def _estimate_some(trace: Path) -> None:
    acks = [Event(entry, EventKind.ACK, 1, entry, entry) for entry in range(100)]
    write_trace([Frame("persistent://public/default/orders", "billing", acks)], trace)
    spark = local_session()
    source = SparkSource.of(spark, trace)
    for each in (source, one_task_source(spark, source.span)):
        found = estimates(each, [None, Policy()]).collect()
        assert found
    spark.stop()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{make_class_archive()}\n")
    except (AckStateError, OSError) as error:
        sys.exit(f"ackstate: {error}")
