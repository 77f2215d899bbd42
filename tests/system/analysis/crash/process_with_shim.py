"""Run by test_system_calls.py in a process that was started with the fault shim; ends with 0.

python -P process_with_shim.py calls|clean
"""

import errno
import os
import sys
import tempfile
from collections import Counter
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from signal import SIGKILL

import crash.system_calls
from ackstate.position import Position
from ackstate.stores import sqlite_database
from crash.shim import Action, CallFault, loaded
from crash.steps import Step, StepKind
from crash.system_calls import SYSCALL_FAULTS, faulted_runs
from crash.system_calls.program import Script

SHIM = loaded()
NEVER = CallFault(1 << 40, Action.FAIL)


def expect(found, expected):
    assert found == expected, f"{found} instead of {expected}"


def said_error(call, *arguments):
    """Return the result of a call, or the name of its errno."""
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]


def calls_that_store_below_the_directory_are_counted_and_no_others(directory):
    file = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
    makes = [
        ("mkdir", (directory / "made").mkdir),
        ("open", (directory / "new").touch),
        ("write", lambda: os.write(file, b"0123456789")),
        ("write", lambda: os.pwrite(file, b"abc", 2)),
        ("write", lambda: os.writev(file, [b"x", b"yz"])),
        ("fsync", lambda: os.fsync(file)),
        ("fdatasync", lambda: os.fdatasync(file)),
        ("ftruncate", lambda: os.ftruncate(file, 5)),
        ("rename", lambda: (directory / "file").rename(directory / "renamed")),
        ("unlink", (directory / "renamed").unlink),
        (None, lambda: os.read(file, 1)),
        (None, lambda: os.write(os.pipe()[1], b"not a file")),
        (None, (directory.parent / f"{directory.name}-beside").touch),
    ]
    for name, make in makes:
        SHIM.arm(directory, CallFault(1, Action.FAIL, errno.EIO))
        failed, met = said_error(make), SHIM.met
        SHIM.arm(directory, NEVER)
        make()
        expect((met and met.name, failed == "EIO", SHIM.call_count), (name, name is not None, int(name is not None)))
    SHIM.disarm()


def a_short_write_stores_half_and_the_next_write_fails(directory):
    file = os.open(directory / "short", os.O_RDWR | os.O_CREAT)
    SHIM.arm(directory, CallFault(1, Action.SHORT, errno.ENOSPC))
    said = [said_error(os.write, file, b"0123456789") for _ in range(3)]
    SHIM.disarm()
    expect((said, (directory / "short").read_bytes()), ([5, "ENOSPC", 10], b"012340123456789"))


def a_failure_lasts_as_long_as_it_was_told(directory):
    SHIM.arm(directory, CallFault(2, Action.FAIL, errno.ENOSPC, lasts=3))
    said = [said_error((directory / str(number)).mkdir) for number in range(6)]
    SHIM.disarm()
    expect(said, [None, "ENOSPC", "ENOSPC", "ENOSPC", None, None])


def a_read_can_fail_and_writes_do_not_count_then(directory):
    (directory / "read").write_bytes(b"there")
    SHIM.arm(directory, CallFault(1, Action.FAIL_READ, errno.EIO))
    (directory / "written").write_bytes(b"x")
    file = os.open(directory / "read", os.O_RDONLY)
    said = [said_error(os.pread, file, 5, 0), os.pread(file, 5, 0)]
    SHIM.disarm()
    expect(said, ["EIO", b"there"])


def a_process_is_killed_before_in_the_midst_of_or_after_a_call(directory):
    stored = {Action.KILL_BEFORE: b"", Action.TORN_KILL: b"abcde", Action.KILL_AFTER: b"abcdefghij"}
    for action, more in stored.items():
        path = directory / action.name
        child = os.fork()
        if child == 0:
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            SHIM.arm(directory, CallFault(2, action))
            os.write(file, b"0123456789")
            os.write(file, b"abcdefghij")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = os.WTERMSIG(status), path.read_bytes(), SHIM.call_count, SHIM.met.name
        expect(found, (SIGKILL, b"0123456789" + more, 2, "write"))


