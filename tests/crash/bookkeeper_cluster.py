"""A private real BookKeeper cluster: ZooKeeper and bookies, each in its own process, killed and restarted at will."""

import shutil
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ackstate.analysis.crash.runs import LayerSkippedError
from crash.zookeeper_server import ZooKeeperServer
from java_server import ONE_COMPILER, JavaServer, listens

JARS = Path(sys.prefix, "share", "ackstate", "servers", "bookkeeper")
"""Where `.ci/setup bookkeeper` puts BookKeeper with its dependencies."""
LEDGERS_ROOT = "/ledgers"
_AVAILABLE = f"{LEDGERS_ROOT}/available"
_STARTS_WITHIN_S = 60.0
_TICK_MS = 200
_LAYOUT = b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
# Small caches and files: three bookies share a machine with the tests.
_BOOKIE_SETTINGS = {
    "advertisedAddress": "127.0.0.1",
    "allowLoopback": "true",
    "listeningInterface": "lo",
    "journalSyncData": "true",
    "journalWriteData": "true",
    "journalMaxSizeMB": 64,
    "journalPreAllocSizeMB": 4,
    "entryLogFilePreallocationEnabled": "false",
    "skipListSizeLimit": 16 << 20,
    "numAddWorkerThreads": 1,
    "numReadWorkerThreads": 1,
    "serverNumIOThreads": 2,
    "httpServerEnabled": "false",
    "diskUsageThreshold": 0.999,
    "diskUsageWarnThreshold": 0.998,
    "diskUsageLwmThreshold": 0.997,
}
_CLIENT_SETTINGS = {"addEntryTimeoutSec": "2", "readEntryTimeoutSec": "2"}


def bookkeeper_options(client=None):
    from ackstate.stores.bookkeeper import BookKeeperOptions
    from ackstate.stores.bookkeeper_client import JVM_OPTIONS

    options = (*JVM_OPTIONS, ONE_COMPILER)
    return BookKeeperOptions(class_path=str(JARS), jvm_options=options, settings=_CLIENT_SETTINGS, client=client)


@contextmanager
def running_cluster(directory, *, bookie_count=3):
    with ExitStack() as stack:
        cluster = BookKeeperCluster(directory, bookie_count=bookie_count)
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster


class BookKeeperCluster:
    """One ZooKeeper server and some bookies, all on 127.0.0.1. Start it from the main thread, with which it ends."""

    def __init__(self, directory, *, bookie_count):
        if not any(JARS.glob("bookkeeper-server-*.jar")):
            raise LayerSkippedError("BookKeeper's jars are missing: run `bash .ci/setup bookkeeper`")
        zookeeper_directory = directory / "zookeeper"
        zookeeper_directory.mkdir()
        self.zookeeper = ZooKeeperServer(zookeeper_directory, tick_ms=_TICK_MS)
        self._directory = directory
        self._bookie_count = 0
        self.bookies = [self._new_bookie() for _ in range(bookie_count)]

    @property
    def hosts(self):
        return self.zookeeper.hosts

    def start(self):
        """Start all and wait until a client can write."""
        self.zookeeper.start()
        with _connected(self.hosts) as client:
            _format(client)
        self._launch(self.bookies)

    def stop(self):
        for bookie in self.bookies:
            bookie.kill()
        self.zookeeper.stop()

    def revive(self):
        self.zookeeper.resume()
        if self.zookeeper.process is None:
            self.zookeeper.start()
        for bookie in self.bookies:
            bookie.resume()
        self._launch([bookie for bookie in self.bookies if bookie.process is None])

    def replace(self, bookie):
        """Kill a bookie for good, with its disk, and start one with an empty disk in its place.

        A bookie must not return under its name without its entries: BookKeeper would take them for never written.
        """
        bookie.kill()
        shutil.rmtree(bookie.directory)
        new = self._new_bookie()
        self.bookies[self.bookies.index(bookie)] = new
        self._launch([new])

    def _launch(self, bookies):
        """Start bookies and wait until clients can find and reach them."""
        with _connected(self.hosts) as client:
            _, status = client.get(_AVAILABLE)
            # The registration of an earlier process of the bookie may still be there for a while.
            before = max(client.last_zxid, status.mzxid)
            for bookie in bookies:
                bookie.launch()
            for bookie in bookies:
                bookie.wait_until(lambda name=bookie.hosts: _is_registered(client, name, before))
                bookie.wait_until(lambda port=bookie.port: listens(port))

    def _new_bookie(self):
        self._bookie_count += 1
        return Bookie(self._directory / f"bookie-{self._bookie_count}", self.hosts)


class Bookie(JavaServer):
    """One bookie on its own port and disk."""

    def __init__(self, directory, zookeeper_hosts):
        directory.mkdir()
        super().__init__(directory)
        settings = {
            **_BOOKIE_SETTINGS,
            "metadataServiceUri": f"zk+hierarchical://{zookeeper_hosts}{LEDGERS_ROOT}",
            "bookiePort": self.port,
            "zkTimeout": 20 * _TICK_MS,
            "journalDirectories": directory / "journal",
            "ledgerDirectories": directory / "ledgers",
        }
        self.configure("bookie.conf", settings)

    def arguments(self):
        return (
            *(ONE_COMPILER, "-cp", f"{JARS}/*", "-Xmx128m", "-XX:MaxDirectMemorySize=128m"),
            *("-Dlog4j2.level=WARN", "-Dlog4j2.StatusLogger.level=OFF"),
            *("org.apache.bookkeeper.server.Main", "--conf", str(self.directory / "bookie.conf")),
        )


@contextmanager
def _connected(hosts):
    try:
        from kazoo.client import KazooClient
    except ImportError as error:
        raise LayerSkippedError(f"BookKeeper needs kazoo: pip install 'ackstate[bookkeeper]' ({error})") from error
    client = KazooClient(hosts)
    client.start(timeout=_STARTS_WITHIN_S)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def _format(client):
    client.create(f"{_AVAILABLE}/readonly", b"", makepath=True)
    client.create(f"{LEDGERS_ROOT}/INSTANCEID", b"00000000-0000-0000-0000-000000000001")
    client.create(f"{LEDGERS_ROOT}/LAYOUT", _LAYOUT)


def _is_registered(client, name, after_zxid):
    status = client.exists(f"{_AVAILABLE}/{name}")
    return status is not None and status.czxid > after_zxid
