"""A store on a real BookKeeper cluster: takeovers, lost answers, dead bookies, a dead Java."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from ackstate import LedgerMap, ManagedCursor
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.errors import CorruptStateError
from ackstate.stores import bookkeeper_client
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, PayloadTooLargeError, StoreError
from ackstate.stores.bookkeeper import BookKeeperStore, encode_batch
from ackstate.stores.bookkeeper_client import BookKeeperClient, Replication
from ackstate.stores.zookeeper import ZooKeeperSession
from ackstate.testing import check_store
from command_line import assert_one_line, run
from crash import PATHS
from crash.bookkeeper_cluster import JARS, bookkeeper_options
from shown_consoles import python_block
from tests.system.cursor.test_zookeeper import snapshot
from waiting import wait_until

pytestmark = pytest.mark.slow
roots = (f"/root-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def cluster(bookkeeper_cluster):
    return bookkeeper_cluster


@pytest.fixture(scope="module")
def client(bookkeeper_client):
    return bookkeeper_client


@pytest.fixture
def root():
    return next(roots)


@pytest.fixture
def open_store(cluster, client, root):
    """Open the same storage each time; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(**settings):
            settings = {"root": root, "bookkeeper": bookkeeper_options(client), **settings}
            return stack.enter_context(closing(BookKeeperStore(cluster.hosts, **settings)))

        yield opened


def entries(store, ledger_id):
    return store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1)


def test_it_keeps_the_contract(cluster, client, root):
    options = bookkeeper_options(client)
    check_store(lambda: BookKeeperStore(cluster.hosts, root=root, bookkeeper=options))


def test_a_store_opens_as_the_guide_has_it(cluster, root):
    code = python_block("guides/choose-a-store.md", "BookKeeperStore(")
    for shown, here in (
        ("zk1:2181,zk2:2181,zk3:2181", cluster.hosts),
        ("/ackstate", root),
        ("/opt/pulsar/lib", str(JARS)),
    ):
        assert code.count(f'"{shown}"') == 1
        code = code.replace(f'"{shown}"', f'"{here}"')
    names = {}
    exec(code, names)
    with closing(names["store"]) as store:
        ledger_id = store.ledgers.create("billing")
        store.ledgers.append(ledger_id, [b"an entry"])
        assert entries(store, ledger_id) == [b"an entry"]


# Takeovers


def test_threads_that_append_without_a_pause_do_not_keep_a_store_from_closing(open_store):
    store = open_store()
    ledger_ids = [store.ledgers.create("billing") for _ in range(4)]
    counts = dict.fromkeys(ledger_ids, 0)

    def append(ledger_id):
        with suppress(StoreError):
            while True:
                store.ledgers.append(ledger_id, [b"x"])
                counts[ledger_id] += 1

    threads = [threading.Thread(target=append, args=[ledger_id], daemon=True) for ledger_id in ledger_ids]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(count > 10 for count in counts.values()))
    closing_thread = threading.Thread(target=store.close, daemon=True)
    closing_thread.start()
    for thread in (closing_thread, *threads):
        thread.join(20)
        assert not thread.is_alive()
    other = open_store()
    for ledger_id, count in counts.items():
        assert other.ledgers.last(ledger_id) + 1 - count in {0, 1}


