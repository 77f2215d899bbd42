"""Run by test_system_calls.py in a process that was started with the fault shim; prints its observations as JSON.

python -P process_with_shim.py calls|planted|clean|cuts
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice, takewhile
from pathlib import Path

from ackstate.analysis.crash.layers.power_cuts import PowerCuts
from ackstate.analysis.crash.shim import Action, CallFault, loaded
from ackstate.analysis.crash.subject_launch import subject_launch
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor.persist import persist_all
from ackstate.cursor.store import StoreError
from ackstate.position import Position
from ackstate.stores import kernel_directory, sqlite_database
from ackstate.stores.kernel_directory import KernelDirectory, KernelFile
from ackstate.stores.sqlite import SqliteStore
from crash.system_calls import layer as system_calls
from crash.system_calls.layer import (
    SYSCALL_FAULTS,
    SyscallFault,
    faulted_runs,
    small_file_store,
)
from crash.system_calls.script import Script

SHIM = loaded()
NEVER = CallFault(1 << 40, Action.FAIL)


def said_error(call, *arguments):
    """Return the result of a call, or the name of its errno."""
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
    """Store half of a write, and return its result and those of the next ones."""
    file = os.open(directory / "short", os.O_RDWR | os.O_CREAT)
    SHIM.arm(directory, CallFault(1, Action.SHORT, errno.ENOSPC))
    said = [said_error(os.write, file, b"0123456789") for _ in range(3)]
    SHIM.disarm()
    return [*said, (directory / "short").read_bytes().decode()]


def lasting(directory):
    """Let three calls in a row fail."""
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
    """Sync a file or a directory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def told(text):
    """Return the first byte of each sector."""
    return "".join(chr(byte) if byte else "." for byte in text[::512])


def calls():
    """Return the observations of each case."""
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
    """Plant: a sync of a file that fails is taken for one that succeeded."""
    sync = KernelFile.sync
    KernelFile.sync = lambda file: said_error(sync, file)


def sync_again():
    """Plant: a sync of a file that fails is tried again, and believed."""
    sync = KernelFile.sync

    def sync_until_well(file):
        if said_error(sync, file) is not None:
            sync(file)

    KernelFile.sync = sync_until_well


def trust_the_cache():
    """Plant: opening syncs the log and takes the bytes it reads for those on the disk."""
    KernelFile.settle = KernelFile.sync


def never_sync():
    """Plant: nothing is synced."""
    KernelFile.sync = lambda _file: None


def never_sync_directory():
    """Plant: the names in a file store's directory are never synced."""
    KernelDirectory.sync = lambda _directory: None


def never_sync_above():
    """Plant: the name of a new directory is not synced; SQLite syncs the names in it itself."""
    kernel_directory.sync_names_above = sqlite_database.sync_names_above = lambda _directory: None


def ignore_short_write():
    """Plant: whatever a write says it stored, all is taken for stored."""

    def write(file, offset, data):
        os.pwrite(file._descriptor, data, offset)

    KernelFile.write = write


def raise_what_comes():
    """Plant: a full disk is told in words that are not ours."""
    write = KernelFile.write

    def write_or_panic(file, offset, data):
        try:
            write(file, offset, data)
        except OSError as error:
            raise RuntimeError("panic") from error

    KernelFile.write = write_or_panic


def no_sqlite_sync():
    """Plant: SQLite is told not to sync."""
    off = tuple(
        "synchronous = OFF" if pragma == "synchronous = FULL" else pragma for pragma in sqlite_database._PRAGMAS
    )
    sqlite_database._PRAGMAS = off


def pass_a_group_by():
    """Plant: where a group of cursors cannot be written, they are taken for written."""

    append = persist_all._append

    def append_together(rounds, begin):
        if len(rounds) == 1:
            return append(rounds, begin)
        prepared = {persister: each.prepare() for persister, each in rounds.items()}
        with suppress(StoreError):
            next(iter(rounds)).journal.store.ledgers.append_all(list(prepared.values()))
        return {
            persister: each.commit(persister.journal.appended(*prepared[persister]))
            for persister, each in rounds.items()
        }

    persist_all._append = append_together


