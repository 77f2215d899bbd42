"""Renders the page of the kill matrix from the measurements and the catalogue of bugs."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from museum.cell import Cell, CellFate
from museum.exhibits import EXHIBITS
from museum.found import OWN_BUGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.crash.campaign import Totals

LAYERS = {
    "L0": "random schedules of a whole broker on a faulty store in memory",
    "L1": "every crash state of a simulated disk",
    "L2": "the n-th system call fails, stores half, or kills",
    "L3": "SIGKILL of a live process",
    "L4": "the power of a real disk is cut",
    "L5": "damaged media",
}
WITHOUT_GAUGE = ("L5", "BK")
"""Layers that judge no gauge: damage and takeovers may lose more acks than the gauge counts."""
PRODUCT = "none"
"""The row of the product without a bug."""

_HEAD = """\
# The kill matrix

This page shows which layer of the crash harness detects which bug. The sixteen bugs are historical bugs of other
systems, planted in our code one at a time; six of them in both stores. `make kill-matrix` runs every layer on every
bug, from a fixed seed, until the layer detects a broken promise or its time is over, and writes this page. At least one
layer kills each bug. Without a bug, no layer reports a broken promise. See [crash testing](crash-testing.md) for
testing your own cursor.

Tests plant the bugs (`tests/museum/`); the product cannot reach them. Each bug has a short story that breaks a promise.
A cell says *killed*, with the number of crashes judged and the time until the first broken promise, or *survived*, with
the number of crashes judged without one. Depending on the layer, a crash is a crash state, a kill, a power cut, or a
damaged copy. Seconds are rounded, and from one machine with two cores.
"""

_BLIND_HEAD = """\
## Blind spots

Each layer is blind to some bugs. The table above confirms these blind spots:
"""


DATABASE_BITS = 327_680
"""Of the small database that L5 flips bit by bit."""
_EVIDENCE_HEAD = """\
## The product under all layers

