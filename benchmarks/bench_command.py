"""The time of `ackstate redelivery`, compared with a Spark session that counts ten rows.

``--events N`` takes another large trace, ``--rounds N`` another number of rounds; those results are not stored.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measurement import Against, BenchmarkReport, Screen, Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMALL = 10_000
LARGE = 10_000_000
ROUNDS = 5
BARE = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
print(spark.range(10).count())
"""
BARE_NAME = "bare session"
ABOUT = (
    "Whole processes, in rounds. The bare session is `SparkSession.builder.master('local[2]').getOrCreate()` and "
    "`spark.range(10).count()`, as a user has it. The commands are `ackstate redelivery TRACE`, on made traces, "
    "`key_shared`, 8 subscriptions on 4 topics, and the same with `--engine local`; Spark has the archive of its "
    "classes that `make setup` makes. CPU seconds include Java and the workers."
)
_ACKSTATE = [sys.executable, "-P", "-m", "ackstate.analysis.cli"]

_PR_SET_CHILD_SUBREAPER = 36


class Cost(NamedTuple):
    """The measurements of a command.

    Attributes:
        wall_s: The time until its process ended, as a user experiences it.
        cpu_s: The CPU time of it and its children, until the last of them ended.
        peak_mb: The most memory that one of these processes had at once, in MB (10^6 bytes).
        out: Its standard output.
        err: The same for standard error.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float
    out: str
    err: str


def cost_of(command: Sequence[str]) -> Cost:
    """Run a command to its end.

    Processes that outlive it, such as the virtual machine of a Python program, become children of this one, so that
    they are counted: it must have no others.

    Raises:
        CalledProcessError: It failed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        begun = perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        wall_s = cpu_s = peak_mb = 0.0
        while True:
            try:
                ended, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            cpu_s += used.ru_utime + used.ru_stime
            peak_mb = max(peak_mb, used.ru_maxrss * 1_024 / 1e6)
            if ended == process.pid:
                wall_s = perf_counter() - begun
                process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, out.read(), err.read())
        return Cost(wall_s, cpu_s, peak_mb, out.read(), err.read())


def made(directory: Path, events: int) -> Path:
    """Make a trace."""
    trace = directory / str(events)
    cost_of([*_ACKSTATE, "trace", "generate", str(trace), "--workload", "key_shared", "--events", str(events)])
    return trace


def commands(traces: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the commands by name."""
    found = {BARE_NAME: [sys.executable, "-c", BARE]}
    for name, trace in traces.items():
        estimate = [*_ACKSTATE, "redelivery", str(trace)]
        found |= {name: estimate, f"{name}, local": [*estimate, "--engine", "local"]}
    return found


def in_rounds(run: Mapping[str, Sequence[str]], *, rounds: int) -> dict[str, list[Cost]]:
    """Run commands in turn: a slow spell of the machine hits all of them."""
    taken: dict[str, list[Cost]] = {name: [] for name in run}
    for _ in range(rounds):
        for name, command in run.items():
            taken[name].append(cost_of(command))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=lambda text: int(float(text)), default=LARGE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    is_kept = (chosen.events, chosen.rounds) == (LARGE, ROUNDS)
    report = (BenchmarkReport if is_kept else Screen)("command", ABOUT)
    with TemporaryDirectory() as directory:
        traces = {f"{events:,} events": made(Path(directory), events) for events in (SMALL, chosen.events)}
        taken = in_rounds(commands(traces), rounds=chosen.rounds)
    for name in traces:
        answers = {cost.out for each in (name, f"{name}, local") for cost in taken[each]}
        assert len(answers) == 1, answers
    for unit, of in (("s", lambda cost: cost.wall_s), ("CPU s", lambda cost: cost.cpu_s)):
        spreads = {name: Spread.of(map(of, costs)) for name, costs in taken.items()}
        for name, spread in spreads.items():
            against = None if name == BARE_NAME else Against(BARE_NAME, spreads[BARE_NAME].median)
            report.time(name, unit, spread, against)
    report.publish()


if __name__ == "__main__":
    main()
