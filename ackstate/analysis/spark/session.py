"""Opens a Spark session that is quiet and reports failures in a sentence; by default it runs on this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.location import StorePath, spark_url
from ackstate.analysis.spark.cluster import (
    answer_awaited,
    await_executor,
    check_master,
    hint,
    is_local,
    is_on_loopback,
    ship_package,
)
from ackstate.analysis.spark.java import SparkUnavailableError, class_archive_option, find_java, start_java
from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from rich.progress import Progress, TaskID

    from ackstate.analysis.location import Location

_CORES = 2
# Spark merges small partitions until there is one per core, all of about the same size.
_PARTITIONS_PER_CORE = 8
# Set by `spark-submit` for the program that it runs.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
_PROGRESS_SECONDS = 0.3
# An error of our own code in a worker, at the end of its traceback.
_OWN_ERROR = re.compile(r"ackstate\.[\w.]+: (.*)")
# An error about a file that Spark reads itself, with the root cause.
_UNREAD_FILE = re.compile(r"Encountered error while reading file (?:file://)?(.+?)(?:: |\. (?=File ))(.*)")
# Java's and Python's text of ENOSPC.
_NO_ROOM = "No space left on device"
_WRITTEN = re.compile(r"writing rows to (?:file:)?(.+?): ")


def local_session(*, cores: int = 2) -> SparkSession:
    """Start, or find, a Spark session on this machine's loopback address with `cores` cores, as `open_session`."""
    return open_session(f"local[{cores}]")


def open_session(master: str | None = None) -> SparkSession:
    """Start, or find, a Spark session that is quiet and reports failures in a sentence."""
    is_submitted = _SUBMITTED in os.environ
    if master is None and not is_submitted:
        master = f"local[{_CORES}]"
    if master is not None:
        check_master(master)
    settings = _settings(master)
    if master is not None:
        settings |= {"spark.master": master, "spark.app.name": "ackstate"}
        if is_on_loopback(master):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Otherwise workers would use the system's interpreter, which lacks our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return _session(master, settings, has_java=is_submitted or _is_running())


def check_startable(master: str | None) -> None:
    """Check, before anything else is done, what `open_session` needs on this machine, and the form of a master."""
    if master is not None:
        check_master(master)
    if _SUBMITTED not in os.environ and not _is_running():
        find_java()


def _is_running() -> bool:
    if "pyspark" not in sys.modules:
        return False
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _session(master: str | None, settings: Mapping[str, str], *, has_java: bool) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    with _own_interrupts():
        try:
            if not has_java:
                SparkContext._ensure_initialized(gateway=start_java(settings))
            configuration = SparkConf().setAppName("ackstate").setAll(list(settings.items()))
            # Now Spark has the master that it was submitted to.
            where = master or SparkConf().get("spark.master", "local")
            assert where is not None
            check_master(where)
            with answer_awaited(where):
                spark = SparkSession.builder.config(conf=configuration).getOrCreate()
            await_executor(spark, where)
            if not is_local(where) and _SUBMITTED not in os.environ:
                ship_package(spark)
        except (PySparkException, Py4JError, OSError) as error:
            raise SparkUnavailableError(f"Spark does not start: {_reason(error)}") from error
    return spark


