"""L4: the power is cut under a live subject, on a real file system; only the kernel decides which writes survive.

Each run has its own disk, with mount options drawn from the seed, and several processes on it. Recoveries are cut, too:
some while they run, some after they have reported.

Another loss is simulated: ext4 writes all names with the next sync of any file, with any mount options, so a missing
sync of a directory costs nothing there. For a subject in Python, if this process was started with the fault shim
(`ackstate.analysis.crash.shim`), every name in an unsynced directory is removed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.dying import die_with, end_worker
from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.loop_disk import LoopDisk
from ackstate.analysis.crash.private_mounts import with_private_mounts
from ackstate.analysis.crash.process_layer import ProcessLayer, RunSize
from ackstate.analysis.crash.process_runs import CrashTiming
from ackstate.analysis.crash.scratch import scratch_directory
from ackstate.analysis.crash.serve import is_class_name
from ackstate.analysis.crash.shim import NEVER, Action, CallFault, compiled, environment, loaded
from ackstate.analysis.crash.subject_process import PATIENCE_S, subject_launch
from ackstate.stores.sqlite_database import sync_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.layer import RunOutcome
    from ackstate.analysis.crash.process_runs import Crash
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
_SHRINK_TRIES = 24
_WORKER_S = 20.0  # for the run in progress
_READ_S = 1.0


@final
class PowerCuts(ProcessLayer):
    """The layer.

    Args:
        launch: See `ProcessLayer`.
        mount_options: Options of ext4; one of them by seed.
        size: See `ProcessLayer`.
        patience_s: Time limit for an answer of a subject.
    """

    ours = ("ours",)
    chance_name = "power cuts"
    shrink_seconds = 15.0

    def __init__(
        self,
        launch: Launch | None = None,
        *,
        mount_options: Sequence[str] = MOUNT_OPTIONS,
        size: RunSize = SIZE,
        patience_s: float = PATIENCE_S,
    ) -> None:
        timing = CrashTiming(early_s=_EARLY_S, patience_s=patience_s)
        super().__init__(launch, size=size, timing=timing, shrink_tries=_SHRINK_TRIES)
        self._mount_options = mount_options

    def __call__(self, first_seed: int) -> Iterator[RunOutcome]:
        """See `Layer`.

        Raises:
            LayerSkippedError: Not Linux, not root, no loop device, or no ext4.
            SubjectError, OSError: See `ProcessLayer.runs`.
        """
        yield from with_private_mounts(partial(self._runs, first_seed))

    def _runs(self, first_seed: int) -> Iterator[RunOutcome]:
        """Yield the runs; names created by the children forked meanwhile are recorded."""
        if shim := loaded():
            disks = Path(tempfile.gettempdir()).resolve()
            os.register_at_fork(after_in_child=partial(shim.arm, disks, CallFault(NEVER, Action.FAIL)))
        with LoopDisk() as disk:  # It says why there can be none, before a subject is started.
            disk.cut_power()
            disk.power_on()
        yield from self.runs(first_seed)

    @contextmanager
    def stage(self, chance: Random) -> Iterator[tuple[Path, Crash]]:
        with LoopDisk(chance.choice(self._mount_options)) as disk:
            directory = disk.directory / "subject"
            directory.mkdir()
            # The existence of its directory is not the responsibility of the subject.
            sync_path(disk.directory)
            yield directory, PowerCut(disk, chance)


def power_cuts(first_seed: int, *, subject: str = "ours") -> Generator[RunOutcome]:
    """Run the layer on a subject by its name; see `subject_launch`.

    For a subject in Python, a worker started with the fault shim runs the layer, if the shim compiles.

    Raises:
        ValueError: The subject is unknown.
        LayerSkippedError, SubjectError, OSError: See `PowerCuts`.
    """
    launch = subject_launch(subject)
    if loaded() is None and is_class_name(subject):
        with scratch_directory("power-shim") as directory:
            try:
                library = compiled(directory)
            except LayerSkippedError:
                pass
            else:
                yield from _cuts_with_shim(library, first_seed, subject)
                return
    yield from PowerCuts(launch)(first_seed)


def _cuts_with_shim(library: Path, first_seed: int, subject: str) -> Iterator[RunOutcome]:
    arguments = [str(os.getpid()), str(first_seed), subject]
    worker = subprocess.Popen(  # noqa: S603 - ourselves
        # Without -P, a directory in the current one could shadow our packages.
        [sys.executable, "-P", "-m", "ackstate.analysis.crash.layers.power_cuts", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(library),
    )
    try:
        assert worker.stdout is not None
        while True:
            kind, content = pickle.load(worker.stdout)  # noqa: S301 - from ourselves
            if kind == "raised":
                raise content
            yield content
    except EOFError:
        raise RuntimeError(f"the worker ended by itself with status {worker.wait()}") from None
    finally:
        end_worker(worker, patience_s=_WORKER_S)


def _work(parent_pid: int, first_seed: int, subject: str) -> None:
    """Stream outcomes, pickled, as ``("item", outcome)``, or ``("raised", error)`` at the end, until no one listens."""
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda asked, _frame: asked_to_end.append(asked))
    die_with(parent_pid)
    # Printed text must not get between the pairs.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        with closing(power_cuts(first_seed, subject=subject)) as outcomes:
            for outcome in outcomes:
                answers.write(pickle.dumps(("item", outcome)))
                if asked_to_end:
                    return
    except Exception as error:  # The parent reports every error.
        answers.write(pickle.dumps(("raised", error)))


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


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        _work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
