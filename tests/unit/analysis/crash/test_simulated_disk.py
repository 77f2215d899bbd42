"""The simulated disk behaves as the kernel while the machine is up, and loses unsynced data when it goes down."""

from __future__ import annotations

import fcntl
import os
import zlib
from contextlib import closing

import pytest

from ackstate.analysis.crash.simulated_crash import DiskHistory, fates
from ackstate.analysis.crash.simulated_disk import SimulatedDisk
from ackstate.stores.base import StoreLockedError


class KernelFile:
    def __init__(self, path, flags):
        self.descriptor = os.open(path, flags | os.O_RDWR, 0o600)

    @property
    def size(self):
        return os.fstat(self.descriptor).st_size

    def write(self, offset, data):
        os.pwrite(self.descriptor, data, offset)

    def read(self, offset, size):
        return os.pread(self.descriptor, size, offset)

    def truncate(self, size):
        os.ftruncate(self.descriptor, size)

    def sync(self):
        os.fsync(self.descriptor)

    settle = sync

    def close(self):
        os.close(self.descriptor)


class KernelDirectory:
    """What the simulated disk is compared with."""

    free_size = 1 << 40

    def __init__(self, path):
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            raise StoreLockedError(f"{path} is open") from None

    def names(self):
        return sorted(each.name for each in self.path.iterdir())

    def create(self, name):
        return KernelFile(self.path / name, os.O_CREAT | os.O_EXCL)

    def open(self, name):
        return KernelFile(self.path / name, 0)

    def rename(self, name, new_name):
        (self.path / name).rename(self.path / new_name)

    def remove(self, name):
        (self.path / name).unlink()

    def sync(self):
        os.fsync(self.descriptor)

    def close(self):
        os.close(self.descriptor)


@pytest.fixture(params=["simulated", "kernel"])
def open_directory(request, tmp_path):
    """Open the same directory each time, which is empty at first."""
    if request.param == "simulated":
        return SimulatedDisk().directory
    return lambda: KernelDirectory(tmp_path)


def test_a_file_is_appended_to_cut_and_read_anywhere(open_directory):
    with closing(open_directory()) as directory:
        file = directory.create("log")
        assert file.size == 0
        file.write(0, b"hello ")
        file.write(6, b"world")
        file.write(11, b"")
        assert (file.size, file.read(0, 11), file.read(6, 3)) == (11, b"hello world", b"wor")
        assert (file.read(9, 100), file.read(11, 1), file.read(50, 1)) == (b"ld", b"", b"")
        file.truncate(5)
        file.write(5, b"!")
        file.sync()
        assert file.read(0, 100) == b"hello!"
        file.write(1, b"a")
        file.write(4, b"...")
        assert (file.size, file.read(0, 100)) == (7, b"hall...")
        file.close()


def test_names_are_made_changed_and_removed(open_directory):
    with closing(open_directory()) as directory:
        assert list(directory.names()) == []
        for name, data in (("b", b"bee"), ("a", b"ay")):
            file = directory.create(name)
            file.write(0, data)
            file.close()
        assert list(directory.names()) == ["a", "b"]
        directory.rename("b", "c")
        directory.rename("a", "c")  # replaces the file of that name
        directory.sync()
        assert list(directory.names()) == ["c"]
        with closing(directory.open("c")) as file:
            assert file.read(0, 9) == b"ay"
        directory.remove("c")
        assert list(directory.names()) == []


def test_what_is_missing_or_there_already_is_refused(open_directory):
    with closing(open_directory()) as directory:
        directory.create("a").close()
        with pytest.raises(FileExistsError):
            directory.create("a")
        for call in (lambda: directory.open("b"), lambda: directory.rename("b", "c"), lambda: directory.remove("b")):
            with pytest.raises(FileNotFoundError):
                call()
        assert list(directory.names()) == ["a"]


def test_a_file_that_is_open_stays_so_under_another_name_or_none(open_directory):
    with closing(open_directory()) as directory:
        file = directory.create("a")
        directory.rename("a", "b")
        file.write(0, b"one")
        with closing(directory.open("b")) as again:
            assert again.read(0, 9) == b"one"
        directory.remove("b")
        file.write(3, b"two")
        assert file.read(0, 9) == b"onetwo"
        directory.create("b").close()  # another file
        assert file.size == 6
        file.close()
        with pytest.raises(OSError):
            file.write(6, b"closed")


def test_what_was_written_is_there_for_the_next_who_opens_the_directory(open_directory):
    with closing(open_directory()) as directory:
        file = directory.create("a")
        file.write(0, b"not even synced")
        with pytest.raises(StoreLockedError):
            open_directory()
        file.close()
    with closing(open_directory()) as directory, closing(directory.open("a")) as file:
        assert file.read(0, 99) == b"not even synced"


