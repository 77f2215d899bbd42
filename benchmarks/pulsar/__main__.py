"""Times Pulsar's own classes and ours on the same workloads, in alternating rounds.

``python -m benchmarks.pulsar [--quick] [--jars VERSION DIRECTORY]``: the first option shows one round of small
workloads, the other one adds a release whose pom does not resolve, from its jars.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measurement import Against, BenchmarkReport, Screen, Spread
from benchmarks.pulsar.ours import Ours
from benchmarks.pulsar.sides import VERSIONS, SideError, running
from benchmarks.pulsar.tasks import FULL, OURS, SMALL, Task, all_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.pulsar.sides import Answer, Side

ABOUT = (
    "Pulsar's `ManagedCursorImpl`, range set and delay trackers, and ours, on the same files of positions, in "
    "alternating rounds after warm-up rounds. Storage is in memory on both sides and takes no time. A result that "
    "differs from the expected one ends the benchmark."
)


class DisagreementError(SideError):
    """A side does not have the expected result."""


def check(task: Task, side: Side, answer: Answer) -> None:
    """Compare an answer with the expected results.

    Raises:
        DisagreementError: It differs.
    """
    for name, expected in task.expected.items():
        if answer[name] != expected:
            raise DisagreementError(f"{side.name}, {task.rows[0].what}: {name} must be {expected}, got {answer[name]}")


def measured(task: Task, sides: Sequence[Side], *, is_quick: bool = False) -> dict[str, list[Answer]]:
    """Return the answers of each side that the task measures, by rounds."""
    sides = [side for side in sides if not task.only or (task.only == OURS) == (side.name == OURS)]
    rounds, warm_ups = (1, min(task.warm_ups, 1)) if is_quick else (task.rounds, task.warm_ups)
    options = {side.name: {**task.options, **(task.ours if side.name == OURS else {})} for side in sides}
    if task.prepare is not None:
        for side in sides:
            check(task, side, side.run("store", **task.prepare, **options[side.name]))
            options[side.name] = {}
    for side in sides:
        for _ in range(min(warm_ups, 1) if side.name == OURS else warm_ups):
            side.run(task.command, **options[side.name])
    answers: dict[str, list[Answer]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            answer = side.run(task.command, **options[side.name])
            check(task, side, answer)
            answers[side.name].append(answer)
    for side in sides:
        side.run("forget")
    return answers


class ComparisonRows:
    """The rows of all tasks, with a figure for each side."""

    def __init__(self, report: BenchmarkReport) -> None:
        self._report = report
        self._found: dict[str, dict[str, Spread]] = {}

    def put(self, task: Task, answers: Mapping[str, Sequence[Answer]]) -> None:
        """Report the rows of a task; a side that it does not measure has the figure of the row beside it."""
        for row in task.rows:
            found = dict(self._found.get(row.beside, {}))
            for side, given in answers.items():
                figures = [answer[row.source] / row.each for answer in given]
                found[side] = Spread.of(figures)
            self._found[row.what] = found
            for side, spread in found.items():
                against = None if side == OURS else Against(OURS, found[OURS].median)
                self._report.time(f"{row.what}; {side}", row.unit, spread, against)


def main(*, is_quick: bool, more: Sequence[str] = ()) -> None:
    """Measure everything."""
    report = (Screen if is_quick else BenchmarkReport)("pulsar", ABOUT)
    rows = ComparisonRows(report)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: list[Side] = [Ours(), *(stack.enter_context(running(version)) for version in VERSIONS)]
        if more:
            version, jars = more
            sides.append(stack.enter_context(running(version, Path(jars))))
        for task in all_tasks(directory, SMALL if is_quick else FULL):
            rows.put(task, measured(task, sides, is_quick=is_quick))
    report.publish()


if __name__ == "__main__":
    try:
        words = sys.argv[1:]
        main(is_quick="--quick" in words, more=words[words.index("--jars") + 1 :] if "--jars" in words else ())
    except SideError as error:
        sys.exit(f"benchmarks.pulsar: {error}")
