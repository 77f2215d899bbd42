"""Starts the child processes that host Java for a store."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket


def start_child(module: str, *sockets: socket.socket) -> subprocess.Popen[bytes]:
    """Start a module of this library with the numbers of open sockets as arguments; it has no other input or output."""
    numbers = [each.fileno() for each in sockets]
    return subprocess.Popen(  # noqa: S603 - a module of ours
        # In a process group of its own it does not receive Ctrl-C.
        [sys.executable, "-P", "-m", module, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=numbers,
        process_group=0,
    )