def test_what_a_fence_returns_is_the_end_while_its_owner_writes_on(open_store):
    stale, owner = open_store(), open_store()
    for _ in range(5):
        ledger_id = stale.ledgers.create("race")
        written = []

        def write(ledger_id=ledger_id, written=written):
            with suppress(LedgerFencedError):
                while True:
                    written.append(stale.ledgers.append(ledger_id, [b"%d" % len(written)]))

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda written=written: len(written) >= 3)
        last = owner.ledgers.fence(ledger_id)
        writer.join(timeout=60)
        assert written == list(range(last + 1))
        assert entries(owner, ledger_id) == [b"%d" % number for number in written]


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_append_that_a_fence_overtakes_counts_if_the_recovery_has_found_it(open_store, monkeypatch, is_stored):
    """Its writer gets an error from one bookie; another one may have given the entry to the recovery."""
    old, new = open_store(), open_store()
    ledger_id = old.ledgers.create("billing")
    old.ledgers.append(ledger_id, [b"a"])
    append_all = BookKeeperClient.append_all

    def overtaken(self, entries):
        if is_stored:
            append_all(self, entries)
        new.ledgers.fence(ledger_id)
        return [LedgerFencedError("fenced") for _ in entries]

    with monkeypatch.context() as patch:
        patch.setattr(BookKeeperClient, "append_all", overtaken)
        if is_stored:
            assert old.ledgers.append(ledger_id, [b"b", b"c"]) == 2
        else:
            with pytest.raises(LedgerFencedError):
                old.ledgers.append(ledger_id, [b"b", b"c"])
    for store in (old, new):
        assert entries(store, ledger_id) == [b"a", b"b", b"c"][: 1 + 2 * is_stored]
    with pytest.raises(LedgerFencedError):
        old.ledgers.append(ledger_id, [b"late"])


@pytest.mark.parametrize("happened", [False, True])
def test_a_ledger_whose_append_failed_takes_no_other_and_its_fence_tells_the_outcome(open_store, monkeypatch, happened):
    store, reader = open_store(), open_store(only_reads=True)
    one, other = (store.ledgers.create("billing") for _ in range(2))
    store.ledgers.append(one, [b"a"])
    append_all = BookKeeperClient.append_all

    def lost(self, entries):
        if happened:
            append_all(self, entries)
        raise StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(BookKeeperClient, "append_all", lost)
        outcomes = store.ledgers.append_many([(one, [b"b"]), (other, [b"c"])])
    assert ["no answer" in str(each) for each in outcomes] == [True, True]
    with pytest.raises(StoreError, match="has failed: fence it, or begin another ledger"):
        store.ledgers.append(one, [b"late"])
    wanted = [b"a", b"b"] if happened else [b"a"]
    assert entries(reader, one) == entries(store, one) == wanted
    assert store.ledgers.fence(one) == len(wanted) - 1
    assert store.ledgers.fence(other) == happened - 1
    with pytest.raises(LedgerFencedError):
        store.ledgers.append(one, [b"late"])


