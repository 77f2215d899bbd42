"""Calls of many threads share a transaction and a sync, and each has the outcome that it would have alone."""

from __future__ import annotations

import itertools
import resource
import signal
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ackstate.errors import CorruptStateError
from ackstate.stores.base import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    StoreError,
    StoreFullError,
    Versioned,
    VersionMismatchError,
)
from ackstate.stores.sqlite import SqliteStore
from waiting import wait_until

PATIENCE_S = 30
LOG = "ackstate.sqlite3-wal"


@pytest.fixture
def store(tmp_path):
    with closing(SqliteStore(tmp_path / "store")) as store:
        yield store


def queued(store) -> int:
    """How many calls have joined the group that is open."""
    return len(store._database._open_group.calls)


class Commits:
    """Counts a store's commits, and holds up the first until it is let go."""

    def __init__(self, store, *, before_second=lambda: None):
        self.count = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.threads = []
        self._before_second = before_second
        store._database._connection.set_trace_callback(self._see)

    def _see(self, statement):
        if statement == "COMMIT":
            self.count += 1
            self.threads.append(threading.get_ident())
            if self.count == 1:
                self.begun.set()
                self.go_on.wait(PATIENCE_S)
            if self.count == 2:
                self._before_second()


class Caller(threading.Thread):
    """A call in a thread of its own, with its result or error."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call = call
        self.outcome = None
        self.start()

    def run(self):
        try:
            self.outcome = self._call()
        except BaseException as error:
            self.outcome = error

    def result(self):
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.outcome


def outcomes_in_one_group(store, calls, **commits_options):
    """Make calls while a commit is held up; return their outcomes, and the commits that all of it took."""
    commits = Commits(store, **commits_options)
    first = Caller(lambda: store.ledgers.create("held up"))
    assert commits.begun.wait(PATIENCE_S)
    callers = []
    for count, call in enumerate(calls, 1):
        callers.append(Caller(call))
        wait_until(lambda count=count: queued(store) == count)
    commits.go_on.set()
    assert isinstance(first.result(), int)
    return [caller.result() for caller in callers], commits.count


def append_to(store, ledger_id, entry=b"x"):
    return lambda: store.ledgers.append(ledger_id, [entry])


def test_calls_that_wait_for_a_commit_share_the_next(store):
    ledger_ids = [store.ledgers.create("billing") for _ in range(7)]
    calls = [append_to(store, ledger_id, b"%d" % ledger_id) for ledger_id in ledger_ids]
    outcomes, commit_count = outcomes_in_one_group(store, calls)
    assert (outcomes, commit_count) == ([0] * 7, 2)
    assert [store.ledgers.read(ledger_id, 0, 1) for ledger_id in ledger_ids] == [[b"%d" % n] for n in ledger_ids]


def test_calls_of_a_group_are_carried_out_in_the_order_in_which_they_came(store):
    ledger_id = store.ledgers.create("billing")
    calls = [append_to(store, ledger_id, b"%d" % number) for number in range(5)]
    calls[3] = lambda: store.ledgers.fence(ledger_id)
    outcomes, commit_count = outcomes_in_one_group(store, calls)
    assert (outcomes[:4], type(outcomes[4]), commit_count) == ([0, 1, 2, 2], LedgerFencedError, 2)
    assert store.ledgers.read(ledger_id, 0, 3) == [b"0", b"1", b"2"]


def test_a_call_that_is_refused_undoes_itself_only(store):
    good, fenced, gone, damaged = (store.ledgers.create("billing") for _ in range(4))
    with store._database.reading() as connection:
        connection.execute("UPDATE ledgers SET entry_count = 7 WHERE id = ?", (damaged,))
    store.ledgers.fence(fenced)
    store.ledgers.delete(gone)
    store.metadata.put("/a", b"old", expected_version=ABSENT)
    # Shows only when SQLite takes it, after the entry before it.
    store._database._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)
    too_large = bytes(60_000)
    calls = [
        append_to(store, good, b"0"),
        append_to(store, fenced, b"lost"),
        append_to(store, gone),
        append_to(store, damaged),
        lambda: store.metadata.put("/a", b"lost", expected_version=7),
        lambda: store.ledgers.append(good, [b"lost", too_large]),
        lambda: store.ledgers.append(good, [b"1", b"2"]),
        lambda: store.metadata.put("/a", b"new", expected_version=0),
        lambda: store.metadata.delete("/b", expected_version=0),
    ]
    outcomes, commit_count = outcomes_in_one_group(store, calls)
    errors = (LedgerFencedError, LedgerNotFoundError, CorruptStateError, VersionMismatchError, StoreError)
    assert [type(outcome) for outcome in outcomes[1:6]] == list(errors)
    assert (outcomes[0], outcomes[6:8]) == (0, [2, 1])
    assert type(outcomes[8]) is VersionMismatchError
    assert commit_count == 2
    assert store.ledgers.read(good, 0, store.ledgers.last(good) + 1) == [b"0", b"1", b"2"]
    assert store.ledgers.last(fenced) == -1
    assert store.metadata.get("/a") == Versioned(b"new", 1)


def test_a_lone_caller_commits_by_itself_at_once(store):
    ledger_id = store.ledgers.create("billing")
    commits = Commits(store)
    commits.go_on.set()
    threads = threading.active_count()
    assert [store.ledgers.append(ledger_id, [b"x"]) for _ in range(5)] == list(range(5))
    assert commits.threads == [threading.get_ident()] * 5
    assert threading.active_count() == threads


class HeldUpList(list):
    """Takes the calls that join on request."""

    def __init__(self):
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __iadd__(self, items):
        self.begun.set()
        self.go_on.wait(PATIENCE_S)
        return super().__iadd__(items)


def test_a_group_is_not_closed_while_a_call_is_about_to_join_it(store):
    ledger_ids = [store.ledgers.create("billing") for _ in range(2)]
    calls = store._database._open_group.calls = HeldUpList()
    first = Caller(append_to(store, ledger_ids[0]))
    assert calls.begun.wait(PATIENCE_S)
    second = Caller(append_to(store, ledger_ids[1]))
    calls.go_on.set()
    assert (first.result(), second.result()) == (0, 0)


# Errors of all calls, and errors of one


def test_damage_that_sqlite_meets_ends_the_group_and_the_store(store, tmp_path):
    ledger_id = store.ledgers.create("billing")
    with store._database.reading() as connection:
        connection.execute("DROP TABLE metadata")
    calls = [
        append_to(store, ledger_id),
        append_to(store, 77),
        lambda: store.metadata.put("/a", b"", expected_version=ABSENT),
        append_to(store, ledger_id),
    ]
    outcomes, commit_count = outcomes_in_one_group(store, calls)
    types = [StoreError, LedgerNotFoundError, CorruptStateError, StoreError]
    assert ([type(outcome) for outcome in outcomes], commit_count) == (types, 1)
    for outcome in (outcomes[0], outcomes[3]):
        assert "close the store and open it again" in str(outcome)
    assert outcomes[0] is not outcomes[3]
    with pytest.raises(StoreError, match="a write failed"):
        store.ledgers.last(ledger_id)
    store.close()
    with closing(sqlite3.connect(tmp_path / "store" / "ackstate.sqlite3")) as connection:
        assert connection.execute("SELECT * FROM entries").fetchall() == []


def test_a_commit_that_fails_fails_every_call_and_ends_the_store(store, tmp_path):
    ledger_ids = [store.ledgers.create("billing") for _ in range(4)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse_to_write():
        size = (tmp_path / "store" / LOG).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    try:
        calls = [append_to(store, ledger_id, bytes(50_000)) for ledger_id in ledger_ids]
        outcomes, commit_count = outcomes_in_one_group(store, calls, before_second=refuse_to_write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ([type(outcome) for outcome in outcomes], commit_count) == ([StoreError] * 4, 2)
    with pytest.raises(StoreError, match="a write failed"):
        store.ledgers.append(ledger_ids[0], [b"x"])
    store.close()
    with closing(SqliteStore(tmp_path / "store")) as reopened:
        assert [reopened.ledgers.last(ledger_id) for ledger_id in ledger_ids] == [-1] * 4
        assert reopened.ledgers.owned_by("held up") == [5]


def test_on_a_full_disk_each_call_of_the_group_is_carried_out_or_refused_alone(store):
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    connection = store._database._connection
    ((page_count,),) = connection.execute("PRAGMA page_count")
    connection.execute(f"PRAGMA max_page_count = {page_count + 10}")
    entries = (b"small", bytes(100_000), b"small")
    calls = [append_to(store, ledger_id, entry) for ledger_id, entry in zip(ledger_ids, entries, strict=True)]
    outcomes, commit_count = outcomes_in_one_group(store, [*calls, append_to(store, 77)])
    assert [type(outcome) for outcome in outcomes] == [int, StoreFullError, int, LedgerNotFoundError]
    assert commit_count == 3
    assert [store.ledgers.last(ledger_id) for ledger_id in ledger_ids] == [0, -1, 0]
    connection.execute("PRAGMA max_page_count = 1000000")
    assert [store.ledgers.append(ledger_id, [b"again"]) for ledger_id in ledger_ids] == [1, 0, 1]


def test_calls_that_wait_when_the_store_is_closed_are_done_or_refused(tmp_path):
    store = SqliteStore(tmp_path)
    ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
    commits = Commits(store)
    first = Caller(append_to(store, ledger_ids[0]))
    assert commits.begun.wait(PATIENCE_S)
    closer = Caller(store.close)
    callers = [Caller(append_to(store, ledger_id, b"late")) for ledger_id in ledger_ids]
    wait_until(lambda: queued(store) == 3)
    commits.go_on.set()
    assert first.result() == 0
    assert closer.result() is None
    outcomes = [caller.result() for caller in callers]
    with closing(SqliteStore(tmp_path)) as reopened:
        last = [reopened.ledgers.last(ledger_id) for ledger_id in ledger_ids]
    if isinstance(outcomes[0], int):
        assert outcomes == last == [1, 0, 0]
    else:
        assert all(type(outcome) is StoreError and "is closed" in str(outcome) for outcome in outcomes)
        assert last == [0, -1, -1]


# Interrupts


def test_a_caller_that_is_interrupted_while_it_waits_has_called_nothing(store):
    mine, others = store.ledgers.create("billing"), store.ledgers.create("billing")
    commits = Commits(store)
    first = Caller(append_to(store, others))
    assert commits.begun.wait(PATIENCE_S)

    def join_and_interrupt():
        wait_until(lambda: queued(store) == 1)
        follower = Caller(append_to(store, others))
        wait_until(lambda: queued(store) == 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return follower

    interrupter = Caller(join_and_interrupt)
    # It is the first of the second group, and would have led it.
    with pytest.raises(KeyboardInterrupt):
        store.ledgers.append(mine, [b"x"])
    commits.go_on.set()
    assert (first.result(), interrupter.result().result()) == (0, 1)
    assert store.ledgers.last(mine) == -1
    assert store.ledgers.append(mine, [b"x"]) == 0


class InterruptedCaller(Caller):
    """A call that gets a KeyboardInterrupt before the n-th line it runs of the store's code."""

    def __init__(self, call, number):
        self._lines, self._number = itertools.count(), number
        super().__init__(call)

    def run(self):
        sys.settrace(self._trace)
        try:
            super().run()
        finally:
            sys.settrace(None)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not Path(code.co_filename).name.startswith("sqlite"):
            return None
        # No interrupt comes between the end of a with statement's body and the exit that follows it.
        if event == "line" and frame.f_lineno not in with_lines(code) and next(self._lines) == self._number:
            raise KeyboardInterrupt
        return self._trace


