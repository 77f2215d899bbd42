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

from ackstate import (
    CursorConfig,
    CursorFencedError,
    Format,
    LedgerMap,
    LogFencedError,
    ManagedCursor,
    Message,
    Position,
)
from ackstate.cursor import PersistTarget, RecoverySource
from ackstate.cursor.journal.journal import cursor_owner, cursor_path
from ackstate.errors import CorruptStateError
from ackstate.stores import bookkeeper_client
from ackstate.stores.base import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
)
from ackstate.stores.bookkeeper import BookKeeperStore
from ackstate.stores.bookkeeper_client import BookKeeperClient
from ackstate.stores.bookkeeper_groups import GroupWriter
from ackstate.stores.bookkeeper_ledger import Replication
from ackstate.stores.bookkeeper_ledgers import BookKeeperLedgers
from ackstate.stores.bookkeeper_nodes import SegmentStatus
from ackstate.stores.bookkeeper_segments import Segments
from ackstate.testing import check_store
from ackstate.topic import MessageLog, Retention, trim_log
from ackstate.wire.pulsar import Compression
from command_line import assert_one_line, run
from crash import PATHS
from crash.bookkeeper_cluster import JARS, bookkeeper_options
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

        def opened(how=BookKeeperStore, **settings):
            options = settings.pop("bookkeeper", None) or bookkeeper_options(client)
            return stack.enter_context(closing(how(cluster.hosts, root=root, bookkeeper=options, **settings)))

        yield opened


def entries(store, ledger_id):
    return store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1)


def segments(store, ledger_id):
    (head,) = store.ledgers._segments.heads([ledger_id])
    return head.state.segments


def test_it_keeps_the_contract(cluster, client, root):
    options = bookkeeper_options(client)
    check_store(lambda: BookKeeperStore(cluster.hosts, root=root, bookkeeper=options))


# Takeovers


def test_two_stores_that_append_to_one_ledger_lose_nothing(open_store):
    one, other = open_store(), open_store()
    ledger_id = one.ledgers.create("billing")
    ids = [store.ledgers.append(ledger_id, b"%d" % number) for number, store in enumerate((one, other) * 3)]
    assert ids == [0, 1, 2, 3, 4, 5]
    for store in (one, other):
        assert entries(store, ledger_id) == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_takeover_of_a_segment_without_entries_loses_no_append(open_store, monkeypatch, count):
    """Another store appends after the first one created a segment; the empty segment is then removed."""
    one, other = open_store(), open_store()
    ledger_ids = [one.ledgers.create("billing") for _ in range(count)]
    first_error, other_ids = BookKeeperLedgers._first_error, []

    def overtaken(self, entries):
        monkeypatch.undo()
        other_ids.append(other.ledgers.append(ledger_ids[0], b"other"))
        return first_error(self, entries)

    monkeypatch.setattr(BookKeeperLedgers, "_first_error", overtaken)
    ids = one.ledgers.append_all([(ledger_id, b"one") for ledger_id in ledger_ids])
    assert (other_ids, ids) == ([0], [1, 0][:count])
    assert [entries(other, ledger_id) for ledger_id in ledger_ids] == [[b"other", b"one"], [b"one"]][:count]


def test_a_group_that_is_under_way_when_the_store_is_closed_damages_nothing(open_store, monkeypatch):
    store = open_store()
    ledger_ids = [store.ledgers.create("billing") for _ in range(4)]
    store.ledgers.append_all([(ledger_id, b"a") for ledger_id in ledger_ids[:2]])
    started, closed, outcomes = threading.Event(), threading.Event(), []

    def late_group():
        with suppress(StoreError):
            outcomes.append(store.ledgers.append_all([(ledger_id, b"a") for ledger_id in ledger_ids[2:]]))

    thread = threading.Thread(target=late_group)
    before_commit(monkeypatch, lambda: (started.set(), closed.wait(0.2)))
    put = Segments.put

    def joined_by_a_group(self, versions, states):
        monkeypatch.setattr(Segments, "put", put)
        thread.start()
        started.wait()
        return put(self, versions, states)

    monkeypatch.setattr(Segments, "put", joined_by_a_group)
    store.close()
    closed.set()
    thread.join()
    found = [entries(open_store(), ledger_id) for ledger_id in ledger_ids]
    assert found[:2] == [[b"a"]] * 2
    assert found[2:] in ([[b"a"]] * 2, [[]] * 2)
    assert not outcomes or found[2:] == [[b"a"]] * 2


