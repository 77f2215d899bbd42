"""L1: every state that a power cut could leave of an `SqliteStore`, opened and checked.

A run executes a seeded workload and then opens each state that a power cut during or after each call of the store could
leave: `crash.crash_states.sqlite` defines these states. The first one that breaks a promise ends the run, and its
workload is shortened to the necessary steps. One run in four has a message log that is trimmed: see `log_trims`.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from ackstate.analysis.crash.oracle import Broken, Promise
from crash.crash_states.execution import Execution
from crash.crash_states.log_trims import draw_log_workload, examine_log
from crash.crash_states.processes import runs_side_by_side
from crash.crash_states.recovery import broken_by_leftovers, open_cursors
from crash.crash_states.sqlite import RecordedStorage, Recoveries, states_of, temporary_place
from crash.crash_states.workload import (
    Examined,
    WorkloadFailure,
    broken_by_error,
    differing,
    draw_workload,
    judge,
    outcome,
)
from crash.promises import PromiseBrokenError

_STEPS = 12
_LOG_ONE_IN = 4
_TRIES = 12


def crash_states(first_seed):
    """Yield the runs of L1, in two processes; see `ackstate.analysis.crash.layer.Layer`."""
    return runs_side_by_side(run, first_seed)


def run(seed):
    random = Random(seed)
    if seed % _LOG_ONE_IN == _LOG_ONE_IN // 2:
        return outcome(seed, draw_log_workload(random), examine_log, tries=_TRIES)
    return outcome(seed, draw_workload(random, step_count=_STEPS), examine, tries=_TRIES)


def examine(workload):
    def recover(store):
        views = open_cursors(store, workload)
        if (leftover := broken_by_leftovers(store, workload.subscriptions)) is not None:
            raise PromiseBrokenError(Promise.I11, leftover)
        return views

    with temporary_place() as place:
        storage = RecordedStorage(place)
        execution = Execution(
            workload, storage.open, count_calls=storage.count_calls, kill=storage.kill, kill_after=storage.kill_after
        )
        failure = None
        with storage.stores:
            try:
                execution.run()
            except Exception as error:  # On a disk without faults no error may escape.
                broken = broken_by_error(error)
                failure = WorkloadFailure(broken, execution.step, (f"recovery: {broken.found}",))
        recoveries = Recoveries(place / "recoveries", recover, differing)
        judged, found = _first_failure(storage.copies, execution.moments, recoveries)
    counts = {
        "crash_states": judged,
        "recoveries": recoveries.opened_count,
        "states_of_recoveries": recoveries.crashed_count,
    }
    return Examined(judged + recoveries.crashed_count, execution.counts + Counter(counts), found or failure)


def _first_failure(copies, moments, recoveries):
    """Check the states that a power cut could leave; return their number, and the first failure."""
    judged = 0
    for made, state in states_of(copies):
        judged += 1
        opened = recoveries.open(state.copy)
        for moment in moments:
            if not moment.first_call <= made <= moment.last_call:
                continue
            broken = opened if isinstance(opened, Broken) else judge(opened, moment, is_worst=made % 2 == 0)
            if broken is not None:
                told = (f"power cut: {state.lost}", f"recovery: {broken.found}")
                return judged, WorkloadFailure(broken, moment.step, told)
    return judged, None
