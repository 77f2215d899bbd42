"""The states that a power cut could leave of unsynced data."""

from __future__ import annotations

import zlib
from random import Random

import pytest

from ackstate.analysis.crash.traced_disk import CallKind, DiskCall, DiskHistory


class RecordedFile:
    """A file of a `RecordedDisk`; known by its number under any name."""

    def __init__(self, disk, name):
        self.disk, self.name, self.number = disk, name, disk.numbers[name]

    @property
    def size(self):
        return len(self.disk.contents[self.number])

    def read(self, offset, size):
        return self.disk.contents[self.number][offset : offset + size]

    def write(self, offset, data):
        before = self.disk.contents[self.number]
        self.note(CallKind.WRITE, offset, data)
        self.disk.contents[self.number] = before[:offset] + data + before[offset + len(data) :]

    def truncate(self, size):
        self.note(CallKind.TRUNCATE, size)
        self.disk.contents[self.number] = self.disk.contents[self.number][:size]

    def sync(self):
        self.note(CallKind.SYNC)

    def note(self, kind, offset=0, data=b""):
        names = {number: name for name, number in self.disk.numbers.items()}
        self.disk.calls.append(DiskCall(kind, names.get(self.number, self.name), self.number, offset, data))


class RecordedDisk:
    """A directory in memory, and the calls that led to it."""

    def __init__(self, files=()):
        self.start, self.calls = dict(files), []
        self.numbers = {name: number for number, name in enumerate(self.start)}
        self.contents = list(self.start.values())

    def names(self):
        return sorted(self.numbers)

    def create(self, name):
        self.numbers[name] = len(self.contents)
        self.contents.append(b"")
        self.calls.append(DiskCall(CallKind.CREATE, name, self.numbers[name]))
        return self.open(name)

    def open(self, name):
        return RecordedFile(self, name)

    def rename(self, name, new_name):
        self.calls.append(DiskCall(CallKind.RENAME, name, self.numbers[name], new_name=new_name))
        self.numbers[new_name] = self.numbers.pop(name)

    def remove(self, name):
        self.calls.append(DiskCall(CallKind.REMOVE, name, self.numbers.pop(name)))

    def sync(self):
        self.calls.append(DiskCall(CallKind.SYNC_DIRECTORY))


def drawn(disk, made=None, *, tries=400):
    """States that a power cut could leave after the last call, or the first few, and the losses of each."""
    history, chance = DiskHistory(disk.start), Random(1)
    for call in disk.calls[:made]:
        history.follow(call)
    return [history.drawn(chance) for _ in range(tries)]


def contents(disk):
    """The distinct states of `drawn`: the names with their bytes."""
    return {tuple(sorted(state.items())) for state, _ in drawn(disk)}


def of_f(disk):
    return {dict(state)["f"] for state in contents(disk)}


def written(*appends, files=None, sync_after=0):
    """A disk with one file ``f`` whose name is certain, after appends of which the first few were synced."""
    disk = RecordedDisk({"f": b""} if files is None else files)
    file = disk.open("f")
    for number, data in enumerate(appends, start=1):
        file.write(file.size, data)
        if number == sync_after:
            file.sync()
    return disk


def test_a_cut_that_was_not_synced_may_not_have_happened():
    disk = RecordedDisk({"f": b"abcdef"})
    file = disk.open("f")
    file.truncate(3)
    file.write(3, b"X")
    assert of_f(disk) == {b"abcdef", b"abc", b"abcX", b"abcXef"}
    file.sync()
    assert of_f(disk) == {b"abcX"}


def test_a_state_says_what_was_lost():
    cut = " (the file was not synced after that)"
    assert {tuple(losses) for _, losses in drawn(written(b"AB"))} == {
        (), (f"the disk lost: write bytes 0 to 2 of f{cut}",),
        (f"the disk lost: write bytes 0 to 2 of f, but the first 1{cut}",),
    }  # fmt: skip


class SmallStore:
    """Numbers in a log, each with its checksum; a full log is replaced by one with their sum."""

    def __init__(self, directory, *, syncs=("file", "new file", "names"), removes_first=False):
        self.directory, self.syncs, self.removes_first = directory, syncs, removes_first
        for name in set(directory.names()) - {"log"}:
            directory.remove(name)
        if "log" not in directory.names():
            self.replace_log(0)
        self.file, self.total = directory.open("log"), 0
        self.file.sync()
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
    """The losses of the first state found in which the sum of the small store is wrong."""
    disk, sums = RecordedDisk(), {}
    store = SmallStore(disk, **mistakes)
    mistakes["removes_first"] = False
    for number in range(1, 9):
        before = store.total
        made = len(disk.calls)
        store.add(number)
        sums.update(dict.fromkeys(range(made + 1, len(disk.calls)), (before, store.total)))
        sums[len(disk.calls)] = (store.total,)
    for made, sum_or_sums in sums.items():
        for state, losses in drawn(disk, made, tries=40):
            if SmallStore(RecordedDisk(state), **mistakes).total not in sum_or_sums:
                return "; ".join(losses)
    return None


def test_a_crash_state_of_a_small_store_has_what_was_synced():
    assert first_wrong_state() is None


@pytest.mark.parametrize(
    ("mistakes", "lost"),
    [
        ({"syncs": ("new file", "names")}, "write bytes"),
        ({"syncs": ("file", "names")}, "write bytes"),
        ({"syncs": ("file", "new file")}, "rename log.new to log"),
        ({"removes_first": True}, ""),
    ],
)
def test_a_sync_that_a_small_store_forgets_is_seen_in_a_crash_state(mistakes, lost):
    found = first_wrong_state(**mistakes)
    assert found is not None
    assert lost in found