def test_threads_that_append_without_a_pause_do_not_keep_a_store_from_closing(open_store, client):
    store = open_store()
    ledger_ids = [store.ledgers.create("billing") for _ in range(4)]
    counts = dict.fromkeys(ledger_ids, 0)

    def append(ledger_id):
        with suppress(StoreError):
            while True:
                store.ledgers.append(ledger_id, b"x")
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
                    written.append(stale.ledgers.append(ledger_id, b"%d" % len(written)))

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda written=written: len(written) >= 3)
        last = owner.ledgers.fence(ledger_id)
        writer.join(timeout=60)
        assert written == list(range(last + 1))
        assert entries(owner, ledger_id) == [b"%d" % number for number in written]


def test_threads_that_append_to_one_ledger_share_it(open_store):
    store = open_store()
    ledger_id, ids = store.ledgers.create("threads"), []

    def append(size):
        ids.extend(store.ledgers.append(ledger_id, bytes(size)) for _ in range(10))

    threads = [threading.Thread(target=append, args=(size,)) for size in (1, 100, 100_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(30))


def test_an_append_to_more_ledgers_than_one_request_to_zookeeper_can_name(open_store):
    store = open_store(request_bytes_max=32 * 1024)
    ledger_ids = [store.ledgers.create("o" * 1_000) for _ in range(40)]
    for number in range(2):
        assert store.ledgers.append_all([(ledger_id, b"x") for ledger_id in ledger_ids]) == [number] * 40


@pytest.mark.parametrize("not_bytes", ["text", 5, None])
def test_what_is_no_buffer_is_refused_and_leaves_the_store_usable(open_store, not_bytes):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    with pytest.raises(TypeError):
        store.ledgers.append_all([(ledger_id, b"good"), (ledger_id, not_bytes)])
    with pytest.raises(TypeError):
        store.metadata.put("/a", not_bytes, expected_version=ABSENT)
    assert store.ledgers.append(ledger_id, b"first") == 0
    assert store.metadata.get("/a") is None


def test_a_fenced_owner_appends_nothing_more(open_store):
    old, new = open_store(), open_store()
    one, other = (old.ledgers.create("billing") for _ in range(2))
    old.ledgers.append_all([(one, b"a"), (other, b"b")])
    assert new.ledgers.fence(one) == 0
    for batch in ([(one, b"late")], [(one, b"late"), (other, b"late")], [(other, b"late"), (one, b"late")]):
        with pytest.raises(LedgerFencedError):
            old.ledgers.append_all(batch)
    assert [entries(new, one), entries(new, other)] == [[b"a"], [b"b"]]
    assert old.ledgers.append(other, b"c") == 1
    new.ledgers.delete(other)
    with pytest.raises(LedgerNotFoundError):
        old.ledgers.append(other, b"late")


def test_another_process_reads_everything_confirmed_although_the_owner_is_at_work_or_gone(open_store):
    owner, reader = open_store(), open_store(BookKeeperStore.open_to_read)
    one, other = (owner.ledgers.create("billing") for _ in range(2))
    assert entries(reader, one) == []
    for number in range(20):
        owner.ledgers.append_all([(one, b"%d" % number)] * 2 + [(other, b"x")] * (number % 2))
        assert len(entries(reader, one)) == 2 * number + 2
    assert entries(reader, other) == [b"x"] * 10
    for change in (
        lambda: reader.ledgers.create("x"),
        lambda: reader.ledgers.append(one, b""),
        lambda: reader.ledgers.fence(one),
        lambda: reader.ledgers.delete(one),
        lambda: reader.metadata.put("/a", b"", expected_version=ABSENT),
    ):
        with pytest.raises(StoreError, match="opened to read"):
            change()
    assert owner.ledgers.append(one, b"the owner has noticed nothing") == 40


def test_entries_of_any_size_are_read_back_and_too_large_ones_are_refused(open_store, client):
    store = open_store()
    ledger_id, other = (store.ledgers.create("billing") for _ in range(2))
    sizes = [0, 1, 1_000_000, 3, *[100_000] * 60, *[10] * 3_000]
    batch = [os.urandom(size) for size in sizes]
    store.ledgers.append_all([(ledger_id, entry) for entry in batch])
    assert store.ledgers.read(ledger_id, 0, len(batch)) == batch
    largest = bytes(client.entry_bytes_max - 22)
    assert store.ledgers.append(other, largest) == 0
    with pytest.raises(PayloadTooLargeError, match="nothing was sent"):
        store.ledgers.append_all([(ledger_id, b"x"), (other, largest + b"x")])
    assert [store.ledgers.last(ledger_id), entries(store, other)] == [len(batch) - 1, [largest]]


# Appends to several ledgers


class LostAnswerError(StoreError):
    """The connection was lost before the answer came."""


@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize("who", ["writer", "successor"])
def test_a_group_whose_commit_has_no_answer_counts_everywhere_or_nowhere(open_store, monkeypatch, happened, who):
    writer = open_store()
    ledger_ids = [writer.ledgers.create("billing") for _ in range(3)]
    writer.ledgers.append_all([(ledger_id, b"before") for ledger_id in ledger_ids])
    commit = GroupWriter.commit

    def lost(self, group):
        if happened:
            commit(self, group)
        raise LostAnswerError

    monkeypatch.setattr(GroupWriter, "commit", lost)
    with pytest.raises(LostAnswerError):
        writer.ledgers.append_all([(ledger_id, b"doubtful") for ledger_id in ledger_ids * 2])
    monkeypatch.undo()
    store = writer if who == "writer" else open_store()
    wanted = [b"before", b"doubtful", b"doubtful"] if happened else [b"before"]
    assert [entries(store, ledger_id) for ledger_id in ledger_ids] == [wanted] * 3
    # Also as recovered, and it stays so.
    assert store.ledgers.fence(ledger_ids[0]) == len(wanted) - 1
    ids = store.ledgers.append_all([(ledger_id, b"after") for ledger_id in ledger_ids[1:]])
    assert ids == [len(wanted)] * 2
    assert [entries(writer, ledger_id)[len(wanted) :] for ledger_id in ledger_ids] == [[], [b"after"], [b"after"]]


def before_commit(monkeypatch, happening):
    """Let something happen when all entries of the next group are durable."""
    commit = GroupWriter.commit

    def delayed(self, group):
        monkeypatch.setattr(GroupWriter, "commit", commit)
        happening()
        return commit(self, group)

    monkeypatch.setattr(GroupWriter, "commit", delayed)


def test_a_fence_in_the_middle_of_a_group_prevents_all_of_it(open_store, monkeypatch):
    old, new = open_store(), open_store()
    one, other = (old.ledgers.create("billing") for _ in range(2))
    before_commit(monkeypatch, lambda: new.ledgers.fence(other))
    with pytest.raises(LedgerFencedError):
        old.ledgers.append_all([(one, b"x"), (other, b"x")])
    assert [entries(store, ledger_id) for store in (old, new) for ledger_id in (one, other)] == [[]] * 4
    assert old.ledgers.append(one, b"y") == 0


def test_a_takeover_in_the_middle_of_a_group_repeats_it(open_store, monkeypatch):
    old, new = open_store(), open_store()
    one, other = (old.ledgers.create("billing") for _ in range(2))
    old.ledgers.append_all([(one, b"a"), (other, b"a")])
    before_commit(monkeypatch, lambda: new.ledgers.append(other, b"new"))
    assert old.ledgers.append_all([(one, b"x"), (other, b"x"), (other, b"y")]) == [1, 2, 3]
    assert [entries(new, one), entries(new, other)] == [[b"a", b"x"], [b"a", b"new", b"x", b"y"]]


def test_a_batch_without_its_end_is_cut_off(open_store, monkeypatch, client):
    """The writer dies when two of three entries are durable."""
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, b"a")
    append = BookKeeperClient.append
    monkeypatch.setattr(BookKeeperClient, "append", lambda self, batch: append(self, batch[:-1]))
    store.ledgers._first_error([])
    batch = [(store.ledgers._writers[ledger_id].handle, entry) for entry in batch_of(3)]
    client.append(batch).wait()
    monkeypatch.undo()
    other = open_store()
    assert entries(other, ledger_id) == [b"a"]
    assert other.ledgers.append(ledger_id, b"b") == 1
    assert entries(store, ledger_id) == [b"a", b"b"]


