"""L4: the power is cut under a live subject, on a real file system; only the kernel decides which writes survive.

Each run has its own disk, with mount options drawn from the seed, and several processes on it. Recoveries are cut, too:
some while they run, some after they have reported.

ext4 writes all names with the next sync of any file, with any mount options, so a missing sync of a directory costs
nothing there; L6 finds it (`ackstate.analysis.crash.traced_disk`).

The disk is small and private: ext4 on a loop device over memory. Linux, and root. Synced data (`fsync`) is in the
memory; data that was only cached is lost by the cut, as by a real one. The cache of a drive is not simulated: the loop
device has none, so `nobarrier` reveals nothing here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.process import subject_launch
from ackstate.analysis.crash.runs import (
    Crash,
    CrashTiming,
    LayerSkippedError,
    ProcessLayer,
    RunSize,
    leftovers,
    scratch_prefix,
)
from ackstate.analysis.crash.traced_disk import losses, snapshot
from ackstate.stores.sqlite_database import sync_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.oracle import RunOutcome
    from ackstate.analysis.crash.process import Subject, SubjectProcess


SIZE_BYTES = 24 * 1024 * 1024
_PURPOSE = "disk"
# linux/loop.h; the configuration is fd, block size, then loop_info64 whose flags are the one field that is not 0.
_LOOP_CONTROL = Path("/dev/loop-control")
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CONFIG = struct.Struct("=II 52x I 240x")
_AUTOCLEAR = 4
# linux/fs.h, linux/mount.h
_FS_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_MNT_DETACH = 2
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
# linux/sched.h
_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
_BUSY_TRIES = 100
_BUSY_PAUSE_S = 0.01

_libc = ctypes.CDLL(None, use_errno=True)


class LoopDisk:
    """An empty ext4 mounted on `directory`; a context manager that unmounts and removes it at its end.

    A killed process leaves a mount behind unless it has private mounts (`private_mounts`), and in any case an
    empty directory, which the next disk removes. The options are those of ext4, separated by commas.
    """

    def __init__(self, options: str = "") -> None:
        _check_possible()
        # A mount point of a killed process is empty, or it is the disk of a running one and is not removed.
        for left in leftovers(_PURPOSE, Path(tempfile.gettempdir())):
            with suppress(OSError):
                left.rmdir()
        self.options = options
        self._image = _empty_image()
        self._device = -1
        self.directory = Path(tempfile.mkdtemp(prefix=scratch_prefix(_PURPOSE, os.getpid())))
        try:
            self._attach()
            # Blocks of 4 KiB, as on larger disks.
            command = [_mkfs() or "", "-q", "-F", "-b", "4096", "-m", "0", self._device_path]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603
            self._mount()
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise LayerSkippedError(f"power cuts need an ext4 on a loop device: {_words(error)}") from error
        except BaseException:
            self.close()
            raise

    def cut_power(self) -> None:
        """Discard all unsynced data, and refuse every later call on its files with EIO until `power_on`."""
        mounted = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(mounted, _FS_IOC_SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))
        except OSError as error:
            raise LayerSkippedError(f"power cuts need FS_IOC_SHUTDOWN: {_words(error)}") from error
        finally:
            os.close(mounted)

    def power_on(self, options: str | None = None) -> None:
        """Unmount and mount again, which replays the journal of the file system; the users of its files have ended."""
        self.options = self.options if options is None else options
        if not self._unmount():
            # A process still has a file open. The old disk can write nothing more: continue with a copy.
            os.close(self._device)
            copy = _empty_image()
            os.sendfile(copy, self._image, 0, SIZE_BYTES)
            os.close(self._image)
            self._image = copy
            self._attach()
        self._mount()

    def close(self) -> None:
        """Unmount, detach and remove all of it. Closing twice does nothing."""
        self._unmount()
        for descriptor in (self._device, self._image):
            if descriptor >= 0:
                os.close(descriptor)
        self._device = self._image = -1
        with suppress(FileNotFoundError):
            self.directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def _device_path(self) -> str:
        return str(Path(f"/proc/self/fd/{self._device}").readlink())

    def _attach(self) -> None:
        """Attach the image to a free loop device, which detaches itself after its last user."""
        while True:
            with _LOOP_CONTROL.open("rb") as control:
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(self._image, 0, _AUTOCLEAR))
            except OSError as error:
                os.close(device)
                # Another process attached it first: take the next free device.
                if error.errno != errno.EBUSY:
                    raise
            else:
                self._device = device
                return

    def _mount(self) -> None:
        _call("mount", self._device_path, self.directory, "ext4", 0, self.options or None)

    def _unmount(self) -> bool:
        """Unmount; return whether the file system is really released, or only detached from the tree."""
        for _ in range(_BUSY_TRIES):
            try:
                _call("umount2", self.directory, 0)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    # Not mounted.
                    return True
                time.sleep(_BUSY_PAUSE_S)
            else:
                return True
        _call("umount2", self.directory, _MNT_DETACH)
        return False


def _check_possible() -> None:
    """Raise `LayerSkippedError` if a private disk is not possible here, before any change."""
    if not hasattr(os, "memfd_create"):
        raise LayerSkippedError("power cuts need Linux")
    if os.geteuid() != 0:
        raise LayerSkippedError("power cuts need root: they mount a file system of their own")
    if not _LOOP_CONTROL.exists():
        raise LayerSkippedError(f"power cuts need loop devices: there is no {_LOOP_CONTROL}")
    if _mkfs() is None:
        raise LayerSkippedError("power cuts need mkfs.ext4 (package e2fsprogs)")


def _mkfs() -> str | None:
    return shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _empty_image() -> int:
    # In memory, so that nothing stays on a disk after a kill, and a sync takes microseconds.
    image = os.memfd_create(scratch_prefix(_PURPOSE, os.getpid()))
    os.truncate(image, SIZE_BYTES)
    return image


def _call(name: str, *arguments: str | Path | int | None) -> None:
    """Call a function of the C library that returns 0 or sets errno, which is raised."""
    converted = [os.fsencode(argument) if isinstance(argument, (str, Path)) else argument for argument in arguments]
    if getattr(_libc, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _words(error: Exception) -> str:
    """Return the text of an error; for mkfs, its standard error."""
    complaint = (
        error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else ""
    )
    return complaint or str(error)


@contextmanager
def private_mounts() -> Iterator[None]:
    """Give this thread private mounts, for good: what it mounts ends with its process in any case.

    Every process that it starts in the block, in any session, is in a process namespace, and is killed at the end of
    the block or with this process; then it holds no mount and no device. ``/proc`` stays that of all processes. Those
    that this process has started itself must have been waited for by then, and it cannot start a thread meanwhile.
    """
    before = os.open("/proc/thread-self/ns/pid_for_children", os.O_RDONLY)
    try:
        # Without the second, these mounts would be propagated to all other processes.
        if (
            _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID) != 0
            or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
        ):
            raise LayerSkippedError(f"private mounts need root: {os.strerror(ctypes.get_errno())}")
        first = _first_process()
        try:
            yield
        finally:
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
    finally:
        _libc.setns(before, _CLONE_NEWPID)
        os.close(before)


def _first_process() -> int:
    """Start the first process of a namespace, whose end is that of all others in it."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent_pid)
            # A Ctrl-C goes to the whole process group. Processes whose parent has ended are now its own.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    return pid


