"""Stops a child process."""

from __future__ import annotations

import os
import signal


def pause(process):
    """Stop a child with SIGSTOP, and return when all of its threads have stopped: until then one may take a request."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
