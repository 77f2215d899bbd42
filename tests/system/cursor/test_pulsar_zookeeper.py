"""Pulsar's nodes on a real ZooKeeper server: compare-and-set, ownership of topics between sessions."""

import contextlib
from contextlib import closing

import pytest

from ackstate.stores.base import ABSENT, StoreError, VersionMismatchError
from ackstate.stores.pulsar import TopicOwnedError, find_owner, hold_topic
from ackstate.stores.zookeeper import ZooKeeperNodes, ZooKeeperSession
from crash.zookeeper_server import running_server
from pulsar_nodes import NODE, POLICIES, TOPIC


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def connect(server):
    """Connect each time; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def connected(**settings):
            return ZooKeeperNodes(stack.enter_context(closing(ZooKeeperSession(server.hosts, **settings))))

        yield connected


def create_above(nodes, path):
    names = path.split("/")[1:-1]
    for end in range(len(names)):
        with contextlib.suppress(VersionMismatchError):
            nodes.put("/" + "/".join(names[: end + 1]), b"", expected_version=ABSENT)


def test_a_value_is_changed_by_compare_and_set(connect):
    nodes, other = connect(), connect()
    assert nodes.get(NODE) is None
    with pytest.raises(StoreError, match="there is nothing above"):
        nodes.put(NODE, b"1", expected_version=ABSENT)
    create_above(nodes, NODE)
    first = nodes.put(NODE, b"1", expected_version=ABSENT)
    assert other.get(NODE) == (b"1", first)
    second = other.put(NODE, b"2", expected_version=first)
    for late in (
        lambda: nodes.put(NODE, b"3", expected_version=first),
        lambda: nodes.delete(NODE, expected_version=first),
    ):
        with pytest.raises(VersionMismatchError):
            late()
    with pytest.raises(VersionMismatchError):
        nodes.put(NODE, b"3", expected_version=ABSENT)
    assert nodes.get(NODE) == (b"2", second)
    assert nodes.children("/managed-ledgers/public") == ["default"]
    assert nodes.children("/none") == []
    nodes.delete(NODE, expected_version=second)
    again = nodes.put(NODE, b"2", expected_version=ABSENT)
    with pytest.raises(VersionMismatchError):
        other.put(NODE, b"4", expected_version=second)
    assert again > second


def test_a_reader_changes_nothing(connect):
    nodes, reader = connect(), connect(only_reads=True)
    create_above(nodes, "/read/x")
    version = nodes.put("/read/x", b"1", expected_version=ABSENT)
    for call in (
        lambda: reader.put("/read/x", b"2", expected_version=version),
        lambda: reader.put("/read/y", b"2", expected_version=ABSENT),
        lambda: reader.delete("/read/x", expected_version=version),
        lambda: reader.session.create_ephemeral("/read/z", b""),
    ):
        with pytest.raises(StoreError, match="opened to read"):
            call()
    assert reader.get("/read/x") == (b"1", version)
    assert reader.children("/read") == ["x"]


def test_a_topic_has_one_holder_and_is_free_when_its_session_ends(connect):
    nodes, other = connect(), connect()
    path = "/admin/policies/public/default"
    create_above(nodes, path)
    nodes.put(path, POLICIES, expected_version=ABSENT)
    with hold_topic(nodes, TOPIC):
        with pytest.raises(TopicOwnedError), hold_topic(other, TOPIC):
            pytest.fail("two hold it")
        assert "holds-this-bundle" in find_owner(other, TOPIC)
    assert find_owner(nodes, TOPIC) is None
    holding = hold_topic(other, TOPIC)
    holding.__enter__()
    assert find_owner(nodes, TOPIC) is not None
    other.session.close()
    assert find_owner(nodes, TOPIC) is None
    with hold_topic(nodes, TOPIC):
        assert find_owner(nodes, TOPIC) is not None
