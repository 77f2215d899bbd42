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
import shutil
from collections import Counter
from dataclasses import replace
from itertools import count

from ackstate.analysis.crash.layer import LayerSkippedError, scratch_directory, shortest
from ackstate.analysis.crash.oracle import BrokenPromise, Promise, RunOutcome, counts, gravest, with_story
from ackstate.analysis.crash.shim import NEVER, Action, loaded
from crash.quiet import quiet
from crash.steps import LEDGERS
from crash.system_calls.attempt import Stage, SyscallFault, attempt
from crash.system_calls.program import script

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
    tally.update(cycles=1, **counts(tried.log.broken))
