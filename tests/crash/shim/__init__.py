"""Makes the n-th system call of this process that stores below a directory fail, stop half way, or kill.

A small C library does the work (``shim.c`` documents the intercepted calls and the bytes that it keeps). It must be
loaded when the process starts, by ``LD_PRELOAD``; `compiled` builds it, `environment` names it, and `loaded` returns
the control of a process that was started with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash import power_cuts
from ackstate.analysis.crash.power_cuts import LoopDisk
from ackstate.analysis.crash.runs import LayerSkippedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCE = Path(__file__).with_name("shim.c")
NEVER = 1 << 40
"""A call number that no program reaches."""
_COMPILE_S_MAX = 60.0


class Action(IntEnum):
    """The action of a fault; numbered as in ``shim.c``."""

    FAIL = 0
    """It fails without effect. A failed sync loses its data, as in the kernel."""
    FAIL_READ = 1
    """A reading call fails; storing calls are not counted."""
    SHORT = 2
    """A write stores and reports half, and the next write to that file fails; any other call fails."""
    TORN_KILL = 3
    """A write stores half and the process is killed; before any other call it is killed."""
    KILL_BEFORE = 4
    """The process is killed before the call."""
    KILL_AFTER = 5
    """The process is killed after the call, and never receives the result."""


class CallFault(NamedTuple):
    """A fault of one call."""

    at: int  # Number of the call: 1 is the first counted one
    action: Action  # The action
    error: int = 0  # Errno of a call that fails
    lasts: int = 1  # FAIL and FAIL_READ: number of consecutive calls that fail
    dies_later: int = 0  # The process is killed before the call this many calls later; 0 for never


class SystemCall(NamedTuple):
    """A system call: its name, without ``p``, ``at`` and ``64``, and its path."""

    name: str
    path: str


@final
class FaultShim:
    """The library in this process. Its counts and kept bytes are shared with children forked from now on.

    Only the process that arms it is counted. A parent may call the other methods after that child has ended.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.ackstate_fault_arm.argtypes = (
            ctypes.c_char_p,
            ctypes.c_long,
            *[ctypes.c_int] * 2,
            *[ctypes.c_long] * 2,
        )
        library.ackstate_fault_undo.argtypes = (ctypes.c_char_p, ctypes.c_int)
        library.ackstate_fault_count.restype = ctypes.c_long
        library.ackstate_fault_undo.restype = ctypes.c_long
        library.ackstate_fault_call.restype = ctypes.c_char_p
        library.ackstate_fault_path.restype = ctypes.c_char_p
        library.ackstate_fault_name_count.restype = ctypes.c_long
        library.ackstate_fault_name_inode.restype = ctypes.c_ulong
        for each in (library.ackstate_fault_name, library.ackstate_fault_old_name):
            each.restype = ctypes.c_char_p
        for each in (library.ackstate_fault_name, library.ackstate_fault_old_name, library.ackstate_fault_name_inode):
            each.argtypes = (ctypes.c_long,)

    def arm(self, directory: Path, fault: CallFault) -> None:
        """Count this process's calls from 1, on paths below a directory without links."""
        path, (at, action, error, lasts, dies_later) = os.fsencode(directory), fault
        dies_at = dies_later and at + dies_later
        if self._library.ackstate_fault_arm(path, at, action, error, lasts, dies_at) != 0:
            raise OSError(f"the fault shim cannot be armed on {directory}")

    def record_names(self, directory: Path) -> None:
        """Record the names that this process creates below a directory; no call fails."""
        self.arm(directory, CallFault(NEVER, Action.FAIL))

    def disarm(self) -> None:
        """Stop counting."""
        self._library.ackstate_fault_disarm()

    @property
    def call_count(self) -> int:
        """Number of calls counted since it was armed, including one that killed."""
        return int(self._library.ackstate_fault_count())

    @property
    def met(self) -> SystemCall | None:
        """The first faulted call, or None."""
        name, path = self._library.ackstate_fault_call(), self._library.ackstate_fault_path()
        return SystemCall(name.decode(), os.fsdecode(path)) if name else None

    def lose_unsynced(self, directory: Path, *, shrinks: bool) -> int:
        """Restore the names and bytes that a power cut would leave below a directory: only successfully synced ones."""
        if self._library.ackstate_fault_overflowed():
            raise OSError("more was written without a sync than the fault shim keeps")
        lost = self.take_names_back()
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.is_symlink():
                count = self._library.ackstate_fault_undo(os.fsencode(path), shrinks)
                if count < 0:
                    raise OSError(f"{path} cannot be given its old bytes")
                lost += count
        return lost

    def take_names_back(self) -> int:
        """Undo creations and renames in directories that were not synced since; return the number of names."""
        lost = 0
        for at in reversed(range(self._library.ackstate_fault_name_count())):
            path = Path(os.fsdecode(self._library.ackstate_fault_name(at)))
            old_path = os.fsdecode(self._library.ackstate_fault_old_name(at))
            inode = self._library.ackstate_fault_name_inode(at)
            # A file that was removed since stays removed; its name may now belong to another file.
            if not os.path.lexists(path) or os.lstat(path).st_ino != inode:
                continue
            lost += 1
            if old_path and not os.path.lexists(old_path):
                path.rename(old_path)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return lost


def loaded() -> FaultShim | None:
    """Return the library if this process was started with it."""
    library = ctypes.CDLL(None)
    return FaultShim(library) if hasattr(library, "ackstate_fault_arm") else None


def lose_names_in_power_cuts() -> None:
    """Make the power cuts of L4 undo the names of directories that were not synced, if this process has the library."""
    if (shim := loaded()) is None:
        return
    disks: list[LoopDisk] = []

    class ForgetfulDisk(LoopDisk):
        def __enter__(self):
            disks.append(self)
            return self

        def __exit__(self, *error):
            disks.remove(self)
            super().__exit__(*error)

        def power_on(self, options=None):
            super().power_on(options)
            shim.take_names_back()

    os.register_at_fork(after_in_child=lambda: disks and shim.record_names(disks[-1].directory.resolve()))
    power_cuts.LoopDisk = ForgetfulDisk


def compiled(directory: Path) -> Path:
    """Compile the library into a directory and return its path; takes about 0.2 s."""
    if not sys.platform.startswith("linux"):
        raise LayerSkippedError(f"failing system calls needs Linux, this is {sys.platform}")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LayerSkippedError("failing system calls needs a C compiler: there is no cc, gcc or clang")
    library = directory / "fault_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S_MAX)
    except subprocess.CalledProcessError as error:
        said = next(iter(error.stderr.decode(errors="replace").splitlines()), "nothing")
        raise LayerSkippedError(f"the fault shim does not compile: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LayerSkippedError(f"the fault shim does not compile: {error}") from error
    return library


def environment(library: Path) -> Mapping[str, str]:
    """Return this process's environment with the library first in ``LD_PRELOAD``."""
    preloaded = os.environ.get("LD_PRELOAD")
    return {**os.environ, "LD_PRELOAD": f"{library}:{preloaded}" if preloaded else str(library)}
