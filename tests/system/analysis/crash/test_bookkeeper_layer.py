"""The BookKeeper layer finds nothing in our store, and finds each planted bug. One cluster for all of it."""

import sys
from itertools import islice

import pytest

from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.promises import Promise
from ackstate.stores.bookkeeper import BookKeeperStore
from ackstate.stores.bookkeeper_client import BookKeeperClient
from ackstate.stores.bookkeeper_ledgers import BookKeeperLedgers
from crash import bookkeeper as layer
from crash import bookkeeper_cluster
from crash.bookkeeper import SharedClient, bookkeeper, run
from crash.takeovers import SIZE

pytestmark = pytest.mark.slow
EVENTS = (
    "_stale", "_suspended", "_bookie_killed", "_quorum_lost", "_disk_lost", "_zookeeper_stopped", "_zookeeper_killed",
    "_client_killed", "_client_stopped",
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
            monkeypatch.setattr(layer._BookKeeperStory, each, getattr(layer._BookKeeperStory, name))

    return choose


def broken_in(outcomes):
    return {broken.promise for outcome in outcomes for broken in outcome.broken}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "seed"), [("_quorum_lost", 100), ("_disk_lost", 101), ("_client_killed", 102)])
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
def test_an_append_that_is_not_waited_for_is_caught(cluster, client, only, monkeypatch):
    """The store reports an append as durable that bookies without a quorum have refused."""
    only("_quorum_lost")
    monkeypatch.setattr(BookKeeperLedgers, "_first_error", lambda self, entries: self._client.append(entries) and None)
    broken = broken_in(run(seed, cluster, client, BookKeeperStore) for seed in range(302, 304))
    assert broken & {Promise.I2, Promise.I12, Promise.ERRORS}


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(bookkeeper_cluster, "JARS", tmp_path)
    with pytest.raises(LayerSkippedError, match=r"jars are missing: run `bash .ci/setup bookkeeper`"):
        next(bookkeeper(0))
    monkeypatch.setitem(sys.modules, "jpype", None)
    with pytest.raises(LayerSkippedError, match=r"pip install 'ackstate\[bookkeeper\]'"):
        next(bookkeeper(0))