MOUNT_OPTIONS = (
    "",
    # Replacing a file by a rename does not write the new bytes, and bytes are not written before the name that refers
    # to them. A program that renames and syncs nothing is caught three times as often as with the defaults.
    "noauto_da_alloc,data=writeback",
    # Bytes get their place when they are written, and not when they go to the disk: a file has its size at once, with
    # other bytes.
    "nodelalloc,data=writeback",
    # Tried, and no better than the defaults: commit=60, because no process lives that long, and nobarrier, because the
    # loop device has no cache to lose. data=journal hides most.
)
_SIZE = RunSize(lives=6, operations=100)
_ANOTHER_SYNCS_SHARE = 0.3
_EARLY_S = 0.02
_READ_S = 1.0


def power_cuts(
    first_seed: int, *, subject: Subject = "ours", mount_options: Sequence[str] = MOUNT_OPTIONS, size: RunSize = _SIZE
) -> Generator[RunOutcome]:
    """Run the layer; each run has one of the options of ext4, by seed."""

    @contextmanager
    def stage(chance: Random) -> Iterator[tuple[Path, Crash]]:
        with LoopDisk(chance.choice(mount_options)) as disk:
            directory = disk.directory / "subject"
            directory.mkdir()
            # The existence of its directory is not the responsibility of the subject.
            sync_path(disk.directory)
            yield directory, PowerCut(disk, chance)

    layer = ProcessLayer(
        name="power cuts",
        launches=[subject_launch(subject)],
        stage=stage,
        size=size,
        timing=CrashTiming(early_s=_EARLY_S),
        shrink_seconds=15.0,
    )
    with private_mounts():
        with LoopDisk() as disk:  # It says why there can be none, before a subject is started.
            disk.cut_power()
            disk.power_on()
        yield from layer(first_seed)


@final
class PowerCut(Crash):
    """The crash of the machine under a process, and the next boot.

    At random, the process is stopped when the power is cut: then the cut comes right after its last output, and never
    inside a system call. Or it runs: then the cut may come there. And at random, another program on the disk has synced
    its own file just before: ext4 then writes every changed name, including those of the subject, but not their bytes.
    """

    def __init__(self, disk: LoopDisk, chance: Random) -> None:
        self._disk = disk
        self._chance = chance
        self._stands_still = self._another_syncs = False
        self._losses: list[str] = []

    def __call__(self, process: SubjectProcess) -> list[Answer]:
        """See `Crash`. Only output read before the cut counts.

        A subject writes a line after the sync that it reports has returned; the line is read after it was written, and
        the power is cut after it was read. So the disk owes everything that was read, whether the process was stopped
        or not. Output between the last read and the cut is also owed, but is indistinguishable from output on a dead
        disk: it is not counted, which is never unfair. A stopped process has no such output.
        """
        self._stands_still = self._chance.random() < 0.5
        self._another_syncs = self._chance.random() < _ANOTHER_SYNCS_SHARE
        said: list[Answer] = []
        try:
            if self._stands_still:
                process.stop()
            # A running process may report for ever that no ack is durable.
            until = time.monotonic() + _READ_S
            while (answers := process.events(0)) and time.monotonic() < until:
                said += answers
        finally:
            self._cut(process)
        return said

    def __str__(self) -> str:
        how = "while it is stopped" if self._stands_still else "while it runs"
        before = "another program syncs a file of its own; then " if self._another_syncs else ""
        cut = f"{before}the power is cut {how}; mounted with {self._disk.options or 'default options'}"
        return "\n".join([cut, *self._losses])

    def _cut(self, process: SubjectProcess) -> None:
        if self._another_syncs:
            (self._disk.directory / "another").write_bytes(b"another")
            sync_path(self._disk.directory / "another")
        before = snapshot(directory := self._disk.directory / "subject")
        self._disk.cut_power()
        # Most processes fail on a dead disk and report it: too late to count.
        process.last_words()
        self._disk.power_on()
        self._losses = losses(before, snapshot(directory))
