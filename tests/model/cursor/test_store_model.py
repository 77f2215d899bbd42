"""Whatever is called, in whatever order, with reopens in between: all backends give the same answers."""

import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ackstate.stores.base import ABSENT, StoreError
from ackstate.stores.memory import MemoryDisk, MemoryStore
from ackstate.stores.sqlite import SqliteStore
from store_directories import check_disk
from strategies import few

LEDGER_IDS = st.integers(0, 5)
BATCHES = st.lists(st.tuples(LEDGER_IDS, st.lists(st.binary(max_size=3), max_size=3)), max_size=4)
PATHS = st.sampled_from(["/a", "/a/b/c", "/ab", "a"])
# How far off the expected version is; mostly it is right, or nothing would ever be changed.
SURPLUS = st.sampled_from([0, 0, 0, 1, -1])


def outcome(call):
    """The result of a call, or the refusal that it raises."""
    try:
        return call()
    except (StoreError, ValueError) as error:
        return type(error)


class StoresMachine(RuleBasedStateMachine):
    """The same calls to both, and the same answers; the ids stay few, so that calls meet."""

    def __init__(self):
        super().__init__()
        self.disk = MemoryDisk()
        self.begin()
        self.open()

    def begin(self):
        self.directory = tempfile.TemporaryDirectory()

    def end(self):
        self.other.close()
        self.directory.cleanup()

    def open(self):
        self.memory = MemoryStore(self.disk)
        self.other = SqliteStore(self.directory.name)

    def agree(self, call):
        assert outcome(lambda: call(self.other)) == outcome(lambda: call(self.memory))

    @rule()
    def reopen(self):
        self.memory.close()
        self.other.close()
        self.open()

    @rule(owner=st.sampled_from(["billing", "shipping"]))
    def create(self, owner):
        self.agree(lambda store: store.ledgers.create(owner))

    @rule(ledger_id=LEDGER_IDS, entries=st.lists(st.binary(max_size=3), max_size=3))
    def append(self, ledger_id, entries):
        self.agree(lambda store: store.ledgers.append(ledger_id, entries))

    @rule(appends=BATCHES)
    def append_many(self, appends):
        def append_many(store):
            outcomes = store.ledgers.append_many(appends)
            return [each if isinstance(each, int) else type(each) for each in outcomes]

        self.agree(append_many)

    @rule(ledger_id=LEDGER_IDS, first=st.integers(-1, 5), end=st.integers(-1, 5))
    def read(self, ledger_id, first, end):
        self.agree(lambda store: store.ledgers.read(ledger_id, first, end))

    @rule(ledger_id=LEDGER_IDS)
    def fence(self, ledger_id):
        self.agree(lambda store: store.ledgers.fence(ledger_id))

    @rule(ledger_id=LEDGER_IDS)
    def delete_ledger(self, ledger_id):
        self.agree(lambda store: store.ledgers.delete(ledger_id))

    def version(self, path):
        return self.disk.values[path].version if path in self.disk.values else ABSENT

    @rule(path=PATHS, data=st.binary(max_size=3), surplus=SURPLUS)
    def put(self, path, data, surplus):
        version = self.version(path) + surplus
        self.agree(lambda store: store.metadata.put(path, data, expected_version=version))

    @rule(path=PATHS, surplus=SURPLUS)
    def delete_value(self, path, surplus):
        version = self.version(path) + surplus
        self.agree(lambda store: store.metadata.delete(path, expected_version=version))

    @rule(path=PATHS)
    def children(self, path):
        self.agree(lambda store: store.metadata.children(path))

    @invariant()
    def same_contents(self):
        check_disk(self.disk)
        self.agree(lambda store: store.metadata.children("/"))
        self.agree(lambda store: store.ledgers.owned_by("billing"))
        self.agree(lambda store: store.ledgers.owners())
        for ledger_id in self.disk.ledgers:
            self.agree(lambda store, ledger_id=ledger_id: store.ledgers.last(ledger_id))
        for path in self.disk.values:
            self.agree(lambda store, path=path: store.metadata.get(path))

    def teardown(self):
        self.end()


TestStoresModel = pytest.mark.slow(StoresMachine.TestCase)
TestStoresModel.settings = few
