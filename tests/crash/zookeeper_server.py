"""A private real ZooKeeper server: started from pyspark's jars, killed, stopped, restarted on the same data."""

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
from ackstate.analysis.crash.runs import LayerSkippedError

# A few of pyspark's jars; opening all of them takes two seconds.
_JARS = (
    *("zookeeper", "slf4j-api", "metrics-core", "snappy-java"),
    *(f"netty-{part}" for part in ("common", "buffer", "codec-base", "handler-4", "transport-4")),
)
_STARTS_WITHIN_S = 60.0


@contextmanager
def running_server(directory):
    server = ZooKeeperServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class JavaServer:
    """A Java process with a port on 127.0.0.1, and a directory with its configuration, its data and its log.

    Start it from the main thread: it ends with the thread that started it.
    """

    def __init__(self, directory):
        self.directory, self.process = directory, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.hosts = f"127.0.0.1:{self.port}"

    def configure(self, name, settings):
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.directory / name).write_text(text)

    def launch(self):
        """Start it without waiting; errors as of `wait_until`, except those of the server."""
        assert self.process is None
        command = [java_program(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *self.arguments()]
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(dying.command_of(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until(self, serves):
        """Wait until it serves; raise `RuntimeError` with its log if it ends, or takes too long."""
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while self.process.poll() is not None or not serves():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError((self.directory / "server.log").read_text())
            time.sleep(0.005)

    def kill(self):
        """Kill it with SIGKILL, if it is running; the kernel keeps its unsynced writes."""
        self._end(signal.SIGKILL)

    def stop(self):
        """Stop it with SIGTERM, if it is running."""
        self.resume()
        self._end(signal.SIGTERM)

    def pause(self):
        """Stop the process, with all of its threads: it keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self):
        """Continue after `pause`, if it is running."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def _end(self, number):
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=30)
            self.process = None


class ZooKeeperServer(JavaServer):
    """One ZooKeeper server."""

    MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"

    def __init__(self, directory, *, tick_ms=500):
        super().__init__(directory)
        settings = {
            "tickTime": tick_ms,
            "dataDir": directory / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "maxClientCnxns": 0,
        }
        self.configure("zoo.cfg", settings)

    def arguments(self):
        return "-cp", _class_path(), "-Xmx256m", self.MAIN, str(self.directory / "zoo.cfg")

    def start(self):
        """Start it and wait until it answers."""
        self.launch()
        self.wait_until(self._answers)

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
    return os.pathsep.join(str(jar) for name in _JARS for jar in jars.glob(f"{name}*.jar"))
