"""A private real ZooKeeper server: started from pyspark's jars, killed, stopped, restarted on the same data."""

import os
import socket
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ackstate.analysis.crash.runs import LayerSkippedError
from java_server import ONE_COMPILER, JavaServer

# A few of pyspark's jars; opening all of them takes two seconds.
_JARS = (
    *("zookeeper", "slf4j-api", "metrics-core", "snappy-java"),
    *(f"netty-{part}" for part in ("common", "buffer", "codec-base", "handler-4", "transport-4")),
)


@contextmanager
def running_server(directory):
    server = ZooKeeperServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()


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
        return ONE_COMPILER, "-cp", _class_path(), "-Xmx256m", self.MAIN, str(self.directory / "zoo.cfg")

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


def _class_path():
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise LayerSkippedError("the ZooKeeper server comes from pyspark's jars: pip install 'ackstate[spark]'")
    jars = Path(spec.submodule_search_locations[0]) / "jars"
    return os.pathsep.join(str(jar) for name in _JARS for jar in jars.glob(f"{name}*.jar"))
