"""Shows that a crash test that only kills the process proves little: it kills and unplugs two ways to save a file.

    sudo python examples/why_sigkill_is_not_enough.py [CRASHES]

The first way is common: write a new file, rename it over the old one, report it as saved. The second also calls fsync,
on the file before the rename and on the directory after it. Each way is crashed CRASHES times by SIGKILL and CRASHES
times by a power cut, on the same ext4 with the same mount options. Needs Linux and root; nothing is left behind.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ackstate.analysis.crash.power_cuts import LoopDisk, private_mounts
from ackstate.analysis.crash.runs import LayerSkippedError

STATE_BYTES = 20_000


class Disk(NamedTuple):
    """The mount options of a disk, and whether another program syncs on it."""

    mounted: str
    options: str
    another_syncs: bool


DISKS = (
    Disk("default", "", another_syncs=False),
    Disk("default", "", another_syncs=True),
    Disk("hostile", "noauto_da_alloc,data=writeback", another_syncs=True),
)


def save_naively(directory: Path, data: bytes) -> None:
    """Save a file. It is there when this returns, until the power is cut."""
    (directory / "state.tmp").write_bytes(data)
    (directory / "state.tmp").rename(directory / "state")


def save_correctly(directory: Path, data: bytes) -> None:
    """Save a file. It is there when this returns, also after a power cut."""
    with (directory / "state.tmp").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    (directory / "state.tmp").rename(directory / "state")
    names = os.open(directory, os.O_RDONLY)
    os.fsync(names)
    os.close(names)


Save = Callable[[Path, bytes], None]


class Crashed(NamedTuple):
    """Counts of wrong files after crashes of one kind.

    Attributes:
        went_back: The file existed, but was older than one that had been reported as saved.
        damaged: The file was empty, incomplete, or missing.
    """

    went_back: int
    damaged: int


class Result(NamedTuple):
    """The counts of one way to save on one disk."""

    protocol: str
    disk: Disk
    by_sigkill: Crashed
    by_power_cut: Crashed


def state(number: int) -> bytes:
    """Return the bytes of a state; an incomplete state differs from them."""
    return b"%d\n" % number * (STATE_BYTES // len(b"%d\n" % number))


def save_until_stopped(save: Save, directory: Path, first: int, tell: int) -> None:
    """Save one state after another, and report the number of each."""
    for number in range(first, sys.maxsize):
        save(directory, state(number))
        os.write(tell, number.to_bytes(8))


def sync_something_else(directory: Path) -> None:
    """Sync a file as another program on the disk might do; the kernel then writes all names, ours among them."""
    with (directory / "something-else").open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())


def crash(pid: int, disk: LoopDisk, *, power_cut: bool, another_syncs: bool) -> None:
    """Kill a process; cut the power of its disk before if `power_cut`."""
    # A stopped process saves and reports nothing, so its last report is from before the crash.
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    if another_syncs:
        sync_something_else(disk.directory)
    if power_cut:
        disk.cut_power()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if power_cut:
        disk.power_on()


def save_and_crash(save: Save, disk: LoopDisk, first: int, receipts: int, **how: bool) -> int:
    """Start a process that saves, crash it after some receipts, and return the number that it reported last."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_until_stopped(save, disk.directory, first, tell)
        finally:
            os._exit(1)
    os.close(tell)
    with open(told, "rb", buffering=0) as pipe:  # noqa: PTH123 - it has no path
        heard = b"".join(pipe.read(8) for _ in range(receipts))
        crash(pid, disk, **how)
        heard += pipe.read(1 << 20)
    return int.from_bytes(heard[-8:])


def found_number(path: Path) -> int | None:
    """Return the number of the state in a file; None if it holds no complete state."""
    data = path.read_bytes() if path.exists() else b""
    number = int(data.partition(b"\n")[0]) if data[:1].isdigit() else -1
    return number if data == state(number) else None


def crash_often(save: Save, at: Disk, crashes: int, *, power_cut: bool) -> Crashed:
    """Crash repeatedly on one disk, each time continuing with the files that the last crash left."""
    chance = random.Random(0)  # noqa: S311 - moments, no secrets
    went_back = damaged = last = 0
    with LoopDisk(at.options) as disk:
        save_correctly(disk.directory, state(last))
        for _ in range(crashes):
            receipts = chance.randint(1, 9)
            last = save_and_crash(save, disk, last + 1, receipts, power_cut=power_cut, another_syncs=at.another_syncs)
            found = found_number(disk.directory / "state")
            went_back += found is not None and found < last
            damaged += found is None
    return Crashed(went_back, damaged)


def results(crashes: int) -> Iterator[Result]:
    """Crash both ways on all disks; the process must be allowed to mount."""
    for protocol, save in (("rename", save_naively), ("fsync, rename, fsync", save_correctly)):
        for disk in DISKS:
            killed, cut = (crash_often(save, disk, crashes, power_cut=power_cut) for power_cut in (False, True))
            yield Result(protocol, disk, killed, cut)


def table(found: Iterator[Result], crashes: int) -> Table:
    """Return the results as a table, one row each."""
    shown = Table(title=f"of {crashes} crashes", caption=f"hostile: mounted with {DISKS[-1].options}")
    for title in ("how it saves", "mounted", "another\nprogram syncs"):
        shown.add_column(title)
    for title in ("SIGKILL:\nwrong", "power cut:\nwent back", "power cut:\ndamaged"):
        shown.add_column(title, justify="right")
    for protocol, disk, killed, cut in found:
        syncs = "yes" if disk.another_syncs else "no"
        shown.add_row(protocol, disk.mounted, syncs, *map(str, (sum(killed), *cut)))
    return shown


def main(crashes: str = "100") -> None:
    """Print the table."""
    try:
        with private_mounts():
            Console(width=100).print(table(results(int(crashes)), int(crashes)))
    except LayerSkippedError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(*sys.argv[1:2])