def batch_of(count):
    from ackstate.stores.bookkeeper_entries import encode_batch

    return encode_batch([b"x"] * count, None)


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
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    for each in (store, stale, store):
        for ledger_id in ledger_ids:
            each.ledgers.append(ledger_id, b"x")
    assert len(bookkeeper_ids(cluster) - before) == 9
    store.ledgers.delete(ledger_ids[0])
    assert len(bookkeeper_ids(cluster) - before) == 6
    with monkeypatch.context() as patch:
        patch.setattr(Segments, "delete", lambda self, segments: _raise(StoreError("no quorum")))
        store.ledgers.delete(ledger_ids[1])
    assert (len(bookkeeper_ids(cluster) - before), store.ledgers.owned_by("billing")) == (6, [ledger_ids[2]])
    open_store()
    assert len(bookkeeper_ids(cluster) - before) == 3
    stale.ledgers.delete(ledger_ids[2])
    assert (bookkeeper_ids(cluster), store.ledgers.owners()) == (before, [])
    with pytest.raises(LedgerNotFoundError):
        store.ledgers.append(ledger_ids[2], b"late")


@pytest.mark.soak
def test_a_trimmed_log_leaves_no_ledger_behind_and_a_sound_store(cluster, open_store, root, capsys, monkeypatch):
    """Thirty ledgers of messages come and go; as many ledgers and nodes stay as after the first ten."""
    monkeypatch.setenv("ACKSTATE_BOOKKEEPER_CLASSPATH", str(JARS))
    before, counts = bookkeeper_ids(cluster), []
    store = open_store()
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=4)
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    for _ in range(3):
        for _ in range(10):
            positions = log.publish([Message(b"x")] * 4)
        cursor.mark_delete(positions[-1], now_ms=0)
        cursor.persist(now_ms=0)
        assert trim_log(log, Retention(), {"s": cursor}, now_ms=0) in {9, 10}
        cursor.reset(positions[-1], now_ms=0)  # It writes a new journal, so that only the log can grow.
        nodes = len(znodes(store._session._client, root))
        counts.append((len(bookkeeper_ids(cluster) - before), nodes))
    assert len(set(counts)) == 1
    assert counts[0][0] < 6
    store.close()
    outcome = run(capsys, "fsck", f"bookkeeper://{cluster.hosts}{root}", "--json")
    assert outcome.status == 0
    assert [found["status"] for found in json.loads(outcome.out)["cursors"]] == ["ok"]