def with_lines(code, known={}):  # noqa: B006 - remembers
    path = code.co_filename
    if path not in known:
        lines = Path(path).read_text().splitlines()
        known[path] = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("with ")}
    return known[path]


def outcomes_with_an_interrupt(store, ledger_ids, number, others):
    """Append to each ledger in one group, and interrupt its leader, which is the first; return the outcomes.

    The group ends with appends of other entries to the first ledger.
    """
    with store._database._lock:
        leader = InterruptedCaller(append_to(store, ledger_ids[0]), number)
        wait_until(lambda: not leader.is_alive() or store._database._open_group.lock.locked())
        callers = [leader]
        appends = [append_to(store, ledger_id) for ledger_id in ledger_ids[1:]]
        for append in (*appends, *(append_to(store, ledger_ids[0], entry) for entry in others)):
            count = queued(store) + 1
            callers.append(Caller(append))
            wait_until(lambda count=count: queued(store) == count)
    return [caller.result() for caller in callers]


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True])
def test_an_interrupt_at_any_line_of_the_leader_is_nobody_elses(tmp_path, is_full):
    """On a full disk, the calls of the group are tried again alone, and each must still be carried out once at most."""
    directory = tmp_path / "store"
    counts = {"interrupted": 0, "done and interrupted": 0}
    with closing(SqliteStore(directory)) as store:
        ledger_ids = [store.ledgers.create("billing") for _ in range(3)]
        store.ledgers.fence(ledger_ids[2])
        for number in itertools.count(step=4 if is_full else 1):  # each takes long
            if is_full:
                connection = store._database._connection
                ((page_count,),) = connection.execute("PRAGMA page_count")
                connection.execute(f"PRAGMA max_page_count = {page_count + 10}")
            before = [store.ledgers.last(ledger_id) for ledger_id in ledger_ids]
            outcomes = outcomes_with_an_interrupt(store, ledger_ids, number, [bytes(100_000)] * is_full)
            after = [store.ledgers.last(ledger_id) for ledger_id in ledger_ids]
            assert outcomes[1] == after[1] == before[1] + 1
            assert type(outcomes[2]) is LedgerFencedError
            assert [type(outcome) for outcome in outcomes[3:]] == [StoreFullError] * is_full
            if type(outcomes[0]) is not KeyboardInterrupt:
                assert outcomes[0] == after[0] == before[0] + 1
                break
            counts["interrupted"] += 1
            counts["done and interrupted"] += after[0] - before[0]
    assert 0 < counts["done and interrupted"] < counts["interrupted"] - 10
    with closing(SqliteStore(directory)) as store:
        assert [store.ledgers.last(ledger_id) for ledger_id in ledger_ids] == after