@contextmanager
def readable_failures(what: Location, *, work: str = "read") -> Iterator[None]:
    """Convert Spark's exceptions into a `TraceError` of one line, and add the trace's name to it."""
    try:
        yield
    except TraceError as error:
        raise error if str(what) in str(error) else TraceError(f"{what}: {error}") from error
    except Exception as error:
        if "py4j" not in sys.modules:
            raise
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        if not isinstance(error, (PySparkException, Py4JError)):
            raise
        reason = _reason(error)
        session = SparkSession.getActiveSession()
        master = (session and session.sparkContext.master) or "local"
        # A URL has the same contents for every machine.
        advice = hint(reason, "local" if isinstance(what, StorePath) else master)
        if own := _OWN_ERROR.fullmatch(reason):
            # An error about a file already names it.
            where = "" if own[1].startswith(f"{what}/") else f"{what}: "
            raise TraceError(f"{where}{own[1]}{advice}") from error
        if unread := _UNREAD_FILE.fullmatch(reason):
            raise TraceError(f"{unread[1]}: not a readable Parquet file, {unread[2]}{advice}") from error
        if _NO_ROOM in reason:
            written = _WRITTEN.search(reason)
            where = written[1] if written else "Spark's temporary files, which SPARK_LOCAL_DIRS can put elsewhere"
            raise TraceError(f"{what}: the disk is full: {where}") from error
        raise TraceError(f"{what}: Spark cannot {work} it, {reason}{advice}") from error


@contextmanager
def shown_stages(spark: SparkSession, progress: Progress, task: TaskID, what: str) -> Iterator[None]:
    """Show the tasks of the running stages, as the status tracker of Spark counts them, while the block runs."""
    if progress.disable:
        yield
        return
    ended = threading.Event()
    follower = threading.Thread(target=_follow_stages, args=(spark, progress, task, what, ended), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _follow_stages(spark: SparkSession, progress: Progress, task: TaskID, what: str, ended: threading.Event) -> None:
    from py4j.protocol import Py4JError

    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(_PROGRESS_SECONDS):
        try:
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        except (Py4JError, OSError):
            return
        if running := [stage for stage in stages if stage is not None]:
            done, total = sum(each.numCompletedTasks for each in running), sum(each.numTasks for each in running)
            name = f"{what}, stage {max(each.stageId for each in running)}: {done} of {total} tasks"
            progress.update(task, description=name, completed=done, total=total)


def _settings(master: str | None) -> dict[str, str]:
    settings = {
        # Each of our records is a chunk of up to 16,384 events.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "64",
        # Otherwise workers would search the current directory first, and could import a foreign `numpy.py`.
        "spark.executorEnv.PYTHONSAFEPATH": "1",
        # A damaged page may decompress to wrong numbers.
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    }
    if master is None:
        return settings
    settings |= {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Our Python workers take most of the time. Optimising Java would occupy their cores for seconds, and pay off
        # later.
        "spark.driver.extraJavaOptions": (
            f'-XX:TieredStopAtLevel=1 "-Dlog4j2.configurationFile={_log_settings()}" {class_archive_option()}'
        ),
    }
    if is_on_loopback(master):
        # The workers of such a cluster are also on this machine.
        settings["spark.executor.extraJavaOptions"] = class_archive_option()
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    cores = re.fullmatch(r"local\[(\d+)\]", master)
    if cores:
        settings["spark.sql.shuffle.partitions"] = str(_PARTITIONS_PER_CORE * int(cores[1]))
    return settings


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Restore the handler of Ctrl-C: Spark's would first call the virtual machine, on a connection that is busy."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def parquet_frame(spark: SparkSession, schema: StructType, *paths: Location) -> DataFrame:
    """Return Parquet files as a DataFrame; brackets and stars in their names are literal."""
    # Without a schema, Spark would start a job to infer it.
    reader = spark.read.schema(schema).option("__globPaths__", "false")
    return reader.parquet(*map(spark_url, paths))


def _reason(error: Exception) -> str:
    """Return a long error in one line: the exception and its root cause, without stack frames or codes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback ") for line in lines):
        return lines[-1]
    raised = [line for line in lines if line.startswith((": ", "Caused by: "))]
    # The first exception and the root cause; a message that is not an exception is used as it is.
    told = [line.partition("Exception: ")[2] or line for line in (*raised[:1], *raised[1:][-1:])] or lines[:1]
    plain = [re.sub(r"^\[[\w.]+\] | *SQLSTATE: \w+$", "", line).rstrip(" .") for line in told]
    return ": ".join(plain) or type(error).__name__


def _log_settings() -> Path:
    return Path(__file__).with_name("log4j2.properties")