def _raise(error):
    raise error


def test_nothing_is_appended_to_a_ledger_whose_deletion_had_no_answer(open_store, monkeypatch):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, b"x")
    take_away = BookKeeperLedgers._take_away

    def lost(self, ledger_id):
        take_away(self, ledger_id)
        raise LostAnswerError

    with monkeypatch.context() as patch:
        patch.setattr(BookKeeperLedgers, "_take_away", lost)
        with pytest.raises(LostAnswerError):
            store.ledgers.delete(ledger_id)
    with pytest.raises(LedgerNotFoundError):
        store.ledgers.append(ledger_id, b"lost")


def test_a_crash_at_any_step_of_a_new_segment_leaves_nothing_unknown(cluster, open_store, monkeypatch):
    before = bookkeeper_ids(cluster)
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    for step in ("_register", "put", "create"):
        done = getattr(Segments, step)

        def crash(self, *arguments, done=done):
            done(self, *arguments)
            raise StoreError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(Segments, step, crash)
            dying = open_store()
            with pytest.raises(StoreError, match="killed"):
                dying.ledgers.append(ledger_id, b"lost")
    assert store.ledgers.last(ledger_id) == -1
    assert store.ledgers.append(ledger_id, b"x") == 0
    registered = {segment.bookkeeper_id for segment in segments(store, ledger_id)}
    assert bookkeeper_ids(cluster) - before <= registered
    store.ledgers.delete(ledger_id)
    assert bookkeeper_ids(cluster) == before


def test_a_closed_store_needs_no_recovery(open_store):
    store = open_store()
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    store.ledgers.append_all([(ledger_id, b"x") for ledger_id in ledger_ids])
    store.close()
    reader = open_store(BookKeeperStore.open_to_read)
    found = [segment for ledger_id in ledger_ids for segment in segments(reader, ledger_id)]
    assert [segment.status for segment in found] == [SegmentStatus.SEALED] * 3
    assert [segment.entry_count for segment in found] == [1] * 3
    assert reader._session.children("/writers") == []


