"""Events that only the file store meets: full disks, failed syncs, a crash at any call, other openers."""

import os
import shutil
import threading
from contextlib import closing

import pytest

from ackstate.cursor import FileStore
from ackstate.cursor.store import ABSENT, LedgerFencedError, StoreError, StoreFullError, StoreLockedError
from ackstate.errors import CorruptStateError
from ackstate.stores import file_generation
from ackstate.stores.file_log import laid_out_size
from ackstate.stores.memory import MemoryStore
from ackstate.testing import check_store
from fake_directory import (
    CALLS,
    LOG,
    FakeDirectory,
    FakeFile,
    broken,
    copied,
    end_of,
    full,
    history_of_calls,
    opened,
    state_in,
    state_of,
)
from tests.model.cursor.test_store_model import StoresMachine


@pytest.fixture(scope="module")
def history():
    return history_of_calls()


# The contract


def test_the_file_store_keeps_the_contract(tmp_path):
    limit = 200_000
    check_store(lambda: FileStore(tmp_path, metadata_value_bytes_max=limit), metadata_value_bytes_max=limit)


@pytest.mark.slow
def test_the_file_store_keeps_the_contract_while_it_compacts_all_the_time(tmp_path):
    check_store(lambda: FileStore(tmp_path, compaction_size_min=0))
    (log,) = [path.name for path in tmp_path.iterdir() if path.name.startswith("log")]
    assert log > LOG


class FileMachine(StoresMachine):
    """The same answers as the memory store, with compactions in between."""

    def begin(self):
        self.files = {}

    def open(self):
        self.memory = MemoryStore(self.disk)
        self.other = FileStore.over(FakeDirectory(self.files), compaction_size_min=300)

    def end(self):
        pass


TestFileModel = pytest.mark.slow(FileMachine.TestCase)


def check_compaction():
    """All that a store holds, and knows, is in the log that a compaction writes."""
    files = {}
    with closing(FileStore.over(FakeDirectory(files))) as store:
        for call in CALLS:
            call(store)
        state = state_of(store)
    with closing(FileStore.over(FakeDirectory(files), compaction_size_min=0)) as store:
        version = ABSENT
        for _ in range(8):
            version = store.metadata.put("/dead", bytes(1_000), expected_version=version)
    assert LOG not in files
    with closing(opened(files)) as store:
        store.metadata.delete("/dead", expected_version=version)
        assert state_of(store) == state
        for call in (lambda: store.ledgers.append(1, b"late"), lambda: store.ledgers.append_all([(1, b"late")])):
            with pytest.raises(LedgerFencedError):
                call()
        assert store.ledgers.create("billing") == 4
        assert store.metadata.put("/new", b"", expected_version=ABSENT) == version + 1


def test_a_compaction_keeps_all():
    check_compaction()


def test_the_check_catches_a_fence_that_a_compaction_forgets(monkeypatch):
    monkeypatch.setattr(file_generation, "fence_record", lambda ledger_id: b"")
    with pytest.raises(pytest.fail.Exception):
        check_compaction()


# A failure while it is open


def used(files, **faults):
    """A store with one ledger over a directory that works so far."""
    store = opened(files)
    store.ledgers.create("billing")
    store.ledgers.append(1, b"kept")
    store.close()
    directory = FakeDirectory(files, **faults)
    return FileStore.over(directory), directory


def fail_next(directory, kind, error, *, count=1):
    """Let the next calls of a kind fail."""
    failed = []

    def step(called, name, partial=lambda: None):
        directory.steps.append((called, name))
        if called == kind:
            failed.append(called)
            if len(failed) == count:
                del directory.step
            partial()
            raise error()

    directory.step = step


