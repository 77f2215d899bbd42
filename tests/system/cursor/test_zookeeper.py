"""Events that only a store on a real ZooKeeper server meets: kills, lost sessions, other processes, limits, damage."""

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from contextlib import closing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.client import KazooClient
from kazoo.protocol.serialization import Close, Connect

from ackstate import CursorFencedError, LedgerMap, LogFencedError, Position
from ackstate.cursor import (
    CursorConfig,
    Format,
    ManagedCursor,
    Message,
    MessageLog,
    PersistTarget,
    RecoverySource,
    Retention,
    trim_log,
)
from ackstate.cursor.store import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
    Versioned,
    VersionMismatchError,
)
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.inspect.store import inspect_store
from ackstate.stores import zookeeper_nodes as nodes
from ackstate.stores.zookeeper import ZooKeeperStore
from ackstate.stores.zookeeper_nodes import Chunk, LedgerState, LedgerStatus, NodeKind
from ackstate.wire.pulsar import Compression
from crash.zookeeper_server import ZooKeeperServer, running_server
from waiting import wait_until

# A request that is small, so that small entries have several chunks.
SMALL = 32 * 1024
CHUNK = SMALL - 16 * 1024
roots = (f"/root-{number}" for number in itertools.count())


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
            return stack.enter_context(closing(ZooKeeperStore(server.hosts, root=root, **settings)))

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


# Names and bytes of nodes


@given(kind=st.sampled_from(NodeKind), path=st.text(st.characters(codec="utf-8")), body=st.binary())
def test_a_node_comes_back_as_it_was_written(kind, path, body):
    encoded = nodes.encode(kind, path, body)
    assert nodes.kind_of(path, encoded) is kind
    assert nodes.decode(kind, path, encoded) == body
    assert len(encoded) == nodes.FRAME_BYTES + len(body)


def test_every_changed_bit_and_every_cut_of_a_node_is_found():
    path = nodes.chunk_path(7, 3, 0)
    encoded = nodes.encode_chunk(path, Chunk(1, b"entry"))
    for bit in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptStateError, UnsupportedVersionError)):
            nodes.decode_chunk(path, bytes(damaged))
    for size in range(len(encoded)):
        with pytest.raises(CorruptStateError):
            nodes.decode_chunk(path, encoded[:size])
    with pytest.raises(CorruptStateError, match="body"):
        nodes.decode_chunk(path, encoded + b"\0")


def test_a_node_belongs_to_its_path_and_its_kind():
    encoded = nodes.encode_ledger(7, LedgerState(3, LedgerStatus.OPEN, "ä"))
    assert nodes.decode_ledger(7, encoded) == LedgerState(3, LedgerStatus.OPEN, "ä")
    with pytest.raises(CorruptStateError, match="CRC"):
        nodes.decode_ledger(8, encoded)
    with pytest.raises(CorruptStateError, match="kind VALUE"):
        nodes.decode(NodeKind.VALUE, nodes.ledger_path(7), encoded)


def test_the_bytes_of_version_1_are_for_ever():
    chunk = nodes.chunk_path(7, 3, 1)
    ledger = LedgerState(3, LedgerStatus.FENCED, "ä")
    golden = {
        nodes.encode(NodeKind.STORE, ""): "41434b5a 0101 0000 00000000 0f9bb142",
        nodes.encode(NodeKind.DIRECTORY, "/metadata"): "41434b5a 0102 0000 00000000 f6f842de",
        nodes.encode_counter("/last-ledger", 7): "41434b5a 0103 0000 08000000 50d89de4 0700000000000000",
        nodes.encode_ledger(7, ledger): "41434b5a 0104 0000 0b000000 c057d36a 0300000000000000 01 c3a4",
        nodes.encode_chunk(chunk, Chunk(2, b"entry")): "41434b5a 0105 0000 09000000 c619b1af 02000000 656e747279",
        nodes.encode(
            NodeKind.VALUE, "/metadata/a%20b/%2E", b"value"
        ): "41434b5a 0106 0000 05000000 dba0b7f6 76616c7565",
    }
    assert [encoded.hex() for encoded in golden] == [text.replace(" ", "") for text in golden.values()]
    assert (chunk, nodes.ledger_path(7)) == ("/ledgers/7/0000000003.0001", "/ledgers/7")
    assert (nodes.value_path("/a b/."), nodes.owner_path("a/b")) == ("/metadata/a%20b/%2E", "/owners/a%2Fb")


@pytest.mark.parametrize("body", [b"", b"\1" * 8, b"\0" * 8 + b"\3", b"\0" * 9 + b"\xff"])
def test_a_ledger_that_says_nothing_sensible_is_damage(body):
    with pytest.raises(CorruptStateError, match="state of a ledger"):
        nodes.decode_ledger(7, nodes.encode(NodeKind.LEDGER, nodes.ledger_path(7), body))


@pytest.mark.parametrize("body", [b"", b"\1\0\0", b"\0\0\0\0data"])
def test_a_chunk_without_a_count_is_damage(body):
    path = nodes.chunk_path(7, 3, 0)
    with pytest.raises(CorruptStateError, match="a chunk count"):
        nodes.decode_chunk(path, nodes.encode(NodeKind.CHUNK, path, body))