def test_threads_that_append_to_one_ledger_share_it(open_store):
    store = open_store()
    ledger_id, ids = store.ledgers.create("threads"), []

    def append(size):
        ids.extend(store.ledgers.append(ledger_id, [bytes(size)] * 2) for _ in range(10))

    threads = [threading.Thread(target=append, args=(size,)) for size in (1, 100, 100_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(1, 60, 2))
    sizes = [len(entry) for entry in entries(store, ledger_id)]
    assert sizes[::2] == sizes[1::2]


def test_another_process_reads_everything_confirmed_although_the_owner_is_at_work_or_gone(open_store):
    owner, reader = open_store(), open_store(only_reads=True)
    one, other = (owner.ledgers.create("billing") for _ in range(2))
    assert entries(reader, one) == []
    for number in range(20):
        owner.ledgers.append_many([(one, [b"%d" % number] * 2), (other, [b"x"] * (number % 2))])
        assert len(entries(reader, one)) == 2 * number + 2
    assert entries(reader, other) == [b"x"] * 10
    assert owner.ledgers.append(one, [b"the owner has noticed nothing"]) == 40


def test_entries_of_any_size_are_read_back_and_too_large_ones_are_refused(open_store, client):
    store = open_store()
    ledger_id, other = (store.ledgers.create("billing") for _ in range(2))
    sizes = [0, 1, 1_000_000, 3, *[100_000] * 60, *[10] * 3_000]
    batch = [os.urandom(size) for size in sizes]
    store.ledgers.append(ledger_id, batch)
    for reader in (store, open_store()):
        assert reader.ledgers.read(ledger_id, 0, len(batch)) == batch
    largest = bytes(client.entry_bytes_max - 6)
    assert store.ledgers.append(other, [largest]) == 0
    outcomes = store.ledgers.append_many([(ledger_id, [b"x"]), (other, [b"x", largest + b"x"])])
    assert (outcomes[0], type(outcomes[1])) == (len(batch), PayloadTooLargeError)
    assert "nothing was sent" in str(outcomes[1])
    assert store.ledgers.append(other, [b"y"]) == 1


@pytest.mark.parametrize(("before", "stored"), [([], 1), *(([b"a", b"b"], stored) for stored in (1, 2, 3))])
def test_a_batch_without_its_end_is_cut_off(open_store, client, before, stored):
    """The writer dies when one, two or all of three entries are durable."""
    store, reader = open_store(), open_store()
    ledger_id = store.ledgers.create("billing")
    if before:
        store.ledgers.append(ledger_id, before)
    handle = store.ledgers._writers[ledger_id].handle
    client.append([(handle, entry) for entry in encode_batch([b"x", b"y", b"z"])[:stored]]).wait()
    wanted = [*before, b"x", b"y", b"z"] if stored == 3 else before
    for _ in range(2):  # While its writer may go on, and after its recovery.
        assert entries(reader, ledger_id) == wanted
        for end in range(len(wanted) + 1, len(before) + 4):
            with pytest.raises(LedgerNotFoundError):
                reader.ledgers.read(ledger_id, len(before), end)
        assert reader.ledgers.fence(ledger_id) == len(wanted) - 1


# Leftovers


def bookkeeper_ids(cluster):
    """The ledgers that BookKeeper has."""
    client = KazooClient(cluster.hosts)
    client.start()
    try:
        found = []

        def visit(path, digits):
            for name in client.get_children(path):
                if re.fullmatch(r"L\d+", name):
                    found.append(int(digits + name[1:]))
                elif name.isdecimal():
                    visit(f"{path}/{name}", digits + name)

        visit("/ledgers", "")
        return set(found)
    finally:
        client.stop()
        client.close()


def test_a_deleted_ledger_leaves_nothing_even_if_the_deletion_was_interrupted(cluster, open_store, monkeypatch):
    before = bookkeeper_ids(cluster)
    store, stale = open_store(), open_store()
    ledger_ids = [(store if number else stale).ledgers.create("billing") for number in range(3)]
    stale.ledgers.append(ledger_ids[0], [b"x"])
    assert bookkeeper_ids(cluster) - before == set(ledger_ids)
    store.ledgers.delete(ledger_ids[0])
    assert bookkeeper_ids(cluster) - before == set(ledger_ids[1:])
    with pytest.raises(LedgerNotFoundError):
        stale.ledgers.append(ledger_ids[0], [b"late"])
    with monkeypatch.context() as patch:
        patch.setattr(BookKeeperClient, "delete", lambda *_: _raise(StoreError("no quorum")))
        with pytest.raises(StoreError, match="no quorum"):
            store.ledgers.delete(ledger_ids[1])
    assert store.ledgers.owned_by("billing") == ledger_ids[2:]
    assert bookkeeper_ids(cluster) - before == set(ledger_ids[1:])
    open_store()
    assert bookkeeper_ids(cluster) - before == set(ledger_ids[2:])
    stale.ledgers.delete(ledger_ids[2])
    assert (bookkeeper_ids(cluster), store.ledgers.owners()) == (before, [])


def _raise(error):
    raise error


def test_nothing_is_appended_to_a_ledger_whose_deletion_had_no_answer(open_store, monkeypatch):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, [b"x"])
    commit = ZooKeeperSession.commit

    def lost(self, operations):
        commit(self, operations)
        raise StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(ZooKeeperSession, "commit", lost)
        with pytest.raises(StoreError, match="no answer"):
            store.ledgers.delete(ledger_id)
    with pytest.raises(LedgerNotFoundError):
        store.ledgers.append(ledger_id, [b"lost"])


