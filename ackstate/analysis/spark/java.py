"""Starts the Java virtual machine of a Spark session, without its warnings, and says why it does not start."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    from pyspark.find_spark_home import _find_spark_home  # noqa: PLC0415 - needs the extra `spark`
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

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