def test_a_counter_of_another_size_is_damage():
    encoded = nodes.encode(NodeKind.COUNTER, nodes.LEDGER_COUNTER, b"\1")
    with pytest.raises(CorruptStateError, match="8 bytes"):
        nodes.decode_counter(nodes.LEDGER_COUNTER, encoded)


def test_a_newer_version_is_refused_before_its_checksum_is_read():
    encoded = bytearray(nodes.encode(NodeKind.STORE, nodes.STORE))
    encoded[4] = 2
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        nodes.decode(NodeKind.STORE, nodes.STORE, bytes(encoded))


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1), min_size=1))
def test_names_in_metadata_are_reversible_and_fit_for_zookeeper(names):
    encoded = nodes.value_path("/" + "/".join(names)).removeprefix(nodes.METADATA).split("/")[1:]
    assert [nodes.name_in_metadata(name) for name in encoded] == names
    assert all(name.isascii() and name.isprintable() and name not in {"", ".", ".."} for name in encoded)


def test_owners_have_names_of_their_own():
    owners = ["", ".", "..", "%", "%2E", "a", "a/b", "a%2Fb", "A"]
    paths = {nodes.owner_path(owner) for owner in owners}
    assert len(paths) == len(owners)
    assert sorted(nodes.owner_in_owners(path.removeprefix(f"{nodes.OWNERS}/")) for path in paths) == sorted(owners)


@pytest.mark.parametrize("name", ["%2e", "a%", "a b", "%ff", "%"])
def test_a_name_that_we_do_not_write_is_damage(name):
    with pytest.raises(CorruptStateError):
        nodes.name_in_metadata(name)
    if name != "%":  # That is not an owner's.
        with pytest.raises(CorruptStateError, match=nodes.OWNERS):
            nodes.owner_in_owners(name)


@pytest.mark.parametrize("name", ["", "5", "5.", ".5", "a.0", "5.a"])
def test_a_chunk_with_a_strange_name_is_damage(name):
    with pytest.raises(CorruptStateError):
        nodes.entry_id_of(name)


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
    for open_with in (ZooKeeperStore, ZooKeeperStore.open_to_read):
        with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
            open_with(**{"hosts": "127.0.0.1:1", **settings})


def test_options_that_kazoo_refuses_are_named_without_their_secrets():
    options = {"auth_data": [("sasl", "me:secret")], "sasl_options": {"mechanism": "PLAIN"}}
    with pytest.raises(ValueError, match=r"auth_data.*sasl_options") as caught:
        ZooKeeperStore("127.0.0.1:1", client_options=options)
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_a_store_error():
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        hosts = f"127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(StoreError, match=f"{hosts}/ackstate: no server answered within 0.3 s"):
            ZooKeeperStore(hosts, call_timeout_s=0.3)


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
    newer = nodes.encode(NodeKind.STORE, nodes.STORE)
    newer = newer[:4] + b"\2" + newer[5:]
    client.set(root, newer)
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        open_store()
    assert (client.get(root)[0], client.get_children(root)) == (newer, [])
    client.set(root, b"")
    assert open_store().ledgers.create("billing") == 1