def test_a_closed_store_needs_no_recovery(open_store, client):
    store = open_store()
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    store.ledgers.append_many([(ledger_id, [b"x"]) for ledger_id in ledger_ids])
    store.close()
    assert [client.metadata(ledger_id).wait().last_entry_id for ledger_id in ledger_ids] == [0] * 3


# Damage


def test_a_ledger_that_bookkeeper_has_lost_is_damage_and_not_empty(open_store, client):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, [b"x"])
    client.delete(ledger_id).wait()
    other = open_store()
    for call in (other.ledgers.last, lambda each: other.ledgers.read(each, 0, 1), other.ledgers.fence):
        with pytest.raises(CorruptStateError, match=rf"ledger {ledger_id}.* expected ledger {ledger_id} of BookKeeper"):
            call(ledger_id)


def test_a_wrong_password_is_a_store_error(open_store, client):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, [b"x"])
    options = replace(bookkeeper_options(client), replication=Replication(password=b"other"))
    other = open_store(bookkeeper=options)
    with pytest.raises(StoreError):
        entries(other, ledger_id)
    assert entries(store, ledger_id) == [b"x"]


# Bookies


def test_dead_bookies_lose_nothing_and_appends_without_a_quorum_fail_with_their_names(cluster, open_store):
    store, reader = open_store(), open_store(only_reads=True)
    ledger_ids = [store.ledgers.create("billing") for _ in range(4)]
    for number in range(3):
        store.ledgers.append_many([(each, [b"%d" % number]) for each in ledger_ids])
    wanted = [b"0", b"1", b"2"]
    try:
        cluster.bookies[0].kill()
        assert store.ledgers.append(ledger_ids[0], [b"3"]) == 3
        # The owner is idle, so the bookies store no later entry, which would confirm the last one.
        assert [entries(reader, each) for each in ledger_ids[1:]] == [wanted] * 3
        cluster.bookies[1].kill()
        killed = [bookie.hosts for bookie in cluster.bookies[:2]]
        calls = [lambda each=each: store.ledgers.append(each, [b"4"]) for each in ledger_ids[:2]]
        for call in (*calls, lambda: store.ledgers.append(store.ledgers.create("new"), [b"4"])):
            with pytest.raises(StoreError) as caught:
                call()
            assert all(name in str(caught.value) for name in killed), caught.value
            assert "\n" not in str(caught.value)
        for each in ledger_ids[1:]:  # All confirmed entries or an error, never less.
            with suppress(StoreError):
                assert entries(reader, each)[:3] == wanted
    finally:
        cluster.revive()
    last = store.ledgers.fence(ledger_ids[0])
    assert entries(open_store(), ledger_ids[0]) == [*wanted, b"3", b"4"][: last + 1]
    assert last >= 3
    assert store.ledgers.append(ledger_ids[3], [b"5"]) == 3
    assert store.ledgers.owned_by("billing") == ledger_ids


# Java


def test_a_dead_client_refuses_all_calls_and_the_next_opening_has_everything(open_store):
    store = open_store(bookkeeper=bookkeeper_options())
    one, other = (store.ledgers.create("billing") for _ in range(2))
    store.ledgers.append_many([(one, [b"a"]), (other, [b"a"])])
    os.kill(store._client.process_id, signal.SIGKILL)
    for call in (
        lambda: store.ledgers.append(one, [b"b"]),
        lambda: store.ledgers.append_many([(one, [b"b"]), (other, [b"b"])]),
        lambda: store.ledgers.last(one),
    ):
        wait_until(lambda: store._client._refusal)
        with pytest.raises(StoreError, match=r"was killed by SIGKILL.*open it again"):
            call()
    store.close()
    again = open_store()
    assert [entries(again, each) for each in (one, other)] == [[b"a"]] * 2
    assert [again.ledgers.fence(each) for each in (one, other)] == [0, 0]


