"""L4: the power is cut under a live subject, on a real file system; nobody but the kernel decides what is left.

Each run has a disk of its own, mounted by seed, and several lives on it. Recoveries are cut, too: some while they run,
some after they have reported.

One thing is taken besides: ext4 writes all names with the next sync of any file, mounted in whatever way, so that a
directory that is never synced costs nothing there. Of a subject in Python, where this process was started with the
fault shim (`ackstate.analysis.crash.layers.system_calls.shim`), every name is taken back whose directory was not
synced.
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
from ackstate.analysis.crash.layers.system_calls.attempt import NEVER
from ackstate.analysis.crash.layers.system_calls.shim import Action, CallFault, loaded
from ackstate.analysis.crash.loop_disk import LoopDisk
from ackstate.analysis.crash.private_mounts import with_private_mounts
from ackstate.analysis.crash.process_layer import RunSize, live_through, process_layer_runs
from ackstate.analysis.crash.process_runs import CrashTiming, ProcessRuns, check_beginning
from ackstate.analysis.crash.serve import is_class_name
from ackstate.analysis.crash.subject_launch import subject_launch
from ackstate.analysis.crash.subject_process import PATIENCE_S
from ackstate.cursor.stores.directory_lock import sync_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.subject_launch import Launch
    from ackstate.analysis.crash.subject_process import SubjectProcess

OURS = ("ours", "ours-sqlite")
"""Crashed in turn, by seed."""
MOUNT_OPTIONS = (
    "",
    # Neither does replacing a file by a rename write the new bytes, nor do bytes come before the name that leads to
    # them. A program that renames and syncs nothing is caught three times as often as with the defaults.
    "noauto_da_alloc,data=writeback",
    # Bytes get their place when they are written, and not when they go to the disk: a file has its size at once, and
    # other bytes.
    "nodelalloc,data=writeback",
    # Tried, and no better than the defaults: commit=60, because no life is as long, and nobarrier, because the loop
    # device has no cache to lose. data=journal hides most.
)
SIZE = RunSize(lives=6, operations=100)
"""Of a run."""
_ANOTHER_SYNCS_SHARE = 0.3
_EARLY_S = 0.02
_READ_S = 1.0


@final
class PowerCuts:
    """The layer.

    Args:
        launch: Begins the subject; None for ours, on files and on SQLite in turn.
        recording: Gets every life, for `ackstate trace` and Spark.
        mount_options: Of ext4; one of them by seed.
        size: Of a run.
        patience_s: How long a subject may take for an answer when it is its turn.
    """

    def __init__(
        self,
        launch: Launch | None = None,
        *,
        recording: Path | None = None,
        mount_options: Sequence[str] = MOUNT_OPTIONS,
        size: RunSize = SIZE,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._launches = [subject_launch(name) for name in OURS] if launch is None else [launch]
        self._recording = recording
        self._mount_options = mount_options
        self.size = size
        self._settings = CrashTiming(early_s=_EARLY_S, patience_s=patience_s)

    run_name = "power-cuts"
    shrink_tries, shrink_seconds = 24, 15.0

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`.

        Raises:
            LayerSkippedError: Not Linux, not root, no loop device, or no ext4.
            SubjectError, OSError: As `process_layer_runs`.
        """
        yield from with_private_mounts(partial(self._runs, first_seed))

    def _runs(self, first_seed: int) -> Iterator[RunOutcome]:
        """Yield the runs in a process of their own, whose forked children have the names noted that they make."""
        if shim := loaded():
            disks = Path(tempfile.gettempdir()).resolve()
            os.register_at_fork(after_in_child=partial(shim.arm, disks, CallFault(NEVER, Action.FAIL)))
        yield from process_layer_runs(self, first_seed, self._recording)

    def check_beginning(self) -> None:
        """See `ProcessLayer`."""
        with LoopDisk() as disk:
            disk.cut_power()
            disk.power_on()
            for number, launch in enumerate(self._launches):
                directory = disk.directory / str(number)
                directory.mkdir()
                check_beginning(launch, directory, patience_s=self._settings.patience_s)

    def lived(self, seed: int, size: RunSize) -> ProcessRuns:
        """See `ProcessLayer`."""
        chance = Random(f"power cuts {seed}")  # noqa: S311 - moments, not secrets
        launch = self._launches[seed % len(self._launches)]
        with LoopDisk(chance.choice(self._mount_options)) as disk:
            directory = disk.directory / "subject"
            directory.mkdir()
            # That it has a directory at all is nothing that the subject should have to see to.
            sync_path(disk.directory)
            lives = ProcessRuns(launch, directory, seed, PowerCut(disk, chance), self._settings)
            return live_through(lives, size.lives, length=lambda: size.operations, chance=chance)


