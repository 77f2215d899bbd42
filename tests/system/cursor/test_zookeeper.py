"""Events of a store's ZooKeeper on a real server: kills, lost sessions, other processes, limits, damage.

Owners and metadata are in ZooKeeper alone, so that no bookie is needed here.
"""

import contextlib
import itertools
import random
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
from ackstate.stores.zookeeper import NodeKind
from crash.zookeeper_server import ZooKeeperServer, running_server
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

    def open_to_read(self, ledger_id, replication):
        there = ledger_id in self.there
        return Done(OpenLedger(ledger_id, ledger_id, -1), None if there else LedgerNotFoundError("none"))

    open_and_fence = open_to_read

    def metadata(self, ledger_id):
        there = ledger_id in self.there
        return Done(LedgerMetadata(2, -1, (), {}), None if there else LedgerNotFoundError("none"))

    def close_ledger(self, handle):
        return Done()

    forget_ledger = close_ledger

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


def tree(client, path):
    """The paths below a node."""
    below = [f"{path}/{name}" for name in client.get_children(path)]
    return sorted(below + [deeper for child in below for deeper in tree(client, child)])


def snapshot(client, path):
    """Every node from a path on: its bytes, its versions, the transactions that made and changed it."""
    return {each: client.get(each) for each in [path, *tree(client, path)]}


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


def before_next_commit(store, monkeypatch, happening):
    """Let something happen after a store has looked and before its transaction is sent."""
    commit = store._session.commit

    def delayed(operations):
        monkeypatch.setattr(store._session, "commit", commit)
        happening()
        return commit(operations)

    monkeypatch.setattr(store._session, "commit", delayed)


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
    client.create(root, b"")
    client.create(f"{root}/child", b"")
    with pytest.raises(StoreError, match="not an ackstate store"):
        open_store()
    client.delete(f"{root}/child")
    client.set(root, b"somebody else's data")
    with pytest.raises(CorruptStateError, match="ACKZ"):
        open_store()
    newer = nodes.encode(NodeKind.BOOKKEEPER_STORE, nodes.STORE)
    newer = newer[:4] + b"\3" + newer[5:]
    client.set(root, newer)
    with pytest.raises(UnsupportedVersionError, match="version 3"):
        open_store()
    assert (client.get(root)[0], client.get_children(root)) == (newer, [])
    client.set(root, b"")
    store = open_store()
    assert store.ledgers.owned_by("billing") == []
    ledger_id = store.ledgers.create("billing")
    assert store.ledgers.owned_by("billing") == [ledger_id]


