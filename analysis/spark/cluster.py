"""A Spark cluster instead of this machine: is it there, does it give anything, and what do its workers need of us?"""

from __future__ import annotations

import re
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.spark.package import write_package
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

EXECUTOR_SECONDS = 60.0
"""A standalone cluster that has started no executor for us by then has nothing to give."""

_CONNECT_SECONDS = 5.0
_STANDALONE = "spark://"
_MASTER = re.compile(r"local(\[[^\]]+\])?|yarn|k8s://\S+|spark://[^\s,:]+:\d+(,[^\s,:]+:\d+)*")
_GIVEN_UP = re.compile("stopped SparkContext|masters are unresponsive")
_LOOPBACK = re.compile(r"(127\.[\d.]+|localhost)$")


class ClusterError(AckStateError):
    """The cluster is not there, or gives nothing; the message names it and says what to do."""


def check_master(master: str) -> None:
    """Make sure that a master is one, and that somebody listens there if it is a standalone cluster's.

    Raises:
        ClusterError: It is not, or nobody does.
    """
    if not _MASTER.fullmatch(master):
        raise ClusterError(f"no Spark master: {master!r}; one is spark://HOST:PORT, yarn, k8s://... or local[N]")
    complaints = [_complaint(host, port) for host, port in _addresses(master)]
    if complaints and all(complaints):
        raise ClusterError(f"no Spark master at {master}: {complaints[0]}; start it, or give another --master")


def is_local(master: str) -> bool:
    """Whether Spark runs in one process of this machine."""
    return master.startswith("local")


def is_on_loopback(master: str) -> bool:
    """Whether nothing needs to reach this process from another machine."""
    return is_local(master) or any(_LOOPBACK.match(host) for host, _ in _addresses(master))


@contextmanager
def answer_awaited(master: str) -> Iterator[None]:
    """Say so if Spark gives a standalone master up in the block.

    Raises:
        ClusterError: It has, after a minute or so.
    """
    try:
        yield
    except Exception as error:
        if master.startswith(_STANDALONE) and _GIVEN_UP.search(str(error)):
            raise ClusterError(
                f"no Spark master at {master}: what listens there does not answer as one of our version; its port for "
                "applications is 7077 unless it was told another, its web page has another"
            ) from None
        raise


def await_executor(spark: SparkSession, master: str) -> None:
    """Wait until a standalone cluster has started something for us.

    Raises:
        ClusterError: It has not in `EXECUTOR_SECONDS`.
    """
    if not master.startswith(_STANDALONE):
        return
    deadline = time.monotonic() + EXECUTOR_SECONDS
    # The driver counts as one.
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 2:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the Spark cluster at {master} has started nothing in {EXECUTOR_SECONDS:g} s: are its workers alive, "
                "and have they as many free cores and as much memory as asked for?"
            )
        time.sleep(0.1)


def ship_package(spark: SparkSession) -> None:
    """Send our packages to the workers, which need not have them installed; what they import must be there."""
    # Workers fetch it when they begin, from a directory that lives as long as Spark.
    package = Path(spark.sparkContext._temp_dir, "ackstate.zip")
    write_package(package)
    spark.sparkContext.addPyFile(str(package))


def hint(reason: str, master: str) -> str:
    """Return what to do about a worker's error, empty if that is unknown.

    Args:
        reason: The error in one line.
        master: Where Spark runs.

    >>> hint("ModuleNotFoundError: No module named 'pyroaring'", "spark://host:7077")
    "; the workers' Python lacks pyroaring: send it an environment, as docs/cluster.md says"
    """
    missing = re.search(r"No module named '(\w+)", reason)
    if missing:
        return f"; the workers' Python lacks {missing[1]}: send it an environment, as docs/cluster.md says"
    if re.search(r"Class \S+FileSystem not found|No FileSystem for scheme", reason):
        return "; Spark lacks its client of this store: docs/cluster.md says which package has it"
    if re.search("does not exist|FileNotFoundException|No such file", reason):
        if is_local(master):
            return "; it was there when the run began: put it back and run again"
        return "; if it is here, the workers cannot see it: put it on storage that all of them mount at this path"
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
