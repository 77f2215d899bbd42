"""Events of ZooKeeper on a real server: kills, lost sessions, other processes, limits, damage, Pulsar's own nodes.

Owners and metadata are in ZooKeeper alone, so that no bookie is needed here.
"""

import contextlib
import itertools
import socket
import struct
import threading
from contextlib import closing, suppress
from functools import partial

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.serialization import Close, Connect

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores import zookeeper as nodes
from ackstate.stores.base import (
    ABSENT,
    DamagedValueError,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
    Versioned,
    VersionMismatchError,
)
from ackstate.stores.bookkeeper import BookKeeperOptions, BookKeeperStore
from ackstate.stores.bookkeeper_client import LedgerMetadata, OpenLedger
from ackstate.stores.pulsar import TopicOwnedError, find_owner, hold_topic
from ackstate.stores.zookeeper import NodeKind, ZooKeeperNodes, ZooKeeperSession
from crash.zookeeper_server import ZooKeeperServer, running_server
from pulsar_nodes import NODE, POLICIES, TOPIC
from waiting import wait_until

roots = (f"/root-{number}" for number in itertools.count())


class Done:
    """The outcome of a call that is over."""

    def __init__(self, result=None, error=None):
        self.result, self.error = result, error

    def wait(self):
        if self.error is not None:
            raise self.error
        return self.result


class EmptyLedgers:
    """A client of BookKeeper that knows ledgers without entries."""

    entry_bytes_max = 5 << 20

    def __init__(self):
        self.ids, self.there = itertools.count(1), set()

    def check_usable(self):
        pass

    def new_ledger_id(self):
        return Done(next(self.ids))

    def create(self, replication, *, ledger_id, custom_metadata):
        self.there.add(ledger_id)
        return Done(OpenLedger(ledger_id, ledger_id, -1))

    def if_there(self, ledger_id, result):
        return Done(result, None if ledger_id in self.there else LedgerNotFoundError("none"))

    def open_to_read(self, ledger_id, replication):
        return self.if_there(ledger_id, OpenLedger(ledger_id, ledger_id, -1))

    open_and_fence = open_to_read

    def metadata(self, ledger_id):
        return self.if_there(ledger_id, LedgerMetadata(2, -1, (), {}))

    def close_ledger(self, handle):
        return Done()

    def destroy(self, ledger_id, replication):
        self.there.discard(ledger_id)


BOOKKEEPER = EmptyLedgers()
WITHOUT_BOOKIES = BookKeeperOptions(client=BOOKKEEPER)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def root():
    return next(roots)


