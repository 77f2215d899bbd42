"""A local Spark session that is quiet, stays on this machine, and fails in a sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.errors import AckStateError
from analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

JAVA_MAJOR_MIN = 17


class SparkUnavailableError(AckStateError):
    """Spark cannot run here; the message says what to install."""


def local_session(*, cores: int = 2) -> SparkSession:
    """Start, or find, a Spark session on this machine's loopback address with `cores` cores.

    Raises:
        SparkUnavailableError: pyspark or a fitting Java is missing, or Spark does not start.
    """
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkUnavailableError(f"Spark is missing, install ackstate[spark]: {error}") from None
    _check_java()
    # Workers would take the system's interpreter, which lacks our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(cores),
        # A record of ours is a chunk of up to 16,384 events.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "64",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_log_settings()}",
    }
    configuration = SparkConf().setMaster(f"local[{cores}]").setAppName("ackstate").setAll(list(settings.items()))
    with tempfile.TemporaryFile() as stderr:
        try:
            # The virtual machine greets every start with warnings that are none of the user's business.
            if SparkContext._gateway is None:
                SparkContext._ensure_initialized(
                    gateway=launch_gateway(configuration, popen_kwargs={"stderr": stderr})
                )
            return SparkSession.builder.config(conf=configuration).getOrCreate()
        except (PySparkException, OSError) as error:
            stderr.seek(0)
            told = stderr.read().decode(errors="replace").strip().splitlines() or str(error).splitlines()
            raise SparkUnavailableError(f"Spark does not start: {told[-1]}") from error


@contextmanager
def readable_failures(what: str) -> Iterator[None]:
    """Turn what Spark raises into a `TraceError` of one line.

    Args:
        what: The trace that is read.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise TraceError(f"{what}: Spark cannot read it, {lines[0] if lines else type(error).__name__}") from error


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise SparkUnavailableError(f"no Java {where}: install Java {JAVA_MAJOR_MIN}, for example openjdk-17-jre-headless")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    version = re.search(r'version "(\d+)', told)
    if version is None or int(version[1]) < JAVA_MAJOR_MIN:
        found = version[1] if version else "unknown"
        raise SparkUnavailableError(f"{java} is Java {found}: Spark needs Java {JAVA_MAJOR_MIN} or newer")


def _log_settings() -> Path:
    return Path(__file__).with_name("log4j2.properties")
