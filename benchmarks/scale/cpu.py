"""How much the cores have worked for this process and all that it started: Java and its Python workers, too."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Return the CPU seconds so far, in steps of 10 ms; those of an ended process count for its parent.

    Source: proc_pid_stat(5).
    """
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name before may have spaces and brackets.
            words = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(status.parent.name)
        children[int(words[1])].append(pid)
        ticks[pid] = sum(map(int, words[11:15]))
    found, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        found += ticks.get(pid, 0)
        pids += children[pid]
    return found * _TICK_S
