"""Opens a Spark session that is quiet and reports failures in a sentence; by default it runs on this machine.

Before, it checks that a cluster answers; after, that it has free executors, and sends our package to its workers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import contextmanager
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from ackstate.analysis.location import StorePath, atomic_write, spark_url
from ackstate.analysis.trace.events import TraceError
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from rich.progress import Progress, TaskID

    from ackstate.analysis.location import Location


_PACKAGE = "ackstate"
# The earliest date of the format: the same release gives the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
SCRIPT = "from ackstate.analysis.cli import main\n\nmain()\n"
"""The script for `spark-submit`, which cannot run a module: it runs the command line."""


def write_package(path: Path) -> int:
    """Write the package of this installation, and return the number of its files.

    The file is written atomically. The same sources give the same bytes.
    """
    count = 0
    with atomic_write(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _sources():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
            count += 1
    return count


def _sources() -> Iterator[tuple[str, bytes]]:
    with as_file(files(_PACKAGE)) as directory:
        # In a checkout some of its folders are links.
        found = [Path(place, name) for place, _, names in os.walk(directory, followlinks=True) for name in names]
        for file in sorted(found):
            if "__pycache__" not in file.parts:
                yield f"{_PACKAGE}/{file.relative_to(directory).as_posix()}", file.read_bytes()


EXECUTOR_SECONDS = 60.0
"""A standalone cluster that has started no executor by then has no free resources."""

_CONNECT_SECONDS = 5.0
_GUIDE = "docs/guides/estimate-from-a-trace.md"
_STANDALONE = "spark://"
_MASTER = re.compile(r"local(\[[^\]]+\])?|yarn|k8s://\S+|spark://[^\s,:]+:\d+(,[^\s,:]+:\d+)*")
_GIVEN_UP = re.compile("stopped SparkContext|masters are unresponsive")
_LOOPBACK = re.compile(r"(127\.[\d.]+|localhost)$")


class ClusterError(AckStateError):
    """The cluster does not answer, or has no free resources; the message has its name and the remedy."""


def check_master(master: str) -> None:
    """Check the form of a master and, if it is a standalone cluster's, that its port is open."""
    if not _MASTER.fullmatch(master):
        raise ClusterError(f"the Spark master must be spark://HOST:PORT, yarn, k8s://... or local[N], got {master!r}")
    complaints = [_port_complaint(host, port) for host, port in _addresses(master)]
    if complaints and all(complaints):
        raise ClusterError(f"no Spark master at {master}: {complaints[0]}; start it, or give another --master")


def is_local(master: str) -> bool:
    """Whether Spark runs in one process of this machine."""
    return master.startswith("local")


def is_on_loopback(master: str) -> bool:
    """Whether no other machine needs to connect to this process."""
    return is_local(master) or any(_LOOPBACK.match(host) for host, _ in _addresses(master))


@contextmanager
def answer_awaited(master: str) -> Iterator[None]:
    """Raise a clear error if Spark gives up on a standalone master in the block."""
    try:
        yield
    except Exception as error:
        if master.startswith(_STANDALONE) and _GIVEN_UP.search(str(error)):
            raise ClusterError(
                f"no Spark master at {master}: the server there does not answer as a master of our version; the "
                "default port for applications is 7077, which is not the port of the web page"
            ) from None
        raise


def await_executor(spark: SparkSession, master: str) -> None:
    """Wait until a standalone cluster has started an executor."""
    if not master.startswith(_STANDALONE):
        return
    deadline = time.monotonic() + EXECUTOR_SECONDS
    # The driver counts as one.
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 2:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the Spark cluster at {master} has started no executor in {EXECUTOR_SECONDS:g} s: check that its "
                "workers run, and have the requested number of free cores and amount of memory"
            )
        time.sleep(0.1)


def ship_package(spark: SparkSession) -> None:
    """Send our package to the workers, which need not have it installed; its dependencies must be installed."""
    # Workers fetch it when they start, from a directory that exists as long as Spark runs.
    package = Path(spark.sparkContext._temp_dir, "ackstate.zip")
    write_package(package)
    spark.sparkContext.addPyFile(str(package))


