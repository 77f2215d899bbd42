"""L4: the power is cut under a live subject, on a real file system; only the kernel decides which writes survive.

Each run has its own disk, with mount options drawn from the seed, and several processes on it. Recoveries are cut, too:
some while they run, some after they have reported.

ext4 writes all names with the next sync of any file, with any mount options, so a missing sync of a directory costs
nothing there; L6 finds it (`ackstate.analysis.crash.traced_disk`).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.layer import ProcessLayer, RunSize
from ackstate.analysis.crash.loop_disk import LoopDisk, private_mounts
from ackstate.analysis.crash.process import subject_launch
from ackstate.analysis.crash.runs import Crash, CrashTiming
from ackstate.analysis.crash.traced_disk import losses, snapshot
from ackstate.stores.sqlite_database import sync_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.oracle import RunOutcome
    from ackstate.analysis.crash.process import Subject, SubjectProcess

MOUNT_OPTIONS = (
    "",
    # Replacing a file by a rename does not write the new bytes, and bytes are not written before the name that refers
    # to them. A program that renames and syncs nothing is caught three times as often as with the defaults.
    "noauto_da_alloc,data=writeback",
    # Bytes get their place when they are written, and not when they go to the disk: a file has its size at once, with
    # other bytes.
    "nodelalloc,data=writeback",
    # Tried, and no better than the defaults: commit=60, because no process lives that long, and nobarrier, because the
    # loop device has no cache to lose. data=journal hides most.
)
_SIZE = RunSize(lives=6, operations=100)
_ANOTHER_SYNCS_SHARE = 0.3
_EARLY_S = 0.02
_READ_S = 1.0


def power_cuts(
    first_seed: int, *, subject: Subject = "ours", mount_options: Sequence[str] = MOUNT_OPTIONS, size: RunSize = _SIZE
) -> Iterator[RunOutcome]:
    """Run the layer; each run has one of the options of ext4, by seed."""

    @contextmanager
    def stage(chance: Random) -> Iterator[tuple[Path, Crash]]:
        with LoopDisk(chance.choice(mount_options)) as disk:
            directory = disk.directory / "subject"
            directory.mkdir()
            # The existence of its directory is not the responsibility of the subject.
            sync_path(disk.directory)
            yield directory, PowerCut(disk, chance)

    layer = ProcessLayer(
        name="power cuts",
        launches=[subject_launch(subject)],
        stage=stage,
        size=size,
        timing=CrashTiming(early_s=_EARLY_S),
        shrink_seconds=15.0,
    )
    with private_mounts():
        with LoopDisk() as disk:  # It says why there can be none, before a subject is started.
            disk.cut_power()
            disk.power_on()
        yield from layer(first_seed)


@final
class PowerCut(Crash):
    """The crash of the machine under a process, and the next boot.

    At random, the process is stopped when the power is cut: then the cut comes right after its last output, and never
    inside a system call. Or it runs: then the cut may come there. And at random, another program on the disk has synced
    its own file just before: ext4 then writes every changed name, including those of the subject, but not their bytes.
    """

    def __init__(self, disk: LoopDisk, chance: Random) -> None:
        self._disk = disk
        self._chance = chance
        self._stands_still = self._another_syncs = False
        self._losses: list[str] = []

    def __call__(self, process: SubjectProcess) -> list[Answer]:
        """See `Crash`. Only output read before the cut counts.

        A subject writes a line after the sync that it reports has returned; the line is read after it was written, and
        the power is cut after it was read. So the disk owes everything that was read, whether the process was stopped
        or not. Output between the last read and the cut is also owed, but is indistinguishable from output on a dead
        disk: it is not counted, which is never unfair. A stopped process has no such output.
        """
        self._stands_still = self._chance.random() < 0.5
        self._another_syncs = self._chance.random() < _ANOTHER_SYNCS_SHARE
        said: list[Answer] = []
        try:
            if self._stands_still:
                process.stop()
            # A running process may report for ever that no ack is durable.
            until = time.monotonic() + _READ_S
            while (answers := process.events(0)) and time.monotonic() < until:
                said += answers
        finally:
            self._cut(process)
        return said

    def __str__(self) -> str:
        how = "while it is stopped" if self._stands_still else "while it runs"
        before = "another program syncs a file of its own; then " if self._another_syncs else ""
        cut = f"{before}the power is cut {how}; mounted with {self._disk.options or 'default options'}"
        return "\n".join([cut, *self._losses])

    def _cut(self, process: SubjectProcess) -> None:
        if self._another_syncs:
            (self._disk.directory / "another").write_bytes(b"another")
            sync_path(self._disk.directory / "another")
        before = snapshot(directory := self._disk.directory / "subject")
        self._disk.cut_power()
        # Most processes fail on a dead disk and report it: too late to count.
        process.last_words()
        self._disk.power_on()
        self._losses = losses(before, snapshot(directory))