@pytest.fixture
def open_store(server, root):
    """Open the same storage each time; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(**settings):
            settings = {"root": root, "bookkeeper": WITHOUT_BOOKIES, **settings}
            return stack.enter_context(closing(BookKeeperStore(server.hosts, **settings)))

        yield opened


@pytest.fixture
def client(server):
    """Another client, which keeps to no rules."""
    client = KazooClient(server.hosts)
    client.start()
    yield client
    client.stop()
    client.close()


def snapshot(client, path):
    """Every node from a path on: its bytes, its versions, the transactions that made and changed it."""
    below = [snapshot(client, f"{path}/{name}") for name in client.get_children(path)]
    return {path: client.get(path)} | {each: found for nodes in below for each, found in nodes.items()}


class CutError(StoreError):
    """The process was killed before this transaction was sent."""


def cut_after(store, monkeypatch, count):
    """Let a store carry out some transactions and then no more."""
    commit, left = store._session.commit, [count]

    def counted(operations):
        if not left[0]:
            raise CutError
        left[0] -= 1
        return commit(operations)

    monkeypatch.setattr(store._session, "commit", counted)


def at_once(*calls):
    """Run calls in a thread each; return what they raised."""
    errors = []

    def run(call):
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return errors


# Roots that may be opened


@pytest.mark.parametrize(
    "settings",
    [
        {"hosts": "127.0.0.1:1/path"},
        {"root": "/"},
        {"root": "ackstate"},
        {"root": "/ackstate/"},
        {"session_timeout_s": 0},
        {"call_timeout_s": -1},
        {"request_bytes_max": 100},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    for only_reads in (False, True):
        with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
            BookKeeperStore(**{"hosts": "127.0.0.1:1", "only_reads": only_reads, **settings})


def test_options_that_kazoo_refuses_are_named_without_their_secrets():
    options = {"auth_data": [("sasl", "me:secret")], "sasl_options": {"mechanism": "PLAIN"}}
    with pytest.raises(ValueError, match=r"auth_data.*sasl_options") as caught:
        BookKeeperStore("127.0.0.1:1", client_options=options)
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_a_store_error():
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        hosts = f"127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(StoreError, match=f"{hosts}/ackstate: no server answered within 0.3 s"):
            BookKeeperStore(hosts, call_timeout_s=0.3)


@pytest.mark.slow
def test_an_empty_node_becomes_a_store_and_any_other_is_left_alone(client, root, open_store):
    with pytest.raises(StoreError, match=f"{root} is not an ackstate store: its node is missing"):
        open_store(only_reads=True)
    assert client.exists(root) is None
    client.create(root, b"")
    with pytest.raises(StoreError, match=f"{root} is not an ackstate store: its node is empty"):
        open_store(only_reads=True)
    client.create(f"{root}/child", b"")
    with pytest.raises(StoreError, match="not an ackstate store"):
        open_store()
    client.delete(f"{root}/child")
    newer = nodes.encode(NodeKind.BOOKKEEPER_STORE, nodes.STORE)
    newer = newer[:4] + b"\3" + newer[5:]
    for data, error in ((b"somebody else's data", CorruptStateError), (newer, UnsupportedVersionError)):
        client.set(root, data)
        for only_reads in (False, True):
            with pytest.raises(error, match=r"ACKZ|version 3"):
                open_store(only_reads=only_reads)
        assert (client.get(root)[0], client.get_children(root)) == (data, [])
    client.set(root, b"")
    store = open_store()
    assert store.ledgers.owned_by("billing") == []
    assert [store.ledgers.create("billing")] == store.ledgers.owned_by("billing")


@pytest.mark.slow
def test_many_may_open_a_new_root_at_once(open_store, root):
    stores = []
    assert at_once(*[lambda: stores.append(open_store(root=f"{root}/deep/er"))] * 6) == []
    ids = [store.ledgers.create("x") for store in stores]
    assert [store.ledgers.owned_by("x") for store in stores] == [ids] * 6


@pytest.mark.slow
def test_a_store_opened_to_read_reads_all_and_changes_nothing(open_store, client, root, monkeypatch):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    version = store.metadata.put("/a/b", b"value", expected_version=ABSENT)
    other = open_store()
    gone = other.ledgers.create("billing")
    with monkeypatch.context() as patch, suppress(CutError):  # Gone for callers, and with a node.
        cut_after(other, patch, 1)
        other.ledgers.delete(gone)
    before = snapshot(client, root)
    assert f"{root}/garbage/{gone}" in before
    assert gone in BOOKKEEPER.there

    reader = open_store(only_reads=True)
    assert (reader.ledgers.last(ledger_id), reader.ledgers.owned_by("billing")) == (-1, [ledger_id])
    assert reader.ledgers.owners() == ["billing"]
    assert reader.metadata.get("/a/b") == Versioned(b"value", version)
    assert reader.metadata.children("/") == ["a"]
    with pytest.raises(LedgerNotFoundError):
        reader.ledgers.last(gone)
    for call in (
        lambda: reader.ledgers.create("billing"),
        lambda: reader.ledgers.append(ledger_id, [b"x"]),
        lambda: reader.ledgers.append_many([]),
        lambda: reader.ledgers.fence(ledger_id),
        lambda: reader.ledgers.delete(gone),
        lambda: reader.metadata.put("/c", b"x", expected_version=ABSENT),
        lambda: reader.metadata.delete("/a/b", expected_version=version),
    ):
        with pytest.raises(StoreError, match="opened to read"):
            call()
    assert snapshot(client, root) == before
    # Writes of others meanwhile are seen, and one that opens the store to write removes the remains.
    other = store.ledgers.create("shipping")
    assert reader.ledgers.owned_by("shipping") == [other]
    open_store()
    assert f"{root}/garbage/{gone}" not in snapshot(client, root)
    assert gone not in BOOKKEEPER.there


# Sizes


@pytest.mark.slow
def test_a_value_that_cannot_fit_is_refused_before_it_is_sent(open_store):
    store = open_store()
    largest = bytes(999_000)
    version = store.metadata.put("/largest", largest, expected_version=ABSENT)
    with pytest.raises(PayloadTooLargeError, match="nothing was sent"):
        store.metadata.put("/largest", bytes(1_000_000), expected_version=version)
    assert store.metadata.get("/largest") == Versioned(largest, version)
    # The server accepts at least the size that we send by default, and drops the connection at a larger one.
    careless = open_store(request_bytes_max=1_048_576 + 10_000)
    with pytest.raises(StoreError, match="connection was lost"):
        careless.metadata.put("/a", bytes(1_048_576), expected_version=ABSENT)
    assert careless.metadata.get("/a") is None
    largest = bytes(1_048_575 - 1_000)
    version = careless.metadata.put("/a", largest, expected_version=ABSENT)
    assert careless.metadata.get("/a") == Versioned(largest, version)


# Cuts between any two transactions


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["create", "delete"])
def test_a_creation_or_deletion_is_finished_by_the_next_opening_wherever_it_is_cut(
    open_store, client, root, monkeypatch, verb
):
    store = open_store()
    empty, ledgers = set(snapshot(client, root)), set(BOOKKEEPER.there)
    for count in range(4):
        ledger_id = store.ledgers.create("cut") if verb == "delete" else None
        victim = open_store()
        cut_after(victim, monkeypatch, count)
        with suppress(CutError):
            victim.ledgers.create("cut") if verb == "create" else victim.ledgers.delete(ledger_id)
        owned = store.ledgers.owned_by("cut")
        assert len(owned) == (count > 1 if verb == "create" else count == 0)
        for each in owned:
            assert store.ledgers.last(each) == -1
            store.ledgers.delete(each)
        if ledger_id is not None:
            with pytest.raises(LedgerNotFoundError):
                store.ledgers.last(ledger_id)
        open_store()
        assert (set(snapshot(client, root)), BOOKKEEPER.there) == (empty, ledgers)


@pytest.mark.slow
def test_a_creation_that_another_opening_takes_for_garbage_begins_again(open_store, client, root, monkeypatch):
    store, create, ids = open_store(), EmptyLedgers.create, []

    def overtaken(self, replication, *, ledger_id, custom_metadata):
        ids.append(ledger_id)
        if len(ids) == 1:
            open_store()
        return create(self, replication, ledger_id=ledger_id, custom_metadata=custom_metadata)

    monkeypatch.setattr(EmptyLedgers, "create", overtaken)
    ledger_id = store.ledgers.create("billing")
    assert store.ledgers.owned_by("billing") == [ledger_id] == ids[1:]
    assert ledger_id in BOOKKEEPER.there
    assert client.get_children(f"{root}/garbage") == []


@pytest.mark.slow
def test_metadata_leaves_no_directory_behind(open_store, client, root):
    store = open_store()
    empty = set(snapshot(client, root))
    paths = ["/a/b/c/d", "/a/b", "/a/x", "/..", "/./."]
    versions = {path: store.metadata.put(path, b"", expected_version=ABSENT) for path in paths}
    assert store.metadata.children("/") == [".", "..", "a"]
    store.metadata.delete("/a/b", expected_version=versions.pop("/a/b"))
    assert store.metadata.get("/a/b") is None
    for path, version in versions.items():
        store.metadata.delete(path, expected_version=version)
    assert set(snapshot(client, root)) == empty


# Others at work


@pytest.mark.slow
@pytest.mark.parametrize("deleting", [False, True])
def test_a_value_made_again_is_not_taken_for_the_old_one(open_store, monkeypatch, deleting):
    stale, other = open_store(), open_store()
    version = stale.metadata.put("/aba", b"old", expected_version=ABSENT)
    commit = stale._session.commit

    def made_again_before(operations):
        monkeypatch.setattr(stale._session, "commit", commit)
        other.metadata.delete("/aba", expected_version=version)
        other.metadata.put("/aba", b"new", expected_version=ABSENT)
        return commit(operations)

    monkeypatch.setattr(stale._session, "commit", made_again_before)
    call = stale.metadata.delete if deleting else partial(stale.metadata.put, data=b"lost")
    with pytest.raises(VersionMismatchError):
        call("/aba", expected_version=version)
    found = other.metadata.get("/aba")
    assert found.data == b"new"
    assert found.version > version


@pytest.mark.slow
def test_values_come_and_go_side_by_side(open_store):
    """The directories above them are made and deleted all the time, and no call trips over that."""
    stores = [open_store(), open_store()]

    def come_and_go(number):
        store, name = stores[number % 2], str(number)
        for _ in range(25):
            version = store.metadata.put(f"/deep/er/{name}", b"", expected_version=ABSENT)
            assert name in store.metadata.children("/deep/er")
            store.metadata.delete(f"/deep/er/{name}", expected_version=version)
            store.ledgers.delete(store.ledgers.create("shared"))

    assert at_once(*(partial(come_and_go, number) for number in range(4))) == []
    assert stores[0].metadata.children("/") == stores[0].ledgers.owned_by("shared") == []


# Damage


@pytest.mark.slow
def test_damage_is_found_wherever_it_is(open_store, client, root):
    store = open_store()
    ledger_id = store.ledgers.create("damage")
    store.metadata.put("/value", b"value", expected_version=ABSENT)
    ledger, value = f"{root}/ledgers/{ledger_id}", f"{root}/metadata/value"
    no_text = nodes.encode(NodeKind.BOOKKEEPER_LEDGER, f"/ledgers/{ledger_id}", b"\xff")
    for path, data, call in (
        (ledger, client.get(ledger)[0][:-1], lambda store: store.ledgers.last(ledger_id)),
        (ledger, client.get(ledger)[0][:-1], lambda store: store.ledgers.append(ledger_id, [b"x"])),
        (ledger, client.get(value)[0], lambda store: store.ledgers.fence(ledger_id)),
        (ledger, no_text, lambda store: store.ledgers.delete(ledger_id)),
        (value, b"", lambda store: store.metadata.get("/value")),
        (value, nodes.encode(NodeKind.BOOKKEEPER_STORE, "/metadata/value"), lambda store: store.metadata.get("/value")),
    ):
        before = client.get(path)[0]
        client.set(path, data)
        with pytest.raises(CorruptStateError):
            call(open_store())
        client.set(path, before)
    assert store.ledgers.last(ledger_id) == -1
    client.set(value, b"damaged")
    with pytest.raises(DamagedValueError) as damage:
        store.metadata.get("/value")
    with pytest.raises(VersionMismatchError):
        store.metadata.put("/value", b"", expected_version=ABSENT)
    version = store.metadata.put("/value", b"repaired", expected_version=damage.value.version)
    assert store.metadata.get("/value") == Versioned(b"repaired", version)
    client.create(f"{root}/owners/damage/x", b"")
    with pytest.raises(CorruptStateError, match="expected numbers of ledgers, found x"):
        store.ledgers.owned_by("damage")
    client.delete(f"{root}/deletions")
    with pytest.raises(CorruptStateError, match=r"deletions.* expected a node, found none"):
        store.metadata.put("/other", b"", expected_version=ABSENT)


# Connection and session


@pytest.mark.slow
def test_a_call_waits_for_a_server_that_comes_back_even_if_it_forgot_a_connection(tmp_path):
    # A server that loads its data may accept a connection and neither answer nor close it. This one bounds sessions to
    # ten seconds: one attempt as long as the requested session would lose it.
    server = ZooKeeperServer(tmp_path)
    server.start()
    found = []
    try:
        settings = {"bookkeeper": WITHOUT_BOOKIES, "session_timeout_s": 18, "call_timeout_s": 80}
        with closing(BookKeeperStore(server.hosts, root="/root", **settings)) as store:
            version = store.metadata.put("/a", b"", expected_version=ABSENT)
            session_id = store._session._client.client_id
            server.kill()
            with socket.create_server(("127.0.0.1", server.port)) as listener:
                waiting = threading.Thread(target=lambda: found.append(store.metadata.get("/a")))
                waiting.start()
                forgotten, _ = listener.accept()
            with forgotten:
                server.start()
                waiting.join(timeout=100)
            assert found == [Versioned(b"", version)]
            assert store.metadata.put("/a", b"x", expected_version=version) > version
            assert store._session._client.client_id == session_id
    finally:
        server.stop()


def impatient(store, call_timeout_s):
    """Return a store whose calls give up after another time; to open it takes longer on a busy machine."""
    store._session._call_timeout_s = call_timeout_s
    return store


@pytest.mark.slow
def test_a_call_does_not_wait_for_ever_and_the_store_goes_on_when_the_server_is_back(server, open_store):
    store, closed = impatient(open_store(), 0.3), open_store(session_timeout_s=2)
    server.kill()
    for call in (
        lambda: store.ledgers.create("bound"),
        lambda: store.metadata.put("/a", b"x", expected_version=ABSENT),
        lambda: store.metadata.get("/a"),
    ):
        with pytest.raises(StoreError, match=r"no connection for 0.3 s|connection was lost"):
            call()
    closed.close()
    server.start()
    # An answer that came too late would end the store, and the machine may be busy.
    impatient(store, 30)
    assert store.metadata.get("/a") is None
    assert [store.ledgers.create("bound")] == store.ledgers.owned_by("bound")
    with pytest.raises(StoreError, match="closed"):
        closed.metadata.get("/a")


def expire(server, store):
    """Close a store's session as if the server had not heard from it for too long."""
    session_id, password = store._session._client.client_id
    requests = Connect(0, 0, 2_000, session_id, password, False).serialize(), struct.pack("!ii", 1, Close.type)
    frames = b"".join(struct.pack("!i", len(request)) + request for request in requests)
    # The store may take its session back before it is closed.
    while not store._session._refusal:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as thief:
            thief.sendall(frames)
            while thief.recv(100):
                pass


