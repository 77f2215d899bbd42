"""An SQLite store on a disk that is full, and how large its log of changes becomes."""

import os
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from ackstate.analysis.crash.power_cuts import LoopDisk
from ackstate.analysis.crash.runs import LayerSkippedError
from ackstate.errors import CorruptStateError
from ackstate.stores.base import ABSENT, LedgerNotFoundError, StoreFullError
from ackstate.stores.sqlite import SqliteStore
from forked import status_of_child
from store_directories import assert_works, names_in

DATABASE = "ackstate.sqlite3"


@contextmanager
def tmpfs(directory):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", directory], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@contextmanager
def ext4(_directory):
    try:
        disk = LoopDisk()
    except LayerSkippedError as skipped:
        pytest.skip(str(skipped))
    with disk:
        fill(disk.directory / "rest", leave=3 << 20)
        yield disk.directory


@pytest.fixture
def tiny_disk(tmp_path, request):
    """A disk with 2 MiB of room, and with a file `ballast` of 1 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    with getattr(request, "param", tmpfs)(directory) as disk:
        (disk / "ballast").write_bytes(bytes(1 << 20))
        yield disk


def free_bytes(directory):
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def fill(path, *, leave=0):
    """Let a file take all the room of its disk but some."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while free_bytes(path.parent) >= leave + size:
                    file.write(bytes(size))


def append_until_full(store, ledger_id, size=1000):
    """Append entries until one finds no room, which has no trace; return the number of entries in the ledger."""
    count = store.ledgers.last(ledger_id) + 1
    with suppress(StoreFullError):
        while True:
            assert store.ledgers.append(ledger_id, [b"%d" % (count % 10) * size]) == count
            count += 1
    assert holds(store, ledger_id, count, size)
    return count


def holds(store, ledger_id, count, size=1000):
    expected = [b"%d" % (number % 10) * size for number in range(count)]
    return store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1) == expected


def in_a_child(live):
    assert os.waitstatus_to_exitcode(status_of_child(live)) in {0, -signal.SIGKILL}


def log_bytes(directory):
    return (directory / f"{DATABASE}-wal").stat().st_size


needs_root = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")]


