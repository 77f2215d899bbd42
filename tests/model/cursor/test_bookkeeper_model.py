"""A BookKeeper store gives the same answers as a memory store, also if its owners leave without closing it."""

import itertools
from contextlib import ExitStack, suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from ackstate.stores import zookeeper
from ackstate.stores.base import StoreError
from ackstate.stores.bookkeeper import BookKeeperStore
from ackstate.stores.bookkeeper_groups import GroupWriter
from ackstate.stores.bookkeeper_ledgers import BookKeeperLedgers
from ackstate.stores.memory import MemoryStore
from crash.bookkeeper_cluster import bookkeeper_options
from strategies import few
from tests.model.cursor.test_store_model import (
    BATCHES,
    STORIES,
    RenumberedStore,
    StoresMachine,
    story_of_a_wrong_version,
    story_of_an_append_to_a_fenced_ledger,
    tell,
)

pytestmark = pytest.mark.slow


class BookKeeperMachine(StoresMachine):
    """The same with a BookKeeper store, each time below another root.

    Its owners also vanish, or die in the middle of an append.
    """

    hosts, client = "", None
    numbers = itertools.count()

    def begin(self):
        self.root = f"/model-{next(self.numbers)}"
        self.versions = {}
        self.stack = ExitStack()

    def open(self):
        self.memory = MemoryStore(self.disk)
        store = BookKeeperStore(self.hosts, root=self.root, bookkeeper=bookkeeper_options(self.client))
        self.stack.callback(store.close)
        self.other = RenumberedStore(store, self.disk, self.versions)

    @rule()
    def vanish(self):
        self.memory.close()
        self.open()

    @rule(entries=BATCHES, is_committed=st.booleans())
    def die_before_or_after_a_commit(self, entries, is_committed):
        """The answer of the commit of a group is lost; a batch for one ledger has none."""
        commit = GroupWriter.commit

        def lost(self, group):
            if is_committed:
                commit(self, group)
            raise StoreError("killed")

        GroupWriter.commit = lost
        try:
            happens = is_committed or len({ledger_id for ledger_id, _ in entries}) < 2
            if happens:
                with suppress(StoreError):
                    self.memory.ledgers.append_all(entries)
            with suppress(StoreError):
                self.other.ledgers.append_all(entries)
        finally:
            GroupWriter.commit = commit
        self.vanish()

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


PLANTED = {
    "versions are not compared": (zookeeper, "_expect", lambda *_: None),
    "a fence is not set": (BookKeeperLedgers, "fence", BookKeeperLedgers.last),
}


@pytest.mark.parametrize(
    ("planted", "story"),
    list(zip(PLANTED, [story_of_a_wrong_version, story_of_an_append_to_a_fenced_ledger], strict=True)),
)
def test_a_story_tells_of_a_bug(machine, monkeypatch, planted, story):
    monkeypatch.setattr(*PLANTED[planted])
    with pytest.raises(AssertionError):
        tell(story, machine)