@pytest.mark.slow
def test_a_lost_session_is_refused_until_reopened(server, open_store):
    store, versions = open_store(), [ABSENT]
    ledger_id = store.ledgers.create("lost")

    def put():
        with suppress(StoreError):
            while True:
                data = b"%d" % len(versions)
                versions.append(store.metadata.put("/flight", data, expected_version=versions[-1]))

    def expire_amid_puts():
        wait_until(lambda: len(versions) >= 5)
        expire(server, store)

    assert at_once(put, expire_amid_puts) == []
    for call in (
        lambda: store.ledgers.create("lost"),
        lambda: store.ledgers.append(ledger_id, [b"x"]),
        lambda: store.ledgers.last(ledger_id),
        lambda: store.metadata.get("/flight"),
        lambda: store.metadata.put("/a", b"x", expected_version=ABSENT),
    ):
        with pytest.raises(StoreError, match="session was lost"):
            call()
    store.close()
    reopened = open_store()
    assert reopened.ledgers.last(ledger_id) == -1
    assert int(reopened.metadata.get("/flight").data) + 1 - len(versions) in {0, 1}


@pytest.mark.slow
def test_a_call_without_an_answer_ends_the_store_and_the_next_owner_has_the_value(server, open_store):
    store = impatient(open_store(session_timeout_s=2), 1)
    version = store.metadata.put("/hangs", b"old", expected_version=ABSENT)
    server.pause()
    try:
        with pytest.raises(StoreError):
            store.metadata.put("/hangs", b"late", expected_version=version)
    finally:
        server.resume()
    owner = open_store()
    found = owner.metadata.get("/hangs")
    assert found.data in {b"old", b"late"}
    version = owner.metadata.put("/hangs", b"new", expected_version=found.version)
    with pytest.raises(StoreError):
        store.metadata.put("/hangs", b"later", expected_version=found.version)
    assert owner.metadata.get("/hangs") == Versioned(b"new", version)
    impatient(owner, 0.2)
    server.pause()
    resumed = threading.Timer(1.5, server.resume)  # Long after the call gave up, whatever else the machine does.
    resumed.start()
    for reason in (r"no answer within 0.2 s", "not answered"):
        with pytest.raises(StoreError, match=reason):
            owner.metadata.get("/hangs")
    resumed.join()