class TestFullDisk:
    pytestmark = needs_root

    @pytest.mark.parametrize("tiny_disk", [tmpfs, ext4], indirect=True)
    def test_a_full_disk_refuses_and_goes_on_when_there_is_room(self, tiny_disk):
        directory = tiny_disk / "store"
        with closing(SqliteStore(directory)) as store:
            ledger_id = store.ledgers.create("billing")
            count = append_until_full(store, ledger_id)
            with pytest.raises(StoreFullError, match=f"{directory}: the disk is full"):
                store.metadata.put("/a", bytes(1 << 19), expected_version=ABSENT)
            assert holds(store, ledger_id, count)
        assert f"{DATABASE}-wal" not in names_in(directory)
        fill(tiny_disk / "others")
        with closing(SqliteStore(directory)) as store:
            assert holds(store, ledger_id, count)
            with pytest.raises(StoreFullError):
                store.metadata.put("/a", bytes(1 << 19), expected_version=ABSENT)
            (tiny_disk / "others").unlink()
            (tiny_disk / "ballast").unlink()
            assert store.metadata.put("/a", b"small", expected_version=ABSENT) == 0
            assert append_until_full(store, store.ledgers.create("billing")) > 0
        with closing(SqliteStore(directory)) as store:
            assert holds(store, ledger_id, count)

    @pytest.mark.parametrize("size", [pytest.param(100, marks=pytest.mark.soak), 1_000, 50_000])
    def test_what_a_deleted_ledger_took_is_there_for_the_next_one(self, tiny_disk, size):
        """The log of changes would be as large as what was appended, and fill the disk before the database does."""
        with closing(SqliteStore(tiny_disk / "store")) as store:
            counts = []
            for _ in range(3):
                ledger_id = store.ledgers.create("billing")
                counts.append(append_until_full(store, ledger_id, size))
                store.metadata.put(f"/full/{ledger_id}", b"a small value", expected_version=ABSENT)
                store.ledgers.delete(ledger_id)
                assert (store.ledgers.owners(), store.ledgers.owned_by("billing")) == ([], [])
                with pytest.raises(LedgerNotFoundError):
                    store.ledgers.last(ledger_id)
            assert min(counts) * size > (1 << 20)
            assert min(counts) > 0.95 * counts[0]

    def test_a_store_whose_contents_are_small_never_fills_its_disk(self, tiny_disk):
        with closing(SqliteStore(tiny_disk / "store")) as store:
            fill(tiny_disk / "rest of the rest", leave=400 << 10)
            version = ABSENT
            for number in range(500):
                ledger_id = store.ledgers.create("billing")
                store.ledgers.append(ledger_id, [bytes(20_000)])
                store.ledgers.delete(ledger_id)
                version = store.metadata.put("/a", b"%d" % number * 3_000, expected_version=version)

    def test_a_disk_that_others_fill_refuses_what_grows_and_takes_a_delete(self, tiny_disk):
        directory = tiny_disk / "store"
        with closing(SqliteStore(directory)) as store:
            ledger_ids = [store.ledgers.create("billing") for _ in range(2)]
            for ledger_id in ledger_ids:
                for number in range(300):
                    store.ledgers.append(ledger_id, [b"%d" % (number % 10) * 1000])
        with closing(SqliteStore(directory)) as store:
            fill(tiny_disk / "others")
            with pytest.raises(StoreFullError):
                store.metadata.put("/large", bytes(500_000), expected_version=ABSENT)
            assert store.metadata.get("/large") is None
            ledger_id = store.ledgers.create("shipping")
            count = append_until_full(store, ledger_id)
            store.ledgers.delete(ledger_ids[1])
            assert append_until_full(store, ledger_id) > count + 250
            count = append_until_full(store, ledger_id)
        with closing(SqliteStore(directory)) as store:
            assert store.ledgers.owned_by("billing") == [ledger_ids[0]]
            assert holds(store, ledger_id, count)

    def test_a_process_that_is_killed_on_a_full_disk_loses_nothing(self, tiny_disk):
        directory = tiny_disk / "store"

        def live():
            store = SqliteStore(directory)
            append_until_full(store, store.ledgers.create("billing"))
            fill(tiny_disk / "others")
            os.kill(os.getpid(), signal.SIGKILL)

        in_a_child(live)
        assert log_bytes(directory) > 0
        with closing(SqliteStore(directory)) as store:
            count = store.ledgers.last(1) + 1
            assert count > 1_000
            assert holds(store, 1, count)
            store.ledgers.delete(1)

    @pytest.mark.parametrize("killed_at", range(1, 8))
    def test_a_delete_on_a_full_disk_is_done_or_not_wherever_the_process_dies(self, tiny_disk, killed_at):
        """The log has no room for all pages of the ledger at once, so they are changed one part after the other."""
        directory = tiny_disk / "store"

        def live():
            store = SqliteStore(directory)
            ledger_id = store.ledgers.create("billing")
            append_until_full(store, ledger_id)
            begun = 0

            def count(statement):
                nonlocal begun
                begun += statement.startswith("COMMIT")
                if begun == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            store._database._connection.set_trace_callback(count)
            store.ledgers.delete(ledger_id)

        in_a_child(live)
        for _ in range(2):
            with closing(SqliteStore(directory)) as store:
                owned = store.ledgers.owned_by("billing")
                assert owned == store.ledgers.owned_by("billing")
                assert owned == ([1] if store.ledgers.owners() else [])
                for ledger_id in owned:
                    assert holds(store, ledger_id, store.ledgers.last(ledger_id) + 1)
                for ledger_id in {1} - set(owned):
                    with pytest.raises(LedgerNotFoundError):
                        store.ledgers.last(ledger_id)
        with closing(SqliteStore(directory)) as store:
            for ledger_id in owned:
                store.ledgers.delete(ledger_id)
            assert append_until_full(store, store.ledgers.create("billing")) > 1_000

    def test_a_small_write_is_not_refused_with_a_large_one(self, tiny_disk):
        with closing(SqliteStore(tiny_disk / "store")) as store, ThreadPoolExecutor(8) as threads:
            fill(tiny_disk / "others", leave=300 << 10)
            large, small, *ledger_ids = [store.ledgers.create("billing") for _ in range(10)]
            outcomes = store.ledgers.append_many([(large, [bytes(50 << 20)]), (small, [b"small"])])
            assert [type(each) for each in outcomes] == [StoreFullError, int]
            assert (store.ledgers.last(large), store.ledgers.last(small)) == (-1, 0)
            sizes = [500_000, 10] * 4

            def append(ledger_id, size):
                try:
                    return [store.ledgers.append(ledger_id, [bytes(size)]) for _ in range(20)]
                except StoreFullError:
                    return []

            found = list(threads.map(append, ledger_ids, sizes))
            assert found == [[], [*range(20)]] * 4
            assert [store.ledgers.last(ledger_id) for ledger_id in ledger_ids] == [-1, 19] * 4

    def test_no_store_and_no_copy_is_half_made_on_a_full_disk(self, tiny_disk, tmp_path, monkeypatch):
        with closing(SqliteStore(tmp_path / "store")) as store:
            store.ledgers.append(store.ledgers.create("billing"), [bytes(3 << 20)])
        monkeypatch.setattr(tempfile, "tempdir", str(tiny_disk))
        before = names_in(tiny_disk)
        with pytest.raises(StoreFullError, match=str(tmp_path / "store")):
            SqliteStore.open_copy(tmp_path / "store")
        assert names_in(tiny_disk) == before
        fill(tiny_disk / "others")
        with pytest.raises(StoreFullError, match=str(tiny_disk / "store")):
            SqliteStore(tiny_disk / "store")
        (tiny_disk / "others").unlink()
        assert_works(tiny_disk / "store")


