"""The CPU time of the hot paths with several Python interpreters: ``python -m benchmarks.bench_python_versions``.

Its arguments are the interpreters, `PYTHON` or `NAME=PYTHON`. Each is compared with all before it, and needs the same
versions of the dependencies of ackstate, and `rich`. Without arguments nothing is measured.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from itertools import combinations

from benchmarks.bench_end_to_end import ROOT, MeasuredProcess
from benchmarks.measurement import Against, BenchmarkReport, Spread

ABOUT = (
    "CPU time of the process, a child of each interpreter, in alternating rounds after one to warm up. From publish to "
    "ack: `bench_end_to_end` with 100 thousand messages on SQLite. One ack, and one persisted to memory: the "
    "cursor has 10 thousand live holes. Delayed messages: an index of 100 thousand due within an hour, to which as "
    "many are added, and a view that is polled each tick."
)
SIZE = 100_000
ROUNDS = 7
SKIPPED = "skipped: pass the interpreters to compare, for example python3.11 python3.14"
Round = dict[str, dict[str, float]]
"""CPU time in us by interpreter and path."""
VERSION = "import platform as p; print(p.python_version(), p.python_compiler(), sep=', ')"


def named(arguments: list[str]) -> dict[str, str]:
    """Return the interpreters by name: the one given, or the version without its third part."""
    interpreters = {}
    for argument in arguments:
        name, _, python = argument.rpartition("=")
        name = name or f"Python {version(python).partition(',')[0].rpartition('.')[0]}"
        if name in interpreters:
            raise SystemExit(f"two interpreters are named {name!r}; pass NAME=PYTHON")
        interpreters[name] = python
    return interpreters


def version(python: str) -> str:
    return subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()


def measured(interpreters: dict[str, str], *, size: int = SIZE, rounds: int = ROUNDS) -> list[Round]:
    """Run all interpreters in turn: a slow spell of the machine hits all of them."""
    with ExitStack() as running:
        sides = {
            name: running.enter_context(
                MeasuredProcess([python, "-P", "-m", "benchmarks.python_versions_side", str(size)], ROOT)
            )
            for name, python in interpreters.items()
        }
        return [{name: side.run() for name, side in sides.items()} for _ in range(rounds + 1)][1:]


def compare(report: BenchmarkReport, rounds: list[Round]) -> None:
    """Report each interpreter beside each one before it, path by path."""
    names = list(rounds[0])
    for path in rounds[0][names[0]]:
        spreads = {name: Spread.of(each[name][path] for each in rounds) for name in names}
        report.time(f"{names[0]}: {path}", "us CPU", spreads[names[0]])
        for earlier, later in combinations(names, 2):
            against = Against(earlier, spreads[earlier].median)
            report.time(f"{later} beside {earlier}: {path}", "us CPU", spreads[later], against)


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        print(SKIPPED)
        return
    interpreters = named(arguments)
    versions = "; ".join(f"{name} is {version(python)}" for name, python in interpreters.items())
    report = BenchmarkReport("python_versions", f"{ABOUT} {versions}.")
    compare(report, measured(interpreters))
    report.publish()


if __name__ == "__main__":
    main(sys.argv[1:])
