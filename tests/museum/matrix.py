"""Run every layer on every bug of the museum, and write docs/kill-matrix.md: `make kill-matrix`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ackstate.analysis.crash.campaign import read_totals
from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.layers.kills import kills
from ackstate.analysis.crash.layers.power_cuts import power_cuts
from ackstate.analysis.crash.shim import compiled, environment, loaded
from crash.crash_states import crash_states
from crash.damage import damage
from crash.schedules import schedules
from crash.system_calls import system_calls
from museum.cell import Cell, CellBudget, CellFate, run_cell
from museum.exhibits import EXHIBITS
from museum.page import LAYERS, PRODUCT, is_good, render

RUNS = {
    "L0": schedules,
    "L1": crash_states,
    "L2": system_calls,
    "L3": kills,
    "L4": power_cuts,
    "L5": damage,
}
SECONDS = {"L0": 60.0, "L1": 15.0, "L2": 15.0, "L3": 20.0, "L4": 30.0, "L5": 40.0}
"""How long a layer may look for a bug."""
MEASURED = Path(__file__).with_name("matrix.json")
"""The measurements; the page shows them."""
PAGE = Path(__file__).parents[2] / "docs" / "kill-matrix.md"
TOTALS = Path(__file__).parents[2] / "benchmarks" / "crash.json"
"""What `make soak` adds up."""


def read_cells(measured=MEASURED):
    """Return the earlier measurements, by row and layer."""
    if not measured.exists():
        return {}
    rows = json.loads(measured.read_text(encoding="utf-8"))
    return {name: {layer: Cell.of(plain) for layer, plain in row.items()} for name, row in rows.items()}


def write_cells(cells, measured):
    rows = {name: {layer: cell.plain() for layer, cell in row.items()} for name, row in cells.items()}
    measured.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments=None):
    """Run the cells that are asked for, and write the page once all have been run."""
    options = _options(arguments)
    if {"L2", "L4"} & set(options.layers) and loaded() is None:
        # Calls are counted by a library that must be there when a process starts. L4 would start one that has it, in
        # which no bug is planted.
        with tempfile.TemporaryDirectory(prefix="ackstate-museum-") as directory, suppress(LayerSkippedError):
            command = [sys.executable, "-P", "-m", "museum.matrix", *sys.argv[1:]]
            return subprocess.run(command, env=environment(compiled(Path(directory))), check=False).returncode
    exhibits = {exhibit.name: exhibit for exhibit in EXHIBITS}
    measured, page = MEASURED, PAGE
    if options.out:
        measured, page = options.out / MEASURED.name, options.out / PAGE.name
        measured.unlink(missing_ok=True)
    for name in options.exhibits:
        for layer in options.layers:
            # That the product survives says the more, the longer it was tried.
            patience = 3 if name == PRODUCT else 1
            budget = CellBudget(SECONDS[layer] * options.scale * patience, first_seed=options.seed)
            cell = run_cell(RUNS[layer], exhibits.get(name), budget)
            _print_cell(name, layer, cell)
            # Read again: two of these may be at work on different layers.
            cells = read_cells(measured)
            cells.setdefault(name, {})[layer] = cell
            write_cells(cells, measured)
    cells = read_cells(measured)
    missing = [name for name in (*exhibits, PRODUCT) if len(cells.get(name, ())) < len(LAYERS)]
    if missing:
        print(f"not all was run: {', '.join(missing)}; the page was left as it is", file=sys.stderr)
        return 0
    page.write_text(render(cells, read_totals(TOTALS)), encoding="utf-8")
    return 0 if is_good(cells) else 1


def _options(arguments):
    parser = argparse.ArgumentParser(prog="museum.matrix", description=__doc__)
    names = [*(exhibit.name for exhibit in EXHIBITS), PRODUCT]
    parser.add_argument("--layers", nargs="*", choices=list(RUNS), default=list(RUNS), metavar="L0..L5")
    parser.add_argument("--exhibits", nargs="+", choices=names, default=names, metavar="M1..M16|none")
    parser.add_argument("--scale", type=float, default=1.0, help="multiple of the usual budget of a cell")
    parser.add_argument("--seed", type=int, default=0, help="where each layer begins")
    parser.add_argument("--out", type=Path, help="write the measurements and the page into this directory instead")
    return parser.parse_args(arguments)


def _print_cell(name, layer, cell):
    what = f"{cell.fate.value} after {cell.cycles:,} crashes, {cell.runs} runs, {cell.seconds:.1f} s"
    print(f"{name} {layer} {what}: {cell.promise} {cell.found[:160]}", file=sys.stderr)
    if cell.fate in {CellFate.DIED, CellFate.HUNG} or os.environ.get("STORIES"):
        print("    " + "\n    ".join(map(str.rstrip, cell.story)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
