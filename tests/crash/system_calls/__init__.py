"""L2: the n-th system call fails, stores half, or kills, for n = 1, 2, 3, ... until a run completes without meeting it.

A seed decides the program and its fault; the program then runs for each n, in a forked child if the fault
kills it. It uses a cursor as a real program would, continues after an error, and reports the promises that it received.
The store is recovered without faults, several times, and compared with them. A power cut follows most faults: it loses
data without a successful sync, including data of a failed sync that a later sync seemed to cover, and every name whose
directory was not synced (`shim`).

After SQLite's own anomaly testing, https://www.sqlite.org/testing.html section 3.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import signal
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.oracle import BrokenPromise, Promise, RunOutcome, gravest, with_story
from ackstate.analysis.crash.runs import LayerSkippedError, scratch_directory
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.position import Position
from ackstate.stores.sqlite import SqliteStore
from crash.observed_cursor import NUMBERING, SUBSCRIPTIONS, open_cursor, state_of
from crash.quiet import quiet
from crash.shim import NEVER, Action, CallFault, loaded
from crash.shrink import shortest
from crash.steps import LEDGERS
from crash.system_calls.program import FaultedProgram, ProgramLog, Setting, script

if TYPE_CHECKING:
    from pathlib import Path

    from crash.shim import FaultShim, SystemCall

_PROGRAM_S_MAX = 30
# In one of this many attempts, the recovery is killed as well, and another one must succeed.
_RECOVERY_KILLED_EVERY = 5
_RECOVERY_CALLS = 16
_LAST = Position(max(LEDGERS), LEDGERS[max(LEDGERS)] - 1)


class SyscallFault(NamedTuple):
    """A fault of a call."""

    name: str  # The fault in words
    action: Action  # The action of the fault
    error: int = 0  # Errno of a call that fails
    lasts: int = 1  # Number of consecutive calls that fail
    dies_later: int = 0  # The program is killed before the call this many calls later; 0 for never
    is_power_cut: bool = True  # Whether everything unsynced is lost at the end

    @property
    def kills(self):
        return self.dies_later > 0 or self.action in {Action.TORN_KILL, Action.KILL_BEFORE, Action.KILL_AFTER}

    def of(self, at):
        """Return the fault for call `at`; the first call is 1."""
        return CallFault(at, self.action, self.error, self.lasts, self.dies_later)


SYSCALL_FAULTS = (
    SyscallFault("fails with EIO", Action.FAIL, errno.EIO),
    SyscallFault("fails to read with EIO", Action.FAIL_READ, errno.EIO),
    SyscallFault("is killed before the call", Action.KILL_BEFORE, is_power_cut=False),
    SyscallFault("fails with ENOSPC", Action.FAIL, errno.ENOSPC),
    SyscallFault("fails with EIO, and loses power before the next call", Action.FAIL, errno.EIO, dies_later=1),
    SyscallFault("is killed half way through the call", Action.TORN_KILL, is_power_cut=False),
    SyscallFault("stores half, then ENOSPC", Action.SHORT, errno.ENOSPC),
    SyscallFault("loses power before the call", Action.KILL_BEFORE),
    SyscallFault("fails with EIO, and so do the 3 calls after it", Action.FAIL, errno.EIO, lasts=4),
    SyscallFault("is killed after the call", Action.KILL_AFTER, is_power_cut=False),
    SyscallFault("stores half, then EIO", Action.SHORT, errno.EIO),
    SyscallFault("fails with EIO, and loses power 4 calls later", Action.FAIL, errno.EIO, dies_later=4),
    SyscallFault("fails with ENOSPC, and so do the 3 calls after it", Action.FAIL, errno.ENOSPC, lasts=4),
    SyscallFault("loses power after the call", Action.KILL_AFTER),
    SyscallFault("fails with EIO twice, loses power 10 calls later", Action.FAIL, errno.EIO, lasts=2, dies_later=10),
    SyscallFault("fails with EIO 4 times, loses power 14 calls later", Action.FAIL, errno.EIO, lasts=4, dies_later=14),
)
"""The faults of programs, in turn."""
_PURPOSE = "calls"
_SHRINK_TRIES = 100
_SHRINK_S = 5.0


def system_calls(first_seed):
    """Yield the runs from a seed on; this process must have been started with the shim, as `python -m crash` is."""
    if (shim := loaded()) is None:
        raise LayerSkippedError("failing system calls needs the fault shim: a 64-bit Linux and a C compiler")
    yield from faulted_runs(first_seed, shim)


def faulted_runs(first_seed, shim, *, faults=SYSCALL_FAULTS):
    """Yield the runs of the seeds from `first_seed` on, in this process, or in its children if a fault kills."""
    # Garbage collection in a child would copy every shared page.
    gc.freeze()
    with scratch_directory(_PURPOSE) as directory, quiet("ackstate"):
        for seed in count(first_seed):
            fault = faults[seed % len(faults)]
            yield _Run(seed, Stage(shim, directory / "run", fault)).outcome()


class _Run:
    """The program of one seed, repeated with the next call faulted each time."""

    def __init__(self, seed, stage):
        self._seed, self._stage, self._script = seed, stage, script(seed)

    def outcome(self):
        """Run the program undisturbed, and then for each n until it does not meet its fault, or breaks a promise."""
        undisturbed = self._try(self._script, NEVER)
        broken = self._told(undisturbed, NEVER)
        counts, tally = undisturbed.log.counts + Counter(calls=undisturbed.calls), Counter()
        _add(tally, undisturbed)
        for at in count(1):
            tried = None if broken else self._try(self._script, at)
            if tried is None or tried.met is None:
                break
            _add(tally, tried)
            counts += tried.log.counts
            broken = self._told(tried, at) or self._leftovers(tried, undisturbed, at)
        counts["completed_programs"] = int(not broken)
        return RunOutcome(self._seed, **tally, broken=broken, counts=dict(counts))

    def _told(self, tried, at):
        """Return the broken promises, with the story of the shortest script that breaks the same at the same call."""
        if not tried.log.broken:
            return ()
        promise = gravest(found.promise for found in tried.log.broken)
        met = tried.met

        def attempt(steps):
            again = self._try(replace(self._script, steps=steps), at)
            is_same = again.met == met and any(found.promise is promise for found in again.log.broken)
            return (steps, again) if is_same else None

        _, found = shortest(self._script.steps, tried, attempt, tries=_SHRINK_TRIES, seconds=_SHRINK_S)
        return with_story(found.log.broken, self._story(found, at))

    def _story(self, tried, at):
        begun = f"{self._script.cursor_count} cursors, {self._script.setting.value}; the message log is {LEDGERS}"
        if tried.met is None:
            return (begun, *tried.log.history)
        faulted = f"{self._stage.fault.name}: call {at}, {tried.met.name} of {tried.met.path}"
        return (begun, f"the program {faulted}", *tried.log.history)

    def _leftovers(self, tried, undisturbed, at):
        """Check that a fault does not leave much more data than the program itself."""
        files_max, bytes_max = undisturbed.files_left + 4, 2 * undisturbed.bytes_left + (64 << 10)
        if tried.files_left <= files_max and tried.bytes_left <= bytes_max:
            return ()
        found = f"{tried.files_left} files of {tried.bytes_left} bytes, expected at most {files_max} of {bytes_max}"
        story = self._story(tried, at)
        return (BrokenPromise(Promise.I11, found, story),)

    def _try(self, played, at):
        directory = self._stage.directory
        directory.mkdir()
        try:
            return attempt(self._stage, played, at)
        finally:
            shutil.rmtree(directory)


def _add(tally, tried):
    tally.update(cycles=1, **oracle.counts(tried.log.broken))


class Stage(NamedTuple):
    """The environment of a program."""

    shim: FaultShim  # The shim of this process
    directory: Path  # Does not exist between two attempts
    fault: SyscallFault  # The fault of one call


class Attempt(NamedTuple):
    """The result of running a program."""

    calls: int  # Number of counted system calls
    met: SystemCall | None  # The faulted call; None if the program did not reach it
    log: ProgramLog  # The reports of the program, and broken promises
    files_left: int  # Files that the store has at the end
    bytes_left: int  # Their size


def attempt(stage, played, at):
    """Run a program once in the stage's directory, which must be empty, and check the recovery."""
    shim, directory, log = stage.shim, stage.directory, ProgramLog(played.cursor_count)

    def play(say):
        FaultedProgram(played, directory / "store", SqliteStore, say).run()

    perform = _forked if stage.fault.kills else _in_place
    said, status = perform(play, stage, stage.fault.of(at))
    calls, met = shim.call_count, shim.met
    for each in said:
        log.record(*each)
    _check_end(log, status, may_be_killed=met is not None and stage.fault.kills)
    if stage.fault.is_power_cut:
        lost = shim.lose_unsynced(directory, shrinks=at % 2 == 0)
        log.history.append(f"the power is cut: {lost} names and writes that no good sync covered are lost")
    if at % _RECOVERY_KILLED_EVERY == 0:
        killed_at = 1 + at // _RECOVERY_KILLED_EVERY % _RECOVERY_CALLS
        _forked(lambda *_: _recover(stage, played.cursor_count), stage, CallFault(killed_at, Action.KILL_BEFORE))
    _check_recovery(log, stage, played.cursor_count)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return Attempt(
        calls,
        met and met._replace(path=met.path.removeprefix(f"{directory}/")),
        log,
        len(files),
        sum(path.stat().st_size for path in files),
    )


