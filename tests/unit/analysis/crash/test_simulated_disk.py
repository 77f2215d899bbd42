"""Every state that a power cut could leave of unsynced data."""

from __future__ import annotations

import zlib

import pytest

from ackstate.analysis.crash.simulated_disk import CallKind, DiskCall, DiskHistory, fates


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


def contents(disk):
    """Every state that a power cut after the last call could leave, as names and bytes."""
    history = DiskHistory(disk.start)
    for call in disk.calls:
        history.follow(call)
    states = [dict(state.files) for state in history.states()]
    return states[0], states


def written(*appends, files=None, sync_after=0):
    """A disk with one file ``f`` whose name is certain, after appends of which the first few were synced."""
    disk = RecordedDisk({"f": b""} if files is None else files)
    file = disk.open("f")
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
    disk = RecordedDisk({"f": b"a" * 1_300})
    disk.open("f").write(500, b"b" * 600)
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
    disk = RecordedDisk({"f": b"abcdef"})
    file = disk.open("f")
    file.truncate(3)
    file.write(3, b"X")
    worst, states = contents(disk)
    assert worst == {"f": b"abcdef"}
    assert {state["f"] for state in states} == {b"abcdef", b"abc", b"abcX", b"abcXef", b"abc\0"}
    file.sync()
    assert contents(disk) == ({"f": b"abcX"}, [{"f": b"abcX"}])


def test_names_not_synced_are_lost_in_any_order():
    disk = RecordedDisk({"old": b"1"})
    directory = disk
    directory.create("new").sync()
    directory.remove("old")
    worst, states = contents(disk)
    assert worst == {"old": b"1"}
    assert sorted(map(sorted, states)) == [[], ["new"], ["new", "old"], ["old"]]
    directory.sync()
    assert contents(disk)[1] == [{"new": b""}]


def test_a_renamed_name_may_be_certain_and_its_bytes_not():
    disk = RecordedDisk({"current": b"old"})
    directory = disk
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
    disk = RecordedDisk({"a": b"A", "b": b"B"})
    disk.rename("a", "b")
    assert contents(disk)[1] == [{"a": b"A", "b": b"B"}, {"b": b"A"}]


def test_too_many_states_at_once_are_varied_one_file_at_a_time():
    disk = RecordedDisk({"f": b"", "g": b""})
    directory = disk
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
    """The first state that a power cut could leave in which the sum of the small store is wrong, in words."""
    disk, sums = RecordedDisk(), {}
    store = SmallStore(disk, **mistakes)
    mistakes["removes_first"] = False
    for number in range(1, 9):
        before = store.total
        made = len(disk.calls)
        store.add(number)
        sums.update(dict.fromkeys(range(made + 1, len(disk.calls)), (before, store.total)))
        sums[len(disk.calls)] = (store.total,)
    for made, state in fates(disk.calls, disk.start):
        if made in sums:
            found = SmallStore(RecordedDisk(state.files), **mistakes).total
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