# Pulsar's nodes


@pytest.fixture
def connect(server):
    """Connect to Pulsar's nodes each time; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def connected(**settings):
            return ZooKeeperNodes(stack.enter_context(closing(ZooKeeperSession(server.hosts, **settings))))

        yield connected


def create_above(nodes, path):
    names = path.split("/")[1:-1]
    for end in range(len(names)):
        with suppress(VersionMismatchError):
            nodes.put("/" + "/".join(names[: end + 1]), b"", expected_version=ABSENT)


@pytest.mark.slow
def test_a_node_of_pulsar_is_changed_by_compare_and_set_and_not_by_a_reader(connect):
    nodes, other, reader = connect(), connect(), connect(only_reads=True)
    assert nodes.get(NODE) is None
    with pytest.raises(StoreError, match="there is nothing above"):
        nodes.put(NODE, b"1", expected_version=ABSENT)
    create_above(nodes, NODE)
    first = nodes.put(NODE, b"1", expected_version=ABSENT)
    assert other.get(NODE) == (b"1", first)
    second = other.put(NODE, b"2", expected_version=first)
    for version, change in (
        *((version, partial(nodes.put, data=b"3")) for version in (first, ABSENT)),
        (first, nodes.delete),
    ):
        with pytest.raises(VersionMismatchError):
            change(NODE, expected_version=version)
    for refused in (
        lambda: reader.put(NODE, b"3", expected_version=second),
        lambda: reader.delete(NODE, expected_version=second),
        lambda: reader.session.create_ephemeral("/read", b""),
    ):
        with pytest.raises(StoreError, match="opened to read"):
            refused()
    assert reader.get(NODE) == (b"2", second)
    assert nodes.children("/managed-ledgers/public") == ["default"]
    assert nodes.children("/none") == []
    nodes.delete(NODE, expected_version=second)
    again = nodes.put(NODE, b"2", expected_version=ABSENT)
    with pytest.raises(VersionMismatchError):
        other.put(NODE, b"4", expected_version=second)
    assert again > second


@pytest.mark.slow
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


# Three servers


class Member(ZooKeeperServer):
    """One server of three; it serves while it has a leader."""

    MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

    def __init__(self, directory, number, addresses):
        directory.mkdir()
        super().__init__(directory, tick_ms=100)  # It is missed soon.
        (directory / "data").mkdir()
        (directory / "data" / "myid").write_text(f"{number}")
        # In ticks: to find a leader, and after how much silence one is lost. A session outlives every election here.
        settings = {"initLimit": 50, "syncLimit": 20, "maxSessionTimeout": 30_000}
        settings |= {f"server.{each}": address for each, address in addresses.items()}
        with (directory / "zoo.cfg").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def start(self):
        self.launch()
        wait_until(self.role)

    def role(self):
        """`leader` or `follower`; empty if it does not serve."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"srvr")
                with connection.makefile() as lines:
                    return "".join(line.removeprefix("Mode: ").strip() for line in lines if line.startswith("Mode: "))
        except OSError:
            return ""