def _in_place(play, stage, fault):
    """Run in this process, in half the time of a fork, if no fault kills; return what is said, and 0."""
    said = []
    stage.shim.arm(stage.directory, fault)
    try:
        play(lambda *each: said.append(each))
    finally:
        stage.shim.disarm()
    return said, 0


def _forked(play, stage, fault):
    """Run in a forked child with a fault; return what is said and its wait status."""
    parent_pid, (reader, writer) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            die_with(parent_pid)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_PROGRAM_S_MAX)
            stage.shim.arm(stage.directory, fault)
            play(lambda *each: _write_whole(writer, pickle.dumps(each)))
        finally:
            # The parent's buffers and resources must not be flushed or cleaned up twice.
            os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor
            said = []
            with suppress(EOFError, pickle.UnpicklingError):  # It may be killed while it says something.
                while True:
                    said.append(pickle.load(pipe))
    finally:
        _, status = os.waitpid(pid, 0)
    return said, status


def _write_whole(descriptor, line):
    while line:
        line = line[os.write(descriptor, line) :]


def _open_cursors(store, cursor_count):
    config = Setting.NATIVE.config
    return [open_cursor(store, subscription, config=config) for subscription in SUBSCRIPTIONS[:cursor_count]]


def _recover(stage, cursor_count):
    with closing(SqliteStore(stage.directory / "store")) as store:
        return [state_of(cursor) for cursor in _open_cursors(store, cursor_count)]


