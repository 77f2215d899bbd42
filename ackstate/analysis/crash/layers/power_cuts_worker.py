"""Cuts the power in a process that was started with the fault shim, which takes unsynced names back.

python -P -m ackstate.analysis.crash.layers.power_cuts_worker PARENT_PID FIRST_SEED SUBJECT [RECORDING]

It writes pairs to standard output, pickled: ``("item", outcome)``, or ``("raised", error)`` and ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from ackstate.analysis.crash.dying import die_with, end_worker
from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.scratch import scratch_directory
from ackstate.analysis.crash.shim import compiled, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.crash.layer import RunOutcome

_PATIENCE_S = 20.0  # for the run in progress


class ShimUnavailableError(Exception):
    """The fault shim is unavailable; never leaves the layer."""


def cuts_with_shim(first_seed: int, *, subject: str) -> Iterator[RunOutcome]:
    """Yield the worker's outcomes.

    Raises:
        ShimUnavailableError: The shim does not compile here; no outcome was yielded.
        Exception: The worker's exception.
    """
    with scratch_directory("power-shim") as directory:
        try:
            library = compiled(directory)
        except LayerSkippedError as error:
            raise ShimUnavailableError(str(error)) from error
        arguments = [str(os.getpid()), str(first_seed), subject]
        worker = subprocess.Popen(  # noqa: S603 - ourselves
            # Without -P, a directory in the current one could shadow our packages.
            [sys.executable, "-P", "-m", __name__, *arguments],
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
            end_worker(worker, patience_s=_PATIENCE_S)


def _work(parent_pid: int, first_seed: int, subject: str) -> None:
    """Stream outcomes until the parent closes the stream, or dies."""
    from ackstate.analysis.crash.layers.power_cuts import power_cuts  # noqa: PLC0415 - which imports this module

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


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        _work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
