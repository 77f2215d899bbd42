"""An SQLite store on a disk that is full."""

import os
import subprocess
import tempfile
from contextlib import closing

import pytest

from ackstate.cursor.store import ABSENT, StoreFullError
from ackstate.cursor.stores.sqlite import SqliteStore
from store_directories import append_until, assert_works, downgraded, names_in

DATABASE = "ackstate.sqlite3"


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 3 MiB with a file `ballast` of 1 MiB on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        (disk / "ballast").write_bytes(bytes(1 << 20))
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


needs_root = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")]


class TestFullDisk:
    pytestmark = needs_root

    def test_a_full_disk_refuses_and_goes_on_when_there_is_room(self, tiny_disk):
        with closing(SqliteStore(tiny_disk / "store")) as store:
            ledger_id = store.ledgers.create("billing")
            entries = append_until(store, ledger_id, StoreFullError)
            with pytest.raises(StoreFullError, match=f"{tiny_disk / 'store'}: the disk is full"):
                store.metadata.put("/a", bytes(1 << 19), expected_version=ABSENT)
            assert store.ledgers.read(ledger_id, 0, len(entries)) == entries
            assert store.ledgers.last(ledger_id) == len(entries) - 1
            (tiny_disk / "ballast").unlink()
            assert store.ledgers.append(ledger_id, b"more") == len(entries)
            assert store.metadata.put("/a", b"small", expected_version=ABSENT) == 0
        with closing(SqliteStore(tiny_disk / "store")) as store:
            assert store.ledgers.read(ledger_id, 0, len(entries) + 1) == [*entries, b"more"]

    def test_close_does_not_raise_and_reopening_waits_for_room(self, tiny_disk):
        directory = tiny_disk / "store"
        store = SqliteStore(directory)
        ledger_id = store.ledgers.create("billing")
        entries = append_until(store, ledger_id, StoreFullError)
        store.close()
        assert f"{DATABASE}-wal" in names_in(directory)
        with pytest.raises(StoreFullError, match=str(directory)):
            SqliteStore(directory)
        (tiny_disk / "ballast").unlink()
        with closing(SqliteStore(directory)) as store:
            assert store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1) == entries

    def test_a_store_that_finds_no_room_to_be_sealed_says_so_and_is_as_it_was(self, tiny_disk):
        directory = tiny_disk / "store"
        with closing(SqliteStore(directory)) as store:
            ledger_id = store.ledgers.create("billing")
            store.ledgers.append_all([(ledger_id, bytes(1000))] * 900)
        downgraded(directory)
        size = (directory / DATABASE).stat().st_size
        (tiny_disk / "more ballast").write_bytes(bytes(2 * 1024 * 1024 - size - size // 2))
        told = f"the disk is full: to add checksums to the rows .* takes about {size * 21 // 20} free bytes"
        with pytest.raises(StoreFullError, match=told):
            SqliteStore(directory)
        (tiny_disk / "ballast").unlink()
        with closing(SqliteStore(directory)) as store:
            assert store.ledgers.read(ledger_id, 0, 900) == [bytes(1000)] * 900

    def test_a_copy_that_does_not_fit_is_refused_and_removed(self, tiny_disk, tmp_path, monkeypatch):
        with closing(SqliteStore(tmp_path / "store")) as store:
            store.ledgers.append(store.ledgers.create("billing"), bytes(3 << 20))
        monkeypatch.setattr(tempfile, "tempdir", str(tiny_disk))
        with pytest.raises(StoreFullError, match=str(tmp_path / "store")):
            SqliteStore.open_copy(tmp_path / "store")
        assert names_in(tiny_disk) == ["ballast"]

    def test_no_store_is_half_made_on_a_full_disk(self, tiny_disk):
        with pytest.raises(OSError, match="No space"):
            (tiny_disk / "rest").write_bytes(bytes(3 << 20))
        with pytest.raises(StoreFullError, match=str(tiny_disk / "store")):
            SqliteStore(tiny_disk / "store")
        (tiny_disk / "rest").unlink()
        assert_works(tiny_disk / "store")
