"""A BookKeeper store gives the same answers as a memory store, also if its owners leave without closing it."""

import itertools
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from ackstate.stores.bookkeeper import BookKeeperLedgers, BookKeeperStore
from ackstate.stores.memory import MemoryStore
from ackstate.stores.zookeeper import ZooKeeperMetadata
from crash.bookkeeper_cluster import bookkeeper_options
from strategies import few
from tests.model.cursor.test_store_model import (
    STORIES,
    RenumberedStore,
    StoresMachine,
    story_of_a_wrong_version,
    tell,
)

pytestmark = pytest.mark.slow


class SameIds:
    """Ledgers that take and give ids as the memory store would: the same, if this one creates whenever that does."""

    def __init__(self, ledgers, disk, ids):
        self.ledgers, self.disk, self.ids = ledgers, disk, ids

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

    def owners(self):
        return self.ledgers.owners()


class BookKeeperMachine(StoresMachine):
    """The same with a BookKeeper store, each time below another root. Its owners also vanish without closing it."""

    hosts, client = "", None
    numbers = itertools.count()

    def begin(self):
        self.root = f"/model-{next(self.numbers)}"
        self.versions, self.ids = {}, {}
        self.stack = ExitStack()

    def open(self):
        self.memory = MemoryStore(self.disk)
        store = BookKeeperStore(self.hosts, root=self.root, bookkeeper=bookkeeper_options(self.client))
        self.stack.callback(store.close)
        self.other = RenumberedStore(store, self.disk, self.versions)
        self.other.ledgers = SameIds(store.ledgers, self.disk, self.ids)

    @rule()
    def vanish(self):
        self.memory.close()
        self.open()

    def end(self):
        self.stack.close()

    def teardown(self):
        self.end()


@pytest.fixture(scope="module")
def machine(bookkeeper_cluster, bookkeeper_client):
    BookKeeperMachine.hosts, BookKeeperMachine.client = bookkeeper_cluster.hosts, bookkeeper_client
    return BookKeeperMachine


def test_bookkeeper_gives_the_same_answers(machine):
    # Round trips for each call: fewer examples than the others have.
    fewer = settings(few, max_examples=few.max_examples // 8 + 10, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=fewer)


@pytest.mark.parametrize("story", STORIES)
def test_each_story_is_one_of_a_sound_store(machine, story):
    tell(story, machine)


def story_of_an_append_after_a_fence(machine):
    machine.create("billing")
    machine.append(1, b"")
    machine.fence(1)
    machine.append(1, b"")


PLANTED = {
    "versions are not compared": (ZooKeeperMetadata, "_expect", lambda *_: None),
    "a fence is not set": (BookKeeperLedgers, "_fence", BookKeeperLedgers._last),
}


@pytest.mark.parametrize(
    ("planted", "story"),
    list(zip(PLANTED, [story_of_a_wrong_version, story_of_an_append_after_a_fence], strict=True)),
)
def test_a_story_tells_of_a_bug(machine, monkeypatch, planted, story):
    monkeypatch.setattr(*PLANTED[planted])
    with pytest.raises(AssertionError):
        tell(story, machine)
