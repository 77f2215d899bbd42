"""Run an `ackstate` command in a process that dies with the one that started it.

python -P -m analysis.crash.child PARENT_PID COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from analysis.cli import main

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends; Linux only, elsewhere do nothing.

    Args:
        parent_pid: If it is not the parent any more, it has ended already, and this process does too.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(2)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    main(sys.argv[2:])