# Many threads


THREADS = 8
ROUNDS = 60


class Appender:
    """Appends to a ledger of its own, to one that all append to, and to one that is fenced meanwhile; puts a value."""

    def __init__(self, store, number, shared, doomed):
        self.store, self.number = store, number
        self.own, self.shared, self.doomed = store.ledgers.create("own"), shared, doomed
        self.entries = {self.own: {}, shared: {}, doomed: {}}
        self.refused = self.put_count = 0

    def __call__(self):
        for number in range(ROUNDS):
            entry = b"%d-%d" % (self.number, number)
            self.append_many([(self.own, [entry, entry * 50]), (self.shared, [entry])])
            self.append_many([(self.shared, [entry]), (self.doomed, [entry, b""])])
            self.increment()

    def append_many(self, appends):
        for (ledger_id, entries), last in zip(appends, self.store.ledgers.append_many(appends), strict=True):
            if isinstance(last, LedgerFencedError):
                self.refused += 1
                continue
            for entry_id, entry in enumerate(entries, last + 1 - len(entries)):
                assert entry_id not in self.entries[ledger_id]
                self.entries[ledger_id][entry_id] = entry

    def increment(self):
        found = self.store.metadata.get("/counter")
        number, version = (int(found.data), found.version) if found else (0, ABSENT)
        try:
            self.store.metadata.put("/counter", b"%d" % (number + 1), expected_version=version)
            self.put_count += 1
        except VersionMismatchError:
            pass


