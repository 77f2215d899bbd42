"""Run a program, let one of its system calls be befallen, and hold what it left against what it said."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.position import Position
from analysis.crash.conversation import read_answer, read_request, tell
from analysis.crash.layer import BrokenPromise
from analysis.crash.layers.fault_shim import Action, Call, Fault, FaultShim
from analysis.crash.layers.faulted_program import (
    HONEST_PROMISE,
    OPENS_PROMISE,
    TYPED_PROMISE,
    FaultedProgram,
    Script,
    acked,
    open_cursor,
)
from analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from analysis.crash.verdict import Life
from analysis.trace.entry_set import EntrySet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cursor.store import Store

    Runs = list[tuple[int, int, int]]

NEVER = 1 << 40
"""A call that no program reaches."""
_PROGRAM_S_MAX = 30
# Every so many attempts, the recovery is killed as well, and another one must cope.
_RECOVERY_KILLED_EVERY = 5
_RECOVERY_CALLS = 16
_PR_SET_PDEATHSIG = 1


class Misfortune(NamedTuple):
    """What befalls a call.

    Attributes:
        name: In words.
        action: What happens to it.
        error: Errno of a call that fails.
        lasts: How many calls in a row fail.
        dies_later: The program is killed before the call that comes so many calls later; 0 for never.
        is_power_cut: Whether everything that was not synced is lost at the end.
    """

    name: str
    action: Action
    error: int = 0
    lasts: int = 1
    dies_later: int = 0
    is_power_cut: bool = True

    @property
    def kills(self) -> bool:
        """Whether the program does not outlive it."""
        return self.dies_later > 0 or self.action in {Action.TORN_KILL, Action.KILL_BEFORE, Action.KILL_AFTER}

    def of(self, at: int) -> Fault:
        """Return the fault for call `at`, the first of which is 1."""
        return Fault(at, self.action, self.error, self.lasts, self.dies_later)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a program is run, and with what.

    Attributes:
        shim: As this process has it.
        directory: Does not exist between two attempts.
        open_store: Opens a store in a directory, or begins one there.
        misfortune: What befalls one call.
    """

    shim: FaultShim
    directory: Path
    open_store: Callable[[Path], Store]
    misfortune: Misfortune


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of a program.

    Attributes:
        calls: How many system calls were counted.
        met: The call that was befallen; None if it did not come to that.
        history: What the program did and met, one line each.
        broken: Every promise seen broken.
        lost_durable: As `RunOutcome`.
        invented: As `RunOutcome`.
        gauge_mismatch: As `RunOutcome`.
        files_left: Files that the store has at the end.
        bytes_left: Their size.
    """

    calls: int
    met: Call | None
    history: tuple[str, ...]
    broken: tuple[BrokenPromise, ...]
    lost_durable: int
    invented: int
    gauge_mismatch: int
    files_left: int
    bytes_left: int


def attempt(stage: Stage, played: Script, at: int) -> Attempt:
    """Run a program once in the stage's directory, which must be empty, and judge what it left.

    Args:
        stage: Where and with what.
        played: What the program does.
        at: Which call is befallen: 1 is the first, `NEVER` none.
    """
    shim, directory, witness = stage.shim, stage.directory, _Witness(dict(played.ledgers))

    def play(say: Callable[[bytes], None]) -> None:
        FaultedProgram(played, directory / "store", stage.open_store, say).run()

    perform = _forked if stage.misfortune.kills else _in_place
    said, status = perform(play, stage, stage.misfortune.of(at))
    calls, met = shim.call_count, shim.met
    for line in said.splitlines(keepends=True):
        witness.hear(line)
    witness.check_end(status, may_be_killed=met is not None and stage.misfortune.kills)
    if stage.misfortune.is_power_cut:
        lost = shim.lose_unsynced(directory, shrinks=at % 2 == 0)
        witness.history.append(f"the power is cut: {lost} writes that no good sync covered are lost")
    if at % _RECOVERY_KILLED_EVERY == 0:
        killed_at = 1 + at // _RECOVERY_KILLED_EVERY % _RECOVERY_CALLS
        _forked(lambda _say: _recover(stage, witness.ledgers), stage, Fault(killed_at, Action.KILL_BEFORE))
    witness.check_recovery(stage)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return Attempt(
        calls,
        met and met._replace(path=met.path.removeprefix(f"{directory}/")),
        tuple(witness.history),
        tuple(witness.broken),
        witness.lost_durable,
        witness.invented,
        witness.gauge_mismatch,
        len(files),
        sum(path.stat().st_size for path in files),
    )


def _in_place(play: Callable[[Callable[[bytes], None]], object], stage: Stage, fault: Fault) -> tuple[bytes, int]:
    """Do something here, where no fault of it kills, in half the time of a fork; return what it said, and 0."""
    lines: list[bytes] = []
    stage.shim.arm(stage.directory, fault)
    try:
        play(lines.append)
    finally:
        stage.shim.disarm()
    return b"".join(lines), 0


def _forked(play: Callable[[Callable[[bytes], None]], object], stage: Stage, fault: Fault) -> tuple[bytes, int]:
    """Do something in a child with a fault, and return all that it said and its wait status."""
    parent_pid, (reader, writer) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _die_with(parent_pid)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_PROGRAM_S_MAX)
            stage.shim.arm(stage.directory, fault)
            play(lambda line: _write_whole(writer, line))
        finally:
            # Nothing of the parent's may be flushed or cleaned up twice.
            os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor
            said = pipe.read()
    finally:
        _, status = os.waitpid(pid, 0)
    return said, status


def _write_whole(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _die_with(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(2)


def _recover(stage: Stage, ledgers: Mapping[int, int]) -> Runs:
    """Open the store and the cursor, and return what it holds."""
    with closing(stage.open_store(stage.directory / "store")) as store:
        return acked(open_cursor(store, ledgers), ledgers)


def _finish(stage: Stage, ledgers: Mapping[int, int]) -> tuple[Runs, int]:
    """Ack everything, close, and return what was held before and how many ledgers the store has then."""
    with closing(stage.open_store(stage.directory / "store")) as store:
        cursor = open_cursor(store, ledgers)
        held = acked(cursor, ledgers)
        last_id = max(ledgers)
        cursor.mark_delete(Position(last_id, ledgers[last_id] - 1), now_ms=0)
        cursor.close(now_ms=0)
        return held, sum(len(store.ledgers.owned_by(owner)) for owner in store.ledgers.owners())


@final
class _Witness:
    """What the harness heard from a program, life by life, and what it found wrong."""

    def __init__(self, ledgers: Mapping[int, int]) -> None:
        self.ledgers = ledgers
        self.history: list[str] = []
        self.broken: list[BrokenPromise] = []
        self.lost_durable = self.invented = self.gauge_mismatch = 0
        self._life = Life(ledgers)
        self._is_done = False
        # What a recovery may find: what was held at the start of this life, and what each persist was to write.
        self._states: list[Runs] = [[]]

    def hear(self, line: bytes) -> None:
        """Take in what the program said."""
        match json.loads(line):
            case {"op": _}:
                operation = read_request(line)
                assert isinstance(operation, Operation)
                self._life.asked(operation)
                self.history.append(_told(operation))
            case {"opened": list(runs)}:
                self._begin_life([(ledger_id, first, end) for ledger_id, first, end in runs])
            case {"writing": list(runs)}:
                self._states.append([(ledger_id, first, end) for ledger_id, first, end in runs])
            case {"failed": str(text)}:
                self.history.append(f"  raised {text}")
            case {"broken": str(promise), "found": str(found)}:
                self._is_done = True
                self._break(promise, found)
            case {"done": True}:
                self._is_done = True
                self.history.append("close")
            case _:
                answer = read_answer(line)
                tell(self._life, answer)
                self.history += [f"  durable: {numbers}" for numbers in [getattr(answer, "numbers", None)] if numbers]

    def check_end(self, status: int, *, may_be_killed: bool) -> None:
        """Make sure that the program ended as it should: killed by the fault, or at the end of its script."""
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if may_be_killed and was_killed:
            self.history.append("it is killed")
        elif not self._is_done:
            self._break("a program with a failed call goes on", f"it ended with wait status {status:#x}")

    def check_recovery(self, stage: Stage) -> None:
        """Recover what was left, several times, and judge it."""
        try:
            found = _recover(stage, self.ledgers)
            self.history.append(f"recovery found {found}")
            self._judge(found)
            again, ledger_count = _finish(stage, self.ledgers)
            if again != found:
                self._break("I5: recovering twice gives the same", f"first {found}, then {again}")
            if ledger_count != 1:
                self._break("I11: no fault leaves a ledger behind", f"{ledger_count} ledgers")
            for run in (self._all() - _entries(_recover(stage, self.ledgers))).runs():
                self._break("I5: what was recovered can be written on", f"{run} was acked, closed, and is gone")
        except (CorruptStateError, UnsupportedVersionError) as error:
            self._break(HONEST_PROMISE, f"recovery raised {type(error).__name__}: {error}")
        except AckStateError as error:
            self._break(OPENS_PROMISE, f"recovery raised {type(error).__name__}: {error}")
        except Exception as error:  # Whatever a broken store raises is looked for.
            self._break(TYPED_PROMISE, f"recovery raised {type(error).__name__}: {error}")

    def _begin_life(self, runs: Runs) -> None:
        self.history.append(f"open: {runs}")
        self._judge(runs)
        self._life = Life(self.ledgers, _entries(runs))
        self._states = [runs]

    def _judge(self, runs: Runs) -> None:
        verdict = self._life.judge(Report([EntryRun(*run) for run in runs]))
        self.lost_durable += len(verdict.lost_durable)
        self.invented += len(verdict.invented)
        self.gauge_mismatch += verdict.is_gauge_passed
        if verdict.lost_durable:
            self._break("I2: a durable receipt survives any crash", f"lost {list(verdict.lost_durable.runs())}")
        if verdict.invented:
            self._break("I1: an unacked message is never treated as acked", f"found {list(verdict.invented.runs())}")
        if verdict.is_gauge_passed:
            found = f"{len(verdict.redelivered)} come again, the gauge said at most {verdict.redelivery_max}"
            self._break("I3: at most the gauge comes again", found)
        if runs not in self._states:
            found = f"{runs}, after {self._states[-2:]} were to be written last"
            self._break("I9: a persist is there as a whole or not at all", found)

    def _all(self) -> EntrySet:
        return _entries([(ledger_id, 0, entry_count) for ledger_id, entry_count in self.ledgers.items()])

    def _break(self, promise: str, found: str) -> None:
        self.broken.append(BrokenPromise(promise, found))


def _entries(runs: Runs) -> EntrySet:
    entries = EntrySet()
    for run in runs:
        entries.add_run(*run)
    return entries


def _told(operation: Operation) -> str:
    if operation.kind is OperationKind.PERSIST:
        return "persist"
    return f"{operation.number}: {operation.kind.value} {operation.ledger_id}:{operation.entry_id}"
