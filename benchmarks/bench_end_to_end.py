"""The CPU time of a message from publish to ack, and the peak memory, compared with an earlier commit in the same run.

``--messages N`` takes another number of messages, ``--rounds N`` of rounds; those results are not stored.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measurement import Against, BenchmarkReport, Screen, Spread

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
BEFORE = "10ef2df"
MESSAGES = 200_000
ROUNDS = 5
PARTS = ("publish", "dispatch", "ack", "persist")
GOALS = {"sqlite": 70_000, "sqlite, Key_Shared": 60_000}
"""Messages a second on one core, for acks by lists."""
ABOUT = (
    "One process: batches of 100 messages of 100 bytes, four consumers that take 100 at a time, acks shuffled over "
    "4,000 outstanding messages, a persist each second; Key_Shared: 1,000 keys. CPU seconds of the process, storage "
    "included. Dispatch is one call for all consumers, each with 1,100 permits that its acks renew. "
    f"`{BEFORE}` dispatches to each consumer and acks one by one, as its subscription has neither rounds "
    "nor lists; it runs in turn with the others."
)


class EndToEndWorkload(NamedTuple):
    type: str
    ack_by: str

    @property
    def name(self) -> str:
        return "sqlite" if self.type == "Shared" else f"sqlite, {self.type}"


WORKLOADS = [EndToEndWorkload(kind, ack_by) for kind in ("Shared", "Key_Shared") for ack_by in ("one by one", "list")]


class MeasuredProcess:
    """A process that runs its workload once for each line of its input, with the code in a directory."""

    def __init__(self, command: list[str], code: Path) -> None:
        environment = dict(os.environ, PYTHONPATH=str(code))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> MeasuredProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes, whereupon it ends, and waits for it
            pass

    def run(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer


def started(code: Path, workload: EndToEndWorkload, messages: int) -> MeasuredProcess:
    program = ROOT / "benchmarks" / "end_to_end_side.py"
    root = "ackstate." if code == ROOT else ""
    return MeasuredProcess([sys.executable, "-P", str(program), root, *workload, str(messages)], code)


def extracted(commit: str, directory: Path) -> Path | None:
    """Write the files of a commit to a directory; None if this is no checkout that has it."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        return None
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory


def measure(report: BenchmarkReport, before: Path | None, *, messages: int, rounds: int) -> None:
    """Run all sides in turn: a slow spell of the machine hits all of them."""
    with ExitStack() as running:
        sides = {("now", each): running.enter_context(started(ROOT, each, messages)) for each in WORKLOADS}
        for each in WORKLOADS:
            if before is not None and each.ack_by != "list":
                sides[BEFORE, each] = running.enter_context(started(before, each, messages))
        taken: dict[tuple[str, EndToEndWorkload], list[dict[str, float]]] = {key: [] for key in sides}
        for _ in range(rounds):
            for key, side in sides.items():
                taken[key].append(side.run())
    for workload in WORKLOADS:
        runs = taken["now", workload]
        earlier = taken.get((BEFORE, workload._replace(ack_by="one by one")), [])
        title = f"{workload.name}, acks {'by lists' if workload.ack_by == 'list' else 'one by one'}"
        against = Against(BEFORE, rate(earlier, messages).median) if earlier else None
        report.time(f"{title}: throughput", "messages/CPU s", rate(runs, messages), against)
        if workload.ack_by == "list":
            report.time(
                f"{title}: throughput beside the goal", "messages/CPU s", rate(runs, messages),
                Against("goal", GOALS[workload.name]),
            )  # fmt: skip
        for part in PARTS:
            own = Spread.of(each[part] / messages * 1e6 for each in runs)
            then = Against(BEFORE, median(each[part] / messages * 1e6 for each in earlier)) if earlier else None
            report.time(f"{title}: {part}", "us a message", own, then)
        peak = Spread.of(each["peak_mb"] for each in runs)
        report.time(
            f"{title}: peak memory", "MB", peak, Against(BEFORE, max(each["peak_mb"] for each in earlier)) if earlier
            else None,
        )  # fmt: skip


def rate(runs: Iterable[dict[str, float]], messages: int) -> Spread:
    return Spread.of(messages / sum(run[part] for part in PARTS) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=lambda text: int(float(text)), default=MESSAGES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    is_kept = (chosen.messages, chosen.rounds) == (MESSAGES, ROUNDS)
    report = (BenchmarkReport if is_kept else Screen)("end_to_end", ABOUT)
    with TemporaryDirectory() as directory:
        before = extracted(BEFORE, Path(directory))
        if before is None:
            print(f"commit {BEFORE} is not here: nothing to compare with", file=sys.stderr)
        measure(report, before, messages=chosen.messages, rounds=chosen.rounds)
    report.publish()


if __name__ == "__main__":
    main()