def power_cuts(first_seed: int, *, subject: str = "ours", recording: Path | None = None) -> Generator[RunOutcome]:
    """Run the layer on a subject by its name, as `subject_launch` has it; ``ours`` is both of ours in turn.

    On a subject in Python a worker runs the layer that was started with the fault shim, where that compiles.

    Args:
        first_seed: As for any `Layer`.
        subject: Whose power is cut.
        recording: Gets every life, for `ackstate trace`.

    Raises:
        ValueError: There is no such subject.
        LayerSkippedError, SubjectError, OSError: As `PowerCuts`.
    """
    launch = None if subject == OURS[0] else subject_launch(subject)
    has_worker = loaded() is None and is_class_name(subject)
    if has_worker:
        try:
            yield from cuts_with_shim(first_seed, subject=subject, recording=recording)
        except ShimUnavailableError:
            has_worker = False
    if not has_worker:
        yield from PowerCuts(launch, recording=recording)(first_seed)


@final
class PowerCut:
    """The crash of the machine under a process, and the next boot.

    By chance the process stands still when the power goes: then the cut comes right after the last thing that it has
    said, and never inside a system call. Or it runs: then it may come there. And by chance another program on the disk
    has synced a file of its own just before: ext4 then writes every name that was changed, those of the subject among
    them, and not their bytes.

    Args:
        disk: Its power is cut.
        chance: As above.
    """

    def __init__(self, disk: LoopDisk, chance: Random) -> None:
        self._disk = disk
        self._chance = chance
        self._stands_still = self._another_syncs = False

    def prepare(self) -> None:
        """See `Crash`; this one comes when it is called."""

    def __call__(self, process: SubjectProcess) -> list[Answer]:
        """See `Crash`. What counts is what was read before the cut.

        A subject writes a line after the sync that it speaks of has returned, we read it after it was written, and we
        cut the power after we have read it. So all that was read the disk owes, whether the process stood still or
        not. What is said between the last read and the cut is owed as well, but cannot be told from what is said on a
        disk that is dead already: it is not counted, which is never unjust. Standing still it says no such thing.
        """
        self._stands_still = self._chance.random() < 0.5
        self._another_syncs = self._chance.random() < _ANOTHER_SYNCS_SHARE
        said: list[Answer] = []
        try:
            if self._stands_still:
                process.stop()
            # One that runs may say for ever that nothing is durable.
            until = time.monotonic() + _READ_S
            while (answers := process.events(0)) and time.monotonic() < until:
                said += answers
        finally:
            self._cut(process)
        return said

    def __str__(self) -> str:
        how = "while it stands still" if self._stands_still else "while it runs"
        before = "another program syncs a file of its own; then " if self._another_syncs else ""
        return f"{before}the power is cut {how}; mounted with {self._disk.options or 'default options'}"

    def _cut(self, process: SubjectProcess) -> None:
        if self._another_syncs:
            (self._disk.directory / "another").write_bytes(b"another")
            sync_path(self._disk.directory / "another")
        self._disk.cut_power()
        # Most fail on a dead disk and say so: too late to count.
        process.last_words()
        self._disk.power_on()
        if shim := loaded():
            shim.take_names_back()
