"""Commands that look at a store: in processes of their own, and at a ZooKeeper server."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from ackstate.cursor.journal.journal import cursor_owner, cursor_path
from command_line import assert_one_line, run, run_apart
from crash.zookeeper_server import running_server
from sample_store import TOPIC, StoreDamage, fill, filled


@pytest.fixture
def path(tmp_path):
    return filled(tmp_path / "store")


@pytest.mark.slow
def test_the_command_itself_says_it_by_its_status(path):
    assert run_apart("fsck", path).status == 0
    StoreDamage(path).flip(3)
    outcome = run_apart("fsck", path)
    assert (outcome.status, outcome.err) == (1, "")
    assert_one_line(run_apart("inspect", path, "--subscription", "biling"), "'billing'", "'audit'")


@pytest.mark.slow
def test_a_store_in_zookeeper_is_looked_at_while_it_is_open_and_none_is_made(tmp_path, capsys):
    from ackstate.stores.zookeeper import ZooKeeperStore

    with running_server(tmp_path) as server, closing(ZooKeeperStore(server.hosts, root="/acks/one")) as store:
        fill(store)
        status, cursors = fsck_of(capsys, f"zookeeper://{server.hosts}/acks/one")
        assert (status, {cursor["status"] for cursor in cursors}) == (0, {"ok"})
        value = store.metadata.get(cursor_path(TOPIC, "billing"))
        store.metadata.put(cursor_path(TOPIC, "billing"), value.data[:-1], expected_version=value.version)
        status, (_, billing) = fsck_of(capsys, f"zookeeper://{server.hosts}/acks/one")
        assert (status, billing["problems"][0]["repairs"][0]["repair"]) == (1, "USE_ORPHAN_JOURNAL")
        for root in ("two", "acks"):
            assert_one_line(run(capsys, "fsck", f"zookeeper://{server.hosts}/{root}"), "not an ackstate store")
        session = store._session._client
        assert (sorted(session.get_children("/")), session.get_children("/acks")) == (["acks", "zookeeper"], ["one"])


@pytest.mark.slow
def test_a_look_at_a_store_in_zookeeper_leaves_every_node_as_it_was(tmp_path, capsys, monkeypatch):
    from ackstate.stores.zookeeper import ZooKeeperStore

    with running_server(tmp_path) as server, closing(ZooKeeperStore(server.hosts, root="/acks")) as store:
        fill(store)
        gone = store.ledgers.create(cursor_owner(cursor_path(TOPIC, "billing")))
        store.ledgers.append(gone, b"half deleted")
        # The process dies when the ledger is gone for callers, and its nodes are still there.
        monkeypatch.setattr(store.ledgers, "_clear", lambda ledger_id: None)
        store.ledgers.delete(gone)
        client = store._session._client
        before = znodes(client, "/")
        assert f"/acks/garbage/{gone}" in before
        for command in ("fsck", "inspect"):
            outcome = run(capsys, command, f"zookeeper://{server.hosts}/acks", "--json")
            assert outcome.status == 0
            assert [cursor["leftovers"] for cursor in json.loads(outcome.out)["cursors"]] == [[], []]
            assert znodes(client, "/") == before


def znodes(client, path):
    """Every node from a path on: its bytes, its versions, the transactions that made and changed it."""
    below = [znodes(client, f"{path.rstrip('/')}/{name}") for name in client.get_children(path)]
    return {path: client.get(path)} | {each: found for nodes in below for each, found in nodes.items()}


def fsck_of(capsys, store):
    outcome = run(capsys, "fsck", store, "--json")
    return outcome.status, json.loads(outcome.out)["cursors"]
