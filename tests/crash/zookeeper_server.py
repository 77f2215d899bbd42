"""A private real ZooKeeper server: started from pyspark's jars, killed, stopped, restarted on the same data."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ackstate.analysis.crash import dying
from ackstate.analysis.crash.layer import LayerSkippedError
from crash.paused import pause

# A few of pyspark's jars; opening all of them takes two seconds.
_JARS = (
    "zookeeper-*.jar",
    "slf4j-api-*.jar",
    "netty-common-*.jar",
    "netty-buffer-*.jar",
    "netty-codec-base-*.jar",
    "netty-handler-4*.jar",
    "netty-transport-4*.jar",
    "metrics-core-*.jar",
    "snappy-java-*.jar",
)
_STARTS_WITHIN_S = 30.0


@contextmanager
def running_server(directory):
    server = ZooKeeperServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class ZooKeeperServer:
    """One server on its own port. Start it from the main thread: it ends with the thread that started it."""

    MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"

    def __init__(self, directory, *, tick_ms=500):
        self.directory = directory
        self.process = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.hosts = f"127.0.0.1:{self.port}"
        settings = {
            "tickTime": tick_ms,
            "dataDir": directory / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "maxClientCnxns": 0,
        }
        (directory / "zoo.cfg").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def start(self):
        """Start it and wait until it answers."""
        self.launch()
        assert self.process is not None
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while self.process.poll() is None and not self._answers():
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.005)
        else:
            if self.process.poll() is None:
                return
        raise RuntimeError((self.directory / "server.log").read_text())

    def launch(self):
        """Start it without waiting; errors as of `start`, except those of the server."""
        assert self.process is None
        command = [
            java_program(),
            *("-cp", _class_path(), "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
            *(self.MAIN, str(self.directory / "zoo.cfg")),
        ]
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(dying.command_of(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self):
        """Kill it with SIGKILL; the kernel keeps its unsynced writes."""
        self._end(signal.SIGKILL)

    def stop(self):
        if self.process is not None:
            self.resume()
            self._end(signal.SIGTERM)

    def pause(self):
        """Stop the process; it keeps its connections and answers nothing."""
        assert self.process is not None
        pause(self.process)

    def resume(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def _end(self, number):
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(timeout=30)
        self.process = None

    def _answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"srvr")
                # During its start it answers that it does not serve requests.
                return connection.recv(17) == b"Zookeeper version"
        except OSError:
            return False


def java_program():
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if not java or not Path(java).exists():
        raise LayerSkippedError("the server needs Java: JAVA_HOME or java in PATH")
    return java


def _class_path():
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise LayerSkippedError("the ZooKeeper server comes from pyspark's jars: pip install 'ackstate[spark]'")
    jars = Path(spec.submodule_search_locations[0]) / "jars"
    return os.pathsep.join(str(jar) for pattern in _JARS for jar in jars.glob(pattern))