def what_a_failed_sync_was_for_is_lost_although_it_is_read_and_a_later_sync_succeeds(directory):
    """Sector a was synced, then overwritten; B came after it. C was synced after the failed sync, D never.

    The bytes can be read until the cache is dropped. A sector that is written again and synced is not lost.
    """
    cases = {"plain": ("ABCD", "a.C", 3), "forgotten": ("a.CD", "a.C", 1), "rewritten": ("ABCD", "aBC", 2)}
    for case, expected in cases.items():
        path = directory / case / "gate"
        path.parent.mkdir()
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        SHIM.arm(path.parent, CallFault(5, Action.FAIL, errno.EIO))
        os.write(file, b"a" * 512)
        os.fsync(file)
        os.pwrite(file, b"A" * 512, 0)
        os.pwrite(file, b"B" * 512, 512)
        expect(said_error(os.fsync, file), "EIO")
        os.fsync(file)
        if case == "rewritten":
            os.pwrite(file, b"B", 512)
        os.pwrite(file, b"C" * 512, 1024)
        os.fsync(file)
        if case == "forgotten":
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pwrite(file, b"D" * 512, 1536)
        readable = path.read_bytes()
        SHIM.disarm()
        lost = SHIM.lose_unsynced(path.parent, shrinks=True)
        sectors = [text[::512].replace(b"\0", b".").decode() for text in (readable, path.read_bytes())]
        expect((*sectors, lost), expected)


def a_power_cut_takes_back_the_names_in_directories_that_were_not_synced(directory):
    (directory / "kept").mkdir()
    SHIM.arm(directory, NEVER)
    for name in ("a", "b", "c"):
        (directory / "kept" / name).write_bytes(b"")
    (directory / "kept" / "b").rename(directory / "kept" / "d")
    (directory / "lost").mkdir()
    (directory / "lost" / "e").write_bytes(b"")
    for path in (directory / "lost", directory / "kept"):
        sqlite_database.sync_path(path)
    (directory / "kept" / "a").rename(directory / "kept" / "f")
    (directory / "kept" / "c").unlink()
    (directory / "kept" / "g").write_bytes(b"")
    (directory / "kept" / "g").rename(directory / "kept" / "h")
    SHIM.disarm()
    # "a" has its old name again, "h" was never there, and "lost" is gone with the files synced in it.
    expect(SHIM.lose_unsynced(directory, shrinks=True), 4)
    expect(sorted(str(path.relative_to(directory)) for path in directory.rglob("*")), ["kept", "kept/a", "kept/d"])


CALLS = (
    calls_that_store_below_the_directory_are_counted_and_no_others,
    a_short_write_stores_half_and_the_next_write_fails,
    a_failure_lasts_as_long_as_it_was_told,
    a_read_can_fail_and_writes_do_not_count_then,
    what_a_failed_sync_was_for_is_lost_although_it_is_read_and_a_later_sync_succeeds,
    a_power_cut_takes_back_the_names_in_directories_that_were_not_synced,
    a_process_is_killed_before_in_the_midst_of_or_after_a_call,
)


def calls():
    with tempfile.TemporaryDirectory() as name:
        for number, check in enumerate(CALLS):
            directory = Path(name).resolve() / str(number)
            directory.mkdir()
            check(directory)


ALONE = Script((Step(StepKind.ACK, 0, Position(1, 5)),))
REOPENED = Script((Step(StepKind.ACK, 0, Position(1, 5)), Step(StepKind.REOPEN), Step(StepKind.PERSIST)))


def runs_of(played, faults, count):
    crash.system_calls.script = lambda _seed: played
    with closing(faulted_runs(0, SHIM, faults=faults)) as outcomes:
        return list(takewhile(lambda outcome: outcome.seed < count, outcomes))


def clean():
    """The product survives a fault of each action in short programs; to be killed after a call is before the next."""
    one_of_each = {fault.action: fault for fault in SYSCALL_FAULTS if fault.action is not Action.KILL_AFTER}
    reading = one_of_each.pop(Action.FAIL_READ)
    outcomes = runs_of(ALONE, [*one_of_each.values()], len(one_of_each))
    # Opened a second time, or nothing would be read.
    outcomes += runs_of(REOPENED, [reading], 1)
    assert not any(outcome.broken for outcome in outcomes), outcomes
    counts = sum((Counter(outcome.counts) for outcome in outcomes), Counter())
    # One for each call of a program, and one that is not faulted.
    expect(counts["completed_programs"], len(one_of_each) + 1)
    cycles = [outcome.cycles for outcome in outcomes]
    expect(sum(cycles), counts["calls"] + counts["completed_programs"])
    assert sum(cycles) > 100, cycles


if __name__ == "__main__":
    {"calls": calls, "clean": clean}[sys.argv[1]]()
