"""The table of capabilities, `capabilities.tsv`: each promise, the page that makes it, and the tests that show it."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("capabilities.tsv")
ROOT = Path(__file__).parents[2]


def missing(path: Path = TABLE) -> list[str]:
    """The tests that a table names and pytest does not collect."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    named = {each for row in rows for each in row["shown by"].split(", ")} - {"-"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(named - {re.sub(r"\[.*", "", line) for line in done.stdout.splitlines()})
