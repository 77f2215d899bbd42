"""A disk whose power can be cut: synced data stays, other data is gone, and nothing of the disk is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from itertools import count, islice
from pathlib import Path

import pytest

from ackstate.analysis.crash import loop_disk
from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.loop_disk import LoopDisk, with_private_mounts
from waiting import wait_until

HOSTILE = "noauto_da_alloc,data=writeback"


def apart(story):
    """Run a story that yields its findings in a process with mounts of its own."""
    with closing(with_private_mounts(story)) as found:
        return list(found)


def save(path, data):
    """Write a file that survives: its bytes, and its name."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    names = os.open(path.parent, os.O_RDONLY)
    os.fsync(names)
    os.close(names)


def left(pid):
    """The mounts, loop devices and mount points of the disks of a process, as this process sees them."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "ackstate-disk" in line]
    # A memory file that is attached to a loop device has its name there; others may have theirs meanwhile.
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    points = list(Path(loop_disk.tempfile.gettempdir()).glob("ackstate-disk-*"))
    return mounts, [name for name in backing if f"ackstate-disk-{pid}-" in name], points


@pytest.fixture(autouse=True)
def root_with_a_disk(request):
    if request.node.get_closest_marker("root"):
        request.getfixturevalue("power_can_be_cut")


@pytest.fixture(autouse=True)
def own_temporary_directory(root_with_a_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_disk.tempfile, "tempdir", str(tmp_path))


@pytest.mark.root
@pytest.mark.parametrize("options", ["", HOSTILE])
def test_a_power_cut_keeps_what_was_synced_and_forgets_the_rest(options):
    def story():
        with LoopDisk(options) as disk:
            for number in range(3):
                save(disk.directory / "synced", b"%d" % number)
                (disk.directory / "unsynced").write_bytes(b"%d" % number)
                disk.cut_power()
                disk.power_on()
                yield (disk.directory / "synced").read_bytes(), (disk.directory / "unsynced").exists()

    assert apart(story) == [(b"0", False), (b"1", False), (b"2", False)]


@pytest.mark.root
def test_after_the_cut_nothing_can_be_written_until_the_power_is_back():
    def story():
        with LoopDisk() as disk:
            disk.cut_power()
            try:
                save(disk.directory / "late", b"late")
            except OSError as error:
                yield error.strerror
            disk.power_on()
            save(disk.directory / "later", b"later")
            yield [path.name for path in disk.directory.iterdir() if path.is_file()]

    assert apart(story) == [os.strerror(5), ["later"]]


@pytest.mark.root
def test_mount_options_change_what_a_missing_sync_costs():
    """Renamed, and another file synced: the default saves the bytes by itself, the hostile options do not."""

    def story():
        with LoopDisk() as disk:
            for options in ("", HOSTILE):
                disk.power_on(options)
                save(disk.directory / "state", b"old")
                (disk.directory / "tmp").write_bytes(b"new")
                (disk.directory / "tmp").rename(disk.directory / "state")
                save(disk.directory / "another", b"")
                disk.cut_power()
                disk.power_on()
                yield (disk.directory / "state").read_bytes()

    assert apart(story) == [b"new", b""]


@pytest.mark.root
def test_a_file_that_someone_holds_open_does_not_keep_the_disk_down(monkeypatch):
    monkeypatch.setattr(loop_disk, "_BUSY_TRIES", 2)

    def story():
        with LoopDisk() as disk:
            save(disk.directory / "synced", b"synced")
            with (disk.directory / "held").open("wb"):
                disk.cut_power()
                disk.power_on()
                yield (disk.directory / "synced").read_bytes(), (disk.directory / "held").exists()
                save(disk.directory / "more", b"more")
                disk.cut_power()
                disk.power_on()
                yield (disk.directory / "more").read_bytes()
        yield loop_disk._visible_pid()

    *found, pid = apart(story)
    assert found == [(b"synced", False), b"more"]
    assert left(pid) == ([], [], [])


@pytest.mark.root
def test_nothing_is_left_of_a_generator_that_is_closed_early():
    ended, tell = os.pipe()

    def story():
        with LoopDisk():
            try:
                yield loop_disk._visible_pid()
                yield from count()
            finally:
                os.write(tell, b"closed")

    with closing(with_private_mounts(story)) as found:
        pid, *numbers = islice(found, 3)
        assert numbers == [0, 1]
        assert [len(kind) for kind in left(pid)] == [0, 1, 1], "its mounts are its own"
    os.close(tell)
    assert os.read(ended, 100) == b"closed"
    os.close(ended)
    assert left(pid) == ([], [], [])


ENDLESS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from ackstate.analysis.crash.loop_disk import LoopDisk
from ackstate.analysis.crash.loop_disk import with_private_mounts
def story():
    with LoopDisk() as disk:
        while True:
            yield disk.directory
for directory in with_private_mounts(story):
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.mark.root
@pytest.mark.slow
def test_of_a_harness_that_is_killed_only_an_empty_directory_is_left_and_the_next_disk_removes_it(tmp_path):
    command = [sys.executable, "-P", "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as harness:
        point = Path(harness.stdout.readline().strip())
        worker = point.name.removeprefix("ackstate-disk-").partition("-")[0]
        assert [len(kind) for kind in left(worker)] == [0, 1, 1]
        harness.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{worker}").exists())
    # By chance it sees that no process reads any more, and tidies up, before the kernel kills it.
    wait_until(lambda: left(worker) in (([], [], [point]), ([], [], [])))
    assert not point.exists() or list(point.iterdir()) == []

    def story():
        with LoopDisk() as disk:
            yield disk.directory

    assert apart(story) != [point]
    assert left(worker) == ([], [], [])


@pytest.mark.root
def test_a_directory_that_is_not_empty_is_not_removed(tmp_path):
    kept = tmp_path / "ackstate-disk-4194305-x" / "file"
    kept.parent.mkdir()
    kept.write_bytes(b"kept")

    def story():
        with LoopDisk():
            yield 0

    assert apart(story) == [0]
    assert kept.read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ({}, "need root"),
        ({"_mkfs": lambda: None}, r"mkfs\.ext4"),
        ({"_LOOP_CONTROL": Path("/nowhere")}, "no /nowhere"),
    ],
)
def test_it_says_what_is_missing(monkeypatch, planted, why):
    monkeypatch.setattr(os, "geteuid", lambda: 0 if planted else 1000)
    for name, value in planted.items():
        monkeypatch.setattr(loop_disk, name, value)
    with pytest.raises(LayerSkippedError, match=why):
        LoopDisk()


@pytest.mark.root
def test_options_that_do_not_exist_are_a_reason_to_skip():
    def story():
        with LoopDisk("no_such_option"):
            yield 0

    with pytest.raises(LayerSkippedError, match="mount: Invalid argument"):
        apart(story)
    assert left(os.getpid())[::2] == ([], [])


@pytest.mark.root
@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (lambda: 1 // 0, r"(?s)Traceback.*ZeroDivisionError"),
        # It is the first of its namespace, which can be killed from outside only.
        (signal.pause, "was killed"),
    ],
)
def test_a_process_that_ends_over_there_is_an_error_here(ends, why):
    def story():
        yield loop_disk._visible_pid()
        ends()

    with closing(with_private_mounts(story)) as found:
        pid = next(found)
        if ends is signal.pause:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=why):
            next(found)


@pytest.mark.root
def test_what_was_started_there_in_a_session_of_its_own_ends_too():
    def story():
        # No process waits for it, and no group has it.
        program = "import os, pathlib, time; print(pathlib.Path('/proc/self').readlink(), flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
        yield int(child.stdout.readline())

    with closing(with_private_mounts(story)) as found:
        pid = next(found)
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
