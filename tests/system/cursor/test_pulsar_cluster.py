"""Pulsar's own layout on a real BookKeeper and ZooKeeper: takeovers, readers beside an owner, dead bookies."""

import contextlib
import threading
from contextlib import closing
from functools import partial

import pytest
from kazoo.client import KazooClient

from ackstate import CursorConfig, Format, ManagedCursor, Position
from ackstate.analysis.pulsar.ack_state_file import exported_cursors
from ackstate.analysis.pulsar.durable import DurableReader
from ackstate.inspect import inspect_store
from ackstate.stores.base import ABSENT, LedgerFencedError, LedgerNotFoundError, StoreError, VersionMismatchError
from ackstate.stores.bookkeeper import BookKeeperLedgers
from ackstate.stores.bookkeeper_client import BookKeeperClient, BookKeeperOptions, Replication
from ackstate.stores.pulsar import CursorLedgers, open_cluster
from ackstate.wire.pulsar.ranges import varint
from crash.bookkeeper_cluster import JARS
from pulsar_nodes import NODE, POLICIES, TOPIC
from shown_consoles import python_block

OPTIONS = BookKeeperOptions(class_path=str(JARS))

pytestmark = pytest.mark.slow
MESSAGES = 40
CONFIG = CursorConfig(format=Format.PULSAR)


@pytest.fixture(scope="module")
def cluster(bookkeeper_cluster):
    return bookkeeper_cluster


@pytest.fixture(scope="module")
def client(bookkeeper_client):
    return bookkeeper_client


