"""The CPU time of a message from publish to ack on SQLite, beside bare SQLite, and beside an earlier checkout if given.

``--beside DIRECTORY`` names the checkout, such as a `git worktree` of an earlier commit; nothing is written then.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.measurement import Against, BenchmarkReport, Screen, Spread

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
MESSAGES, ROUNDS = 200_000, 5
PARTS = ("publish", "dispatch", "ack", "persist")
KINDS = [(kind, ack_by) for kind in ("Shared", "Key_Shared") for ack_by in ("one by one", "list")]
ABOUT = (
    "One process: batches of 100 messages of 100 bytes, four consumers that take 100 at a time, acks shuffled over "
    "4,000 outstanding messages, a persist each second; Key_Shared: 1,000 keys. CPU seconds of the process, storage "
    "included. Dispatch is one call for all consumers, each with 1,100 permits that its acks renew. Bare SQLite: the "
    "least that the storage takes, a transaction for each batch, with synchronous=FULL."
)


class Side:
    """A process that runs its workload once for each line of its input, with the code in a directory."""

    def __init__(self, code: Path, kind: tuple[str, str], messages: int) -> None:
        root = "ackstate." if (code / "ackstate" / "dispatch").is_dir() else ""
        program = [sys.executable, "-P", str(ROOT / "benchmarks" / "end_to_end_side.py"), root, *kind, str(messages)]
        environment = dict(os.environ, PYTHONPATH=str(code))
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes, whereupon it ends, and waits for it
            pass

    def run(self) -> dict[str, float]:
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def bare_sqlite(messages: int) -> float:
    """Return the CPU seconds of the messages' bytes alone."""
    with TemporaryDirectory() as directory, closing(sqlite3.connect(Path(directory) / "bare")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, data BLOB)")
        begun = time.process_time()
        for _ in range(messages // 100):
            connection.execute("INSERT INTO entries (data) VALUES (?)", (bytes(100 * 100),))
            connection.commit()
        return time.process_time() - begun


def rate(seconds: Iterable[float], messages: int) -> Spread:
    return Spread.of(messages / each for each in seconds)


def measure(report: BenchmarkReport, beside: Path | None, *, messages: int, rounds: int) -> None:
    """Run all sides in turn: a slow spell of the machine hits all of them."""
    with ExitStack() as running:
        sides = {(code, kind): running.enter_context(Side(code, kind, messages))
                 for code in (ROOT, beside) if code for kind in KINDS}  # fmt: skip
        bare, taken = [], {key: [] for key in sides}
        for _ in range(rounds):
            bare.append(bare_sqlite(messages))
            for key, side in sides.items():
                taken[key].append(side.run())
    least = report.time("bare SQLite", "messages/CPU s", rate(bare, messages))
    for kind in KINDS:
        title = f"{kind[0]}, acks {'by lists' if kind[1] == 'list' else 'one by one'}"
        against = Against("bare SQLite", least.median)
        if beside:
            earlier = rate((sum(each[part] for part in PARTS) for each in taken[beside, kind]), messages)
            against = Against(beside.name, earlier.median)
        runs = taken[ROOT, kind]
        report.time(
            title, "messages/CPU s", rate((sum(each[part] for part in PARTS) for each in runs), messages), against
        )
        for part in PARTS:
            report.time(f"{title}: {part}", "us a message", Spread.of(each[part] / messages * 1e6 for each in runs))
        report.time(f"{title}: peak memory", "MB", Spread.of(each["peak_mb"] for each in runs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--small", type=int, default=1, metavar="N", help="divide the messages; nothing is written")
    chosen = parser.parse_args()
    report = (Screen if chosen.beside or chosen.small > 1 else BenchmarkReport)("end_to_end", ABOUT)
    measure(report, chosen.beside, messages=MESSAGES // chosen.small // 100 * 100, rounds=ROUNDS)
    report.publish()