@pytest.mark.slow
def test_whatever_the_threads_do_each_call_is_there_once_or_not_at_all(tmp_path):
    store = SqliteStore(tmp_path)
    shared, doomed = store.ledgers.create("shared"), store.ledgers.create("doomed")
    appenders = [Appender(store, number, shared, doomed) for number in range(THREADS)]
    callers = [Caller(appender) for appender in appenders]
    wait_until(lambda: store.ledgers.last(doomed) >= 20)
    doomed_last = store.ledgers.fence(doomed)
    assert [caller.result() for caller in callers] == [None] * THREADS
    assert sum(appender.refused for appender in appenders) > 0
    store.close()
    with closing(SqliteStore(tmp_path)) as store:
        for ledger_id in (shared, doomed, *(appender.own for appender in appenders)):
            returned = [appender.entries.get(ledger_id, {}) for appender in appenders]
            wanted = {entry_id: entry for entries in returned for entry_id, entry in entries.items()}
            # No entry id was returned twice.
            assert len(wanted) == sum(map(len, returned))
            found = store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1)
            assert dict(enumerate(found)) == wanted
        assert store.ledgers.last(doomed) == doomed_last
        put_count = sum(appender.put_count for appender in appenders)
        assert store.metadata.get("/counter") == Versioned(b"%d" % put_count, put_count - 1)
