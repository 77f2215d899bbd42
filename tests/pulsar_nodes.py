"""The metadata of a Pulsar cluster in memory, with one topic, for tests without a broker."""

from ackstate import MemoryStore
from ackstate.stores.bookkeeper import Tail
from ackstate.stores.pulsar import PulsarLayout

TOPIC = "persistent://public/default/t1"
NODE = "/managed-ledgers/public/default/persistent/t1"
# The record of a topic, and that of a cursor, which a 4.2.4 broker wrote.
TOPIC_RECORD = b"\n\x04\x08\x00 \x00"
CURSOR_RECORD = b"\x08\x01\x10\x00\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x010\xd7\xb1\xf6\xeb\xa04"
POLICIES = b'{"bundles":{"boundaries":["0x00000000","0x80000000","0xffffffff"],"numBundles":2}}'
OWNED = b'{"nativeUrl":"pulsar://127.0.0.1:6650","disabled":false}'


class Nodes:
    """Pulsar's metadata in memory: the methods of `ZooKeeperNodes` and its session, on those of a `MemoryStore`."""

    name = "nodes in memory"

    def __init__(self):
        self.store = MemoryStore()
        self.get, self.put, self.delete = self.store.metadata.get, self.store.metadata.put, self.store.metadata.delete
        self.children = self.store.metadata.children
        self.session, self.is_connected = self, True

    def get_many(self, paths):
        return [self.get(path) for path in paths]

    def check_usable(self):
        pass

    def set(self, path, data):
        found = self.get(path)
        return self.put(path, data, expected_version=-1 if found is None else found.version)

    def create_ephemeral(self, path, data):
        if self.get(path) is not None:
            return False
        self.set(path, data)
        return True

    def delete_ephemeral(self, path):
        self.delete(path, expected_version=self.get(path).version)

    def close(self):
        self.store.close()


def new_nodes():
    """Return the metadata of a cluster with one empty topic, which no broker owns."""
    found = Nodes()
    found.set("/admin/policies/public/default", POLICIES)
    found.set(NODE, TOPIC_RECORD)
    return found


def layout_of(nodes, within=""):
    """Return the store of a cluster's cursors."""
    ledgers = nodes.store.ledgers

    def read_tail(ledger_id, _=None):
        last = ledgers.last(ledger_id)
        return Tail(ledger_id, last, ledgers.read(ledger_id, last, last + 1)[0] if last >= 0 else b"")

    ledgers.read_tail, ledgers.release_tail, ledgers.check_usable = read_tail, lambda _: None, lambda: None
    return PulsarLayout(nodes, ledgers, within=within)
