"""A Spark session that is quiet and fails in a sentence; unless told otherwise it stays on this machine."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
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
from ackstate.analysis.spark.java import Java, SparkUnavailableError, class_archive_option
from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from rich.progress import Progress, TaskID

    from ackstate.analysis.location import Location

_LOG = logging.getLogger(__name__)
_CORES = 2
# Spark puts small ones together until there is one a core, and all are of about one size.
_PARTITIONS_PER_CORE = 8
# What `spark-submit` tells the program that it runs.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
_PROGRESS_SECONDS = 0.3
# What one of our workers refused, at the end of its traceback.
_OWN_ERROR = re.compile(r"ackstate\.[\w.]+: (.*)")
# Of a file that Spark reads itself, with the error at the root.
_UNREAD_FILE = re.compile(r"Encountered error while reading file (?:file://)?(.+?)(?:: |\. (?=File ))(.*)")
# Java's and Python's text of ENOSPC.
_NO_ROOM = "No space left on device"
_WRITTEN = re.compile(r"writing rows to (?:file:)?(.+?): ")


def local_session(*, cores: int = 2) -> SparkSession:
    """Start, or find, a Spark session on this machine's loopback address with `cores` cores, as `open_session`."""
    return open_session(f"local[{cores}]")


def open_session(master: str | None = None) -> SparkSession:
    """Start, or find, a Spark session that is quiet and fails in a sentence.

    Args:
        master: Where Spark runs: ``local[N]`` is this machine, ``spark://HOST:PORT`` a standalone cluster, whose
            workers are sent our packages. None for what `spark-submit` was told, which also sends what it was given;
            without that, two cores of this machine.

    Raises:
        SparkUnavailableError: pyspark or a fitting Java is missing, or Spark does not start.
        ClusterError: The cluster is not there, or gives nothing.
    """
    with starting_session(master) as session:
        return session()


@contextmanager
def starting_session(master: str | None = None) -> Iterator[Callable[[], SparkSession]]:
    """Start a session as `open_session` does, in the background: the block calls what it is given when it needs it.

    Java, which takes longest, is started at once, and ended if the block ends without the session.
    """
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
    # Workers would take the system's interpreter, which lacks our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with ExitStack() as kept:
        java = None if is_submitted or _is_running() else kept.enter_context(Java(settings))
        yield lambda: _session(master, settings, java)


def _is_running() -> bool:
    if "pyspark" not in sys.modules:
        return False
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _session(master: str | None, settings: Mapping[str, str], java: Java | None) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    with _own_interrupts():
        try:
            if java is not None:
                SparkContext._ensure_initialized(gateway=java.gateway())
                _LOG.info("Java started")
            configuration = SparkConf().setAppName("ackstate").setAll(list(settings.items()))
            # Now Spark tells what it was submitted to.
            where = master or SparkConf().get("spark.master", "local")
            assert where is not None
            check_master(where)
            with answer_awaited(where):
                spark = SparkSession.builder.config(conf=configuration).getOrCreate()
            await_executor(spark, where)
            if not is_local(where) and _SUBMITTED not in os.environ:
                ship_package(spark)
            _LOG.info("Spark session begun")
        except (PySparkException, Py4JError, OSError) as error:
            told = "" if isinstance(error, Py4JError) or java is None else java.complaint()
            raise SparkUnavailableError(f"Spark does not start: {told or _reason(error)}") from error
    return spark


@contextmanager
def readable_failures(what: Location, *, work: str = "read") -> Iterator[None]:
    """Turn what Spark raises into a `TraceError` of one line, and put the trace into one that does not name it.

    Args:
        what: The trace that is read, or written.
        work: Which of both.
    """
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
        # Behind a URL there is for all what there is for one.
        advice = hint(reason, "local" if isinstance(what, StorePath) else master)
        if own := _OWN_ERROR.fullmatch(reason):
            # An error of a file names it.
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
def shown_stages(spark: SparkSession, progress: Progress) -> Iterator[None]:
    """Show the stages that Spark is at, as its status tracker counts them, while the block runs."""
    task = progress.add_task("Spark computes every instant", total=None)
    if progress.disable:
        yield
        return
    ended = threading.Event()
    follower = threading.Thread(target=_follow_stages, args=(spark, progress, task, ended), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _follow_stages(spark: SparkSession, progress: Progress, task: TaskID, ended: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(_PROGRESS_SECONDS):
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        running = [stage for stage in stages if stage is not None]
        if running:
            done, total = sum(each.numCompletedTasks for each in running), sum(each.numTasks for each in running)
            name = f"Spark, stage {max(each.stageId for each in running)}: {done} of {total} tasks"
            progress.update(task, description=name, completed=done, total=total)


def _settings(master: str | None) -> dict[str, str]:
    settings = {
        # A record of ours is a chunk of up to 16,384 events.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "64",
        # Workers would look for modules in the current directory first, and find a stranger's `numpy.py` there.
        "spark.executorEnv.PYTHONSAFEPATH": "1",
        # Damage inside a page may decompress to other numbers.
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    }
    if master is None:
        return settings
    settings |= {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # What takes time are our Python workers. To compile Java well takes their cores for seconds, and pays later.
        "spark.driver.extraJavaOptions": (
            f'-XX:TieredStopAtLevel=1 "-Dlog4j2.configurationFile={_log_settings()}" {class_archive_option()}'
        ),
    }
    if is_on_loopback(master):
        # The workers of such a cluster are on this machine, too.
        settings["spark.executor.extraJavaOptions"] = class_archive_option()
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if is_local(master):
        # Others have no such module until it is sent.
        settings["spark.python.daemon.module"] = "ackstate.analysis.spark.worker_daemon"
    cores = re.fullmatch(r"local\[(\d+)\]", master)
    if cores:
        settings["spark.sql.shuffle.partitions"] = str(_PARTITIONS_PER_CORE * int(cores[1]))
    return settings


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Take back what Spark makes of Ctrl-C: it would first ask the virtual machine, on a connection that is busy."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def parquet_frame(spark: SparkSession, schema: StructType, *paths: Location) -> DataFrame:
    """Return Parquet files as a DataFrame.

    Args:
        spark: The session.
        schema: Of the files; Spark would start a job to find out.
        paths: Files or directories; brackets and stars in their names are no patterns.
    """
    reader = spark.read.schema(schema).option("__globPaths__", "false")
    return reader.parquet(*map(spark_url, paths))


def _reason(error: Exception) -> str:
    """Return in a line what a long story says: the exception and what caused it, neither its frames nor its codes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback ") for line in lines):
        return lines[-1]
    raised = [line for line in lines if line.startswith((": ", "Caused by: "))]
    # The first exception and the one at the root; a message that is no exception stands for itself.
    told = [line.partition("Exception: ")[2] or line for line in (*raised[:1], *raised[1:][-1:])] or lines[:1]
    plain = [re.sub(r"^\[[\w.]+\] | *SQLSTATE: \w+$", "", line).rstrip(" .") for line in told]
    return ": ".join(plain) or type(error).__name__


def _log_settings() -> Path:
    return Path(__file__).with_name("log4j2.properties")