# Damage


def test_a_ledger_that_bookkeeper_has_lost_is_damage_and_not_empty(open_store, client):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, b"x")
    client.delete(segments(store, ledger_id)[0].bookkeeper_id).wait()
    other = open_store()
    for call in (other.ledgers.last, lambda each: other.ledgers.append(each, b"y"), other.ledgers.fence):
        with pytest.raises(CorruptStateError, match=rf"ledger {ledger_id}.* expected ledger \d+ of BookKeeper"):
            call(ledger_id)


def test_a_wrong_password_is_a_store_error(open_store, client):
    store = open_store()
    ledger_id = store.ledgers.create("billing")
    store.ledgers.append(ledger_id, b"x")
    options = replace(bookkeeper_options(client), replication=Replication(password=b"other"))
    other = open_store(bookkeeper=options)
    with pytest.raises(StoreError):
        entries(other, ledger_id)
    assert entries(store, ledger_id) == [b"x"]


# Bookies


def test_dead_bookies_lose_nothing_and_appends_without_a_quorum_fail_with_their_names(cluster, open_store):
    store, idle, reader = open_store(), open_store(), open_store(BookKeeperStore.open_to_read)
    ledger_id, other = (store.ledgers.create("billing") for _ in range(2))
    store.ledgers.append(ledger_id, b"a")
    ledger_ids = [idle.ledgers.create("idle") for _ in range(3)]
    for number in range(3):
        idle.ledgers.append_all([(each, b"%d" % number) for each in ledger_ids])
    try:
        cluster.bookies[0].kill()
        assert store.ledgers.append(ledger_id, b"b") == 1
        # The owner is idle, so the bookies store no later entry, which would confirm the last one.
        assert [entries(reader, each) for each in ledger_ids] == [[b"0", b"1", b"2"]] * 3
        cluster.bookies[1].kill()
        killed = [bookie.name for bookie in cluster.bookies[:2]]
        for each in (ledger_id, other, other, other):
            with pytest.raises(StoreError) as caught:
                store.ledgers.append(each, b"c")
            assert all(name in str(caught.value) for name in killed), caught.value
            assert "\n" not in str(caught.value)
        assert len(segments(store, other)) == 1
        for each in ledger_ids:  # All confirmed entries or an error, never less.
            with suppress(StoreError):
                assert entries(reader, each) == [b"0", b"1", b"2"]
    finally:
        cluster.revive()
    # Whether it happened is known before anything else is appended.
    found = entries(store, ledger_id)
    assert found[:2] == [b"a", b"b"]
    assert store.ledgers.append(ledger_id, b"d") == len(found)
    assert entries(open_store(), ledger_id) == [*found, b"d"]
    assert store.ledgers.append(other, b"e") == 0


# Java


def test_a_dead_client_refuses_all_calls_and_the_next_opening_has_everything(open_store):
    store = open_store(bookkeeper=bookkeeper_options())
    one, other = (store.ledgers.create("billing") for _ in range(2))
    store.ledgers.append_all([(one, b"a"), (other, b"a")])
    os.kill(store._client.process_id, signal.SIGKILL)
    with pytest.raises(StoreError, match=r"was killed by SIGKILL.*open it again"):
        store.ledgers.append(one, b"b")
    for call in (lambda: store.ledgers.append_all([(one, b"b"), (other, b"b")]), lambda: store.ledgers.last(one)):
        with pytest.raises(StoreError, match="SIGKILL"):
            call()
    store.close()
    again = open_store()
    assert entries(again, one)[0] == b"a"
    assert entries(again, other) == [b"a"]
    assert again.ledgers.append_all([(one, b"c"), (other, b"c")])[1] == 1


def test_a_hanging_client_is_given_up_after_a_while(cluster):
    with closing(bookkeeper_options().connect(cluster.hosts, call_timeout_s=2)) as client:
        opened = client.create(Replication()).wait()
        os.kill(client.process_id, signal.SIGSTOP)
        # More than fits into the socket, so that sending hangs too.
        replies = [client.append([(opened.handle, bytes(1_000_000))])]
        with pytest.raises(StoreError, match=r"within 2 s|accepts no request"):
            replies[0].wait()
        with pytest.raises(StoreError, match="open it again"):
            client.append([(opened.handle, b"")])
        wait_until(lambda: client._child.poll() is not None)


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
    settings = {"zkTimeout": "1000"}
    with pytest.raises(StoreError, match=message) as caught:
        BookKeeperClient("zk+null://127.0.0.1:1/ledgers", class_path=class_path, settings=settings)
    assert "\n" not in str(caught.value)


