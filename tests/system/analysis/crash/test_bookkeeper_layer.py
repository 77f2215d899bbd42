"""The BookKeeper layer finds nothing in our store, and finds each planted bug. One cluster for all of it."""

from itertools import islice

import pytest

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.stores.base import ABSENT
from ackstate.stores.bookkeeper import BookKeeperLedgers, BookKeeperStore
from ackstate.stores.bookkeeper_client import BookKeeperClient
from ackstate.topic.log import LogOwnership, LogRecord
from crash import bookkeeper as layer
from crash.bookkeeper import SIZE, SharedClient, bookkeeper, run

pytestmark = pytest.mark.slow
EVENTS = (
    "_stale", "_suspended", "_bookie_killed", "_quorum_lost", "_disk_lost", "_session_expired",
    "_zookeeper_stopped", "_zookeeper_killed", "_client_killed", "_client_stopped",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(bookkeeper_cluster):
    return bookkeeper_cluster


@pytest.fixture(scope="module")
def client(cluster):
    with SharedClient(cluster) as client:
        yield client


@pytest.fixture
def only(monkeypatch):
    """Let nothing happen but one kind of thing."""

    def choose(name):
        for each in EVENTS:
            monkeypatch.setattr(layer._Story, each, getattr(layer._Story, name))

    return choose


def broken_in(outcomes):
    return {broken.promise for outcome in outcomes for broken in outcome.broken}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("_session_expired", 103),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                ("_quorum_lost", 100),
                ("_disk_lost", 101),
                ("_client_killed", 102),
                ("_zookeeper_stopped", 104),
                ("_zookeeper_killed", 105),
                ("_suspended", 106),
            )
        ),
    ],
)
def test_each_thing_that_may_happen_breaks_no_promise(cluster, client, only, name, seed):
    only(name)
    # Two events: a killed client is replaced by another Java, which takes seconds.
    outcome = run(seed, cluster, client, BookKeeperStore, size=SIZE._replace(lives=2))
    assert outcome.broken == ()
    assert outcome.counts


@pytest.mark.soak
def test_a_slice_of_the_layer_finds_nothing_and_takes_its_cluster_down():
    runs = bookkeeper(4)
    outcomes = list(islice(runs, 3))
    runs.close()
    assert broken_in(outcomes) == set()
    assert [outcome.seed for outcome in outcomes] == [4, 5, 6]


def test_a_recovery_that_does_not_fence_is_caught(cluster, client, only, monkeypatch):
    only("_stale")
    assert broken_in([run(201, cluster, client, BookKeeperStore)]) == set()
    monkeypatch.setattr(BookKeeperClient, "open_and_fence", BookKeeperClient.open_to_read)
    broken = broken_in(run(seed, cluster, client, BookKeeperStore) for seed in range(202, 205))
    assert broken & {Promise.I14, Promise.I2, Promise.I12, Promise.ERRORS}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["_stale", "_suspended"])
def test_a_log_whose_earlier_owner_publishes_on_is_caught(cluster, client, only, monkeypatch, name):
    """The opening of the log fences no one: a stale owner appends to the ledger that it has."""
    only(name)

    def taken_at_once(cls, store, topic):
        return cls(store, topic, record=LogRecord(1, None), version=ABSENT)

    monkeypatch.setattr(LogOwnership, "take_over", classmethod(taken_at_once))
    monkeypatch.setattr(LogOwnership, "_put", lambda *_: ABSENT)
    monkeypatch.setattr(LogOwnership, "check", lambda _: None)
    broken = broken_in(run(seed, cluster, client, BookKeeperStore) for seed in range(211, 213))
    assert broken & {Promise.I14, Promise.I12}


@pytest.mark.soak
def test_a_store_that_says_it_has_written_and_has_not_is_caught(cluster, client, only, monkeypatch):
    only("_stale")
    append_many = BookKeeperLedgers._append_many

    def forgetful(self, appends):
        ((ledger_id, entries),) = appends
        is_cursor = ledger_id in self.owned_by(cursor_owner(cursor_path("orders", "billing")))
        # The first entry of a ledger is the state that it begins with.
        if not is_cursor or self.last(ledger_id) < 0:
            return append_many(self, appends)
        return [self.last(ledger_id) + len(entries)]

    monkeypatch.setattr(BookKeeperLedgers, "_append_many", forgetful)
    outcomes = [run(seed, cluster, client, BookKeeperStore) for seed in range(301, 304)]
    assert broken_in(outcomes) & {Promise.I14, Promise.I2}
    # The story that is told has one event, and no ack that it can do without, however busy the machine is.
    monkeypatch.setattr(layer, "_SHRINK_S", float("inf"))
    outcome = next(each for each in outcomes if each.broken)
    shrunk = layer.shrunk(outcome, cluster, client, BookKeeperStore)
    assert (shrunk.cycles, shrunk.seed, shrunk.counts) == (outcome.cycles, outcome.seed, outcome.counts)
    _, acks, happened, *rest = shrunk.broken[0].story
    assert acks == "1 acks, each with a persist"
    assert happened.startswith("another owner opens the cursor")
    assert rest in ([], ["recover"])


@pytest.mark.soak
def test_an_append_that_is_not_waited_for_is_caught(cluster, client, only, monkeypatch):
    """The store reports an append as durable that bookies without a quorum have refused."""
    only("_quorum_lost")
    monkeypatch.setattr(
        BookKeeperClient, "append_all", lambda self, entries: self.append(entries) and [0 for _ in entries]
    )
    broken = broken_in(run(seed, cluster, client, BookKeeperStore) for seed in range(302, 304))
    assert broken & {Promise.I2, Promise.I12, Promise.ERRORS}