GATE = SyscallFault("fails with EIO, and loses power before the next call", Action.FAIL, errno.EIO, dies_later=1)
SHORT = SyscallFault("stores half, then EIO", Action.SHORT, errno.EIO)
ENOSPC = SyscallFault("fails with ENOSPC", Action.FAIL, errno.ENOSPC)
GATE_LATER = SyscallFault("fails with EIO, and loses power 2 calls later", Action.FAIL, errno.EIO, dies_later=2)
GATE_MUCH_LATER = SyscallFault("fails with EIO, and loses power 12 calls later", Action.FAIL, errno.EIO, dies_later=12)
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
    "swallow_failed_sync": (swallow_failed_sync, GATE, small_file_store),
    "sync_again": (sync_again, GATE_LATER, small_file_store),
    "trust_the_cache": (trust_the_cache, GATE_MUCH_LATER, small_file_store),
    "never_sync": (never_sync, POWER, small_file_store),
    "never_sync_directory": (never_sync_directory, POWER, small_file_store),
    "never_sync_above": (never_sync_above, POWER, small_file_store),
    "never_sync_above_sqlite": (never_sync_above, POWER, SqliteStore),
    "ignore_short_write": (ignore_short_write, SHORT, small_file_store),
    "raise_what_comes": (raise_what_comes, ENOSPC, small_file_store),
    "no_sqlite_sync": (no_sqlite_sync, POWER, SqliteStore),
    "pass_a_group_by": (pass_a_group_by, GATE, small_file_store, GROUP),
}


def planted():
    """Return for each planted bug the first run that caught it, or the last."""
    return {name: in_child(lambda case=case: run_planted(*case)) for name, case in PLANTED.items()}


def run_planted(plant, fault, open_store, played=None):
    """Plant a bug and return the first outcome that caught it, or the last of two runs."""
    plant()
    if played is not None:
        system_calls.script = lambda _seed: played
    with closing(faulted_runs(0, SHIM, stores=[open_store], faults=[fault])) as outcomes:
        for outcome in takewhile(lambda outcome: outcome.seed < 2, outcomes):
            if outcome.broken:
                break
    return asdict(outcome)


def in_child(play):
    """Return the result of a function in a forked child, which keeps its patches to itself."""
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
    """Plant a bug in our cursor on a `FileStore`, and return the first outcome that caught it, or the last."""
    plant()
    run_count = 20 if plant in {never_sync_directory, never_sync_above} else 3
    with closing(PowerCuts(subject_launch("ours"), mount_options=[""])(1)) as outcomes:
        for outcome in islice(outcomes, run_count):
            if outcome.broken:
                break
    return asdict(outcome)


def clean():
    """Return the outcomes of a fault of each action on a `FileStore`, and of one on SQLite; short programs."""
    one_of_each = {fault.action: fault for fault in SYSCALL_FAULTS}
    reading = one_of_each.pop(Action.FAIL_READ)
    return [
        *outcomes_of(ALONE, small_file_store, [*one_of_each.values()]),
        # Opened a second time, or nothing would be read.
        *outcomes_of(REOPENED, small_file_store, [reading]),
        *outcomes_of(ALONE, SqliteStore, SYSCALL_FAULTS[:1]),
    ]


def outcomes_of(played, open_store, faults):
    """Run one program once with each fault."""
    system_calls.script = lambda _seed: played
    with closing(faulted_runs(0, SHIM, stores=[open_store], faults=faults)) as outcomes:
        return [asdict(outcome) for outcome in takewhile(lambda found: found.seed < len(faults), outcomes)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"calls": calls, "planted": planted, "clean": clean, "cuts": cuts}[sys.argv[1]]()))