class TestLog:
    pytestmark = pytest.mark.slow

    def test_the_log_of_a_store_in_use_is_bounded(self, tmp_path):
        """It is emptied at 1000 pages, and what one huge change made of it is given back."""
        with closing(SqliteStore(tmp_path)) as store:
            sizes, version = [], ABSENT
            for number in range(150):
                ledger_id = store.ledgers.create("billing")
                store.ledgers.append(ledger_id, [b"%d" % (number % 10) * 20_000] * 4)
                store.ledgers.delete(ledger_id)
                sizes.append(log_bytes(tmp_path))
            assert max(sizes) < 5 << 20
            store.metadata.put("/huge", bytes(30 << 20), expected_version=ABSENT)
            assert log_bytes(tmp_path) > 30 << 20
            for number in range(3):
                version = store.metadata.put("/small", b"%d" % number, expected_version=version)
            assert log_bytes(tmp_path) <= 8 << 20

    def test_a_caller_that_keeps_an_error_does_not_keep_the_log_from_being_emptied(self, tmp_path):
        with closing(SqliteStore(tmp_path)) as store:
            for owner in ("a", "b", "c"):
                store.ledgers.create(owner)
            store._database._connection.execute("UPDATE ledgers SET owner = CAST(owner AS BLOB)")
            with pytest.raises(CorruptStateError) as kept:
                store.ledgers.owners()
            ledger_id = store.ledgers.create("c")
            for _ in range(30):
                store.ledgers.append(ledger_id, [bytes(500_000)])
            assert log_bytes(tmp_path) < 8 << 20
            assert "where text belongs" in str(kept.value)
