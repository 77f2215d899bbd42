"""Who has a file store: one process, whatever becomes of the lock's name, and no child that it forks."""

import gc
import os
import time
import warnings
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ackstate.cursor import FileStore, SqliteStore
from ackstate.cursor.store import ABSENT, StoreError, StoreLockedError
from fake_directory import LOG, FakeDirectory
from forked import in_child, living_child


def test_a_store_whose_lock_was_removed_is_not_opened_twice_nor_copied(tmp_path):
    with closing(FileStore(tmp_path)) as store:
        store.ledgers.create("billing")
        (tmp_path / "LOCK").unlink()
        for opening in (FileStore, FileStore.open_copy):
            with pytest.raises(StoreLockedError, match="LOCK was removed"):
                opening(tmp_path)
            (tmp_path / "LOCK").unlink(missing_ok=True)
        store.ledgers.append(1, b"goes on")
    with closing(FileStore(tmp_path)) as store:
        assert store.ledgers.read(1, 0, 1) == [b"goes on"]


@pytest.mark.parametrize("call", ["append", "read", "put", "children"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path, call):
    with closing(FileStore(tmp_path)) as store:
        store.ledgers.append(store.ledgers.create("billing"), b"parent")
        log = (tmp_path / LOG).read_bytes()
        calls = {
            "append": lambda: store.ledgers.append(1, b"child"),
            "read": lambda: store.ledgers.read(1, 0, 1),
            "put": lambda: store.metadata.put("/child", b"", expected_version=ABSENT),
            "children": lambda: store.metadata.children("/"),
        }
        # As a thread of the parent would hold it that is in a call while another forks.
        with store._log._lock:
            said = in_child(calls[call])
        assert said.startswith("StoreError")
        assert "forked" in said
        assert (tmp_path / LOG).read_bytes() == log
        assert in_child(lambda: str(store.close())) == "None"
        with pytest.raises(StoreLockedError):
            FileStore(tmp_path)
        assert store.ledgers.append(1, b"parent again") == 1


def test_a_child_that_lives_on_does_not_keep_the_store(tmp_path):
    store = FileStore(tmp_path)
    with living_child():
        store.close()
        FileStore(tmp_path).close()


def test_a_parent_that_dies_leaves_the_store_to_others_though_its_child_lives(tmp_path):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        kept = FileStore(tmp_path)
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
        os._exit(0 if kept else 1)
    os.waitpid(parent, 0)
    try:
        # The child may not have run yet.
        for _ in range(200):
            with suppress(StoreLockedError):
                FileStore(tmp_path).close()
                break
            time.sleep(0.01)
        else:
            pytest.fail("the store stayed locked")
    finally:
        os.close(writer)
        os.close(reader)


def test_a_store_that_is_dropped_leaves_no_descriptor(tmp_path):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(3):
        store = FileStore(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del store
            gc.collect()
    assert count() == before


def test_children_are_found_without_a_look_at_all_values(monkeypatch):
    with closing(FileStore.over(FakeDirectory())) as store:
        paths = ["/a", "/a-b", "/a/x", "/a/y/z", "/a0", "/b/c", *(f"/many/below/{number}" for number in range(300))]
        for path in reversed(paths):
            store.metadata.put(path, b"", expected_version=ABSENT)
        expected = {"/": ["a", "a-b", "a0", "b", "many"], "/a": ["x", "y"], "/many": ["below"], "/none": []}
        assert {path: store.metadata.children(path) for path in expected} == expected
        store.metadata.delete("/a-b", expected_version=0)
        store.metadata.put("/a/0", b"", expected_version=ABSENT)
        assert store.metadata.children("/") == ["a", "a0", "b", "many"]
        assert store.metadata.children("/a") == ["0", "x", "y"]
        looks = []

        class Counting(list):
            def __getitem__(self, at):
                looks.append(at)
                return super().__getitem__(at)

        index = store._log._generation.index
        index._paths = Counting(index._paths)
        assert store.metadata.children("/many") == ["below"]
        store.metadata.put("/last", b"", expected_version=ABSENT)
        assert len(looks) < 50


def test_an_identity_of_another_size_is_refused():
    with pytest.raises(ValueError, match="identity must be 8 bytes, got b'short'"):
        FileStore.over(FakeDirectory(), identity=b"short")


def test_stores_are_told_apart_by_chance_and_runs_repeated_by_a_given_identity():
    drawn, given = [], []
    for _ in range(2):
        for found, identity in ((drawn, None), (given, b"repeated")):
            files = {}
            FileStore.over(FakeDirectory(files), identity=identity).close()
            found.append({name: bytes(content) for name, content in files.items()})
    assert drawn[0] != drawn[1]
    assert given[0] == given[1]


def test_the_directory_of_a_store_in_sqlite_is_no_store_of_this_kind(tmp_path):
    SqliteStore(tmp_path).close()
    for _ in ("with its database", "with its mark alone"):
        with pytest.raises(StoreError, match="is not an ackstate store"):
            FileStore(tmp_path)
        (tmp_path / "ackstate.sqlite3").unlink(missing_ok=True)