These are the totals of `make soak` so far, over consecutive seeds ([crash.json](../benchmarks/crash.json)): broken
promises, and the number of crashes judged. *Lost* entries had a durable receipt. *Invented* entries are treated as
acked and never were. The *gauge* must equal the redelivery after the worst crash in L0 and L1, and must not be below
the redelivery in L2 to L4. In L3 and L4 it is also wrong if it counts entries that have a receipt.
"""


def render(cells: Mapping[str, Mapping[str, Cell]], totals: Mapping[str, Totals]) -> str:
    """Return the page.

    Args:
        cells: By the name of an exhibit, or `PRODUCT`, and of a layer.
        totals: The bugs that each layer has found in the product, by its name.
    """
    parts = (_table(cells), _evidence(totals), _exhibits(cells), [_BLIND_HEAD, *_blind(cells), ""], _own_bugs())
    return "\n".join([_HEAD, *chain.from_iterable(parts)])


def is_good(cells: Mapping[str, Mapping[str, Cell]]) -> bool:
    """Say whether every exhibit is killed by some layer, and the product by none of those that can run here."""
    product = [cells[PRODUCT][layer].fate for layer in LAYERS if layer in cells[PRODUCT]]
    is_unharmed = set(product) in ({CellFate.SURVIVED}, {CellFate.SURVIVED, CellFate.SKIPPED})
    return all(_killers(cells[exhibit.name]) for exhibit in EXHIBITS) and is_unharmed and len(product) == len(LAYERS)


def _killers(row: Mapping[str, Cell]) -> list[str]:
    return [layer for layer in LAYERS if layer in row and row[layer].fate is CellFate.KILLED]


def _table(cells):
    yield f"| bug | {' | '.join(LAYERS)} |"
    yield "| --- |" + " --- |" * len(LAYERS)
    for exhibit in EXHIBITS:
        yield f"| {exhibit.name} {exhibit.title} | {_row(cells[exhibit.name])} |"
    yield f"| no bug at all | {_row(cells[PRODUCT])} |"
    yield ""
    yield "; ".join(f"{layer}: {what}" for layer, what in LAYERS.items()) + "."


def _evidence(totals):
    if not totals:
        return
    yield ""
    yield _EVIDENCE_HEAD
    yield "| layer | runs | crashes judged | lost | invented | gauge wrong | failed runs |"
    yield "| --- |" + " ---: |" * 6
    for name, total in totals.items():
        gauge = "-" if name in WITHOUT_GAUGE else f"{total.gauge_mismatch:,}"
        numbers = [f"{number:,}" for number in (total.runs, total.cycles, total.lost_durable, total.invented)]
        yield f"| {name} | " + " | ".join((*numbers, gauge, f"{total.failed_runs:,}")) + " |"
        if total.skipped:
            yield f"| {name} | the last time it was skipped: {_plain(total.skipped)} | | | | | |"
    yield from _flips(totals["L5"].counts) if "L5" in totals else ()


def _flips(counts):
    flipped, in_turn = (counts.get(name, 0) for name in ("bits_flipped", "bits_in_turn"))
    yield ""
    yield (
        f"In L5, {flipped:,} of the copies have a single bit flipped. Each run flips the next of the {DATABASE_BITS:,} "
        f"bits of a small `SqliteStore`, which has covered them {in_turn / DATABASE_BITS:.1f} times so far."
    )


def _row(row):
    return " | ".join(_text(row[layer]) if layer in row else "not run" for layer in LAYERS)


def _text(cell):
    crashes = f"{cell.cycles:,}"
    seconds = f"{cell.seconds:.0f} s" if cell.seconds >= 1 else "under 1 s"
    match cell.fate:
        case CellFate.KILLED:
            return f"**killed** after {crashes} in {seconds}"
        case CellFate.SURVIVED:
            return f"survived {crashes}"
        case CellFate.SKIPPED:
            return "skipped"
    return f"{cell.fate.value} after {crashes}"


def _exhibits(cells):
    yield ""
    yield "## The bugs"
    yield ""
    for exhibit in EXHIBITS:
        yield f"### {exhibit.name}: {exhibit.title}"
        yield ""
        yield f"Where: {exhibit.happened}"
        yield ""
        yield f"Here: {exhibit.planted}"
        yield ""
        for layer in _killers(cells[exhibit.name]):
            cell = cells[exhibit.name][layer]
            yield f"- {layer} reported: {_plain(cell.promise)}" + (f" ({_short(cell.found)})" if cell.found else "")
        yield ""


def _plain(text):
    """Return a text in one line, with Markdown's own characters escaped."""
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")


def _short(text):
    text = _plain(text)
    return text if len(text) <= 140 else f"{text[:140].rstrip()} ..."


def _blind(cells):
    for layer, what, names in BLIND_SPOTS:
        cells_run = {
            name: cells[name][layer]
            for name in names
            if cells[name][layer].fate in {CellFate.KILLED, CellFate.SURVIVED}
        }
        seen = [name for name, cell in cells_run.items() if cell.fate is CellFate.KILLED]
        judged = sum(cell.cycles for cell in cells_run.values())
        result = f"yet it killed {', '.join(seen)}" if seen else f"0 of {len(cells_run)} in {judged:,} crashes"
        result = result if cells_run else "not measured"
        yield f"- {layer} is blind to {what} ({', '.join(names)}): {result}."


BLIND_SPOTS = (
    ("L3", "missing syncs, because the kernel keeps the writes of a killed process", ("M1", "M2")),
    ("L5", "missing and misplaced syncs, because it damages stores that were closed", ("M1", "M2", "M11", "M14")),
    ("L1", "an empty log, because no crash leaves a log of ours empty", ("M4",)),
    ("L1", "limits, gates and delayed messages, because its workload has none", ("M9", "M13", "M16")),
    ("L0", "files, because its store is in memory", ("M1", "M2", "M3", "M4", "M11", "M14")),
)
"""The blind spot of a layer with its reason, and the exhibits that show it."""


def _own_bugs():
    yield "## Bugs of our own that the layers found"
    yield ""
    if not OWN_BUGS:
        yield "None so far."
        return
    yield "| layer | bug | fix | test |"
    yield "| --- | --- | --- | --- |"
    for bug in OWN_BUGS:
        yield f"| {' | '.join(map(_plain, bug))} |"