def hint(reason: str, master: str) -> str:
    """Return the remedy for a worker's error, empty if there is none.

    >>> hint("ModuleNotFoundError: No module named 'pyroaring'", "spark://host:7077")
    "; the workers' Python lacks pyroaring: send it an environment, see docs/guides/estimate-from-a-trace.md"
    """
    missing = re.search(r"No module named '(\w+)", reason)
    if missing:
        return f"; the workers' Python lacks {missing[1]}: send it an environment, see {_GUIDE}"
    if re.search(r"Class \S+FileSystem not found|No FileSystem for scheme", reason):
        return f"; Spark lacks its client of this store: {_GUIDE} has the name of the package"
    if re.search("does not exist|FileNotFoundException|No such file", reason):
        if is_local(master):
            return "; it existed when the run started: restore it and run again"
        return "; if it exists here, the workers cannot see it: put it on storage that all of them mount at this path"
    if re.search(r"Cannot run program|PYTHON_VERSION_MISMATCH|different version", reason):
        return "; name the workers' interpreter, a Python of our version, with PYSPARK_PYTHON"
    return ""


def _addresses(master: str) -> list[tuple[str, int]]:
    if not master.startswith(_STANDALONE):
        return []
    pairs = (each.rpartition(":") for each in master.removeprefix(_STANDALONE).split(","))
    return [(host, int(port)) for host, _, port in pairs]


def _port_complaint(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return ""
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)


CLASS_ARCHIVE = Path(sys.prefix, "share", "ackstate", "spark-classes.jsa")
"""Used if it exists; see `ackstate.analysis.spark.class_archive`."""
JAVA_MAJOR_MIN = 17
_POLL_S = 0.01
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


class SparkUnavailableError(AckStateError):
    """Spark cannot run here; the message names the missing package."""


def start_java(settings: Mapping[str, str]) -> Any:
    """Start a virtual machine with Spark and return pyspark's connection to it."""
    java = find_java()
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.java_gateway import launch_gateway

    home = _find_spark_home()
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    options += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
    # The virtual machine prints warnings at every start that are irrelevant to the user.
    with TemporaryDirectory() as directory, TemporaryFile() as said:
        connection = Path(directory, "connection")
        environment = {
            **os.environ, "SPARK_HOME": home, "SPARK_CONNECT_MODE": "0",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection),
        }  # fmt: skip
        # It ends when its input does, so it never outlives this process. In a process group of its own it does not
        # receive Ctrl-C, and its children end with it.
        process = subprocess.Popen(  # noqa: S603
            [f"{home}/bin/spark-submit", *options],
            stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment, process_group=0,
        )  # fmt: skip
        try:
            while not connection.exists():
                if process.poll() is not None:
                    _check_version(java)
                    said.seek(0)
                    complaint = _complaint(said.read().decode(errors="replace")) or "without a message"
                    raise SparkUnavailableError(f"Spark does not start: {complaint}")
                time.sleep(_POLL_S)
            told = connection.read_bytes()
            # A port, and the length of the secret that follows.
            os.environ |= {_PORT: str(int.from_bytes(told[:4])), _SECRET: told[8:].decode()}
            try:
                gateway = launch_gateway()  # type: ignore[no-untyped-call]
            finally:
                del os.environ[_PORT], os.environ[_SECRET]
        except BaseException:
            # An interrupted start must not leave it behind.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
            raise
    gateway.proc = process
    return gateway


def find_java() -> str:
    """Return the path of Java, after a check that pyspark is there, without importing it."""
    if given := os.environ.get("SPARK_HOME"):
        if not Path(given, "bin", "spark-submit").is_file():
            raise SparkUnavailableError(f"no spark-submit in SPARK_HOME={given}")
    elif find_spec("pyspark") is None:
        raise SparkUnavailableError("pyspark is missing: install ackstate[spark]")
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise SparkUnavailableError(
            f"no Java {where}: install Java {JAVA_MAJOR_MIN}, for example openjdk-17-jre-headless"
        )
    return java


def _check_version(java: str) -> None:
    told = _output_of([java, "-version"])
    # Java 8 reports 1.8.
    version = re.search(r'version "(?:1\.)?(\d+)', told)
    if version is None:
        raise SparkUnavailableError(f"{java} does not report its version: {_complaint(told) or 'no output'}")
    if int(version[1]) < JAVA_MAJOR_MIN:
        raise SparkUnavailableError(f"{java} is Java {version[1]}: Spark needs Java {JAVA_MAJOR_MIN} or newer")


def class_archive_option() -> str:
    """Return the option that makes Java use the archive of classes, empty if there is none."""
    return f'"-XX:SharedArchiveFile={CLASS_ARCHIVE}"' if CLASS_ARCHIVE.is_file() else ""


def _output_of(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stderr  # noqa: S603
    except OSError as error:
        raise SparkUnavailableError(f"{command[0]} does not run: {error.strerror}") from error


def _complaint(told: str) -> str:
    """Return the line of a failed process's output that states the error, empty if there is no output."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return next(
        (line for line in lines if re.search("error|exception|unrecognized", line, re.IGNORECASE)), "".join(lines[-1:])
    )


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
