"""A Spark session that is quiet and fails in a sentence; unless told otherwise it stays on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.redelivery.cluster import (
    answer_awaited,
    await_executor,
    check_master,
    hint,
    is_local,
    is_on_loopback,
    ship_package,
)
from ackstate.analysis.trace.events import TraceError
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from rich.progress import Progress, TaskID

CLASS_ARCHIVE = Path(sys.prefix, "share", "ackstate", "spark-classes.jsa")
"""Used if it is there; see `ackstate.analysis.redelivery.class_archive`."""
JAVA_MAJOR_MIN = 17
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


class SparkUnavailableError(AckStateError):
    """Spark cannot run here; the message says what to install."""


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
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkUnavailableError(f"Spark is missing, install ackstate[spark]: {error}") from None
    from py4j.protocol import Py4JError

    is_submitted = _SUBMITTED in os.environ
    if master is None and not is_submitted:
        master = f"local[{_CORES}]"
    if master is not None:
        check_master(master)
    if not is_submitted:
        _check_java()
    # Workers would take the system's interpreter, which lacks our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    configuration = SparkConf().setAppName("ackstate").setAll(list(_settings(master).items()))
    if master is not None:
        configuration.setMaster(master)
        if is_on_loopback(master):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryFile() as said, _own_interrupts():
        try:
            # The virtual machine greets every start with warnings that are none of the user's business.
            if SparkContext._gateway is None:
                output = {"stdout": said, "stderr": said}
                with _interrupts_held_back():
                    gateway = launch_gateway(configuration, popen_kwargs=output)  # type: ignore[no-untyped-call]
                SparkContext._ensure_initialized(gateway=gateway)
            # Now Spark tells what it was submitted to.
            where = master or SparkConf().get("spark.master", "local")
            assert where is not None
            check_master(where)
            with answer_awaited(where):
                spark = SparkSession.builder.config(conf=configuration).getOrCreate()
            await_executor(spark, where)
            if not is_local(where) and not is_submitted:
                ship_package(spark)
        except (PySparkException, Py4JError, OSError) as error:
            said.seek(0)
            told = said.read().decode(errors="replace")
            reason = _reason(error) if isinstance(error, Py4JError) else _complaint(told) or _reason(error)
            raise SparkUnavailableError(f"Spark does not start: {reason}") from error
    return spark


@contextmanager
def readable_failures(what: Path, *, work: str = "read") -> Iterator[None]:
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
        advice = hint(reason, (session and session.sparkContext.master) or "local")
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
            f'-XX:TieredStopAtLevel=1 "-Dlog4j2.configurationFile={_log_settings()}" {_class_archive()}'
        ),
    }
    if is_on_loopback(master):
        # The workers of such a cluster are on this machine, too.
        settings["spark.executor.extraJavaOptions"] = _class_archive()
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
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


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C take effect after the block: a virtual machine that nobody is connected to yet would live on."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is signal.SIG_IGN:
        yield
        return
    held_back: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: held_back.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held_back:
            raise KeyboardInterrupt


def parquet_frame(spark: SparkSession, schema: StructType, *paths: Path) -> DataFrame:
    """Return Parquet files as a DataFrame.

    Args:
        spark: The session.
        schema: Of the files; Spark would start a job to find out.
        paths: Files or directories; brackets and stars in their names are no patterns.
    """
    reader = spark.read.schema(schema).option("__globPaths__", "false")
    return reader.parquet(*(f"file://{path.absolute()}" for path in paths))


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


def _complaint(told: str) -> str:
    """Return the line in which a process that did not start says why, empty if it said nothing."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return next(
        (line for line in lines if re.search("error|exception|unrecognized", line, re.IGNORECASE)), "".join(lines[-1:])
    )


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise SparkUnavailableError(
            f"no Java {where}: install Java {JAVA_MAJOR_MIN}, for example openjdk-17-jre-headless"
        )
    told = _output_of([java, "-version"])
    # Java 8 calls itself 1.8.
    version = re.search(r'version "(?:1\.)?(\d+)', told)
    if version is None:
        raise SparkUnavailableError(f"{java} does not say its version: {_complaint(told) or 'it says nothing'}")
    if int(version[1]) < JAVA_MAJOR_MIN:
        raise SparkUnavailableError(f"{java} is Java {version[1]}: Spark needs Java {JAVA_MAJOR_MIN} or newer")


def _output_of(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stderr  # noqa: S603
    except OSError as error:
        raise SparkUnavailableError(f"{command[0]} does not run: {error.strerror}") from error


def _class_archive() -> str:
    return f'"-XX:SharedArchiveFile={CLASS_ARCHIVE}"' if CLASS_ARCHIVE.is_file() else ""


def _log_settings() -> Path:
    return Path(__file__).with_name("log4j2.properties")
