"""Run every layer on every bug of the museum, and write matrix.json: `python -P -m museum.matrix`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ackstate.analysis.crash.kills import kills
from ackstate.analysis.crash.power_cuts import power_cuts
from ackstate.analysis.crash.runs import LayerSkippedError
from crash.crash_states import crash_states
from crash.damage import damage
from crash.schedules import schedules
from crash.shim import compiled, environment, loaded, lose_names_in_power_cuts
from crash.system_calls import system_calls
from museum.cell import Cell, CellBudget, CellFate, run_cell
from museum.exhibits import EXHIBITS

RUNS = {"L0": schedules, "L1": crash_states, "L2": system_calls, "L3": kills, "L4": power_cuts, "L5": damage}
SECONDS = {"L0": 60.0, "L1": 15.0, "L2": 15.0, "L3": 20.0, "L4": 30.0, "L5": 40.0}
"""How long a layer may look for a bug."""
MEASURED = Path(__file__).with_name("matrix.json")
"""The measurements."""
PRODUCT = "none"
"""The row of the product without a bug."""


def read_cells(measured=MEASURED):
    if not measured.exists():
        return {}
    rows = json.loads(measured.read_text(encoding="utf-8"))
    return {name: {layer: Cell.of(plain) for layer, plain in row.items()} for name, row in rows.items()}


def write_cells(cells, measured):
    rows = {name: {layer: cell.plain() for layer, cell in row.items()} for name, row in cells.items()}
    measured.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def is_good(cells):
    """Say whether every exhibit is killed by some layer, and the product by none of those that can run here."""
    product = [cells[PRODUCT][layer].fate for layer in RUNS if layer in cells[PRODUCT]]
    is_unharmed = set(product) in ({CellFate.SURVIVED}, {CellFate.SURVIVED, CellFate.SKIPPED})
    killed = [any(cell.fate is CellFate.KILLED for cell in cells[exhibit.name].values()) for exhibit in EXHIBITS]
    return all(killed) and is_unharmed and len(product) == len(RUNS)


def main(arguments=None):
    """Run the cells that are asked for; 1 if a bug is killed by no layer, or the product by one."""
    options = _options(arguments)
    if {"L2", "L4"} & set(options.layers) and loaded() is None:
        # Calls are counted, and names recorded, by a library that must be there when a process starts.
        with tempfile.TemporaryDirectory(prefix="ackstate-museum-") as directory, suppress(LayerSkippedError):
            command = [sys.executable, "-P", "-m", "museum.matrix", *sys.argv[1:]]
            return subprocess.run(command, env=environment(compiled(Path(directory))), check=False).returncode
    lose_names_in_power_cuts()
    exhibits = {exhibit.name: exhibit for exhibit in EXHIBITS}
    measured = MEASURED
    if options.out:
        measured = options.out / MEASURED.name
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
    missing = [name for name in (*exhibits, PRODUCT) if len(cells.get(name, ())) < len(RUNS)]
    if missing:
        print(f"not all was run: {', '.join(missing)}", file=sys.stderr)
        return 0
    return 0 if is_good(cells) else 1


def _options(arguments):
    parser = argparse.ArgumentParser(prog="museum.matrix", description=__doc__)
    names = [*(exhibit.name for exhibit in EXHIBITS), PRODUCT]
    parser.add_argument("--layers", nargs="*", choices=list(RUNS), default=list(RUNS), metavar="L0..L5")
    parser.add_argument("--exhibits", nargs="+", choices=names, default=names, metavar="M1..M16|none")
    parser.add_argument("--scale", type=float, default=1.0, help="multiple of the usual budget of a cell")
    parser.add_argument("--seed", type=int, default=0, help="where each layer begins")
    parser.add_argument("--out", type=Path, help="write the measurements into this directory instead")
    return parser.parse_args(arguments)


def _print_cell(name, layer, cell):
    what = f"{cell.fate.value} after {cell.cycles:,} crashes, {cell.runs} runs, {cell.seconds:.1f} s"
    print(f"{name} {layer} {what}: {cell.promise} {cell.found[:160]}", file=sys.stderr)
    if cell.fate in {CellFate.DIED, CellFate.HUNG} or os.environ.get("STORIES"):
        print("    " + "\n    ".join(map(str.rstrip, cell.story)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
