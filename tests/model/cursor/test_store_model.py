"""Whatever is called, in whatever order, with reopens in between: all backends give the same answers."""

import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ackstate.stores.base import ABSENT, StoreError
from ackstate.stores.memory import MemoryDisk, MemoryStore
from ackstate.stores.sqlite import SqliteStore
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
        self.disk._check()
        self.agree(lambda store: store.metadata.children("/"))
        self.agree(lambda store: store.ledgers.owned_by("billing"))
        self.agree(lambda store: store.ledgers.owners())
        for ledger_id in self.disk.ledgers:
            self.agree(lambda store, ledger_id=ledger_id: store.ledgers.last(ledger_id))
        for path in self.disk.values:
            self.agree(lambda store, path=path: store.metadata.get(path))

    def teardown(self):
        self.other.close()
        self.end()

    def end(self):
        self.directory.cleanup()


TestStoresModel = pytest.mark.slow(StoresMachine.TestCase)
TestStoresModel.settings = few


def story_of_a_value_that_comes_back(machine):
    machine.put("/a", b"", 0)
    machine.delete_value("/a", 0)
    machine.reopen()
    machine.put("/a", b"", 0)


def story_of_a_wrong_version(machine):
    machine.put("/a", b"", 0)
    machine.put("/a", b"1", 1)


def story_of_an_append_to_a_fenced_ledger(machine):
    machine.create("billing")
    machine.append(1, [b""])
    machine.fence(1)
    machine.reopen()
    machine.append(1, [b""])


STORIES = (story_of_a_value_that_comes_back, story_of_a_wrong_version, story_of_an_append_to_a_fenced_ledger)


def tell(story, machine):
    """Run a story, and look at all contents at its end."""
    machine = machine()
    try:
        story(machine)
        machine.same_contents()
    finally:
        machine.teardown()


@pytest.mark.parametrize("story", STORIES)
def test_each_story_is_one_of_sound_stores(story):
    tell(story, StoresMachine)


class SameVersions:
    """Metadata that takes and gives versions as the memory store would: the same, if this one put whenever that did."""

    def __init__(self, metadata, disk, versions):
        self.metadata = metadata
        self.disk = disk
        self.versions = versions  # of the memory store, by path, each with the one that the metadata gave

    def __getattr__(self, name):
        return getattr(self.metadata, name)

    def theirs(self, path, version):
        return ABSENT if version == ABSENT else self.versions.get((path, version), 2**62 + version)

    def get(self, path):
        found = self.metadata.get(path)
        if found is None:
            return None
        (version,) = [
            ours for (place, ours), theirs in self.versions.items() if (place, theirs) == (path, found.version)
        ]
        return found._replace(version=version)

    def put(self, path, data, *, expected_version):
        version = self.metadata.put(path, data, expected_version=self.theirs(path, expected_version))
        ours = self.disk.first_version if expected_version == ABSENT else expected_version + 1
        self.versions[path, ours] = version
        return ours

    def delete(self, path, *, expected_version):
        self.metadata.delete(path, expected_version=self.theirs(path, expected_version))


class RenumberedStore:
    """A store whose metadata has `SameVersions`."""

    def __init__(self, store, disk, versions):
        self.ledgers = store.ledgers
        self.metadata = SameVersions(store.metadata, disk, versions)
        self.close = store.close