def test_a_missing_java_is_named_in_one_line():
    program = (
        "from jpype._jvmfinder import LinuxJVMFinder\n"
        "from ackstate.stores.bookkeeper_java import JavaUnavailableError, start_java\n"
        "LinuxJVMFinder._locations, LinuxJVMFinder._java = (), '/nowhere'\n"
        "try:\n"
        "    start_java([], [])\n"
        "except JavaUnavailableError as error:\n"
        "    print(error)\n"
    )
    command, environment = [sys.executable, "-P", "-c", program], {**os.environ, "JAVA_HOME": "/nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert re.match(r"^BookKeeper's client needs Java 11 or newer: install a JRE, or set .*\n$", done.stdout), (
        done.stderr
    )


# Cursors and logs on it


def open_cursor(store, subscription="billing"):
    log = LedgerMap.from_counts({3: 10, 6: 10})
    return ManagedCursor.open(store, topic="orders", subscription=subscription, ledgers=log, now_ms=0)


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


def test_a_publish_on_its_way_is_refused_after_a_takeover(open_store, monkeypatch):
    newer, first_error = [], BookKeeperLedgers._first_error
    older = MessageLog.open(open_store(), topic="t")
    positions = older.publish([Message(b"", publish_time_ms=1)])

    def overtaken(self, entries):
        monkeypatch.undo()
        newer.append(MessageLog.open(open_store(), topic="t"))
        return first_error(self, entries)

    monkeypatch.setattr(BookKeeperLedgers, "_first_error", overtaken)
    with pytest.raises(LogFencedError):
        older.publish([Message(b"", publish_time_ms=2)])
    positions += newer[0].publish([Message(b"", publish_time_ms=3)])
    assert [message.publish_time_ms for message in newer[0].read(positions)] == [1, 3]
    assert sum(newer[0].ledgers.counts().values()) == 2


@pytest.mark.parametrize("codec", [each for each in Compression if each is not Compression.NONE])
@pytest.mark.parametrize("reopened", [Compression.LZ4, Compression.NONE])
def test_a_compressed_record_that_was_closed_opens_whatever_compression_is_configured(open_store, codec, reopened):
    """Uncompressed it would take more than ZooKeeper accepts."""
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


# Commands


def znodes(client, path):
    """Every node from a path on: its bytes, its versions, the transactions that made and changed it."""
    below = [znodes(client, f"{path}/{name}") for name in client.get_children(path)]
    return {path: client.get(path)} | {each: found for nodes in below for each, found in nodes.items()}


def test_commands_look_at_a_store_without_disturbing_its_owner(cluster, open_store, root, capsys, monkeypatch):
    """Every node and every ledger stays as it was, those of an interrupted deletion too."""
    monkeypatch.setenv("ACKSTATE_BOOKKEEPER_CLASSPATH", str(JARS))
    store = open_store()
    cursor = open_cursor(store)
    cursor.ack_entries(3, [1, 2, 7], now_ms=0)
    cursor.persist(now_ms=0)
    gone = store.ledgers.create(cursor_owner(cursor_path("orders", "billing")))
    store.ledgers.append(gone, b"half deleted")
    # The process dies when the ledger is gone for callers, and the rest of it is still there.
    monkeypatch.setattr(store.ledgers, "_clear", lambda ledger_id: None)
    store.ledgers.delete(gone)
    before = znodes(store._session._client, root), bookkeeper_ids(cluster)
    assert f"{root}/garbage/{gone}" in before[0]
    outcome = run(capsys, "fsck", f"bookkeeper://{cluster.hosts}{root}", "--json")
    (found,) = json.loads(outcome.out)["cursors"]
    assert (outcome.status, found["status"], found["range_count"], found["leftovers"]) == (0, "ok", 2, [])
    assert (znodes(store._session._client, root), bookkeeper_ids(cluster)) == before
    cursor.ack_entries(3, [9], now_ms=1)
    assert cursor.persist(now_ms=1).messages_covered == 1
    assert_one_line(run(capsys, "fsck", f"bookkeeper://{cluster.hosts}/nothing"), "not an ackstate store")
