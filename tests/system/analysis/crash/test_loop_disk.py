"""A disk whose power can be cut: synced data stays, other data is gone, and nothing of the disk is left."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ackstate.analysis.crash import power_cuts as loop_disk
from ackstate.analysis.crash.power_cuts import LoopDisk, private_mounts
from ackstate.analysis.crash.runs import LayerSkippedError
from waiting import wait_until

pytestmark = pytest.mark.root

HOSTILE = "noauto_da_alloc,data=writeback"


def apart(story):
    """Run a story that yields its findings with private mounts."""
    with private_mounts(), closing(story()) as found:
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
    own = f"ackstate-disk-{pid}-"
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if own in line]
    # A memory file that is attached to a loop device has its name there; others may have theirs meanwhile.
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    points = list(Path(loop_disk.tempfile.gettempdir()).glob("ackstate-disk-*"))
    return mounts, [name for name in backing if own in name], points


@pytest.fixture(autouse=True)
def own_temporary_directory(power_can_be_cut, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_disk.tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("options", ["", HOSTILE])
def test_a_power_cut_keeps_what_was_synced_and_forgets_the_rest(options):
    def story():
        with LoopDisk(options) as disk:
            for number in range(3):
                save(disk.directory / "synced", b"%d" % number)
                (disk.directory / "unsynced").write_bytes(b"%d" % number)
                disk.cut_power()
                with pytest.raises(OSError, match=os.strerror(5)):
                    save(disk.directory / "late", b"late")
                disk.power_on()
                files = [path.name for path in disk.directory.iterdir() if path.is_file()]
                yield files, (disk.directory / "synced").read_bytes()

    assert apart(story) == [(["synced"], b"%d" % number) for number in range(3)]


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
        yield os.getpid()

    *found, pid = apart(story)
    assert found == [(b"synced", False), b"more"]
    assert left(pid) == ([], [], [])


def test_nothing_is_left_after_an_error():
    def fail_in_it():
        with private_mounts(), LoopDisk() as disk:
            assert [len(kind) for kind in left(os.getpid())] == [1, 1, 1]
            mounted_elsewhere = Path(f"/proc/{os.getppid()}/mounts").read_text()
            assert str(disk.directory) not in mounted_elsewhere, "its mounts are its own"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_it()
    assert left(os.getpid()) == ([], [], [])


ENDLESS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from ackstate.analysis.crash.power_cuts import LoopDisk
from ackstate.analysis.crash.power_cuts import private_mounts
with private_mounts(), LoopDisk() as disk:
    print(disk.directory, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_of_a_harness_that_is_killed_only_an_empty_directory_is_left_and_the_next_disk_removes_it(tmp_path):
    command = [sys.executable, "-P", "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as harness:
        point = Path(harness.stdout.readline().strip())
        worker = point.name.removeprefix("ackstate-disk-").partition("-")[0]
        assert [len(kind) for kind in left(worker)] == [0, 1, 1]
        harness.send_signal(signal.SIGKILL)
    wait_until(lambda: left(worker) == ([], [], [point]))
    assert list(point.iterdir()) == []

    def story():
        with LoopDisk() as disk:
            yield disk.directory

    assert apart(story) != [point]
    assert left(worker) == ([], [], [])


def test_a_directory_that_is_not_empty_is_not_removed(tmp_path):
    kept = tmp_path / "ackstate-disk-4194305-x" / "file"
    kept.parent.mkdir()
    kept.write_bytes(b"kept")

    def story():
        with LoopDisk():
            yield 0

    assert apart(story) == [0]
    assert kept.read_bytes() == b"kept"


def test_options_that_do_not_exist_are_a_reason_to_skip():
    def story():
        with LoopDisk("no_such_option"):
            yield 0

    with pytest.raises(LayerSkippedError, match="mount: Invalid argument"):
        apart(story)
    assert left(os.getpid())[::2] == ([], [])


def test_what_was_started_there_in_a_session_of_its_own_ends_too():
    with private_mounts():
        # No process waits for it, and no group has it.
        program = 'import os, time; print(os.readlink("/proc/self"), flush=True); time.sleep(600)'
        command = ["sh", "-c", f"setsid {sys.executable} -c '{program}' &"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
            pid = int(shell.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