@pytest.mark.slow
def test_many_may_open_a_new_root_at_once(open_store, root):
    stores = []
    threads = [threading.Thread(target=lambda: stores.append(open_store(root=f"{root}/deep/er"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [store.ledgers.create("x") for store in stores]
    assert [store.ledgers.owned_by("x") for store in stores] == [ids] * 6


# To read


@pytest.fixture
def open_to_read(server, root):
    with contextlib.ExitStack() as stack:

        def opened():
            return stack.enter_context(
                closing(BookKeeperStore(server.hosts, root=root, bookkeeper=WITHOUT_BOOKIES, only_reads=True))
            )

        yield opened


def half_deleted(store, owner, monkeypatch):
    """Leave a ledger that is gone for callers and has a node."""
    ledger_id = store.ledgers.create(owner)
    with monkeypatch.context() as patch, contextlib.suppress(CutError):
        cut_after(store, patch, 1)
        store.ledgers.delete(ledger_id)
    return ledger_id


@pytest.mark.slow
def test_a_store_opened_to_read_reads_all_and_changes_nothing(open_store, open_to_read, client, root, monkeypatch):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    version = store.metadata.put("/a/b", b"value", expected_version=ABSENT)
    gone = half_deleted(open_store(), "billing", monkeypatch)
    before = snapshot(client, root)
    assert f"{root}/garbage/{gone}" in before
    assert gone in BOOKKEEPER.there

    reader = open_to_read()
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
        lambda: reader.ledgers.delete(ledger_id),
        lambda: reader.ledgers.delete(gone),
        lambda: reader.metadata.put("/a/b", b"x", expected_version=version),
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
    reader.close()
    with pytest.raises(StoreError, match="closed"):
        reader.ledgers.last(ledger_id)


@pytest.mark.slow
def test_what_is_no_store_is_not_opened_to_read(open_to_read, client, root):
    with pytest.raises(StoreError, match=f"{root} is not an ackstate store: its node is missing"):
        open_to_read()
    assert client.exists(root) is None
    client.create(root, b"")
    before = client.get(root)
    with pytest.raises(StoreError, match=f"{root} is not an ackstate store: its node is empty"):
        open_to_read()
    assert (client.get(root), client.get_children(root)) == (before, [])
    client.set(root, b"somebody else's data")
    with pytest.raises(CorruptStateError, match="ACKZ"):
        open_to_read()
    encoded = nodes.encode(NodeKind.BOOKKEEPER_STORE, nodes.STORE)
    client.set(root, encoded[:4] + b"\3" + encoded[5:])
    with pytest.raises(UnsupportedVersionError, match="version 3"):
        open_to_read()


# Names


@pytest.mark.slow
def test_an_owner_may_have_any_name_or_none(open_store):
    store, names = open_store(), ["", "%", ".", "..", "/", "a/b", "ä", "\U0001f40d", "\uffff", "A"]
    for name in names:
        store.ledgers.create(name)
    assert store.ledgers.owners() == sorted(names)


# Sizes


def largest_value(store, path, version):
    """The size of the largest value that a path takes, by trying, and the version at the end."""
    low, high = 0, 2_000_000
    while high - low > 1:
        size = (low + high) // 2
        try:
            version = store.metadata.put(path, bytes(size), expected_version=version)
        except PayloadTooLargeError:
            high = size
        else:
            low = size
    return low, version


@pytest.mark.slow
def test_a_value_that_cannot_fit_is_refused_before_it_is_sent(open_store, monkeypatch):
    store = open_store()
    version = store.metadata.put("/largest", b"", expected_version=ABSENT)
    size, version = largest_value(store, "/largest", version)
    assert 999_000 < size < 1_000_000
    data = random.Random(1).randbytes(size)
    version = store.metadata.put("/largest", data, expected_version=version)
    assert store.metadata.get("/largest") == Versioned(data, version)
    exchange, sent = store._session._exchange, []
    monkeypatch.setattr(store._session, "_exchange", lambda requests: sent.append(len(requests)) or exchange(requests))
    with pytest.raises(PayloadTooLargeError, match="nothing was sent"):
        store.metadata.put("/largest", data + b"x", expected_version=version)
    # One exchange: the look at the nodes.
    assert len(sent) == 1
    assert store.metadata.get("/largest") == Versioned(data, version)


@pytest.mark.slow
def test_our_limit_is_below_the_servers_and_a_dropped_connection_is_found_again(open_store):
    careless = open_store(request_bytes_max=1_048_576 + 10_000)
    with pytest.raises(StoreError, match="connection was lost"):
        careless.metadata.put("/a", bytes(1_048_576), expected_version=ABSENT)
    assert careless.metadata.get("/a") is None
    # The server accepts at least the size that we send by default.
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
    empty, ledgers = tree(client, root), set(BOOKKEEPER.there)
    for count in range(4):
        ledger_id = store.ledgers.create("cut") if verb == "delete" else None
        victim = open_store()
        cut_after(victim, monkeypatch, count)
        with contextlib.suppress(CutError):
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
        assert (tree(client, root), BOOKKEEPER.there) == (empty, ledgers)


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
    empty = tree(client, root)
    paths = ["/a/b/c/d", "/a/b", "/a/x", "/..", "/./."]
    versions = {path: store.metadata.put(path, b"", expected_version=ABSENT) for path in paths}
    assert store.metadata.children("/") == [".", "..", "a"]
    store.metadata.delete("/a/b", expected_version=versions.pop("/a/b"))
    assert store.metadata.get("/a/b") is None
    for path, version in versions.items():
        store.metadata.delete(path, expected_version=version)
    assert tree(client, root) == empty


# Others at work


@pytest.mark.slow
@pytest.mark.parametrize("deleting", [False, True])
def test_a_value_made_again_is_not_taken_for_the_old_one(open_store, monkeypatch, deleting):
    stale, other = open_store(), open_store()
    version = stale.metadata.put("/aba", b"old", expected_version=ABSENT)

    def make_again():
        other.metadata.delete("/aba", expected_version=version)
        other.metadata.put("/aba", b"new", expected_version=ABSENT)

    before_next_commit(stale, monkeypatch, make_again)
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
    failures = []

    def come_and_go(store, name):
        try:
            for _ in range(25):
                version = store.metadata.put(f"/deep/er/{name}", b"", expected_version=ABSENT)
                assert name in store.metadata.children("/deep/er")
                store.metadata.delete(f"/deep/er/{name}", expected_version=version)
                store.ledgers.delete(store.ledgers.create("shared"))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(stores[number % 2], str(number))) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
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


class Writer(threading.Thread):
    """Puts numbers, each over the one before, while servers die under it; a number that failed may be stored."""

    def __init__(self, open_store):
        super().__init__()
        self.open_store = open_store
        self.store = open_store()
        self.stored, self.last_tried, self.failures = [], 0, 0
        self.stopping = threading.Event()
        self.error = None

    def run(self):
        try:
            while not self.stopping.is_set():
                try:
                    self.step()
                except StoreError:
                    self.failures += 1
                    self.reopen_if_lost()
        except Exception as error:
            self.error = error

    def step(self):
        found = self.store.metadata.get("/number")
        number = int(found.data) if found else 0
        # All that was confirmed is there, and nothing that was never sent.
        assert (self.stored or [0])[-1] <= number <= self.last_tried
        self.last_tried += 1
        version = found.version if found else ABSENT
        self.store.metadata.put("/number", b"%d" % self.last_tried, expected_version=version)
        self.stored.append(self.last_tried)

    def reopen_if_lost(self):
        try:
            self.store._session.check_usable()
        except StoreError:
            with suppress(StoreError):  # The server may take longer to be back; the next step tries again.
                self.store = self.open_store()

    def gets_on(self):
        """Wait until more is stored."""
        before = len(self.stored)
        wait_until(lambda: self.error or len(self.stored) >= before + 5)

    def end(self):
        self.stopping.set()
        self.join(timeout=60)
        assert not self.is_alive()
        assert self.error is None


# Quick to try again, so that there is time for more.
QUICK = {"connection_retry": {"max_tries": -1, "delay": 0.02, "max_delay": 0.1}}


@pytest.mark.slow
def test_what_was_put_survives_kills(server, open_store):
    chance, writer = random.Random(20), Writer(partial(open_store, session_timeout_s=2, client_options=QUICK))
    writer.start()
    for _ in range(3):
        writer.gets_on()
        writer.stopping.wait(chance.random() * 0.05)  # Not set yet: a random moment.
        server.kill()
        server.start()
    writer.gets_on()
    writer.end()
    assert writer.failures >= 1
    found = int(open_store().metadata.get("/number").data)
    assert writer.stored[-1] <= found <= writer.last_tried


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
    store = impatient(open_store(), 0.3)
    server.kill()
    for call in (
        lambda: store.ledgers.create("bound"),
        lambda: store.metadata.put("/a", b"x", expected_version=ABSENT),
        lambda: store.metadata.get("/a"),
    ):
        with pytest.raises(StoreError, match=r"no connection for 0.3 s|connection was lost"):
            call()
    server.start()
    # An answer that came too late would end the store, and the machine may be busy.
    impatient(store, 30)
    assert store.metadata.get("/a") is None
    assert [store.ledgers.create("bound")] == store.ledgers.owned_by("bound")


def expire(server, store):
    """Close a store's session as if the server had not heard from it for too long."""
    session_id, password = store._session._client.client_id
    requests = Connect(0, 0, 2_000, session_id, password, False).serialize(), struct.pack("!ii", 1, Close.type)
    frames = b"".join(struct.pack("!i", len(request)) + request for request in requests)
    # The store may take its session back before it is closed.
    while not store._session._refusal:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as thief:
            thief.sendall(frames)
            while thief.recv(100):
                pass


@pytest.mark.slow
def test_a_lost_session_is_refused_until_reopened(server, open_store):
    store = open_store()
    ledger_id = store.ledgers.create("lost")
    version = store.metadata.put("/a", b"", expected_version=ABSENT)
    expire(server, store)
    for call in (
        lambda: store.ledgers.create("lost"),
        lambda: store.ledgers.append(ledger_id, [b"x"]),
        lambda: store.ledgers.last(ledger_id),
        lambda: store.metadata.get("/a"),
        lambda: store.metadata.put("/a", b"x", expected_version=version),
    ):
        with pytest.raises(StoreError, match="session was lost"):
            call()
    store.close()
    reopened = open_store()
    assert reopened.ledgers.last(ledger_id) == -1
    assert reopened.metadata.get("/a") == Versioned(b"", version)


@pytest.mark.slow
def test_a_call_in_flight_when_the_session_is_lost_is_a_store_error(server, open_store):
    store, versions = open_store(), [ABSENT]

    def put():
        with contextlib.suppress(StoreError):
            while True:
                data = b"%d" % len(versions)
                versions.append(store.metadata.put("/flight", data, expected_version=versions[-1]))

    writer = threading.Thread(target=put)
    writer.start()
    wait_until(lambda: len(versions) >= 5)
    expire(server, store)
    writer.join(timeout=60)
    assert not writer.is_alive()
    found = int(open_store().metadata.get("/flight").data)
    assert found + 1 - len(versions) in {0, 1}


@pytest.mark.slow
def test_a_server_that_hangs_is_a_store_error_and_the_next_owner_has_the_value(server, open_store):
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


@pytest.mark.slow
def test_a_call_without_an_answer_ends_the_store(server, open_store):
    store = impatient(open_store(), 0.2)
    server.pause()
    resumed = threading.Timer(1.5, server.resume)  # Long after the call gave up, whatever else the machine does.
    resumed.start()
    with pytest.raises(StoreError, match=r"no answer within 0.2 s"):
        store.metadata.get("/a")
    resumed.join()
    with pytest.raises(StoreError, match="not answered"):
        store.metadata.get("/a")


@pytest.mark.slow
def test_closing_while_the_server_is_down_is_quiet(server, open_store):
    store = open_store(session_timeout_s=2)
    server.kill()
    store.close()
    server.start()
    with pytest.raises(StoreError, match="closed"):
        store.metadata.get("/a")


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


class Ensemble:
    def __init__(self, directory):
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(6)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
            pairs = enumerate(zip(ports[::2], ports[1::2], strict=True), 1)
            addresses = {number: f"127.0.0.1:{quorum}:{election}" for number, (quorum, election) in pairs}
            self.members = [Member(directory / f"{number}", number, addresses) for number in addresses]
        self.hosts = ",".join(member.hosts for member in self.members)

    def start_missing(self):
        for member in self.members:
            if member.process is None:
                member.launch()
        wait_until(lambda: sorted(member.role() for member in self.members) == ["follower", "follower", "leader"])

    def leader(self, *, but=None):
        """Wait for an election to end."""
        candidates = [member for member in self.members if member is not but]
        wait_until(lambda: any(member.role() == "leader" for member in candidates))
        return next(member for member in candidates if member.role() == "leader")

    def followers(self):
        return [member for member in self.members if member.role() == "follower"]


@pytest.fixture(scope="module")
def three_servers(tmp_path_factory):
    ensemble = Ensemble(tmp_path_factory.mktemp("ensemble"))
    with contextlib.ExitStack() as stack:
        for member in ensemble.members:
            stack.callback(member.stop)
        yield ensemble


@pytest.fixture
def ensemble(three_servers):
    three_servers.start_missing()
    return three_servers


def open_at(hosts, root):
    settings = {"bookkeeper": WITHOUT_BOOKIES, "session_timeout_s": 20, "client_options": QUICK}
    return closing(BookKeeperStore(hosts, root=root, **settings))


@pytest.mark.slow
def test_a_store_goes_on_by_itself_when_servers_of_three_die_and_loses_nothing(ensemble, root):
    """Store and session stay the same: nothing is reopened, only a put that failed is tried again."""
    with open_at(ensemble.hosts, root) as store:
        session_id, states = store._session._client.client_id, []
        store._session._client.add_listener(states.append)
        writer = Writer(lambda: store)
        writer.start()

        def outlives(member, *, hangs_first=False):
            if hangs_first:
                # So that it dies with a write that no other server has.
                member.pause()
                writer.stopping.wait(0.1)  # Not set yet.
            else:
                writer.gets_on()
            member.kill()
            writer.gets_on()
            for survivor in ensemble.members:
                if survivor is not member:
                    before = writer.stored[-1]
                    with open_at(survivor.hosts, root) as other:
                        assert before <= int(other.metadata.get("/number").data) <= writer.last_tried
            member.start()

        outlives(ensemble.leader())
        outlives(ensemble.leader(), hangs_first=True)
        for follower in ensemble.followers():
            outlives(follower)
        writer.end()
        assert store._session._client.client_id == session_id
        # Followers without a leader drop their clients, so the loss of each leader was felt.
        assert states.count("SUSPENDED") >= 2


@pytest.mark.slow
def test_the_last_write_on_the_far_side_of_a_split_is_undone(ensemble, root):
    """Its server leads no more when it returns, and takes nothing of the writes sent to it meanwhile."""
    far = ensemble.leader()
    near = ",".join(member.hosts for member in ensemble.members if member is not far)
    with open_at(far.hosts, root) as stale, contextlib.ExitStack() as stack:
        version = stale.metadata.put("/a", b"durable", expected_version=ABSENT)
        errors = []

        def put_late():
            try:
                stale.metadata.put("/a", b"late", expected_version=version)
            except Exception as error:
                errors.append(error)

        writer = threading.Thread(target=put_late)
        far.pause()
        stack.callback(far.resume)
        writer.start()
        ensemble.leader(but=far)
        newer = stack.enter_context(open_at(near, root))
        assert newer.metadata.get("/a") == Versioned(b"durable", version)
        new_version = newer.metadata.put("/a", b"new", expected_version=version)
        assert writer.is_alive()
        far.resume()
        writer.join(timeout=120)
        assert [isinstance(error, StoreError) for error in errors] == [True]
        with pytest.raises(VersionMismatchError):
            stale.metadata.put("/a", b"later", expected_version=version)
        assert newer.metadata.get("/a") == Versioned(b"new", new_version)
    wait_until(far.role)
    with open_at(far.hosts, root) as store:
        assert store.metadata.get("/a") == Versioned(b"new", new_version)
