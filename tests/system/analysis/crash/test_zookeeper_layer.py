"""The ZooKeeper layer finds nothing in our store, and does find planted bugs. One server for all of it."""

import subprocess
from importlib.util import find_spec
from itertools import islice

import pytest

from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.promises import Promise
from ackstate.cursor.store import ABSENT
from ackstate.stores.zookeeper import ZooKeeperStore
from ackstate.stores.zookeeper_ledgers import ZooKeeperLedgers
from ackstate.topic.log_ownership import LogOwnership, LogRecord
from crash import zookeeper as layer
from crash import zookeeper_server
from crash.zookeeper import run, zookeeper

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with zookeeper_server.running_server(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def only(monkeypatch):
    """Let nothing happen but one kind of thing."""

    def choose(name):
        for each in ("_stale", "_expired", "_stopped", "_killed", "_suspended"):
            monkeypatch.setattr(layer._ZooKeeperStory, each, getattr(layer._ZooKeeperStory, name))

    return choose


def broken_in(outcomes):
    return {broken.promise for outcome in outcomes for broken in outcome.broken}


def test_a_slice_of_the_layer_finds_nothing_and_takes_its_server_down():
    runs = zookeeper(4)
    outcomes = list(islice(runs, 3))
    runs.close()
    assert broken_in(outcomes) == set()
    assert [outcome.seed for outcome in outcomes] == [4, 5, 6]
    assert sum(outcome.cycles for outcome in outcomes) >= 3


@pytest.mark.parametrize(
    ("name", "seed"), [("_expired", 100), ("_stopped", 101), ("_killed", 106), ("_suspended", 107)]
)
def test_each_thing_that_may_happen_breaks_no_promise(server, only, name, seed):
    only(name)
    outcome = run(seed, server, ZooKeeperStore)
    assert outcome.broken == ()
    assert outcome.counts


def test_a_fence_that_lets_stale_owners_write_on_is_caught(server, only, monkeypatch):
    """Two owners append to one ledger: the new one lacks the promises to the old one."""
    only("_stale")
    assert broken_in([run(201, server, ZooKeeperStore)]) == set()
    monkeypatch.setattr(ZooKeeperLedgers, "fence", ZooKeeperLedgers.last)
    broken = broken_in(run(seed, server, ZooKeeperStore) for seed in range(202, 206))
    assert broken & {Promise.I14, Promise.I2, Promise.ERRORS}


@pytest.mark.parametrize("name", ["_stale", "_suspended"])
def test_a_log_whose_earlier_owner_publishes_on_is_caught(server, only, monkeypatch, name):
    """The opening of the log fences no one: a stale owner appends to the ledger that it has."""
    only(name)

    def taken_at_once(cls, store, topic):
        yield from ()
        return cls(store, topic, record=LogRecord(1, None), version=ABSENT)

    monkeypatch.setattr(LogOwnership, "take_over", classmethod(taken_at_once))
    monkeypatch.setattr(LogOwnership, "_put", lambda *_: (yield from ()) or ABSENT)
    monkeypatch.setattr(LogOwnership, "check", lambda _: None)
    broken = broken_in(run(seed, server, ZooKeeperStore) for seed in range(211, 213))
    assert broken & {Promise.I14, Promise.I12}


def test_a_store_that_says_it_has_written_and_has_not_is_caught(server, only, monkeypatch):
    only("_stale")
    append_all = ZooKeeperLedgers.append_all

    def forgetful(self, entries):
        ((ledger_id, _),) = entries
        # The first entry of a ledger is the state that it begins with.
        return append_all(self, entries) if self.last(ledger_id) < 0 else [self.last(ledger_id) + 1]

    monkeypatch.setattr(ZooKeeperLedgers, "append_all", forgetful)
    outcomes = [run(seed, server, ZooKeeperStore) for seed in range(301, 304)]
    assert broken_in(outcomes) & {Promise.I14, Promise.I2}
    # The story that is told has one event, and no ack that it can do without.
    outcome = next(each for each in outcomes if each.broken)
    shrunk = layer.shrunk(outcome, server, ZooKeeperStore)
    assert (shrunk.cycles, shrunk.seed, shrunk.counts) == (outcome.cycles, outcome.seed, outcome.counts)
    _, acks, happened, *rest = shrunk.broken[0].story
    assert acks == "1 acks, each with a persist"
    assert happened.startswith("another owner opens the cursor")
    assert rest in ([], ["recover"])


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(LayerSkippedError, match="Java"):
        next(zookeeper(0))
    monkeypatch.undo()
    monkeypatch.setattr(zookeeper_server, "find_spec", lambda name: None if name == "pyspark" else find_spec(name))
    with pytest.raises(LayerSkippedError, match="pyspark"):
        next(zookeeper(0))
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "ackstate.stores.zookeeper", None)
    with pytest.raises(LayerSkippedError, match="kazoo"):
        next(zookeeper(0))


def test_a_server_that_does_not_start_says_why(tmp_path):
    server = zookeeper_server.ZooKeeperServer(tmp_path)
    (tmp_path / "zoo.cfg").write_text("nonsense")
    with pytest.raises(RuntimeError, match="Invalid config"):
        server.start()
    server.stop()
    assert isinstance(server.process, subprocess.Popen | None)
