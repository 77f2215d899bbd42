"""A forked child neither writes to its parent's store nor keeps a closed one shut."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from ackstate.stores.base import ABSENT, StoreError, StoreLockedError
from ackstate.stores.sqlite import SqliteStore
from forked import in_child, living_child

LOG = "ackstate.sqlite3-wal"


def refusal_of(call, *args, **named):
    try:
        return f"returned {call(*args, **named)!r}"
    except StoreError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("drops_a_reference", [False, True])
def test_what_the_parent_makes_durable_after_a_child_has_ended_is_durable(tmp_path, drops_a_reference):
    """A child that let go of the connection, as nothing but `close` does, would lose what the parent writes."""
    store = SqliteStore(tmp_path / "store")
    ledger_id = store.ledgers.create("orders")
    store.ledgers.append(ledger_id, [b"before"])

    def end_child():  # As an interpreter does at its end.
        if drops_a_reference:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(store._database._connection))
        store._database._connection = None
        gc.unfreeze()
        gc.collect()

    in_child(end_child)
    for entry in (b"durable", b"durable too"):
        store.ledgers.append(ledger_id, [entry])
    cut = tmp_path / "cut"  # The power.
    shutil.copytree(tmp_path / "store", cut)
    store.close()
    with closing(SqliteStore(cut)) as left:
        assert left.ledgers.last(ledger_id) == (0 if drops_a_reference else 2)


CHILD_ENDS = """
import os, sys
from ackstate.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.ledgers.create("orders")
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
os._exit(os.path.getsize(sys.argv[1] + "/ackstate.sqlite3-wal") == 0)
"""


@pytest.mark.slow
def test_a_child_that_ends_by_itself_leaves_the_log(tmp_path):
    subprocess.run([sys.executable, "-c", CHILD_ENDS, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
    assert (tmp_path / LOG).exists()


def test_a_child_is_refused_every_call_and_may_close(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id = store.ledgers.create("orders")
        refused = f"StoreError: {tmp_path}: the store was open when this process was forked"
        for call in (
            lambda: store.ledgers.append(ledger_id, [b"child"]),
            lambda: store.ledgers.last(ledger_id),
            lambda: store.metadata.put("/a", b"child", expected_version=ABSENT),
        ):
            assert in_child(lambda call=call: refusal_of(call)).startswith(refused)
        assert in_child(lambda: refusal_of(store.close)) == "returned None"
        # The child's close was none of ours.
        assert store.ledgers.append(ledger_id, [b"parent"]) == 0
        with pytest.raises(StoreLockedError):
            SqliteStore(tmp_path)


def test_a_child_forked_amid_a_call_of_another_thread_does_not_wait_for_it(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        entered, done = threading.Event(), threading.Event()

        def read_slowly():
            with store._database.reading():
                entered.set()
                done.wait()

        thread = threading.Thread(target=read_slowly)
        thread.start()
        entered.wait()
        try:
            assert "forked" in in_child(lambda: refusal_of(store.ledgers.owners))
        finally:
            done.set()
            thread.join()


def test_a_closed_store_can_be_opened_and_copied_while_a_child_lives(tmp_path):
    store = SqliteStore(tmp_path)
    ledger_id = store.ledgers.create("orders")
    with living_child():
        store.close()
        with closing(SqliteStore(tmp_path)) as again:
            assert again.ledgers.last(ledger_id) == -1
        SqliteStore.open_copy(tmp_path).close()
    assert "the store is closed" in in_child(lambda: refusal_of(store.ledgers.owners))


def test_a_child_is_told_why_it_cannot_open_the_store_of_its_parent(tmp_path):
    store = SqliteStore(tmp_path)
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(outside)
        os.read(inside, 1)
        SqliteStore(tmp_path / "other").close()
        os._exit("open when this process was forked" not in refusal_of(SqliteStore, tmp_path))
    store.close()
    os.close(inside)
    os.close(outside)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    SqliteStore(tmp_path).close()


@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_child_does_not_remove_the_copy_that_its_parent_has_open(tmp_path, end):
    SqliteStore(tmp_path).close()
    with closing(SqliteStore.open_copy(tmp_path)) as copy:
        lies_in = copy._path

        def end_child():
            if end == "close":
                copy.close()
            else:
                weakref.finalize._exitfunc()  # As an interpreter does at its end.

        in_child(end_child)
        assert lies_in.exists()
        copy.ledgers.create("goes on")
    assert not lies_in.exists()
