"""Builds and runs a release of Pulsar: a process of Java that answers a line of JSON to each command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSIONS = ("4.2.4", "5.0.0-M1")
_HERE = Path(__file__).parent
BUILT = _HERE.parent.parent / "out" / "pulsar"
HEAP = "3g"  # of each process
_JVM = (
    "-XX:+UseG1GC", "-XX:+AlwaysPreTouch", "-Dslf4j.provider=org.slf4j.nop.NOPServiceProvider", "-Dlog4j2.level=OFF",
)  # fmt: skip

Answer = dict[str, int]
"""Times in ns, sizes in bytes, and results of the work that must be equal on all sides."""


class Side(Protocol):
    """Runs commands: our classes in this process, or a release of Pulsar in a process of its own."""

    name: str

    def run(self, command: str, **options: object) -> Answer:
        """Run one round of a command.

        Raises:
            SideError: The command failed.
        """


class SideError(Exception):
    """A side cannot be built, cannot be started or failed; the message is one line."""


class Release:
    """A release of Pulsar as a side; made by `running`."""

    def __init__(self, version: str, process: subprocess.Popen[str]) -> None:
        self.name = f"Pulsar {version}"
        self._process = process

    def run(self, command: str, **options: object) -> Answer:
        """See `Side.run`."""
        line = " ".join([command, *(f"{key}={value}" for key, value in options.items())])
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer: Answer = json.loads(self._process.stdout.readline() or '{"error": "the process has ended"}')
        except BrokenPipeError:
            raise SideError(f"{self.name}, {command}: the process has ended; see {BUILT}/*/log") from None
        if "error" in answer:
            raise SideError(f"{self.name}, {command}: {answer['error']}; see {BUILT}/*/log")
        return answer


@contextmanager
def running(version: str, jars: Path | None = None) -> Iterator[Release]:
    """Build a release if it was not built before, start its process, and end that at the end.

    Args:
        version: Of Pulsar.
        jars: A directory with its jars, and those of pom.xml beside it, where its pom does not resolve.

    Raises:
        SideError: Maven or a JDK is missing, or the build failed.
    """
    built = BUILT / version
    built.mkdir(parents=True, exist_ok=True)
    if jars is None:
        _build(version)
        classpath = f"{built / 'classes'}:{(built / 'classpath').read_text().strip()}"
    else:
        classpath = f"{built / 'classes'}:{jars}/*"
        options = ["-nowarn", "-proc:none", "-d", str(built / "classes"), "-cp", classpath]
        _run(version, [_java("javac"), *options, *map(str, (_HERE / "src").rglob("*.java"))])
    command = [_java("java"), f"-Xms{HEAP}", f"-Xmx{HEAP}", *_JVM, "-cp", classpath, "ackstate.Main"]
    with (
        (built / "log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield Release(version, process)
        finally:
            process.kill()


def _build(version: str) -> None:
    if shutil.which("mvn") is None:
        raise SideError("Maven is missing: as root, apt-get install maven")
    _java("javac")
    _run(version, ["mvn", "-B", "-q", "-f", str(_HERE / "pom.xml"), f"-Dpulsar.version={version}", "compile"])


def _run(version: str, command: list[str]) -> None:
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if finished.returncode:
        errors = [line for line in finished.stdout.splitlines() if line.startswith("[ERROR]") or ": error:" in line]
        raise SideError(f"Pulsar {version} cannot be built: {errors[0] if errors else finished.returncode}")


def _java(program: str) -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(program, path=f"{home}/bin") if home else shutil.which(program)
    if found is None:
        raise SideError(f"{program} is missing: as root, apt-get install openjdk-17-jdk-headless, or set JAVA_HOME")
    return found
