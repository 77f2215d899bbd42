"""L4: the power is cut under a live subject, on a real file system; only the kernel decides which writes survive.

Each run has its own disk, with mount options drawn from the seed, and several processes on it. Recoveries are cut, too:
some while they run, some after they have reported.

Another loss is simulated: ext4 writes all names with the next sync of any file, with any mount options, so a missing
sync of a directory costs nothing there. For a subject in Python, if this process was started with the fault shim
(`ackstate.analysis.crash.shim`), every name in an unsynced directory is removed.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.layers.power_cuts_worker import ShimUnavailableError, cuts_with_shim
from ackstate.analysis.crash.loop_disk import LoopDisk
from ackstate.analysis.crash.private_mounts import with_private_mounts
from ackstate.analysis.crash.process_layer import RunSize, live_through, process_layer_runs
from ackstate.analysis.crash.process_runs import CrashTiming, ProcessRuns, check_beginning
from ackstate.analysis.crash.serve import is_class_name
from ackstate.analysis.crash.shim import NEVER, Action, CallFault, loaded
from ackstate.analysis.crash.subject_process import PATIENCE_S, subject_launch
from ackstate.stores.directory_lock import sync_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.subject_process import Launch, SubjectProcess

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
SIZE = RunSize(lives=6, operations=100)
"""The size of a run."""
_ANOTHER_SYNCS_SHARE = 0.3
_EARLY_S = 0.02
_READ_S = 1.0


@final
class PowerCuts:
    """The layer.

    Args:
        launch: Starts the subject; None for ours.
        mount_options: Options of ext4; one of them by seed.
        size: The size of a run.
        patience_s: Time limit for an answer of a subject.
    """

    def __init__(
        self,
        launch: Launch | None = None,
        *,
        mount_options: Sequence[str] = MOUNT_OPTIONS,
        size: RunSize = SIZE,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._launch = subject_launch("ours") if launch is None else launch
        self._mount_options = mount_options
        self.size = size
        self._settings = CrashTiming(early_s=_EARLY_S, patience_s=patience_s)

    shrink_tries, shrink_seconds = 24, 15.0

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`.

        Raises:
            LayerSkippedError: Not Linux, not root, no loop device, or no ext4.
            SubjectError, OSError: See `process_layer_runs`.
        """
        yield from with_private_mounts(partial(self._runs, first_seed))

    def _runs(self, first_seed: int) -> Iterator[RunOutcome]:
        """Yield the runs; names created by the children forked meanwhile are recorded."""
        if shim := loaded():
            disks = Path(tempfile.gettempdir()).resolve()
            os.register_at_fork(after_in_child=partial(shim.arm, disks, CallFault(NEVER, Action.FAIL)))
        yield from process_layer_runs(self, first_seed)

    def check_beginning(self) -> None:
        with LoopDisk() as disk:
            disk.cut_power()
            disk.power_on()
            directory = disk.directory / "subject"
            directory.mkdir()
            check_beginning(self._launch, directory, patience_s=self._settings.patience_s)

    def lived(self, seed: int, size: RunSize) -> ProcessRuns:
        chance = Random(f"power cuts {seed}")  # noqa: S311 - moments, not secrets
        with LoopDisk(chance.choice(self._mount_options)) as disk:
            directory = disk.directory / "subject"
            directory.mkdir()
            # The existence of its directory is not the responsibility of the subject.
            sync_path(disk.directory)
            lives = ProcessRuns(self._launch, directory, seed, PowerCut(disk, chance), self._settings)
            return live_through(lives, size.lives, length=lambda: size.operations, chance=chance)


def power_cuts(first_seed: int, *, subject: str = "ours") -> Generator[RunOutcome]:
    """Run the layer on a subject by its name; see `subject_launch`.

    For a subject in Python, a worker started with the fault shim runs the layer, if the shim compiles.

    Args:
        first_seed: See `Layer`.
        subject: The subject whose power is cut.

    Raises:
        ValueError: The subject is unknown.
        LayerSkippedError, SubjectError, OSError: See `PowerCuts`.
    """
    launch = subject_launch(subject)
    has_worker = loaded() is None and is_class_name(subject)
    if has_worker:
        try:
            yield from cuts_with_shim(first_seed, subject=subject)
        except ShimUnavailableError:
            has_worker = False
    if not has_worker:
        yield from PowerCuts(launch)(first_seed)


@final
class PowerCut:
    """The crash of the machine under a process, and the next boot.

    At random, the process is stopped when the power is cut: then the cut comes right after its last output, and never
    inside a system call. Or it runs: then the cut may come there. And at random, another program on the disk has synced
    its own file just before: ext4 then writes every changed name, including those of the subject, but not their bytes.

    Args:
        disk: The disk whose power is cut.
        chance: Decides the variants above.
    """

    def __init__(self, disk: LoopDisk, chance: Random) -> None:
        self._disk = disk
        self._chance = chance
        self._stands_still = self._another_syncs = False

    def prepare(self) -> None:
        """See `Crash`; this one comes when it is called."""

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
        return f"{before}the power is cut {how}; mounted with {self._disk.options or 'default options'}"

    def _cut(self, process: SubjectProcess) -> None:
        if self._another_syncs:
            (self._disk.directory / "another").write_bytes(b"another")
            sync_path(self._disk.directory / "another")
        self._disk.cut_power()
        # Most processes fail on a dead disk and report it: too late to count.
        process.last_words()
        self._disk.power_on()
        if shim := loaded():
            shim.take_names_back()
