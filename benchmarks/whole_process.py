"""Runs commands as processes, and measures their time, CPU seconds and memory, including their child processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from tempfile import TemporaryFile
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_CHILD_SUBREAPER = 36


class Cost(NamedTuple):
    """The measurements of a command.

    Attributes:
        wall_s: The time until its process ended, as a user experiences it.
        cpu_s: The CPU time of it and its children, until the last of them ended.
        peak_mb: The most memory that one of these processes had at once, in MB (10^6 bytes).
        out: Its standard output.
        err: The same for standard error.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float
    out: str
    err: str


def cost_of(command: Sequence[str]) -> Cost:
    """Run a command to its end.

    Processes that outlive it, such as the virtual machine of a Python program, become children of this one, so that
    they are counted: it must have no others.

    Raises:
        CalledProcessError: It failed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        begun = perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        wall_s = cpu_s = peak_mb = 0.0
        while True:
            try:
                ended, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            cpu_s += used.ru_utime + used.ru_stime
            peak_mb = max(peak_mb, used.ru_maxrss * 1_024 / 1e6)
            if ended == process.pid:
                wall_s = perf_counter() - begun
                process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, out.read(), err.read())
        return Cost(wall_s, cpu_s, peak_mb, out.read(), err.read())
