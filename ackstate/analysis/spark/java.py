"""Starts the Java virtual machine of a Spark session in the background, and ends it if it is not used.

It takes a second until it accepts connections, during which Python imports Spark and checks the trace.

Source: `pyspark.java_gateway`, which does this in one blocking step.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any, Final, final

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CLASS_ARCHIVE = Path(sys.prefix, "share", "ackstate", "spark-classes.jsa")
"""Used if it exists; see `ackstate.analysis.spark.class_archive`."""
JAVA_MAJOR_MIN = 17
_POLL_S = 0.01
# Spark's launcher only assembles the real command line, so optimising compilation is not worth it.
_LAUNCHER_OPTIONS: Final = {"SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


class SparkUnavailableError(AckStateError):
    """Spark cannot run here; the message names the missing package."""


@final
class Java:
    """A starting virtual machine with Spark; a context manager that ends it, unless `gateway` was called.

    Args:
        settings: Settings of Spark.

    Raises:
        SparkUnavailableError: pyspark or Java is missing.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        home = _spark_home()
        _java_program()
        self._directory = TemporaryDirectory()
        self._connection = Path(self._directory.name, "connection")
        # The virtual machine prints warnings at every start that are irrelevant to the user.
        self._said = TemporaryFile()  # noqa: SIM115 - closed by `_forget`
        command = [f"{home}/bin/spark-submit"]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        environment = {
            **_LAUNCHER_OPTIONS, **os.environ, "SPARK_HOME": home, "SPARK_CONNECT_MODE": "0",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._connection),
        }  # fmt: skip
        with _interrupts_held_back():
            # It ends when its input does, so it never outlives this process. In a process group of its own it does not
            # receive Ctrl-C, and its children end with it.
            self._process = subprocess.Popen(  # noqa: S603
                [*command, *shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))],
                stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, env=environment, process_group=0,
            )  # fmt: skip
        self._is_taken = False

    def __enter__(self) -> Java:
        """Return this."""
        return self

    def __exit__(self, *_failure: object) -> None:
        """End the virtual machine if it is not connected."""
        if not self._is_taken:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._directory.cleanup()
        self._said.close()

    def gateway(self) -> Any:
        """Wait for the virtual machine and return pyspark's connection to it; the caller then owns the process.

        Raises:
            SparkUnavailableError: It ended.
        """
        from pyspark.java_gateway import launch_gateway  # noqa: PLC0415 - while Java starts

        while not self._connection.exists():
            if self._process.poll() is not None:
                check_java_version()
                raise SparkUnavailableError(f"Spark does not start: {self.complaint() or 'without a message'}")
            time.sleep(_POLL_S)
        told = self._connection.read_bytes()
        # A port, and the length of the secret that follows.
        os.environ |= {_PORT: str(int.from_bytes(told[:4])), _SECRET: told[8:].decode()}
        try:
            gateway = launch_gateway()  # type: ignore[no-untyped-call]
        finally:
            del os.environ[_PORT], os.environ[_SECRET]
        gateway.proc = self._process
        self._is_taken = True
        return gateway

    def complaint(self) -> str:
        """Return the line of its output that states the error, empty if there is none."""
        self._said.seek(0)
        return _complaint(self._said.read().decode(errors="replace"))


def check_java_version() -> None:
    """Check that Java is new enough.

    Raises:
        SparkUnavailableError: Java is too old, or is missing.
    """
    java = _java_program()
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


def _spark_home() -> str:
    """Return the directory of Spark, without importing it."""
    if given := os.environ.get("SPARK_HOME"):
        if not Path(given, "bin", "spark-submit").is_file():
            raise SparkUnavailableError(f"no spark-submit in SPARK_HOME={given}")
        return given
    found = find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        raise SparkUnavailableError("pyspark is missing: install ackstate[spark]")
    for package in found.submodule_search_locations:
        # An installation for another Hadoop has Spark in a separate directory.
        for home in (f"{package}/spark-distribution", package):
            if Path(home, "bin", "spark-submit").is_file():
                return home
    raise SparkUnavailableError("pyspark has no spark-submit: set SPARK_HOME to the directory of Spark")


def _java_program() -> str:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise SparkUnavailableError(
            f"no Java {where}: install Java {JAVA_MAJOR_MIN}, for example openjdk-17-jre-headless"
        )
    return java


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


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delay Ctrl-C until after the block: otherwise a virtual machine that is not registered yet would survive."""
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