def test_a_full_disk_refuses_the_call_and_the_store_goes_on():
    files = {}
    store, directory = used(files)
    before = files[LOG][: end_of(files[LOG])]
    for number, call in enumerate(
        (
            lambda: store.ledgers.append_all([(1, b"a"), (1, b"b")]),
            lambda: store.ledgers.create("shipping"),
            lambda: store.ledgers.fence(1),
            lambda: store.ledgers.delete(1),
            lambda: store.metadata.put("/a", b"x", expected_version=ABSENT),
        )
    ):
        # The first is to be written into the space laid out; the others find none, and try it alone, too.
        write, cut = ("write", LOG), ("truncate", LOG)
        expected = [write, cut] if number == 0 else [write, cut, write, cut]
        del directory.steps[:]
        fail_next(directory, "write", full, count=expected.count(write))
        with pytest.raises(StoreFullError):
            call()
        assert files[LOG] == before
        # Or a power cut could leave a part of it below the next group.
        assert directory.steps == [*expected, ("sync", LOG)]
    assert state_of(store) == ({1: [b"kept"]}, {})
    assert store.ledgers.append(1, b"more") == 1
    assert store.ledgers.create("shipping") == 2
    store.close()
    assert state_in(files) == ({1: [b"kept", b"more"], 2: []}, {})


def test_a_disk_with_room_for_a_group_and_for_nothing_laid_out_behind_it_takes_the_group():
    files = {}
    store, directory = used(files)
    del files[LOG][end_of(files[LOG]) :]
    del directory.steps[:]
    fail_next(directory, "write", full)
    store.ledgers.append(1, b"fits")
    assert len(files[LOG]) == end_of(files[LOG])
    assert [kind for kind, _ in directory.steps] == ["write", "truncate", "write", "sync"]
    store.ledgers.append(1, b"and so on")
    assert len(files[LOG]) % 512 == 0
    assert state_in(files) == ({1: [b"kept", b"fits", b"and so on"]}, {})


@pytest.mark.parametrize("second", ["truncate", "sync"])
def test_a_full_disk_that_cannot_be_undone_ends_the_store(second):
    files = {}
    store, directory = used(files)
    fail_next(directory, "write", full)
    first = directory.step

    def step(called, name, partial=lambda: None):
        try:
            first(called, name, partial)
        finally:
            fail_next(directory, second, broken)

    directory.step = step
    with pytest.raises(StoreError, match="open it again"):
        store.ledgers.append(1, b"lost")
    assert_refuses_all(store)
    store.close()
    assert state_in(files) == ({1: [b"kept"]}, {})


def assert_refuses_all(store):
    for call in (
        lambda: store.ledgers.append(1, b"x"),
        lambda: store.ledgers.read(1, 0, 1),
        lambda: store.ledgers.last(1),
        lambda: store.metadata.get("/a"),
        lambda: store.metadata.put("/a", b"", expected_version=ABSENT),
    ):
        with pytest.raises(StoreError, match="close the store and open it again"):
            call()


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_a_failed_write_or_sync_nothing_is_tried_again(kind):
    files = {}
    store, directory = used(files)
    fail_next(directory, kind, broken)
    with pytest.raises(StoreError, match="Input/output error"):
        store.ledgers.append(1, b"unknown")
    steps = len(directory.steps)
    assert_refuses_all(store)
    store.close()
    assert len(directory.steps) == steps


def test_after_a_failed_sync_the_next_opening_believes_the_disk_and_not_the_cache(monkeypatch):
    files = {}
    store, directory = used(files)
    end, on_disk = end_of(files[LOG]), bytes(files[LOG])
    fail_next(directory, "sync", broken)
    with pytest.raises(StoreError):
        store.ledgers.append(1, b"lost" * 200)
    store.close()
    assert files[LOG] != on_disk

    def settle(file):
        file.sync()
        file.content[:] = on_disk.ljust(len(file.content), b"\0")
        # A sector of it reached the disk, and not the one with its header.
        file.content[700] = 1

    monkeypatch.setattr(FakeFile, "settle", settle)
    with closing(FileStore.over(FakeDirectory(files))) as again:
        assert again.discarded[:2] == (end, 701 - end)
        assert state_of(again) == ({1: [b"kept"]}, {})
    assert files[LOG] == on_disk[:end]


def test_opening_syncs_what_a_killed_process_wrote(history):
    directory = FakeDirectory(copied(history[-1][0]))
    FileStore.over(directory).close()
    assert directory.steps == [("sync", LOG), ("sync", "")]


