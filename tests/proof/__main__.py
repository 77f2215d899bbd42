"""Runs every part of a proof for its share of the time, and writes the status: python -P -m proof --budget 1h.

Exit status: 0 nothing failed, 1 something failed, 2 nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ackstate.analysis.durations import Duration
from proof.page import render
from proof.parts import PARTS, ROOT, PartEnd

if TYPE_CHECKING:
    from collections.abc import Mapping

STATUS = ROOT / "benchmarks" / "proof.json"
PAGE = ROOT / "docs" / "proof.md"


def main(arguments: list[str] | None = None) -> int:
    """Prove, write the status at the beginning and after each part, and return the exit status."""
    options = _options(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    budget_s = Duration.parse(options.budget).seconds
    shares = sum(PARTS[name].share for name in options.parts)
    status = {
        "begun": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "budget_s": round(budget_s), "parts": [],
        "planned": [PARTS[name].title for name in options.parts],
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
    }  # fmt: skip
    _write(status, options)
    for name in options.parts:
        part = PARTS[name]
        begun_s = time.monotonic()
        print(f"{part.title}: {budget_s * part.share / shares:.0f} s ...", flush=True)
        try:
            result = part.run(budget_s * part.share / shares, out)
        except Exception as error:
            result = PartEnd({}, (f"{type(error).__name__}: {error}",))
        found = {**result._asdict(), "title": part.title, "seconds": round(time.monotonic() - begun_s)}
        status["parts"].append(found)
        print(f"  {result}", flush=True)
        _write(status, options)
    print(options.page)
    if any(part["failures"] for part in status["parts"]):
        return 1
    return 0 if any(part["tried"] for part in status["parts"]) else 2


def _write(status: Mapping[str, Any], options: argparse.Namespace) -> None:
    options.status.write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
    options.page.write_text(render(json.loads(options.status.read_text(encoding="utf-8"))), encoding="utf-8")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m proof", description=__doc__)
    parser.add_argument("--budget", default="1h", help="the time of all parts together: 10m, 2h; 1h by default")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "proof", help="for logs and details")
    parser.add_argument("--status", type=Path, default=STATUS, help="the result as JSON")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