def leader(members):
    """Wait for an election to end."""
    wait_until(lambda: any(member.role() == "leader" for member in members))
    return next(member for member in members if member.role() == "leader")


@pytest.fixture
def members(tmp_path):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(6)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    addresses = {number: f"127.0.0.1:{ports[2 * number - 2]}:{ports[2 * number - 1]}" for number in (1, 2, 3)}
    members = [Member(tmp_path / f"{number}", number, addresses) for number in addresses]
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.callback(member.stop)
            member.launch()
        wait_until(lambda: sorted(member.role() for member in members) == ["follower", "follower", "leader"])
        yield members


def open_at(members, root):
    hosts = ",".join(member.hosts for member in members)
    # Quick to try again, so that there is time for more.
    options = {"connection_retry": {"max_tries": -1, "delay": 0.02, "max_delay": 0.1}}
    settings = {"bookkeeper": WITHOUT_BOOKIES, "session_timeout_s": 20, "client_options": options}
    return closing(BookKeeperStore(hosts, root=root, **settings))


class Writer(threading.Thread):
    """Puts numbers, each over the one before, while servers die under it; a number that failed may be stored."""

    def __init__(self, store):
        super().__init__(daemon=True)
        self.store, self.stored, self.last_tried, self.stopping, self.error = store, [0], 0, threading.Event(), None

    def run(self):
        try:
            while not self.stopping.is_set():
                with suppress(StoreError):
                    self.step()
        except Exception as error:
            self.error = error

    def step(self):
        found = self.store.metadata.get("/number") or Versioned(b"0", ABSENT)
        # All that was confirmed is there, and nothing that was never sent.
        assert self.stored[-1] <= int(found.data) <= self.last_tried
        self.last_tried += 1
        self.store.metadata.put("/number", b"%d" % self.last_tried, expected_version=found.version)
        self.stored.append(self.last_tried)

    def gets_on(self):
        """Wait until more is stored."""
        before = len(self.stored)
        wait_until(lambda: self.error or len(self.stored) >= before + 5)


@pytest.mark.slow
def test_a_store_goes_on_by_itself_when_servers_of_three_die_and_loses_nothing(members, root):
    """Store and session stay the same: nothing is reopened, only a put that failed is tried again."""
    with open_at(members, root) as store:
        session_id, states = store._session._client.client_id, []
        store._session._client.add_listener(states.append)
        writer = Writer(store)
        writer.start()
        writer.gets_on()
        for hangs_first in (False, True):
            dying = leader(members)
            if hangs_first:  # So that it dies with a write that no other server has.
                dying.pause()
                writer.stopping.wait(0.1)  # Not set yet.
            dying.kill()
            writer.gets_on()
            for survivor in members:
                if survivor is not dying:
                    before = writer.stored[-1]
                    with open_at([survivor], root) as other:  # A follower that lags must catch up first.
                        assert before <= int(other.metadata.get("/number").data) <= writer.last_tried
            dying.start()
        writer.stopping.set()
        writer.join(timeout=60)
        assert (writer.is_alive(), writer.error) == (False, None)
        assert store._session._client.client_id == session_id
        # Followers without a leader drop their clients, so the loss of each leader was felt.
        assert states.count("SUSPENDED") >= 2