def test_a_compaction_without_room_is_given_up_for_now():
    files = {}
    store, directory = used(files)
    store.close()
    store = FileStore.over(directory, compaction_size_min=1_000)
    real = directory.step

    def step(called, name, partial=lambda: None):
        if called == "write" and name.endswith(".new"):
            raise full()
        real(called, name, partial)

    directory.step = step
    for number in range(20):
        store.metadata.put("/a", bytes(200), expected_version=number - 1)
    assert set(files) == {LOG, "MADE"}
    del directory.step
    for number in range(20, 60):
        store.metadata.put("/a", bytes(200), expected_version=number - 1)
    assert LOG not in files
    store.close()
    assert state_in(files)[0] == {1: [b"kept"]}


@pytest.mark.parametrize("called", ["create", "write", "sync"])
def test_a_compaction_that_does_not_get_as_far_as_the_name_leaves_the_old_log_in_use(called):
    """For want of a descriptor or of an inode, say."""
    files = {}
    store, directory = used(files)
    store.close()
    store = FileStore.over(directory, compaction_size_min=1_000)
    real, failed = directory.step, []

    def step(what, name, partial=lambda: None):
        if name.endswith(".new") and what in {called, "remove"}:
            failed.append(what)
            raise broken()
        real(what, name, partial)

    directory.step = step
    for number in range(20):
        store.metadata.put("/a", bytes(200), expected_version=number - 1)
    assert called in failed or "remove" in failed
    assert LOG in files
    del directory.step
    for number in range(20, 60):
        store.metadata.put("/a", bytes(200), expected_version=number - 1)
    assert LOG not in files
    store.close()
    assert state_in(files)[0] == {1: [b"kept"]}


def test_the_log_stays_within_twice_what_is_alive_and_compacting_is_amortised():
    directory = FakeDirectory()
    appended = 0
    real = FakeFile.write

    class CountingFile(FakeFile):
        def write(self, offset, data):
            nonlocal appended
            appended += end_of(data)
            real(self, offset, data)

    directory.create = lambda name: (
        FakeDirectory.create(directory, name),
        CountingFile(directory, name, directory.files[name]),
    )[1]
    with closing(FileStore.over(directory, compaction_size_min=4_000)) as store:
        ledger_id = store.ledgers.create("billing")
        written = 0
        for number in range(600):
            store.ledgers.append(ledger_id, bytes(100))
            store.metadata.put("/a", bytes(50), expected_version=number - 1)
            written += 100 + 50 + 2 * 41 + 17 + 27
            if number % 50 == 49:
                store.ledgers.delete(ledger_id)
                ledger_id = store.ledgers.create("billing")
            (log,) = [content for name, content in directory.files.items() if name.startswith("log")]
            assert end_of(log) < 2 * 50 * (100 + 17) + 4_000
            assert len(log) < 2 * end_of(log) + 4_096
    assert written < appended < 3 * written


@pytest.mark.parametrize("group_size", [100, 5_000, 60_000])
def test_a_log_grows_in_few_steps_and_is_laid_out_for_256_kib_at_most(group_size):
    size, grown = 0, 0
    for end in range(group_size, 4 << 20, group_size):
        if end > size:
            size, grown = laid_out_size(end - group_size, end), grown + 1
            assert size % (4_096 if end >= 4_096 else 512) == 0
            assert end <= size < end + min(end, 1 << 18) + 4_096
    # From half a KiB up to 256 KiB it doubles, then it takes 256 KiB at a time.
    assert grown <= 10 + 16


def test_behind_a_large_group_nothing_is_laid_out():
    assert laid_out_size(1_000, 1_000 + (1 << 16)) == 1_000 + (1 << 16)


def test_a_group_that_fits_is_written_over_what_is_laid_out_and_the_file_does_not_grow():
    files = {}
    store, _ = used(files)
    sizes = []
    for _ in range(30):
        store.ledgers.append(1, b"x" * 200)
        sizes.append(len(files[LOG]))
    assert sorted(set(sizes)) == [512, 1_536, 3_584, 7_680, 16_384]
    assert end_of(files[LOG]) > 8_000


class SmallDisk(FakeDirectory):
    """A directory on a disk of 512 KiB, which counts how often it is asked for its room."""

    asked = 0

    @property
    def room(self):
        return (1 << 19) - sum(map(len, self.files.values()))

    @property
    def free_size(self):
        self.asked += 1
        return self.room

    def create(self, name):
        super().create(name)
        return SmallDiskFile(self, name, self.files[name])