@pytest.mark.slow
def test_many_may_open_a_new_root_at_once(server, root):
    stores = []
    threads = [
        threading.Thread(target=lambda: stores.append(ZooKeeperStore(server.hosts, root=f"{root}/deep/er")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.ledgers.create("x") for store in stores) == [1, 2, 3, 4, 5, 6]
    for store in stores:
        store.close()


# To read


@pytest.fixture
def open_to_read(server, root):
    with contextlib.ExitStack() as stack:

        def opened(**settings):
            return stack.enter_context(closing(ZooKeeperStore.open_to_read(server.hosts, root=root, **settings)))

        yield opened


def half_deleted(store, owner, monkeypatch):
    """Leave a ledger that is gone for callers and has lost the first 1,000 of its 1,002 chunks."""
    ledger_id = store.ledgers.create(owner)
    store.ledgers.append_all([(ledger_id, b"gone")] * 1_002)
    with monkeypatch.context() as patch:
        cut_after(store, patch, 2)
        with pytest.raises(CutError):
            store.ledgers.delete(ledger_id)
    return ledger_id


@pytest.mark.slow
def test_a_store_opened_to_read_reads_all_and_changes_nothing(open_store, open_to_read, client, root, monkeypatch):
    store = open_store(request_bytes_max=SMALL)
    ledger_id = store.ledgers.create("billing")
    entries = [b"a", bytes(3 * CHUNK)]
    store.ledgers.append_all([(ledger_id, entry) for entry in entries])
    version = store.metadata.put("/a/b", b"value", expected_version=ABSENT)
    gone = half_deleted(open_store(), "billing", monkeypatch)
    before = snapshot(client, root)
    assert f"{root}/garbage/{gone}" in before
    assert len(client.get_children(f"{root}{nodes.ledger_path(gone)}")) == 2

    reader = open_to_read()
    assert reader.ledgers.read(ledger_id, 0, 2) == entries
    assert (reader.ledgers.last(ledger_id), reader.ledgers.owned_by("billing")) == (1, [ledger_id])
    assert reader.ledgers.owners() == ["billing"]
    assert reader.metadata.get("/a/b") == Versioned(b"value", version)
    assert reader.metadata.children("/") == ["a"]
    with pytest.raises(LedgerNotFoundError):
        reader.ledgers.last(gone)
    for call in (
        lambda: reader.ledgers.create("billing"),
        lambda: reader.ledgers.append(ledger_id, b"x"),
        lambda: reader.ledgers.append_all([(ledger_id, bytes(2_000_000))]),
        lambda: reader.ledgers.append_all([]),
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
    assert store.ledgers.append(ledger_id, b"later") == 2
    assert reader.ledgers.read(ledger_id, 2, 3) == [b"later"]
    open_store()
    assert f"{root}/garbage/{gone}" not in snapshot(client, root)
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
    encoded = nodes.encode(NodeKind.STORE, nodes.STORE)
    client.set(root, encoded[:4] + b"\2" + encoded[5:])
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        open_to_read()


# Sizes


@pytest.mark.slow
@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, SMALL * 10])
def test_an_entry_comes_back_whatever_its_size(open_store, size):
    store = open_store(request_bytes_max=SMALL)
    entry = random.Random(size).randbytes(size)
    ledger_id = store.ledgers.create("sizes")
    assert store.ledgers.append_all([(ledger_id, b"a"), (ledger_id, entry), (ledger_id, b"b")]) == [0, 1, 2]
    assert store.ledgers.append(ledger_id, entry) == 3
    assert store.ledgers.read(ledger_id, 0, 4) == [b"a", entry, b"b", entry]
    # Another limit has other chunks, and reads these all the same.
    assert open_store().ledgers.read(ledger_id, 1, 2) == [entry]


@pytest.mark.slow
def test_entries_around_the_servers_own_limit(open_store):
    store = open_store()
    ledger_id = store.ledgers.create("sizes")
    entries = [random.Random(size).randbytes(size) for size in (983_616, 983_617, 1_000_000, 1_048_575, 5_000_000)]
    for entry_id, entry in enumerate(entries):
        assert store.ledgers.append(ledger_id, entry) == entry_id
    assert store.ledgers.read(ledger_id, 0, len(entries)) == entries


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


@pytest.mark.slow
def test_a_batch_over_more_ledgers_than_one_request_can_name_is_refused_before_it_is_sent(open_store):
    store = open_store(request_bytes_max=SMALL)
    ledger_ids = [store.ledgers.create("o" * 1_000) for _ in range(40)]
    with pytest.raises(PayloadTooLargeError):
        store.ledgers.append_all([(ledger_id, bytes(CHUNK)) for ledger_id in ledger_ids])
    assert store.ledgers.append_all([(ledger_id, b"x") for ledger_id in ledger_ids[:5]]) == [0] * 5


# CutError between any two transactions


@pytest.mark.slow
def test_a_large_batch_is_all_or_nothing_wherever_it_is_cut(open_store, client, root, monkeypatch):
    store = open_store(request_bytes_max=SMALL)
    one, other = store.ledgers.create("cut"), store.ledgers.create("cut")
    store.ledgers.append(one, b"first")
    batch = [(one, b"a" * 3 * CHUNK), (other, b"b"), (one, b"c"), (other, b"d" * 2 * CHUNK)]
    for count in range(20):
        victim = open_store(request_bytes_max=SMALL)
        cut_after(victim, monkeypatch, count)
        try:
            victim.ledgers.append_all(batch)
        except CutError:
            assert (store.ledgers.last(one), store.ledgers.last(other)) == (0, -1)
        else:
            break
    assert count >= 6
    assert store.ledgers.read(one, 0, 3) == [b"first", b"a" * 3 * CHUNK, b"c"]
    assert store.ledgers.read(other, 0, 2) == [b"b", b"d" * 2 * CHUNK]
    # Nothing that was staged and given up is left.
    assert len(tree(client, f"{root}/ledgers")) == 2 + 1 + 4 + 3


@pytest.mark.slow
def test_what_a_cut_append_left_never_shows_through_smaller_entries(open_store, monkeypatch):
    store = open_store(request_bytes_max=SMALL)
    ledger_id = store.ledgers.create("cut")
    victim = open_store(request_bytes_max=SMALL)
    cut_after(victim, monkeypatch, 3)
    with pytest.raises(CutError):
        victim.ledgers.append(ledger_id, bytes(5 * CHUNK))
    for entry_id in range(3):
        assert store.ledgers.append(ledger_id, b"%d" % entry_id) == entry_id
    assert store.ledgers.read(ledger_id, 0, 3) == [b"0", b"1", b"2"]


@pytest.mark.slow
def test_two_that_stage_in_the_same_ledger_never_mix(open_store, monkeypatch):
    one, other = open_store(request_bytes_max=SMALL), open_store(request_bytes_max=SMALL)
    ledger_id = one.ledgers.create("both")
    commit, count = one._session.commit, itertools.count()

    def interrupted(operations):
        # After the first chunk of one is staged, the other appends a whole entry.
        if next(count) == 1:
            assert other.ledgers.append(ledger_id, b"b" * 3 * CHUNK) == 0
        return commit(operations)

    monkeypatch.setattr(one._session, "commit", interrupted)
    assert one.ledgers.append(ledger_id, b"a" * 4 * CHUNK) == 1
    assert one.ledgers.read(ledger_id, 0, 2) == [b"b" * 3 * CHUNK, b"a" * 4 * CHUNK]


@pytest.mark.slow
def test_an_end_never_moves_over_chunks_that_another_has_removed(open_store, monkeypatch):
    one, other = open_store(request_bytes_max=SMALL), open_store(request_bytes_max=SMALL)
    ledger_id = one.ledgers.create("both")
    commit, count = one._session.commit, itertools.count()
    # The other runs into the staged chunks, has changed the ledger and removed them, and dies.
    cut_after(other, monkeypatch, 3)

    def interrupted(operations):
        if next(count) == 2:
            with pytest.raises(CutError):
                other.ledgers.append(ledger_id, b"b" * 3 * CHUNK)
        return commit(operations)

    monkeypatch.setattr(one._session, "commit", interrupted)
    assert one.ledgers.append(ledger_id, b"a" * 4 * CHUNK) == 0
    assert one.ledgers.read(ledger_id, 0, 1) == [b"a" * 4 * CHUNK]


@pytest.mark.slow
def test_a_deletion_is_finished_by_the_next_opening_wherever_it_is_cut(open_store, client, root, monkeypatch):
    store = open_store()
    empty = tree(client, root)
    for count in itertools.count():
        ledger_id = store.ledgers.create("cut")
        store.ledgers.append_all([(ledger_id, b"%d" % number) for number in range(2_500)])
        victim = open_store()
        cut_after(victim, monkeypatch, count)
        try:
            victim.ledgers.delete(ledger_id)
        except CutError:
            gone = store.ledgers.owned_by("cut") == []
            assert gone == (count > 0)
            if not gone:
                assert len(store.ledgers.read(ledger_id, 0, 2_500)) == 2_500
                store.ledgers.delete(ledger_id)
            with pytest.raises(LedgerNotFoundError):
                store.ledgers.read(ledger_id, 0, 1)
            open_store()
            assert tree(client, root) == empty
        else:
            break
    assert count == 5
    assert tree(client, root) == empty


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


def test_a_trimmed_log_leaves_no_node_behind(open_store, client, root):
    """Forty ledgers come and go; as many nodes and bytes stay as after the first ten."""
    store, sizes = open_store(), []
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=4)
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    for _ in range(4):
        for _ in range(10):
            positions = log.publish([Message(b"x" * 5_000)] * 4)
        cursor.mark_delete(positions[-1], now_ms=0)
        cursor.persist(now_ms=0)
        assert trim_log(log, Retention(), {"s": cursor}, now_ms=0) in {9, 10}
        cursor.reset(positions[-1], now_ms=0)  # It writes a new journal, so that only the log can grow.
        nodes_left = snapshot(client, root)
        sizes.append((len(nodes_left), sum(len(data) for data, _ in nodes_left.values()) // 1_000))
    assert len(set(sizes)) == 1
    assert sizes[0][1] < 30


# Others at work


@pytest.mark.slow
def test_an_append_on_its_way_is_refused_after_a_fence(open_store, monkeypatch):
    stale, owner = open_store(), open_store()
    ledger_id = stale.ledgers.create("fenced")
    stale.ledgers.append(ledger_id, b"a")
    before_next_commit(stale, monkeypatch, lambda: owner.ledgers.fence(ledger_id))
    with pytest.raises(LedgerFencedError):
        stale.ledgers.append(ledger_id, b"late")
    assert owner.ledgers.last(ledger_id) == 0
    other = stale.ledgers.create("fenced")
    before_next_commit(stale, monkeypatch, lambda: owner.ledgers.fence(other))
    with pytest.raises(LedgerFencedError):
        stale.ledgers.append_all([(other, bytes(2_000_000))])
    assert owner.ledgers.last(other) == -1


@pytest.mark.slow
def test_what_a_fence_returns_is_the_end_while_its_owner_writes_on(open_store):
    stale, owner = open_store(), open_store()
    for _ in range(10):
        ledger_id = stale.ledgers.create("race")
        written = []

        def write(ledger_id=ledger_id, written=written):
            with contextlib.suppress(LedgerFencedError):
                while True:
                    written.append(stale.ledgers.append(ledger_id, b"%d" % len(written)))

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda written=written: len(written) >= 3)
        last = owner.ledgers.fence(ledger_id)
        writer.join(timeout=60)
        assert written == list(range(last + 1))
        assert owner.ledgers.read(ledger_id, 0, last + 1) == [b"%d" % number for number in written]


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


@pytest.mark.slow
def test_threads_that_append_to_one_ledger_share_it(open_store):
    store = open_store(request_bytes_max=SMALL)
    ledger_id = store.ledgers.create("threads")
    ids = []

    def append(size):
        ids.extend(store.ledgers.append(ledger_id, bytes(size)) for _ in range(10))

    threads = [threading.Thread(target=append, args=(size,)) for size in (1, 100, 3 * CHUNK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(30))


# Damage


@pytest.mark.slow
def test_damage_is_found_wherever_it_is(open_store, client, root):
    store = open_store(request_bytes_max=SMALL)
    ledger_id = store.ledgers.create("damage")
    store.ledgers.append_all([(ledger_id, b"zero"), (ledger_id, b"one"), (ledger_id, bytes(3 * CHUNK))])
    store.metadata.put("/value", b"value", expected_version=ABSENT)
    chunks = [root + nodes.chunk_path(ledger_id, *place) for place in ((0, 0), (1, 0), (2, 1))]

    def refused(path, data, call):
        before = client.get(path)[0]
        client.set(path, data)
        with pytest.raises(CorruptStateError):
            call(open_store())
        client.set(path, before)

    def read(store):
        store.ledgers.read(ledger_id, 0, 3)

    for chunk in chunks:
        refused(chunk, client.get(chunk)[0][:-1] + b"\xff", read)
        refused(chunk, b"", read)
    refused(chunks[0], client.get(chunks[1])[0], read)
    state = root + nodes.ledger_path(ledger_id)
    for call in (
        read,
        lambda store: store.ledgers.append(ledger_id, b"x"),
        lambda store: store.ledgers.fence(ledger_id),
    ):
        refused(state, client.get(state)[0][:-1], call)
    refused(f"{root}/last-ledger", b"", lambda store: store.ledgers.create("x"))
    refused(f"{root}/metadata/value", b"", lambda store: store.metadata.get("/value"))
    refused(f"{root}/metadata/value", b"", lambda store: store.metadata.put("/value", b"", expected_version=ABSENT))
    read(store)


@pytest.mark.slow
def test_a_node_that_is_missing_is_damage(open_store, client, root):
    store = open_store(request_bytes_max=SMALL)
    ledger_id = store.ledgers.create("damage")
    store.ledgers.append(ledger_id, bytes(3 * CHUNK))
    client.delete(root + nodes.chunk_path(ledger_id, 0, 2))
    with pytest.raises(CorruptStateError, match="expected a node, found none"):
        store.ledgers.read(ledger_id, 0, 1)
    client.delete(root + nodes.LEDGER_COUNTER)
    with pytest.raises(CorruptStateError, match="last-ledger"):
        store.ledgers.create("x")


@pytest.mark.slow
def test_a_chunk_of_another_entry_does_not_fit(open_store, client, root):
    store = open_store(request_bytes_max=SMALL)
    ledger_id = store.ledgers.create("damage")
    store.ledgers.append(ledger_id, bytes(3 * CHUNK))
    path = nodes.chunk_path(ledger_id, 0, 1)
    client.set(root + path, nodes.encode_chunk(path, Chunk(4, b"x")))
    with pytest.raises(CorruptStateError, match="3 chunks"):
        store.ledgers.read(ledger_id, 0, 1)


# Connection and session


class Writer(threading.Thread):
    """Appends numbers, small and large, while the server dies under it, and now and then swings a value."""

    def __init__(self, open_store):
        super().__init__()
        self.open_store = open_store
        # Quick to try again, so that there is time for more.
        retry = {"max_tries": -1, "delay": 0.02, "max_delay": 0.1}
        self.settings = {
            "request_bytes_max": SMALL,
            "session_timeout_s": 2,
            "client_options": {"connection_retry": retry},
        }
        self.store = open_store(**self.settings)
        self.ledger_id = self.store.ledgers.create("writer")
        self.appended = {}
        self.puts = self.failures = self.reopened = 0
        self.stopping = threading.Event()
        self.error = None

    def run(self):
        try:
            for number in itertools.count():
                if self.stopping.is_set():
                    return
                try:
                    self.step(number)
                except StoreError:
                    self.failures += 1
                    self.reopen_if_lost()
        except Exception as error:
            self.error = error

    def step(self, number):
        entry = entry_of(number)
        self.appended[number] = self.store.ledgers.append(self.ledger_id, entry)
        if number % 8 == 0:
            self.put(number)

    def put(self, number):
        found = self.store.metadata.get("/number")
        assert found is None or int(found.data) <= number
        version = found.version if found else ABSENT
        self.store.metadata.put("/number", b"%d" % number, expected_version=version)
        self.puts = number

    def reopen_if_lost(self):
        try:
            self.store._session.check_usable()
        except StoreError:
            self.reopened += 1
            self.store = self.open_store(**self.settings)


def entry_of(number):
    """Every fourth is staged in several transactions."""
    return b"%d " % number + bytes(100 if number % 4 else 5 * CHUNK)


@pytest.mark.slow
def test_what_was_appended_survives_kills_in_order_and_whole(server, open_store):
    chance = random.Random(20)
    writer = Writer(open_store)
    writer.start()
    for _ in range(3):
        before = len(writer.appended)
        wait_until(lambda before=before: len(writer.appended) >= before + 3)
        writer.stopping.wait(chance.random() * 0.05)  # Not set yet: a random moment.
        server.kill()
        server.start()
    writer.stopping.set()
    writer.join(timeout=60)
    assert writer.error is None
    assert writer.failures >= 1
    store = open_store()
    entries = store.ledgers.read(writer.ledger_id, 0, store.ledgers.last(writer.ledger_id) + 1)
    numbers = [int(entry.split()[0]) for entry in entries]
    assert entries == [entry_of(number) for number in numbers]
    assert numbers == sorted(set(numbers))
    assert {number: numbers[entry_id] for number, entry_id in writer.appended.items()} == {
        number: number for number in writer.appended
    }
    # Only calls that failed may have been forgotten or carried out unknown.
    assert len(numbers) <= len(writer.appended) + writer.failures
    assert int(store.metadata.get("/number").data) >= writer.puts
    assert len(writer.appended) >= 9


@pytest.mark.slow
def test_a_call_waits_for_a_server_that_comes_back_even_if_it_forgot_a_connection(tmp_path):
    # A server that loads its data may accept a connection and neither answer nor close it. This one bounds sessions to
    # ten seconds: one attempt as long as the requested session would lose it.
    server = ZooKeeperServer(tmp_path)
    server.start()
    ids = []
    try:
        with closing(ZooKeeperStore(server.hosts, root="/root", session_timeout_s=18, call_timeout_s=80)) as store:
            ledger_id = store.ledgers.create("back")
            session_id = store._session._client.client_id
            server.kill()
            with socket.create_server(("127.0.0.1", server.port)) as listener:
                waiting = threading.Thread(target=lambda: ids.append(store.ledgers.last(ledger_id)))
                waiting.start()
                forgotten, _ = listener.accept()
            with forgotten:
                server.start()
                waiting.join(timeout=100)
            assert ids == [-1]
            assert store.ledgers.append(ledger_id, b"x") == 0
            assert store._session._client.client_id == session_id
    finally:
        server.stop()


def impatient(store, call_timeout_s):
    """Return a store whose calls give up soon; to open it takes longer on a busy machine."""
    store._session._call_timeout_s = call_timeout_s
    return store


@pytest.mark.slow
def test_a_call_does_not_wait_for_ever_and_the_store_goes_on_when_the_server_is_back(server, open_store):
    store = impatient(open_store(), 0.3)
    ledger_id = store.ledgers.create("bound")
    server.kill()
    for call in (
        lambda: store.ledgers.append(ledger_id, b"x"),
        lambda: store.ledgers.last(ledger_id),
        lambda: store.metadata.get("/a"),
    ):
        with pytest.raises(StoreError, match=r"no connection for 0.3 s|connection was lost"):
            call()
    server.start()
    patient = open_store()
    assert patient.ledgers.last(ledger_id) == -1
    deadline_s = time.monotonic() + 60
    while True:
        try:
            assert store.ledgers.append(ledger_id, b"x") == 0
            break
        except StoreError:
            assert time.monotonic() < deadline_s


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
        lambda: store.ledgers.append(ledger_id, b"x"),
        lambda: store.ledgers.last(ledger_id),
        lambda: store.metadata.get("/a"),
        lambda: store.metadata.put("/a", b"x", expected_version=version),
    ):
        with pytest.raises(StoreError, match="session was lost"):
            call()
    store.close()
    reopened = open_store()
    assert reopened.ledgers.append(ledger_id, b"x") == 0
    assert reopened.metadata.get("/a") == Versioned(b"", version)


@pytest.mark.slow
def test_a_call_in_flight_when_the_session_is_lost_is_a_store_error(server, open_store):
    store = open_store()
    ledger_id = store.ledgers.create("flight")
    appended = []

    def append():
        with contextlib.suppress(StoreError):
            while True:
                appended.append(store.ledgers.append(ledger_id, b"%d" % len(appended)))

    writer = threading.Thread(target=append)
    writer.start()
    wait_until(lambda: len(appended) >= 5)
    expire(server, store)
    writer.join(timeout=60)
    assert not writer.is_alive()
    entries = open_store().ledgers.read(ledger_id, 0, len(appended))
    assert entries == [b"%d" % number for number in appended]


@pytest.mark.slow
def test_a_server_that_hangs_is_a_store_error_and_the_fence_holds(server, open_store):
    store, owner = open_store(session_timeout_s=2), open_store(session_timeout_s=2)
    ledger_id = store.ledgers.create("hangs")
    server.pause()
    try:
        with pytest.raises(StoreError):
            store.ledgers.append(ledger_id, b"late")
    finally:
        server.resume()
    owner.close()
    last = open_store().ledgers.fence(ledger_id)
    with pytest.raises(StoreError):
        store.ledgers.append(ledger_id, b"later")
    assert open_store().ledgers.last(ledger_id) == last


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


# Cursors on it


def open_cursor(store, subscription="billing"):
    log = LedgerMap.from_counts({3: 10, 6: 10})
    return ManagedCursor.open(store, topic="orders", subscription=subscription, ledgers=log, now_ms=0)


@pytest.mark.slow
def test_a_cursor_is_there_again_after_a_reopen(open_store):
    store = open_store()
    cursor, other = open_cursor(store), open_cursor(store, "shipping")
    cursor.ack(Position(3, 4), now_ms=1)
    cursor.persist(now_ms=1)
    other.mark_delete(Position(6, 2), now_ms=1)
    other.persist(now_ms=1)
    cursor.ack(Position(6, 1), now_ms=2)
    cursor.close(now_ms=2)
    other.close(now_ms=2)
    store.close()
    store = open_store()
    cursor, other = open_cursor(store), open_cursor(store, "shipping")
    assert cursor.recovery_report.source is RecoverySource.JOURNAL
    assert [cursor.is_acked(Position(*place)) for place in ((3, 4), (6, 1), (3, 5))] == [True, True, False]
    assert other.mark_delete_position == Position(6, 2)
    assert cursor.mark_delete_position == Position(3, -1)


@pytest.mark.slow
def test_an_older_cursor_in_another_process_is_fenced(open_store):
    older = open_cursor(open_store())
    older.ack(Position(3, 4), now_ms=1)
    older.persist(now_ms=1)
    newer = open_cursor(open_store())
    older.ack(Position(3, 5), now_ms=2)
    with pytest.raises(CursorFencedError):
        older.persist(now_ms=2)
    newer.ack(Position(3, 6), now_ms=3)
    newer.persist(now_ms=3)
    found = open_cursor(open_store())
    assert [found.is_acked(Position(3, entry)) for entry in (4, 5, 6)] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("entries_per_ledger_max", [1, 2, 50])
def test_an_older_owner_of_a_log_in_another_process_is_fenced(open_store, entries_per_ledger_max):
    """It appends to the ledger that it has, or needs the next one."""

    def opened():
        return MessageLog.open(open_store(), topic="t", entries_per_ledger_max=entries_per_ledger_max)

    def publish(log, number):
        return log.publish([Message(b"", publish_time_ms=number)])

    older = opened()
    positions = publish(older, 1)
    newer = opened()
    for _ in range(2):
        with pytest.raises(LogFencedError):
            publish(older, 2)
    positions += publish(newer, 3)
    with pytest.raises(LogFencedError):
        publish(older, 4)
    found = opened()
    assert sum(found.ledgers.counts().values()) == 2
    assert [message.publish_time_ms for message in found.read(positions)] == [1, 3]


@pytest.mark.slow
def test_a_publish_on_its_way_is_refused_after_a_takeover(open_store, monkeypatch):
    store, newer = open_store(), []
    older = MessageLog.open(store, topic="t")
    positions = older.publish([Message(b"", publish_time_ms=1)])
    before_next_commit(store, monkeypatch, lambda: newer.append(MessageLog.open(open_store(), topic="t")))
    with pytest.raises(LogFencedError):
        older.publish([Message(b"", publish_time_ms=2)])
    positions += newer[0].publish([Message(b"", publish_time_ms=3)])
    assert [message.publish_time_ms for message in newer[0].read(positions)] == [1, 3]
    assert sum(newer[0].ledgers.counts().values()) == 2


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
    retry = {"max_tries": -1, "delay": 0.02, "max_delay": 0.1}
    options = {"connection_retry": retry}
    return closing(ZooKeeperStore(hosts, root=root, session_timeout_s=20, client_options=options))


class Acker:
    """Acks entry after entry, each with a persist that is tried until it succeeds; leaves out every 50th."""

    LOG = LedgerMap.from_counts({3: 1_000_000})

    def __init__(self, store):
        # Without compaction nothing that was lost is written once more.
        config = CursorConfig(compaction_bytes_min=1 << 30)
        self.cursor = ManagedCursor.open(
            store, topic="orders", subscription="acker", ledgers=self.LOG, config=config, now_ms=0
        )
        self.entry_ids = (number for number in itertools.count() if number % 50)
        self.acked, self.durable = set(), set()
        self.stopping = threading.Event()
        self.error = None

    @contextlib.contextmanager
    def at_work(self):
        self.stopping.clear()
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            thread.join(timeout=60)
        assert not thread.is_alive()
        assert self.error is None

    def run(self):
        try:
            while not self.stopping.is_set():
                self.step(next(self.entry_ids))
        except Exception as error:
            self.error = error

    def step(self, entry_id):
        receipt = self.cursor.ack(Position(3, entry_id), now_ms=1_000 * entry_id)
        self.acked.add(entry_id)
        while not self.stopping.is_set() and not self.cursor.durable(receipt):
            with contextlib.suppress(StoreError):
                self.cursor.persist(now_ms=1_000 * entry_id)
        if self.cursor.durable(receipt):
            self.durable.add(entry_id)

    def gets_on(self):
        """Wait until more is durable."""
        before = len(self.durable)
        wait_until(lambda: self.error or len(self.durable) >= before + 5)


def acked_in(hosts, root):
    """The result of a recovery, seen through one server and without touching it."""
    with closing(ZooKeeperStore.open_to_read(hosts, root=root)) as store:
        (found,) = inspect_store(store)
        assert found.problems == ()
        return {entry_id for run in found.content.deleted.runs() for entry_id in range(run.first, run.end)}


@pytest.mark.slow
def test_a_cursor_goes_on_by_itself_when_servers_of_three_die_and_loses_nothing_durable(ensemble, root):
    """Cursor, store and session stay the same: nothing is reopened, only a persist that failed is tried again."""
    with open_at(ensemble.hosts, root) as store:
        session_id, states = store._session._client.client_id, []
        store._session._client.add_listener(states.append)
        acker = Acker(store)

        def outlives(member, *, hangs_first=False):
            if hangs_first:
                # So that it dies with a write that no other server has.
                member.pause()
            with acker.at_work():
                if hangs_first:
                    acker.stopping.wait(0.1)  # Not set yet.
                else:
                    acker.gets_on()
                member.kill()
                acker.gets_on()
            for survivor in ensemble.members:
                if survivor is not member:
                    assert acker.durable <= acked_in(survivor.hosts, root) <= acker.acked
            member.start()

        outlives(ensemble.leader())
        outlives(ensemble.leader(), hangs_first=True)
        for follower in ensemble.followers():
            outlives(follower)
        assert store._session._client.client_id == session_id
        # Followers without a leader drop their clients, so the loss of each leader was felt.
        assert states.count("SUSPENDED") >= 2
    for member in ensemble.members:
        assert acker.durable <= acked_in(member.hosts, root) <= acker.acked
    with open_at(ensemble.hosts, root) as store:
        reopened = Acker(store).cursor
        assert all(reopened.is_acked(Position(3, entry_id)) for entry_id in acker.durable)


@pytest.mark.slow
def test_an_owner_on_the_far_side_of_a_split_is_fenced_and_its_last_write_undone(ensemble, root):
    """Its server leads no more when it returns, and takes nothing of the writes sent to it meanwhile."""
    far = ensemble.leader()
    near = ",".join(member.hosts for member in ensemble.members if member is not far)
    with open_at(far.hosts, root) as far_store, contextlib.ExitStack() as stack:
        stale = open_cursor(far_store)
        stale.ack(Position(3, 4), now_ms=1)
        stale.persist(now_ms=1)
        late = stale.ack(Position(3, 5), now_ms=2)
        errors = []

        def persist_late():
            try:
                stale.persist(now_ms=2)
            except Exception as error:
                errors.append(error)

        writer = threading.Thread(target=persist_late)
        far.pause()
        stack.callback(far.resume)
        writer.start()
        ensemble.leader(but=far)
        newer = open_cursor(stack.enter_context(open_at(near, root)))
        assert newer.is_acked(Position(3, 4))
        newer.ack(Position(3, 6), now_ms=3)
        newer.persist(now_ms=3)
        assert writer.is_alive()
        far.resume()
        writer.join(timeout=120)
        assert [type(error) for error in errors] == [CursorFencedError]
        with pytest.raises(CursorFencedError):
            stale.persist(now_ms=4)
        assert not stale.durable(late)
        newer.ack(Position(3, 7), now_ms=5)
        newer.persist(now_ms=5)
    wait_until(far.role)
    with open_at(far.hosts, root) as store:
        found = open_cursor(store)
        assert [found.is_acked(Position(3, entry_id)) for entry_id in (4, 5, 6, 7)] == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("codec", [each for each in Compression if each is not Compression.NONE])
@pytest.mark.parametrize("reopened", [Compression.LZ4, Compression.NONE])
def test_a_compressed_record_that_was_closed_opens_whatever_compression_is_configured(open_store, codec, reopened):
    """Uncompressed it would take more than the servers accept."""
    log = LedgerMap.from_counts({10: 120_000})

    def open_cursor(compression):
        config = CursorConfig(
            format=Format.PULSAR, range_count_max=200_000, metadata_range_count_max=200_000, compression=compression
        )
        return ManagedCursor.open(open_store(), topic="t", subscription="s", ledgers=log, config=config, now_ms=0)

    cursor = open_cursor(codec)
    cursor.ack_entries(10, range(1, 120_000, 2), now_ms=1)
    assert cursor.close(now_ms=2).route is PersistTarget.METADATA
    for _ in range(2):
        again = open_cursor(reopened)
        assert again.recovery_report.source is RecoverySource.METADATA
        assert again.deleted.range_count == 60_000
        assert again.deleted == cursor.deleted
    again.set_cursor_properties({"owner": "billing"})  # Then it is not compressed, and so it moves to a ledger.
    again = open_cursor(reopened)
    assert again.recovery_report.source is RecoverySource.JOURNAL
    assert again.cursor_properties == {"owner": "billing"}
    assert again.deleted == cursor.deleted
    again.ack(Position(10, 0), now_ms=3)
    again.close(now_ms=4)
    assert open_cursor(reopened).deleted == again.deleted
