"""Run by test_system_calls.py in a process that was started with the fault shim; prints its observations as JSON.

python -P process_with_shim.py calls|planted|clean|cuts
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict
from itertools import islice, takewhile
from pathlib import Path

from ackstate.analysis.crash.power_cuts import power_cuts_of
from ackstate.analysis.crash.process import subject_launch
from ackstate.analysis.crash.shim import Action, CallFault, loaded
from ackstate.cursor import persist
from ackstate.errors import AckStateError
from ackstate.position import Position
from ackstate.stores import sqlite_database
from ackstate.stores.sqlite_connection import SqliteConnection
from crash.steps import Step, StepKind
from crash.system_calls import layer as system_calls
from crash.system_calls.layer import (
    SYSCALL_FAULTS,
    SyscallFault,
    faulted_runs,
)
from crash.system_calls.program import Script

SHIM = loaded()
NEVER = CallFault(1 << 40, Action.FAIL)


def said_error(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]


def counted(directory):
    """Make every kind of call below a directory, and some elsewhere; of each, its name, whether it fails, its count."""
    file = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
    makes = [
        (directory / "made").mkdir,
        (directory / "new").touch,
        lambda: os.write(file, b"0123456789"),
        lambda: os.pwrite(file, b"abc", 2),
        lambda: os.writev(file, [b"x", b"yz"]),
        lambda: os.fsync(file),
        lambda: os.fdatasync(file),
        lambda: os.ftruncate(file, 5),
        lambda: (directory / "file").rename(directory / "renamed"),
        (directory / "renamed").unlink,
        lambda: os.read(file, 1),
        lambda: os.write(os.pipe()[1], b"not a file"),
        (directory.parent / f"{directory.name}-beside").touch,
    ]
    seen = []
    for make in makes:
        SHIM.arm(directory, CallFault(1, Action.FAIL, errno.EIO))
        failed, met = said_error(make), SHIM.met
        SHIM.arm(directory, NEVER)
        make()
        seen.append([met and met.name, failed == "EIO", SHIM.call_count])
    SHIM.disarm()
    return seen


def torn(directory):
    file = os.open(directory / "short", os.O_RDWR | os.O_CREAT)
    SHIM.arm(directory, CallFault(1, Action.SHORT, errno.ENOSPC))
    said = [said_error(os.write, file, b"0123456789") for _ in range(3)]
    SHIM.disarm()
    return [*said, (directory / "short").read_bytes().decode()]


def lasting(directory):
    SHIM.arm(directory, CallFault(2, Action.FAIL, errno.ENOSPC, lasts=3))
    said = [said_error((directory / str(number)).mkdir) for number in range(6)]
    SHIM.disarm()
    return said


def killed(directory, action):
    """Write ten bytes and ten more in a child, the second faulted; return its signal and the file."""
    path = directory / action.name
    child = os.fork()
    if child == 0:
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        SHIM.arm(directory, CallFault(2, action))
        os.write(file, b"0123456789")
        os.write(file, b"abcdefghij")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return [os.WTERMSIG(status), path.read_bytes().decode(), SHIM.call_count, SHIM.met.name]


def reading(directory):
    """Let a read fail; writes do not count then."""
    (directory / "read").write_bytes(b"there")
    SHIM.arm(directory, CallFault(1, Action.FAIL_READ, errno.EIO))
    (directory / "written").write_bytes(b"x")
    file = os.open(directory / "read", os.O_RDONLY)
    said = [said_error(os.pread, file, 5, 0), os.pread(file, 5, 0).decode()]
    SHIM.disarm()
    return said


def gate(directory, *, rewrites=False, forgets=False):
    """Sync, write on two sectors, fail the sync, write a third, sync; return the bytes that survive a power cut."""
    path = directory / "gate"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    SHIM.arm(directory, CallFault(5, Action.FAIL, errno.EIO))
    os.write(file, b"a" * 512)
    os.fsync(file)
    os.pwrite(file, b"A" * 512, 0)
    os.pwrite(file, b"B" * 512, 512)
    said = said_error(os.fsync, file)
    os.fsync(file)
    if rewrites:
        os.pwrite(file, b"B", 512)
    os.pwrite(file, b"C" * 512, 1024)
    os.fsync(file)
    if forgets:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pwrite(file, b"D" * 512, 1536)
    readable = path.read_bytes()
    SHIM.disarm()
    lost = SHIM.lose_unsynced(directory, shrinks=True)
    return [said, *(told(text) for text in (readable, path.read_bytes())), lost]


def unsynced_names(directory):
    """Make and rename files and directories, sync some of their directories; return those that survive a power cut."""
    (directory / "kept").mkdir()
    SHIM.arm(directory, NEVER)
    for name in ("a", "b", "c"):
        (directory / "kept" / name).write_bytes(b"")
    (directory / "kept" / "b").rename(directory / "kept" / "d")
    (directory / "lost").mkdir()
    (directory / "lost" / "e").write_bytes(b"")
    synced(directory / "lost")
    synced(directory / "kept")
    (directory / "kept" / "a").rename(directory / "kept" / "f")
    (directory / "kept" / "c").unlink()
    (directory / "kept" / "g").write_bytes(b"")
    (directory / "kept" / "g").rename(directory / "kept" / "h")
    SHIM.disarm()
    lost = SHIM.lose_unsynced(directory, shrinks=True)
    return [sorted(str(path.relative_to(directory)) for path in directory.rglob("*")), lost]


def synced(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def told(text):
    return "".join(chr(byte) if byte else "." for byte in text[::512])


def calls():
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        cases = {
            "counted": counted,
            "torn": torn,
            "lasting": lasting,
            "reading": reading,
            "gate": gate,
            "gate_forgotten": lambda place: gate(place, forgets=True),
            "unsynced_names": unsynced_names,
            "gate_rewritten": lambda place: gate(place, rewrites=True),
        }
        seen = {}
        for case, play in cases.items():
            (directory / case).mkdir()
            seen[case] = play(directory / case)
        for action in (Action.TORN_KILL, Action.KILL_BEFORE, Action.KILL_AFTER):
            seen[action.name] = killed(directory, action)
        return seen


def swallow_failed_sync():
    """Plant: a commit whose sync fails is taken for one that succeeded; SQLite has undone it."""
    undo = SqliteConnection._undo

    def undo_or_trust(connection, calls, error, *, is_committing):
        if not is_committing or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_IOERR:
            return undo(connection, calls, error, is_committing=is_committing)
        for call in calls:
            call.is_withdrawn = True
        return True

    SqliteConnection._undo = undo_or_trust


def never_sync_directory():
    """Plant: the names in a store's directory are never synced; SQLite syncs some of them itself."""
    sync = sqlite_database.sync_path
    sqlite_database.sync_path = lambda path: None if path.is_dir() else sync(path)