def contents(disk):
    """Every state that a power cut after the last call could leave, as names and bytes."""
    history = DiskHistory(disk.start)
    for call in disk.calls:
        history.follow(call)
    states = [dict(state.files) for state in history.states()]
    return states[0], states


def written(*appends, files=None, sync_after=0):
    """A disk with one file ``f`` whose name is certain, after appends of which the first few were synced."""
    disk = SimulatedDisk({"f": b""} if files is None else files)
    file = disk.directory().open("f")
    for number, data in enumerate(appends, start=1):
        file.write(file.size, data)
        if number == sync_after:
            file.sync()
    return disk


def test_a_torn_write_is_cut_at_every_byte():
    worst, states = contents(written(b"sure", b"torn", sync_after=1))
    assert worst == {"f": b"sure"}
    assert [state["f"] for state in states[1:]] == [b"suretorn", b"suret", b"sureto", b"suretor", b"sure\0\0\0\0"]


def test_whole_sectors_of_a_write_are_zeros():
    _, states = contents(written(b"a" * 500, b"b" * 600, sync_after=1))
    found = {state["f"][500:] for state in states if len(state["f"]) == 1100}
    # The write lies in three sectors: 12 bytes of the first, all of the second, 76 bytes of the third.
    parts = [12, 512, 76]
    every = {b"".join((b"b" if keep >> i & 1 else b"\0") * size for i, size in enumerate(parts)) for keep in range(8)}
    assert found == every


def test_of_a_write_over_what_was_there_each_sector_is_as_before_or_after_and_its_end_may_be_missing():
    disk = SimulatedDisk({"f": b"a" * 1_300})
    disk.directory().open("f").write(500, b"b" * 600)
    worst, states = contents(disk)
    assert worst == {"f": b"a" * 1_300}
    assert {len(state["f"]) for state in states} == {1_300}
    found = {state["f"][500:1_100] for state in states}
    parts = [12, 512, 76]
    every = {b"".join((b"b" if keep >> i & 1 else b"a") * size for i, size in enumerate(parts)) for keep in range(8)}
    assert found == every | {b"b" * kept + b"a" * (600 - kept) for kept in range(1, 600)}


def test_a_file_that_grows_by_zeros_behind_a_write_may_end_with_the_write():
    _, states = contents(written(b"sure", b"torn" + bytes(2_000), sync_after=1))
    found = {state["f"] for state in states}
    assert {b"sure", b"suret", b"suretor", b"suretorn", b"suretorn" + bytes(2_000), b"sure" + bytes(2_004)} == found - {
        b"sureto"
    }


def test_unsynced_writes_are_lost_and_reordered():
    _, states = contents(written(b"A", b"B", b"C"))
    assert {state["f"] for state in states} == {
        b"", b"A", b"AB", b"ABC", b"\0B", b"\0\0C", b"A\0C", b"\0BC",
        b"\0", b"A\0", b"AB\0",  # written, and the sector not there
    }  # fmt: skip


def test_many_unsynced_writes_are_lost_in_order_and_each_alone():
    _, states = contents(written(*(bytes([65 + number]) for number in range(10))))
    found = {state["f"] for state in states}
    assert {b"ABCDEFGHIJ"[:kept] for kept in range(11)} <= found
    assert {b"ABCDEFGHIJ".replace(bytes([65 + number]), b"\0") for number in range(9)} <= found
    assert len(found) < 60


def test_a_cut_that_was_not_synced_may_not_have_happened():
    disk = SimulatedDisk({"f": b"abcdef"})
    file = disk.directory().open("f")
    file.truncate(3)
    file.write(3, b"X")
    worst, states = contents(disk)
    assert worst == {"f": b"abcdef"}
    assert {state["f"] for state in states} == {b"abcdef", b"abc", b"abcX", b"abcXef", b"abc\0"}
    file.sync()
    assert contents(disk) == ({"f": b"abcX"}, [{"f": b"abcX"}])


def test_names_not_synced_are_lost_in_any_order():
    disk = SimulatedDisk({"old": b"1"})
    directory = disk.directory()
    directory.create("new").sync()
    directory.remove("old")
    worst, states = contents(disk)
    assert worst == {"old": b"1"}
    assert sorted(map(sorted, states)) == [[], ["new"], ["new", "old"], ["old"]]
    directory.sync()
    assert contents(disk)[1] == [{"new": b""}]


def test_a_renamed_name_may_be_certain_and_its_bytes_not():
    disk = SimulatedDisk({"current": b"old"})
    directory = disk.directory()
    file = directory.create("draft")
    file.write(0, b"new")
    directory.rename("draft", "current")
    directory.sync()
    worst, states = contents(disk)
    assert worst == {"current": b""}
    assert {"current": b"ne"} in states
    assert {"current": b"old"} not in states
    file.sync()
    assert contents(disk)[1] == [{"current": b"new"}]