@pytest.fixture
def connect(cluster, client):
    """Open the cluster's cursors each time, by default with the shared client; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(*, client=client, replication=OPTIONS.replication, **settings):
            options = BookKeeperOptions(replication, class_path=str(JARS), client=client)
            return stack.enter_context(
                closing(open_cluster(f"pulsar+zk://{cluster.hosts}", bookkeeper=options, **settings))
            )

        yield opened


@pytest.fixture
def store(connect):
    """A cluster with one topic, whose messages are in an open ledger, and no cursor."""
    store, broker = connect(), connect()
    message_ledger = broker.ledgers.create(_owner("messages"))
    broker.ledgers.append(message_ledger, [b"\0\0\0\0%d" % number for number in range(MESSAGES)])
    ledger = b"\x08" + varint(message_ledger) + b" \x00"
    for path, data in ((NODE, b"\n%c" % len(ledger) + ledger), ("/admin/policies/public/default", POLICIES)):
        names = path.split("/")[1:]
        for end in range(1, len(names)):
            with contextlib.suppress(VersionMismatchError):
                store.nodes.put("/" + "/".join(names[:end]), b"", expected_version=ABSENT)
        found = store.nodes.get(path)
        store.nodes.put(path, data, expected_version=ABSENT if found is None else found.version)
    for name in store.nodes.children(NODE):
        store.nodes.delete(f"{NODE}/{name}", expected_version=store.nodes.get(f"{NODE}/{name}").version)
    return store


@pytest.fixture(scope="module")
def open_ledgers(cluster, client):
    """Open the ledgers of the cluster each time, as another owner."""
    options = BookKeeperOptions(class_path=str(JARS), client=client)
    with closing(open_cluster(f"pulsar+zk://{cluster.hosts}", bookkeeper=options)) as store:
        how = Replication()
        yield lambda: BookKeeperLedgers(client, how, CursorLedgers(client, store.nodes, how))


def _owner(name):
    return f"cursor /managed-ledgers/persistent%3A%2F%2Fpublic%2Fdefault%2Ft1/{name}"


def opened(store, name="s"):
    log = store.find_message_log(TOPIC).ledgers
    return ManagedCursor.open(store, topic=TOPIC, subscription=name, ledgers=log, config=CONFIG, now_ms=0)


def test_a_cursor_is_taken_over_as_the_guide_has_it(store, cluster, monkeypatch):
    monkeypatch.setenv("ACKSTATE_BOOKKEEPER_CLASSPATH", str(JARS))
    code = python_block("guides/move-a-subscription.md", "open_cluster(")
    for shown, here in (("persistent://public/default/orders", TOPIC), ("127.0.0.1:2181", cluster.hosts)):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    position = Position(store.find_message_log(TOPIC).ledgers.first_ledger_id, 7)
    exec(code, {"CursorConfig": CursorConfig, "Format": Format, "ManagedCursor": ManagedCursor,
                "position": position, "now_ms": 1_000})  # fmt: skip
    assert opened(store, "billing").is_acked(position)


def acked(cursor, *entries):
    ledger_id = cursor.ledgers.first_ledger_id
    cursor.ack_many([Position(ledger_id, entry) for entry in entries], now_ms=1)
    return cursor.persist(now_ms=2)


def test_the_size_of_an_open_ledger_is_that_of_its_last_readable_entry(store, connect):
    # BookKeeper confirms an entry to readers with the next one.
    for client in (store, connect(only_reads=True)):
        log = client.find_message_log(TOPIC)
        assert list(log.ledgers.counts().values()) == [MESSAGES]


@pytest.mark.soak
def test_a_url_has_the_brokers_password(cluster, tmp_path, store):
    (tmp_path / "secret").write_text("s3cret\n")
    url = f"pulsar+zk://{cluster.hosts}?digest=MAC&password_file={tmp_path / 'secret'}"
    with closing(open_cluster(url, bookkeeper=OPTIONS)) as secret:
        ledger_id = secret.ledgers.create(_owner("u"))
        assert secret.ledgers.append(ledger_id, [b"x"]) == 0
        assert secret.ledgers.last(ledger_id) == 0
    for call in (store.ledgers.last, store.ledgers.fence):
        with pytest.raises(StoreError):
            call(ledger_id)
    with closing(open_cluster(url, bookkeeper=OPTIONS, only_reads=True)) as secret:
        assert secret.ledgers.read(ledger_id, 0, 1) == [b"x"]


@pytest.mark.soak
def test_a_cluster_may_be_below_a_node_of_zookeeper(cluster):
    client = KazooClient(cluster.hosts)
    client.start()
    try:
        for name in ("ledgers/LAYOUT", "ledgers/INSTANCEID"):
            client.create(f"/elsewhere/{name}", client.get(f"/{name}")[0], makepath=True)
        client.create("/elsewhere/ledgers/available/readonly", makepath=True)
        client.create("/elsewhere/managed-ledgers/public/default/persistent/t1", b"\n\x04\x08\x07 \x00", makepath=True)
    finally:
        client.stop()
        client.close()
    for url in (f"zk:{cluster.hosts}/elsewhere", f"pulsar+zk://{cluster.hosts}?chroot=/elsewhere"):
        with closing(open_cluster(url, bookkeeper=OPTIONS, only_reads=True)) as elsewhere:
            assert list(elsewhere.metadata.topics()) == [TOPIC]
            assert elsewhere.find_message_log(TOPIC).ledgers.counts() == {7: 0}


@pytest.fixture
def ledgers(open_ledgers):
    return open_ledgers()


@pytest.fixture
def ledger_id(ledgers):
    """A ledger with one entry."""
    ledger_id = ledgers.create(_owner("s"))
    ledgers.append(ledger_id, [b"a"])
    return ledger_id


@pytest.mark.parametrize("change", ["seal", "fence", "delete"])
def test_an_append_that_is_overtaken_by_another_call_still_has_its_outcome(ledgers, ledger_id, monkeypatch, change):
    """The other call waits for the append that is under way."""
    append_all, others = BookKeeperClient.append_all, []

    def overtaken(client, entries):
        call = ledgers.seal if change == "seal" else partial(getattr(ledgers, change), ledger_id)
        others.append(threading.Thread(target=call))
        others[0].start()
        others[0].join(0.05)
        return append_all(client, entries)

    with monkeypatch.context() as patch:
        patch.setattr(BookKeeperClient, "append_all", overtaken)
        assert ledgers.append(ledger_id, [b"b"]) == 1
    others[0].join()
    with pytest.raises(LedgerNotFoundError if change == "delete" else LedgerFencedError):
        ledgers.append(ledger_id, [b"late"])
    if change != "delete":
        assert ledgers.read(ledger_id, 0, ledgers.last(ledger_id) + 1) == [b"a", b"b"]


def test_a_reader_sees_the_last_ack_and_its_owner_goes_on(store, connect):
    cursor, reader = opened(store), connect(only_reads=True)
    for entry in (3, 5, 7, 11):
        acked(cursor, entry)
        (found,) = inspect_store(reader)
        assert found.problems == ()
        assert len(found.content.deleted) == len(cursor.deleted)
    for call in (
        lambda: reader.ledgers.create(_owner("t")),
        lambda: reader.ledgers.append(found.record.cursor_ledger_id, [b""]),
        lambda: reader.ledgers.fence(found.record.cursor_ledger_id),
        lambda: reader.ledgers.delete(found.record.cursor_ledger_id),
        lambda: opened(reader),
    ):
        with pytest.raises(StoreError, match="opened to read"):
            call()
    acked(cursor, 13)
    (now,) = inspect_store(reader)
    assert (now.record.cursor_ledger_id, len(now.content.deleted)) == (found.record.cursor_ledger_id, 5)


def test_a_ledger_belongs_to_the_cursor_that_its_metadata_names(store):
    acked(opened(store, "s"), 3)
    acked(opened(store, "t"), 4)
    (ledger_id,) = store.ledgers.owned_by(_owner("t"))[-1:]
    record = store.nodes.get(f"{NODE}/t").data
    found = store.nodes.get(f"{NODE}/s")
    store.nodes.put(f"{NODE}/s", record, expected_version=found.version)
    (problem,) = (problem for each in inspect_store(store) for problem in each.problems)
    assert problem.expected == "a ledger made in the cursor's name"
    assert problem.found == f"ledger {ledger_id}, another's"


def test_an_export_beside_the_owner_has_its_acks(store, connect):
    owner = opened(store)
    acked(owner, 0, 1, 3, 39)
    (cursor,) = exported_cursors(connect(only_reads=True), TOPIC)
    assert (cursor.content.mark_delete, str(cursor.content.deleted)) == (owner.mark_delete_position, str(owner.deleted))
    assert len(cursor.fingerprints) == 3
    assert acked(owner, 5).messages_covered == 1


def test_ledgers_that_are_missing_or_anothers_are_named(store, connect):
    other = connect(replication=Replication(3, 3, 2))
    ledger_id = other.ledgers.create(_owner("u"))
    assert other.ledgers.append(ledger_id, [b"x"]) == 0
    with pytest.raises(LedgerFencedError, match=f"ledger {ledger_id} was fenced, or created by another opening"):
        store.ledgers.append(ledger_id, [b"y"])
    assert store.ledgers.fence(ledger_id) == 0
    with pytest.raises(LedgerFencedError):
        other.ledgers.append(ledger_id, [b"y"])
    for call in (
        lambda: store.ledgers.append(2**40, [b"y"]),
        lambda: store.ledgers.last(2**40),
        lambda: store.ledgers.read(ledger_id, 1, 2),
    ):
        with pytest.raises(LedgerNotFoundError):
            call()
    with pytest.raises(StoreError, match="only cursors have ledgers here"):
        store.ledgers.create("log of t")
    store.ledgers.delete(ledger_id)
    store.ledgers.delete(ledger_id)
    assert store.ledgers.owned_by(_owner("u")) == []


@pytest.fixture(scope="module")
def reader(cluster):
    """Read with a Java client of its own, which takes seconds to start."""
    with DurableReader(f"pulsar+zk://{cluster.hosts}", class_path=str(JARS)) as found:
        yield found


def _durable(reader, names):
    found = reader.read([(TOPIC, name) for name in names])
    return {name: str(found[TOPIC, name].deleted) for name in names}


def test_many_durable_states_are_read_beside_their_owners(store, reader):
    """The versions of all nodes stay, and the owners append to the same ledgers."""
    names = [f"s{number}" for number in range(15)]
    owners = {name: opened(store, name) for name in names}
    for number, owner in enumerate(owners.values()):
        acked(owner, 1, 3 + number % 5)
    nodes = ["/ledgers", *(f"{NODE}/{name}" for name in names)]
    before = store.nodes.get_many(nodes)
    for entry in (11, 13):
        assert _durable(reader, names) == {name: str(owner.deleted) for name, owner in owners.items()}
        assert _durable(reader, names) == {name: str(owner.deleted) for name, owner in owners.items()}
        assert store.nodes.get_many(nodes) == before
        for owner in owners.values():
            acked(owner, entry)
    for entry in range(21, 30, 2):  # many entries between two reads
        acked(owners["s3"], entry)
    assert _durable(reader, names) == {name: str(owner.deleted) for name, owner in owners.items()}
    ledger_ids = [state.version[1] for state in reader.read([(TOPIC, name) for name in names]).values()]
    assert ledger_ids == [store.ledgers.owned_by(_owner(name))[-1] for name in sorted(names)]


def test_a_ledger_that_is_taken_over_is_read_to_its_end_and_then_in_its_successor(store, connect, reader):
    acked(opened(store), 1, 3)
    first = _durable(reader, "s")
    cursor = opened(connect())  # by recovery, which closes the ledger
    assert _durable(reader, "s") == first
    acked(cursor, 5)
    assert _durable(reader, "s") == {"s": str(cursor.deleted)}


def test_durable_states_are_read_while_a_bookie_is_dead(cluster, store, reader):
    names = [f"d{number}" for number in range(12)]
    owners = {name: opened(store, name) for name in names}
    for owner in owners.values():
        acked(owner, 1, 3)
    expected = {name: str(owner.deleted) for name, owner in owners.items()}
    assert _durable(reader, names[:6]) == {name: expected[name] for name in names[:6]}
    cluster.bookies[0].kill()
    try:
        assert _durable(reader, names) == expected
    finally:
        cluster.revive()
    assert _durable(reader, names) == expected
