"""Connects to a Spark cluster: checks that it answers and has free executors, and sends our package to its workers."""

from __future__ import annotations

import os
import re
import socket
import time
import zipfile
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.atomic_write import atomic_write
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


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
    complaints = [_complaint(host, port) for host, port in _addresses(master)]
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


def _complaint(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return ""
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
