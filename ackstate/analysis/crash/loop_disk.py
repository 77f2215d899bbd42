"""A small private disk whose power can be cut: ext4 on a loop device over memory. Linux, and root.

Synced data (`fsync`) is in the memory; data that was only cached is lost by the cut, as by a real one. The cache of a
drive is not simulated: the loop device has none, so `nobarrier` reveals nothing here.
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
from typing import TYPE_CHECKING, Self

from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.layer import LayerSkippedError, leftovers, scratch_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

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