def _finish(stage, cursor_count):
    """Ack everything, close, and return the states before, and the number of ledgers after."""
    with closing(SqliteStore(stage.directory / "store")) as store:
        cursors = _open_cursors(store, cursor_count)
        before = [state_of(cursor) for cursor in cursors]
        for cursor in cursors:
            cursor.mark_delete(_LAST, now_ms=0)
            cursor.close(now_ms=0)
        return before, sum(len(store.ledgers.owned_by(owner)) for owner in store.ledgers.owners())


def _check_end(log, status, *, may_be_killed):
    """Check that the program ended as expected: killed by the fault, or at the end of its script."""
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if may_be_killed and was_killed:
        log.history.append("it is killed")
    elif not log.is_done:
        log.breaks(Promise.CONVERSATION, f"it ended with wait status {status:#x}")


def _check_recovery(log, stage, cursor_count):
    """Recover the store several times, and check it."""
    try:
        found = _recover(stage, cursor_count)
        for number, state in enumerate(found):
            log.history.append(f"recovery found of cursor {number}: {state}")
            log.judge(number, state)
        again, ledger_count = _finish(stage, cursor_count)
        for first, second in zip(found, again, strict=True):
            log.broken += oracle.differing(first, second)
        if ledger_count != cursor_count:
            log.breaks(Promise.I11, f"{ledger_count} ledgers of {cursor_count} cursors")
        for number, state in enumerate(_recover(stage, cursor_count)):
            if state.acked != NUMBERING.up_to(*_LAST):
                log.breaks(Promise.I5, f"cursor {number} is closed: {state}")
    except (CorruptStateError, UnsupportedVersionError) as error:
        log.breaks(Promise.I10, f"recovery raised {type(error).__name__}: {error}")
    except AckStateError as error:
        log.breaks(Promise.I5, f"recovery raised {type(error).__name__}: {error}")
    except Exception as error:  # Any error of a broken store is a finding.
        log.breaks(Promise.ERRORS, f"recovery raised {type(error).__name__}: {error}")
