"""A BookKeeper store gives the same answers as a memory store, also if its owners leave without closing it."""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from ackstate.stores.base import ABSENT
from ackstate.stores.bookkeeper import BookKeeperStore
from ackstate.stores.memory import MemoryStore
from crash.bookkeeper_cluster import bookkeeper_options
from strategies import few
from tests.model.cursor.test_store_model import StoresMachine


class SameIds:
    """Ledgers that take and give ids as the memory store would: the same, if this one creates whenever that does."""

    def __init__(self, ledgers, disk, ids):
        self.ledgers, self.disk, self.ids = ledgers, disk, ids
        self.owners = ledgers.owners

    def __getattr__(self, name):
        method = getattr(self.ledgers, name)
        return lambda ledger_id, *rest: method(self.theirs(ledger_id), *rest)

    def theirs(self, ledger_id):
        return self.ids.get(ledger_id, 2**62 + ledger_id)

    def create(self, owner):
        ours = self.disk.next_ledger_id
        self.ids[ours] = self.ledgers.create(owner)
        return ours

    def append_many(self, appends):
        return self.ledgers.append_many([(self.theirs(ledger_id), entries) for ledger_id, entries in appends])

    def owned_by(self, owner):
        ours = {theirs: ours for ours, theirs in self.ids.items()}
        return [ours[ledger_id] for ledger_id in self.ledgers.owned_by(owner)]


class SameVersions:
    """Metadata that takes and gives versions as the memory store would: the same, if this one put whenever that did."""

    def __init__(self, metadata, disk, versions):
        self.metadata, self.disk = metadata, disk
        self.versions = versions  # of the memory store, by path, each with the one that the metadata gave
        self.children = metadata.children

    def theirs(self, path, version):
        return ABSENT if version == ABSENT else self.versions.get((path, version), 2**62 + version)

    def get(self, path):
        found = self.metadata.get(path)
        if found is None:
            return None
        (version,) = [ours for (place, ours), theirs in self.versions.items() if (place, theirs) == (path, found[1])]
        return found._replace(version=version)

    def put(self, path, data, *, expected_version):
        version = self.metadata.put(path, data, expected_version=self.theirs(path, expected_version))
        ours = self.disk.first_version if expected_version == ABSENT else expected_version + 1
        self.versions[path, ours] = version
        return ours

    def delete(self, path, *, expected_version):
        self.metadata.delete(path, expected_version=self.theirs(path, expected_version))


class BookKeeperMachine(StoresMachine):
    """The same with a BookKeeper store, each time below another root. Its owners also vanish without closing it."""

    hosts, client = "", None
    numbers = itertools.count()

    def begin(self):
        self.root = f"/model-{next(self.numbers)}"
        self.versions, self.ids = {}, {}
        self.stack = ExitStack()

    def end(self):
        self.stack.close()

    def open(self):
        self.memory = MemoryStore(self.disk)
        store = BookKeeperStore(self.hosts, root=self.root, bookkeeper=bookkeeper_options(self.client))
        self.stack.callback(store.close)
        self.other = SimpleNamespace(
            ledgers=SameIds(store.ledgers, self.disk, self.ids),
            metadata=SameVersions(store.metadata, self.disk, self.versions),
            close=store.close,
        )

    @rule()
    def vanish(self):
        self.memory.close()
        self.open()


@pytest.mark.slow
def test_bookkeeper_gives_the_same_answers(bookkeeper_cluster, bookkeeper_client):
    BookKeeperMachine.hosts, BookKeeperMachine.client = bookkeeper_cluster.hosts, bookkeeper_client
    # Round trips for each call: fewer examples than the others have.
    fewer = settings(few, max_examples=few.max_examples // 8 + 10, stateful_step_count=30)
    run_state_machine_as_test(BookKeeperMachine, settings=fewer)