def test_the_child_ends_with_its_parent(cluster, tmp_path):
    program = (
        "import os, sys, signal\n"
        "from crash.bookkeeper_cluster import bookkeeper_options\n"
        f"client = bookkeeper_options().connect({cluster.hosts!r}, call_timeout_s=30)\n"
        "print(client.process_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command, environment = [sys.executable, "-P", "-c", program], {**os.environ, **PATHS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    child = Path(f"/proc/{int(done.stdout)}")
    wait_until(lambda: not child.exists() or "(python" not in _stat(child))


def _stat(process):
    with suppress(OSError):
        return (process / "stat").read_text()
    return ""


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("jars", r"^/nowhere has no jars: name a folder .*ACKSTATE_BOOKKEEPER_CLASSPATH.*PULSAR_HOME$"),
        ("classes", r"the class path has no complete BookKeeper client .*such as Pulsar's lib"),
        ("jpype", r"^a BookKeeper client needs JPype: pip install 'ackstate\[bookkeeper\]'$"),
        ("server", r"127.0.0.1:1"),
        ("java", r"BookKeeper's client needs Java 11 or newer: install a JRE, or set JAVA_HOME"),
    ],
)
def test_what_is_missing_is_named_in_one_line(tmp_path, monkeypatch, missing, message):
    class_path = str(JARS)
    if missing == "jars":
        class_path = "/nowhere"
    elif missing == "classes":
        (tmp_path / "empty.jar").write_bytes(b"PK\5\6" + bytes(18))
        class_path = str(tmp_path)
    elif missing == "jpype":
        monkeypatch.setattr(bookkeeper_client, "find_spec", lambda name: None)
    elif missing == "java":
        child = tmp_path / "child.py"
        child.write_text(
            "import runpy\nfrom jpype._jvmfinder import LinuxJVMFinder\n"
            "LinuxJVMFinder._locations, LinuxJVMFinder._java = (), '/nowhere'\n"
            f"runpy.run_path({str(bookkeeper_client._CHILD)!r}, run_name='__main__')\n"
        )
        monkeypatch.setattr(bookkeeper_client, "_CHILD", child)
        monkeypatch.setenv("JAVA_HOME", "/nowhere")
    settings = {"zkTimeout": "200"}
    with pytest.raises(StoreError, match=message) as caught:
        BookKeeperClient("zk+null://127.0.0.1:1/ledgers", class_path=class_path, settings=settings)
    assert "\n" not in str(caught.value)


# Commands


def test_commands_look_at_a_store_without_disturbing_its_owner(cluster, open_store, root, capsys, monkeypatch):
    """Every node and every ledger stays as it was, those of an interrupted deletion too."""
    monkeypatch.setenv("ACKSTATE_BOOKKEEPER_CLASSPATH", str(JARS))
    store = open_store()
    log = LedgerMap.from_counts({3: 10, 6: 10})
    cursor = ManagedCursor.open(store, topic="orders", subscription="billing", ledgers=log, now_ms=0)
    cursor.ack_entries(3, [1, 2, 7], now_ms=0)
    cursor.persist(now_ms=0)
    gone = store.ledgers.create(cursor_owner(cursor_path("orders", "billing")))
    store.ledgers.append(gone, [b"half deleted"])
    # The process dies when the ledger is gone for callers, and the rest of it is still there.
    with monkeypatch.context() as patch, suppress(StoreError):
        patch.setattr(BookKeeperClient, "destroy", lambda *_: _raise(StoreError("killed")))
        store.ledgers.delete(gone)
    before = snapshot(store._session._client, root), bookkeeper_ids(cluster)
    assert f"{root}/garbage/{gone}" in before[0]
    outcome = run(capsys, "fsck", f"bookkeeper://{cluster.hosts}{root}", "--json")
    (found,) = json.loads(outcome.out)["cursors"]
    assert (outcome.status, found["status"], found["range_count"], found["leftovers"]) == (0, "ok", 2, [])
    assert (snapshot(store._session._client, root), bookkeeper_ids(cluster)) == before
    cursor.ack_entries(3, [9], now_ms=1)
    assert cursor.persist(now_ms=1).messages_covered == 1
    assert_one_line(run(capsys, "fsck", f"bookkeeper://{cluster.hosts}/nothing"), "not an ackstate store")
