"""L1: every state that a power cut could leave of an `SqliteStore`, opened and checked.

A run executes a seeded workload and then opens each state that a power cut during or after each call of the store could
leave: `crash.crash_states.sqlite` defines these states. The first one that breaks a promise ends the run, and its
workload is shortened to the necessary steps. One run in four has a message log that is trimmed: see `log_trims`.
"""

import gc
import logging
import os
import signal
from collections import deque
from itertools import count
from multiprocessing import get_context
from random import Random

from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.runs import scratch_directory
from crash.crash_states import sqlite
from crash.crash_states.cursors import draw_workload
from crash.crash_states.examination import outcome
from crash.crash_states.log_trims import draw_log_workload

_LOG_ONE_IN = 4
_PROCESS_COUNT = 2
_RUNS_AHEAD = 2
_RUN_S_MAX = 600.0


def crash_states(first_seed):
    """Yield the runs of L1; see `ackstate.analysis.crash.runs.Layer`."""
    return side_by_side(run, first_seed)


def run(seed):
    random = Random(seed)
    is_of_log = seed % _LOG_ONE_IN == _LOG_ONE_IN // 2
    return outcome(seed, (draw_log_workload if is_of_log else draw_workload)(random))


def side_by_side(run, first_seed):
    """Yield the results for `first_seed`, `first_seed` + 1, ... for ever, in order, made in two processes.

    They are forked, so that code patched in this process is patched in them, and end when this is closed.
    """
    with (
        scratch_directory("states") as directory,
        get_context("fork").Pool(_PROCESS_COUNT, _begin, (run, os.getpid(), directory)) as pool,
    ):
        seeds = count(first_seed)
        begun = deque(pool.apply_async(_run, (next(seeds),)) for _ in range(_PROCESS_COUNT * _RUNS_AHEAD))
        while True:
            found = begun.popleft().get(_RUN_S_MAX)
            begun.append(pool.apply_async(_run, (next(seeds),)))
            yield found


def _begin(run, parent_pid, directory):
    global _patched_run  # noqa: PLW0603 - of this process: one that is patched cannot be sent
    _patched_run = run
    # It is killed at its work: what it leaves is removed with the directory.
    sqlite.IN_MEMORY = directory
    die_with(parent_pid)
    # The harness handles both. The exception of a handler is lost in a callback of Python's own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Warnings of cursors about limits are disabled: the workloads reach limits on purpose.
    logging.disable(logging.WARNING)
    # What the parent left is not ours to destroy: its threads, for which a destructor may wait, are not here.
    gc.freeze()
    # A run keeps each of its states until it ends: repeated garbage collection among them would take a twelfth of the
    # time, and finds next to nothing.
    gc.disable()


def _run(seed):
    found = _patched_run(seed)
    gc.collect()
    return found
