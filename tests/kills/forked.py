"""Runs pytest in a process that is forked from one which has imported the large libraries already."""

from __future__ import annotations

import os
import resource
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["hypothesis.stateful", "kazoo.client", "numpy", "pandas", "pyarrow.parquet", "pyroaring", "typer"]
)


def run(arguments, environment, *, seconds_max):
    """Run pytest on some tests; return its status, negative if it ended by a signal, None if it did not end.

    Args:
        arguments: Of pytest.
        environment: Variables to set.
        seconds_max: Of CPU, as other programs may run beside it. One that waits ends after twice the time.
    """
    process = _CONTEXT.Process(target=_run, args=(arguments, environment, int(seconds_max)))
    process.start()
    process.join(2 * seconds_max)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def _run(arguments, environment, seconds):
    import pytest

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with open(os.devnull, "r+") as nothing:  # noqa: PTH123 - it is for all three
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    os.environ |= environment
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    runpy.run_path(str(Path(__file__).with_name("site") / "sitecustomize.py"))
    sys.exit(pytest.main(arguments))