class SmallDiskFile(FakeFile):
    def write(self, offset, data):
        if offset + len(data) - self.size > self.directory.room:
            raise full()
        super().write(offset, data)


def test_the_room_on_the_disk_is_asked_for_once_in_16_kib_and_dead_bytes_never_fill_it():
    directory = SmallDisk()
    with closing(FileStore.over(directory, compaction_size_min=1 << 30)) as store:
        ledger_id, appended = store.ledgers.create("billing"), 0
        for number in range(6_000):
            if number % 100 == 0:
                store.ledgers.delete(ledger_id)
                ledger_id = store.ledgers.create("billing")
            store.ledgers.append(ledger_id, bytes(100))
            appended += 17 + 100 + 55  # The record before an entry, the entry, and the frame of a group.
        compactions = sum(kind == "rename" for kind, _ in directory.steps)
    assert compactions > 1
    assert directory.asked <= appended // (1 << 14) + 4 * compactions


# Real directories, threads and processes


def test_a_closed_store_is_a_lock_a_mark_and_a_log(tmp_path):
    FileStore(tmp_path / "a" / "b").close()
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["LOCK", "MADE", LOG]


def test_a_second_opener_is_refused_and_a_copy_opens(tmp_path):
    with closing(FileStore(tmp_path / "store")) as store:
        store.ledgers.append(store.ledgers.create("billing"), b"x")
        with pytest.raises(StoreLockedError, match=f"is open in process {os.getpid()}"):
            FileStore(tmp_path / "store")
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with closing(FileStore(tmp_path / "copy")) as copy, closing(FileStore(tmp_path / "store")) as store:
        assert state_of(copy) == state_of(store) == ({1: [b"x"]}, {})


@pytest.mark.parametrize("names", [["notes.txt"], ["LOCK", "notes.txt"], ["log-1"], [f"{LOG}.old"]])
def test_a_directory_with_other_content_is_refused_and_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(StoreError, match=f"{tmp_path} is not an ackstate store"):
        FileStore(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(names, b"mine")


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StoreError, match=f"{tmp_path / below}: .*directory"):
        FileStore(tmp_path / below)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_refused_opening_lets_go_of_the_directory(tmp_path):
    FileStore(tmp_path).close()
    content = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(b"")
    with pytest.raises(CorruptStateError, match=str(tmp_path / LOG)):
        FileStore(tmp_path)
    (tmp_path / LOG).write_bytes(content)
    FileStore(tmp_path).close()


def test_calls_that_come_during_a_sync_share_the_next_one_and_a_refused_one_undoes_itself_only():
    directory = FakeDirectory()
    store = FileStore.over(directory)
    ledger_id = store.ledgers.create("billing")
    outcomes = {}

    def append(number):
        try:
            target = ledger_id if number % 4 else 99
            outcomes[number] = store.ledgers.append_all([(ledger_id, b"%d" % number), (target, b"same call")])
        except StoreError as error:
            outcomes[number] = type(error).__name__

    group = store._log._groups._open_group
    with store._log._lock:
        threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        while len(group.calls) < 8:
            threading.Event().wait(0.001)
        before = len(directory.steps)
    for thread in threads:
        thread.join()
    assert [kind for kind, _ in directory.steps[before:]] == ["write", "sync"]
    refused = [number for number, outcome in outcomes.items() if outcome == "LedgerNotFoundError"]
    assert sorted(refused) == [0, 4]
    ids = sorted(entry_id for number, outcome in outcomes.items() if number % 4 for entry_id in outcome)
    assert ids == list(range(12))
    store.close()
    (entries,) = state_in(directory.files)[0].values()
    assert sorted(entries) == sorted([b"same call"] * 6 + [b"%d" % number for number in (1, 2, 3, 5, 6, 7)])


def test_a_call_interrupted_amid_its_write_ends_the_store():
    store, directory = used({})
    fail_next(directory, "sync", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        store.ledgers.append(1, b"unknown")
    assert_refuses_all(store)