def never_sync_above():
    """Plant: the name of a new directory is not synced."""
    sqlite_database.sync_names_above = lambda _directory: None


def raise_what_comes():
    """Plant: a full disk is told in words that are not ours."""
    SqliteConnection._in_our_words = lambda _connection, error: RuntimeError(f"panic: {error}")


def never_sync():
    """Plant: SQLite is told not to sync."""
    off = tuple(
        "synchronous = OFF" if pragma == "synchronous = FULL" else pragma for pragma in sqlite_database._PRAGMAS
    )
    sqlite_database._PRAGMAS = off


def pass_a_group_by():
    """Plant: where a group of cursors cannot be written, they are taken for written."""

    append = persist._append

    def append_together(appends):
        outcomes = append(appends)
        if len(outcomes) == 1:
            return outcomes
        return [0 if isinstance(each, AckStateError) else each for each in outcomes]

    persist._append = append_together


GATE = SyscallFault("fails with EIO, and loses power before the next call", Action.FAIL, errno.EIO, dies_later=1)
ENOSPC = SyscallFault("fails with ENOSPC", Action.FAIL, errno.ENOSPC)
POWER = SyscallFault("loses power before the call", Action.KILL_BEFORE)
# Two cursors whose acks are written with one sync, where each has a ledger already.
GROUP = Script(
    (
        Step(StepKind.ACK, 0, Position(1, 5)),
        Step(StepKind.ACK, 1, Position(1, 7)),
        Step(StepKind.PERSIST_ALL),
    ),
    cursor_count=2,
    endures=True,
)
ALONE = Script((Step(StepKind.ACK, 0, Position(1, 5)),))
REOPENED = Script((Step(StepKind.ACK, 0, Position(1, 5)), Step(StepKind.REOPEN), Step(StepKind.PERSIST)))
PLANTED = {
    "swallow_failed_sync": (swallow_failed_sync, GATE),
    "never_sync": (never_sync, POWER),
    "never_sync_above": (never_sync_above, POWER),
    "raise_what_comes": (raise_what_comes, ENOSPC),
    "pass_a_group_by": (pass_a_group_by, GATE, GROUP),
}


def planted():
    return {name: in_child(lambda case=case: run_planted(*case)) for name, case in PLANTED.items()}


def run_planted(plant, fault, played=None):
    plant()
    if played is not None:
        system_calls.script = lambda _seed: played
    with closing(faulted_runs(0, SHIM, faults=[fault])) as outcomes:
        for outcome in takewhile(lambda outcome: outcome.seed < 2, outcomes):
            if outcome.broken:
                break
    return asdict(outcome)


def in_child(play):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(play()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:  # noqa: PTH123 - a descriptor
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)


def cuts():
    """Return for each bug that costs names the first outcome of the power cuts that caught it, or the last of 20."""
    plants = {"none": lambda: None, "never_sync_directory": never_sync_directory, "never_sync_above": never_sync_above}
    return {name: in_child(lambda plant=plant: run_cuts(plant)) for name, plant in plants.items()}


def run_cuts(plant):
    plant()
    run_count = 20 if plant in {never_sync_directory, never_sync_above} else 3
    with closing(power_cuts_of(subject_launch("ours"), mount_options=[""])(1)) as outcomes:
        for outcome in islice(outcomes, run_count):
            if outcome.broken:
                break
    return asdict(outcome)


def clean():
    """Return the outcomes of a fault of each action; short programs."""
    one_of_each = {fault.action: fault for fault in SYSCALL_FAULTS}
    reading = one_of_each.pop(Action.FAIL_READ)
    return [
        *outcomes_of(ALONE, [*one_of_each.values()]),
        # Opened a second time, or nothing would be read.
        *outcomes_of(REOPENED, [reading]),
    ]


def outcomes_of(played, faults):
    """Run one program once with each fault."""
    system_calls.script = lambda _seed: played
    with closing(faulted_runs(0, SHIM, faults=faults)) as outcomes:
        return [asdict(outcome) for outcome in takewhile(lambda found: found.seed < len(faults), outcomes)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"calls": calls, "planted": planted, "clean": clean, "cuts": cuts}[sys.argv[1]]()))
