"""A real Pulsar cluster on the loopback address: ZooKeeper, bookies and a broker, each a process of its own."""

import json
import signal
import time
import urllib.error
import urllib.request
from urllib.parse import quote

from java_server import free_port, listens
from live.java_process import JavaProcess

NAME = "standalone"
_LOADS_WITHIN_S = 60
_ZOOKEEPER = "org.apache.zookeeper.server.ZooKeeperServerMain"
_BOOKIE = "org.apache.bookkeeper.server.Main"
_SET_UP = "org.apache.pulsar.PulsarClusterMetadataSetup"
_BROKER = "org.apache.pulsar.PulsarBrokerStarter"
_BOOKIE_SETTINGS = {
    "allowLoopback": "true", "listeningInterface": "lo", "advertisedAddress": "127.0.0.1",
    "allowEphemeralPorts": "true",
    "journalWriteData": "true", "journalSyncData": "true", "journalPreAllocSizeMB": 4, "gcWaitTime": 600000,
    "diskUsageThreshold": 0.999, "diskUsageWarnThreshold": 0.99, "diskUsageLwmThreshold": 0.98,
    "dbStorage_writeCacheMaxSizeMb": 32, "dbStorage_readAheadCacheMaxSizeMb": 16,
    "dbStorage_rocksDB_blockCacheSize": 16 << 20,
}  # fmt: skip
_BROKER_SETTINGS = {
    "clusterName": NAME, "bindAddress": "127.0.0.1", "advertisedAddress": "127.0.0.1",
    "loadBalancerEnabled": "false", "brokerDeleteInactiveTopicsEnabled": "false",
    "numIOThreads": 2, "numHttpServerThreads": 4, "managedLedgerCacheSizeMB": 64,
    "managedLedgerDefaultMarkDeleteRateLimit": 0, "managedLedgerMinLedgerRolloverTimeMinutes": 0,
    "metadataStoreSessionTimeoutMillis": 5000, "systemTopicEnabled": "false", "topicLevelPoliciesEnabled": "false",
}  # fmt: skip


class Cluster:
    """The cluster, with the admin interface of its broker.

    Args:
        directory: For everything that it writes.
        bookie_count: How many bookies it has; each entry is written to at most 2 of them.
        is_compiled: See `JavaProcess`; of the broker.

    Attributes:
        service_url: For clients.
        web_url: For admin requests.
    """

    def __init__(self, directory, *, bookie_count=1, is_compiled=False):
        self.directory, self._is_compiled = directory, is_compiled
        directory.mkdir(parents=True, exist_ok=True)
        self.service_port, self.web_port = free_port(), free_port()
        self.service_url = f"pulsar://127.0.0.1:{self.service_port}"
        self.web_url = f"http://127.0.0.1:{self.web_port}"
        self.broker = None
        self._quorum = min(2, bookie_count)
        self._zookeeper = self._make_zookeeper()
        self.hosts = self._zookeeper.hosts
        self.bookies = [self._make_bookie(number) for number in range(bookie_count)]

    def start(self, **broker_settings):
        """Start everything."""
        self._zookeeper.start(lambda: listens(self._zookeeper.port))
        store = f"zk:{self.hosts}"
        JavaProcess(
            self.directory, "set-up", _SET_UP, "--cluster", NAME, "--metadata-store", store,
            "--configuration-metadata-store", store, "--web-service-url", self.web_url,
            "--broker-service-url", self.service_url,
        ).run()  # fmt: skip
        for bookie in self.bookies:
            bookie.start(lambda port=bookie.port: listens(port))
        self.start_broker(**broker_settings)
        return self

    def start_broker(self, **settings):
        """Start the broker, with other settings than the default ones."""
        quorum = {f"managedLedgerDefault{name}": self._quorum for name in ("EnsembleSize", "WriteQuorum", "AckQuorum")}
        store = dict.fromkeys(("metadataStoreUrl", "configurationMetadataStoreUrl"), f"zk:{self.hosts}")
        ports = {"brokerServicePort": self.service_port, "webServicePort": self.web_port}
        assert self.broker is None
        path = self.directory / "broker.conf"
        self.broker = JavaProcess(
            self.directory, "broker", _BROKER, "-c", path, heap_mib=768, is_compiled=self._is_compiled
        )
        self.broker.configure(path.name, _BROKER_SETTINGS | quorum | store | ports | settings)
        self.broker.start(self._answers)

    def stop(self):
        """End everything."""
        self.kill_broker()
        for server in (*self.bookies, self._zookeeper):
            server.kill()

    def kill_broker(self):
        """End the broker with SIGKILL."""
        self._end_broker(signal.SIGKILL)

    def stop_broker(self):
        """End the broker with SIGTERM: it closes its cursors."""
        self._end_broker(signal.SIGTERM)

    def _end_broker(self, how):
        if self.broker is not None:
            self.broker.end(how)
            self.broker = None

    def _answers(self):
        try:
            return "default" in str(self.admin("namespaces/public"))
        except OSError:
            return False

    def admin(self, path, *, method="GET", body=None):
        """Return the JSON at a path of the admin interface."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.web_url}/admin/v2/{path}", data=data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def internal_stats(self, topic):
        """Return the internal statistics of a topic of `public/default`; this loads it."""
        deadline_s = time.monotonic() + _LOADS_WITHIN_S
        while True:
            try:
                return self.admin(f"{_path(topic)}/internalStats")
            except urllib.error.HTTPError:
                if time.monotonic() > deadline_s:
                    raise
            try:
                urllib.request.urlopen(f"{self.web_url}/lookup/v2/topic/{_path(topic)}", timeout=30).close()
            except urllib.error.HTTPError:
                time.sleep(0.25)

    def unload(self, topic):
        """Make the broker close a topic, and with it the cursors."""
        self.admin(f"{_path(topic)}/unload", method="PUT")

    def unload_namespace(self):
        """Make the broker close all topics and give up their bundles, which nothing then owns."""
        self.admin("namespaces/public/default/unload", method="PUT")

    def _make_zookeeper(self):
        server = JavaProcess(self.directory, "zookeeper", _ZOOKEEPER, self.directory / "zoo.cfg", heap_mib=128)
        settings = {
            "tickTime": 1000, "dataDir": self.directory / "zookeeper", "clientPort": server.port,
            "clientPortAddress": "127.0.0.1", "admin.enableServer": "false", "maxClientCnxns": 0,
        }  # fmt: skip
        server.configure("zoo.cfg", settings)
        return server

    def _make_bookie(self, number):
        name, directory = f"bookie-{number}.conf", self.directory / f"bookie-{number}"
        bookie = JavaProcess(self.directory, f"bookie-{number}", _BOOKIE, "--conf", self.directory / name)
        settings = _BOOKIE_SETTINGS | {
            "bookiePort": bookie.port, "metadataServiceUri": f"zk+null://{self.hosts}/ledgers",
            "journalDirectories": directory / "journal", "ledgerDirectories": directory / "ledgers",
            "indexDirectories": directory / "ledgers", "zkTimeout": 30000,
            "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
        }  # fmt: skip
        bookie.configure(name, settings)
        return bookie


def _path(topic):
    return f"persistent/public/default/{quote(topic, safe='')}"
