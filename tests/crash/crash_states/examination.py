"""L1: every state that a power cut could leave of a `FileStore` on a simulated disk, opened and checked.

A run executes a seeded workload and then, after each call of the disk, opens each state that a power cut there could
leave: `ackstate.analysis.crash.simulated_crash` defines these states. The first one that breaks a promise ends the run,
and its workload is shortened to the necessary steps. One run in twenty uses SQLite: see the module `sqlite`. One in
twenty has a message log that is trimmed: see `log_trims`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.simulated_crash import DiskHistory
from ackstate.analysis.crash.simulated_disk import CallKind, SimulatedDisk
from ackstate.stores.file import FileStore
from crash.crash_states.execution import Execution
from crash.crash_states.log_trims import draw_log_workload, examine_log
from crash.crash_states.moments import broken_by_error, judge
from crash.crash_states.processes import runs_side_by_side
from crash.crash_states.recovery import Recoveries
from crash.crash_states.sqlite import examine_sqlite
from crash.crash_states.story import Examined, WorkloadFailure, outcome
from crash.crash_states.workload import draw_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.oracle import Broken
    from ackstate.analysis.crash.simulated_crash import CrashState
    from ackstate.cursor.store import Store
    from ackstate.stores.store_directory import StoreDirectory
    from crash.crash_states.moments import Moment
    from crash.crash_states.recovery import RecoveredDisk
    from crash.crash_states.workload import Workload

_STEPS = 16
_STEPS_ON_SQLITE = 20
_SQLITE_ONE_IN = 20
_LOG_ONE_IN = 20
_COMPACTION_SIZE_MIN = 300
_CALLS_TOLD = 12


def open_file_store(directory: StoreDirectory) -> Store:
    """Open a `FileStore` that compacts so early that a short workload triggers it."""
    return FileStore.over(directory, compaction_size_min=_COMPACTION_SIZE_MIN, identity=b"simulate")


@final
class CrashStates:
    """The layer; see the module.

    Args:
        open_store: Opens the store that is crashed, in a directory of the simulated disk. The store must be compacted
            before its files exceed four times the live bytes by 1,200.
        sqlite_one_in: One run in this many uses SQLite; 0 for none.
    """

    def __init__(
        self, open_store: Callable[[StoreDirectory], Store] = open_file_store, *, sqlite_one_in: int = _SQLITE_ONE_IN
    ) -> None:
        self._open_store = open_store
        self._sqlite_one_in = sqlite_one_in

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """Yield the runs, starting with `first_seed`."""
        return runs_side_by_side(self.run, first_seed)

    def run(self, seed: int) -> RunOutcome:
        """Return the outcome of the run of a seed, which uses SQLite or trims a log for some seeds."""
        random = Random(seed)
        if self._sqlite_one_in and seed % self._sqlite_one_in == self._sqlite_one_in - 1:
            workload = draw_workload(random, step_count=_STEPS_ON_SQLITE)
            return outcome(seed, workload, examine_sqlite, tries=12)
        if seed % _LOG_ONE_IN == _LOG_ONE_IN // 2:
            return outcome(seed, draw_log_workload(random), lambda shorter: examine_log(shorter, self._open_store))
        workload = draw_workload(random, step_count=_STEPS)
        return outcome(seed, workload, lambda shorter: examine(shorter, self._open_store))


def crash_states(first_seed: int) -> Iterator[RunOutcome]:
    """Yield the runs of L1, in two processes; see `ackstate.analysis.crash.layer.Layer`."""
    return CrashStates()(first_seed)


def examine(workload: Workload, open_store: Callable[[StoreDirectory], Store]) -> Examined:
    """Execute a workload on a simulated disk, and check its crash states up to the first that breaks a promise."""
    disk = SimulatedDisk()
    execution = Execution(
        workload,
        lambda: open_store(disk.directory()),
        count_calls=lambda: len(disk.calls),
        kill=disk.kill,
        kill_after=disk.kill_after,
    )
    failure = None
    try:
        execution.run()
    except Exception as error:  # On a disk without faults no error may escape.
        failure = _failure(broken_by_error(error), execution.step, disk, len(disk.calls), None)
    judging = _CrashStateJudge(disk, execution.moments, Recoveries(workload, open_store))
    failure = judging.first_failure() or failure
    counts = execution.counts + Counter(judging.counts()) + Counter(store_compactions=_compaction_count(disk))
    return Examined(judging.cycles, counts, failure)


def _compaction_count(disk: SimulatedDisk) -> int:
    """Return the number of times that a log replaced another."""
    names = {call.new_name for call in disk.calls if call.kind is CallKind.RENAME}
    return max(0, sum(name.startswith("log-") for name in names) - 1)


@final
class _CrashStateJudge:
    """Checks every crash state of a disk."""

    def __init__(self, disk: SimulatedDisk, moments: Sequence[Moment], recoveries: Recoveries) -> None:
        self._disk = disk
        self._recoveries = recoveries
        self._judged = 0
        self._moments: dict[int, list[Moment]] = defaultdict(list)
        for moment in moments:
            for made in range(moment.first_call, moment.last_call + 1):
                self._moments[made].append(moment)

    @property
    def cycles(self) -> int:
        return self._judged + self._recoveries.counts.states_of_recoveries

    def counts(self) -> dict[str, int]:
        """Return the counts by name."""
        counts = self._recoveries.counts
        return {
            "distinct_states": counts.distinct_states,
            "recoveries": counts.recoveries,
            "states_of_recoveries": counts.states_of_recoveries,
        }

    def first_failure(self) -> WorkloadFailure | None:
        """Check the states after each call, and return the first failure."""
        history = DiskHistory(self._disk.start)
        for made in range(len(self._disk.calls) + 1):
            if made:
                history.follow(self._disk.calls[made - 1])
            if (failure := self._failure_after(made, history)) is not None:
                return failure
        return None

    def _failure_after(self, made: int, history: DiskHistory) -> WorkloadFailure | None:
        is_worst, clean = True, set()
        for state in history.states():
            self._judged += 1
            recovered = self._recoveries.recover(state.files)
            # States that open to the same result have the same verdict at one moment, except the worst state.
            if id(recovered) not in clean:
                failure = self._failure_in(recovered, made, state, is_worst=is_worst)
                if failure is not None:
                    return failure
                if not is_worst:
                    clean.add(id(recovered))
            is_worst = False
        return None

    def _failure_in(
        self, recovered: RecoveredDisk, made: int, state: CrashState, *, is_worst: bool
    ) -> WorkloadFailure | None:
        moments = self._moments[made]
        if recovered.broken is not None:
            return _failure(recovered.broken, moments[-1].step if moments else 0, self._disk, made, state)
        for moment in moments:
            broken = judge(recovered.views, moment, is_worst=is_worst)
            if broken is not None:
                return _failure(broken, moment.step, self._disk, made, state)
        return None


def _failure(broken: Broken, step: int, disk: SimulatedDisk, made: int, state: CrashState | None) -> WorkloadFailure:
    # Only the last calls are relevant.
    told = [f"disk: {call}" for call in disk.calls[max(0, made - _CALLS_TOLD) : made]]
    told += [f"power cut: {state}"] if state is not None else []
    return WorkloadFailure(broken, step, (*told, f"recovery: {broken.found}"))
