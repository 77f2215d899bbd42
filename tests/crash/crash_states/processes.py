"""Runs consecutive seeds in parallel, in forked processes, and yields the outcomes in order."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import suppress
from multiprocessing import get_context

_PROCESSES_MAX = 2
_RUNS_AHEAD = 2
_END_S = 10.0
"""A worker that has not ended by then is killed."""


def runs_side_by_side(run, first_seed):
    """Yield the runs of `first_seed`, `first_seed` + 1, ... for ever; the processes end when this is closed.

    They are forked, so that code patched in this process is patched in them.
    """
    count = min(_PROCESSES_MAX, len(os.sched_getaffinity(0)))
    context = get_context("fork")
    workers = []
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(run, first_seed + number, count, theirs), daemon=True)
            worker.start()
            theirs.close()
            workers.append((worker, ours))
        for _, pipe in workers * _RUNS_AHEAD:
            with suppress(BrokenPipeError):  # It has already died, which is detected below.
                pipe.send(None)
        while True:
            for _, pipe in workers:
                try:
                    outcome = pipe.recv()
                    pipe.send(None)
                except (EOFError, OSError):
                    raise RuntimeError("a process that runs crash states has died") from None
                yield outcome
    finally:
        for worker, pipe in workers:
            pipe.close()
            worker.terminate()
            # The exception by which a worker ends is lost if it is raised in a callback of Python's own.
            worker.join(_END_S)
            worker.kill()
            worker.join()


def _work(run, first_seed, stride, pipe):
    """Execute one run for each message received, until the parent closes the pipe."""
    # Warnings of cursors about limits are disabled: the workloads reach limits on purpose.
    logging.disable(logging.WARNING)
    # A run keeps each of its states until it ends: repeated garbage collection among them would take a twelfth of the
    # time, and finds next to nothing.
    gc.disable()
    seed = first_seed
    try:
        while True:
            pipe.recv()
            pipe.send(run(seed))
            gc.collect()
            seed += stride
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
