"""A small private disk whose power can be cut: ext4 on a loop device over memory. Linux, and root.

Synced data (`fsync`) is in the memory; data that was only cached is lost by the cut, as by a real one. The cache of a
drive is not simulated: the loop device has none, so `nobarrier` reveals nothing here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import traceback
from contextlib import closing, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, final

from ackstate.analysis.crash.conversation import SubjectError
from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.layer import LayerSkippedError, leftovers, scratch_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

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
# The time for a run and its unmount to end after the request; then the process is killed, and the kernel unmounts.
_PATIENCE_S = 5.0
_BUSY_TRIES = 100
_BUSY_PAUSE_S = 0.01

_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


@final
class LoopDisk:
    """An empty ext4 mounted on `directory`; a context manager that unmounts and removes it at its end.

    A killed process leaves a mount behind unless it has private mounts (`with_private_mounts`), and in any case an
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
        self.directory = Path(tempfile.mkdtemp(prefix=scratch_prefix(_PURPOSE, _visible_pid())))
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
    image = os.memfd_create(scratch_prefix(_PURPOSE, _visible_pid()))
    os.truncate(image, SIZE_BYTES)
    return image


def _visible_pid() -> int:
    """Return the process id in `/proc`, which differs from `os.getpid` in a process namespace."""
    return int(Path("/proc/self").readlink().name)


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


def with_private_mounts(make: Callable[[], Iterator[_T]]) -> Iterator[_T]:
    """Yield the items of `make()`, each made on request, in a forked process with private mounts.

    It has the same patched code as this one. Its mounts and loop devices end with it in any case. It is the first of a
    process namespace: every process started in it, in any session, is killed with it, and then holds no mount and no
    device. ``/proc`` stays that of all processes, so that `os.getpid` differs there from ``/proc/self``. Closing this
    iterator closes the generator and ends the process.
    """
    here, there = Pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        here.close()
        _work_apart(make, there, parent_pid)
    there.close()
    yield from _items_of(here, pid)


def _items_of(here: Connection, pid: int) -> Iterator[Any]:
    """Request items from a process in `_work_apart` until there are no more; end the process with this iterator."""
    try:
        while True:
            # A process that has ended answers with the end of the pipe below.
            with suppress(BrokenPipeError):
                here.send(None)
            try:
                kind, content = here.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError("the process with private mounts was killed") from None
            if kind == "raised":
                raise content
            if kind == "ended":
                return
            yield content
    finally:
        here.close()
        _reap(pid)


def _work_apart(make: Callable[[], Iterator[object]], there: Connection, parent_pid: int) -> NoReturn:
    """Make items in a child process with private mounts, and end as it ends: two harnesses must not continue from here.

    The child does the work, because the creator of a process namespace is not in it.
    """
    status = 1
    try:
        # A Ctrl-C goes to the whole process group; the parent handles it and closes its end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        die_with(parent_pid)
        try:
            _leave_mounts()
        except LayerSkippedError as error:
            there.send(("raised", error))
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            # The state of the parent is not visible here. If it has ended, the other end of `there` is closed.
            die_with(os.getppid())
            _answer(make, there)
            os._exit(0)
        _, ended_status = os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(ended_status) & 0xFF
    finally:
        os._exit(status)


def _answer(make: Callable[[], Iterator[object]], there: Connection) -> None:
    """Make an item for each request; close the generator when the other end is closed."""
    answer: tuple[str, object] = ("ended", None)
    try:
        with closing(make()) as items:  # type: ignore[type-var] # a generator; an iterator need not
            while True:
                there.recv()
                there.send(("item", next(items)))
    except StopIteration:
        pass
    except EOFError:
        return
    except (LayerSkippedError, SubjectError, OSError) as error:
        answer = "raised", error
    except Exception:
        answer = "raised", RuntimeError(traceback.format_exc())
    with suppress(OSError):
        there.send(answer)


def _leave_mounts() -> None:
    """Make the mounts private, and start a new process namespace for the child processes."""
    # Without the second, these mounts would be propagated to all other processes.
    if (
        _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID) != 0
        or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
    ):
        raise LayerSkippedError(f"private mounts need root: {os.strerror(ctypes.get_errno())}")


def _reap(pid: int) -> None:
    """End a child process and wait for it."""
    ended = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([ended], [], [], _PATIENCE_S)
        if not readable:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        os.close(ended)