def test_a_rename_is_all_or_nothing():
    disk = SimulatedDisk({"a": b"A", "b": b"B"})
    disk.directory().rename("a", "b")
    assert contents(disk)[1] == [{"a": b"A", "b": b"B"}, {"b": b"A"}]


def test_too_many_states_at_once_are_varied_one_file_at_a_time():
    disk = SimulatedDisk({"f": b"", "g": b""})
    directory = disk.directory()
    for name in ("f", "g"):
        directory.open(name).write(0, b"x" * 400)
    worst, states = contents(disk)
    assert worst == {"f": b"", "g": b""}
    sizes = {(len(state["f"]), len(state["g"])) for state in states}
    assert {(size, 0) for size in range(401)} | {(400, size) for size in range(401)} <= sizes
    assert len(states) < 2000


def test_every_prefix_of_the_calls_has_its_states():
    disk = written(b"AB", b"CD", sync_after=1)
    found = [(made, state.files[0][1]) for made, state in fates(disk.calls, disk.start)]
    assert [content for made, content in found if made == 2] == [b"AB"]
    assert [content for made, content in found if made == 3] == [b"AB", b"ABCD", b"ABC", b"AB\0\0"]
    assert [made for made, _ in found] == sorted(made for made, _ in found)


def test_states_say_what_was_lost():
    history = DiskHistory({"f": b""})
    disk = written(b"AB")
    for call in disk.calls:
        history.follow(call)
    assert [str(state) for state in history.states()] == [
        "f: lost: write bytes 0 to 2 of f",
        "nothing is lost",
        "f: of the 2 bytes written at 0 the first 1 are there",
        "f: of the 2 bytes written at 0 those in the sectors [0] are as before",
    ]


def test_a_dead_process_leaves_all_that_it_wrote():
    disk = SimulatedDisk()
    directory = disk.directory()
    directory.create("f").write(0, b"x")
    disk.kill()
    with pytest.raises(OSError):
        directory.names()
    assert SimulatedDisk.from_state(disk.files()).files() == {"f": b"x"}
    assert list(disk.directory().names()) == ["f"]


class SmallStore:
    """Numbers in a log, each with its checksum; a full log is replaced by one with their sum."""

    def __init__(self, directory, *, syncs=("file", "new file", "names"), removes_first=False):
        self.directory, self.syncs, self.removes_first = directory, syncs, removes_first
        for name in set(directory.names()) - {"log"}:
            directory.remove(name)
        if "log" not in directory.names():
            self.replace_log(0)
        self.file, self.total = directory.open("log"), 0
        self.file.settle()
        for offset in range(0, self.file.size - 7, 8):
            data = self.file.read(offset, 8)
            if zlib.crc32(data[:4]) != int.from_bytes(data[4:], "little"):
                self.file.truncate(offset)
                break
            self.total += int.from_bytes(data[:4], "little")

    def replace_log(self, number):
        if self.removes_first and "log" in self.directory.names():
            self.directory.remove("log")
            self.sync(self.directory, "names")
        file = self.directory.create("log.new")
        self.write(file, number, "new file")
        self.directory.rename("log.new", "log")
        self.sync(self.directory, "names")
        self.file = file

    def add(self, number):
        if self.file.size >= 24:
            self.replace_log(self.total + number)
        else:
            self.write(self.file, number, "file")
        self.total += number

    def write(self, file, number, what):
        data = number.to_bytes(4, "little")
        file.write(file.size // 8 * 8, data + zlib.crc32(data).to_bytes(4, "little"))
        self.sync(file, what)

    def sync(self, thing, what):
        if what in self.syncs:
            thing.sync()


def first_wrong_state(**mistakes):
    """The first state that a power cut could leave in which the sum of the small store is wrong, in words."""
    disk, sums = SimulatedDisk(), {}
    store = SmallStore(disk.directory(), **mistakes)
    mistakes["removes_first"] = False
    for number in range(1, 9):
        before = store.total
        made = len(disk.calls)
        store.add(number)
        sums.update(dict.fromkeys(range(made + 1, len(disk.calls)), (before, store.total)))
        sums[len(disk.calls)] = (store.total,)
    for made, state in fates(disk.calls, disk.start):
        if made in sums:
            found = SmallStore(SimulatedDisk.from_state(state.files).directory(), **mistakes).total
            if found not in sums[made]:
                return str(state)
    return None


def test_every_crash_state_of_a_small_store_has_what_was_synced():
    assert first_wrong_state() is None


@pytest.mark.parametrize(
    ("mistakes", "lost"),
    [
        ({"syncs": ("new file", "names")}, "log: lost: write"),
        ({"syncs": ("file", "names")}, "lost: write"),
        ({"syncs": ("file", "new file")}, "rename log.new to log"),
        ({"removes_first": True}, ""),
    ],
)
def test_a_sync_that_a_small_store_forgets_is_seen_in_a_crash_state(mistakes, lost):
    found = first_wrong_state(**mistakes)
    assert found is not None
    assert lost in found
