"""Processes that end with their parent, so that a killed harness leaves none behind.

python -P .../dying.py PARENT_PID PROGRAM ARGUMENT... arranges that, and then executes the program, given by its path.
Started by its path, this module imports nothing else of the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends in any way; Linux only, elsewhere do nothing."""
    if (prctl := getattr(_libc, "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in {0, parent_pid}:  # It has ended already; 0 is one outside of the process namespace.
        os._exit(2)


def command_of(command: list[str]) -> list[str]:
    """Return a command that executes another one, given by the path of its program, and ends with this process."""
    # Without -P a directory of the current one, such as `analysis`, would hide a package.
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


def how_ended(status: int) -> str:
    """Return how a process ended, as the predicate of a sentence."""
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended by itself with status {os.WEXITSTATUS(status)}"


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    # The request to the kernel survives exec.
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command that was given
