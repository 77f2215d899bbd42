"""The page of the kill matrix: from what was measured, and from the catalogue."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from museum.cell import Cell, Fate
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
WITHOUT_GAUGE = ("L5", "ZK")
"""Layers that look at no gauge: what is damaged or taken over may lose more than it says."""
PRODUCT = "none"
"""The row of the product without a bug."""

_HEAD = """\
# The kill matrix

Sixteen bugs that others really shipped, made again in our code one at a time, and which layer of the crash harness sees
which. `make kill-matrix` measures it and writes this page: every layer runs on every bug, from a fixed seed, until it
sees a promise broken or its time is over. Every bug is killed by at least one layer; without a bug, nothing is.

The bugs are planted by tests and cannot be reached from the product: `tests/museum/`, each with a short story that it
breaks. In a cell: how many crashes had been judged when the first promise was seen broken, and after how long; or
*survived* and how many were judged for nothing. A crash is what the layer calls one: a crash state, a kill, a power
cut, a damaged copy. Seconds are of one machine with two cores, and rounded.
"""

_BLIND_HEAD = """\
## Blind spots

What a layer cannot see is as good to know as what it sees. Measured, in the table above:
"""


DATABASE_BITS = 327_680
"""Of the small database that L5 flips bit by bit."""
_EVIDENCE_HEAD = """\
## The product under all of them

What `make soak` has added up so far, from one seed after another
([crash.json](../benchmarks/crash.json)): promises broken, and how many crashes were judged for it. *Lost* are
entries with a durable receipt, *invented* such as nobody had acked; the *gauge* is wrong where what came back is not
what it said: in L0 and L1 exactly that many after the worst crash, in L2 to L4 at most; in L3 and L4 it is wrong, too,
where it counts entries that have a receipt.
"""


def render(cells: Mapping[str, Mapping[str, Cell]], totals: Mapping[str, Totals]) -> str:
    """Return the page.

    Args:
        cells: By the name of an exhibit, or `PRODUCT`, and of a layer.
        totals: What each layer has found in the product, by its name.
    """
    parts = (_table(cells), _evidence(totals), _exhibits(cells), [_BLIND_HEAD, *_blind(cells), ""], _own_bugs())
    return "\n".join([_HEAD, *chain.from_iterable(parts)])


def is_good(cells: Mapping[str, Mapping[str, Cell]]) -> bool:
    """Say whether every exhibit is killed by some layer, and the product by none of those that can run here."""
    product = [cells[PRODUCT][layer].fate for layer in LAYERS if layer in cells[PRODUCT]]
    is_unharmed = set(product) in ({Fate.SURVIVED}, {Fate.SURVIVED, Fate.SKIPPED})
    return all(_killers(cells[exhibit.name]) for exhibit in EXHIBITS) and is_unharmed and len(product) == len(LAYERS)


def _killers(row: Mapping[str, Cell]) -> list[str]:
    return [layer for layer in LAYERS if layer in row and row[layer].fate is Fate.KILLED]


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
    flipped, whole, in_turn = (counts.get(name, 0) for name in ("bits_flipped", "stores_flipped_whole", "bits_in_turn"))
    yield ""
    yield (
        f"In L5, {flipped:,} of the copies have a single bit flipped. Every bit of a small `FileStore` was flipped "
        f"{whole:,} times; of the {DATABASE_BITS:,} bits of a small `SqliteStore` each run takes the next ones: "
        f"{in_turn / DATABASE_BITS:.1f} times round so far."
    )


def _row(row):
    return " | ".join(_text(row[layer]) if layer in row else "not run" for layer in LAYERS)


def _text(cell):
    crashes = f"{cell.cycles:,}"
    seconds = f"{cell.seconds:.0f} s" if cell.seconds >= 1 else "under 1 s"
    match cell.fate:
        case Fate.KILLED:
            return f"**killed** after {crashes} in {seconds}"
        case Fate.SURVIVED:
            return f"survived {crashes}"
        case Fate.SKIPPED:
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
            yield f"- {layer} saw: {_plain(cell.promise)}" + (f" ({_short(cell.found)})" if cell.found else "")
        yield ""


def _plain(text):
    """Return a text in one line, without what Markdown takes for its own."""
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")


def _short(text):
    text = _plain(text)
    return text if len(text) <= 140 else f"{text[:140].rstrip()} ..."


def _blind(cells):
    for layer, what, names in BLIND_SPOTS:
        cells_run = {
            name: cells[name][layer] for name in names if cells[name][layer].fate in {Fate.KILLED, Fate.SURVIVED}
        }
        seen = [name for name, cell in cells_run.items() if cell.fate is Fate.KILLED]
        judged = sum(cell.cycles for cell in cells_run.values())
        result = f"yet it saw {', '.join(seen)}" if seen else f"0 of {len(cells_run)} in {judged:,} crashes"
        result = result if cells_run else "not measured"
        yield f"- {layer} and {what} ({', '.join(names)}): {result}."


BLIND_SPOTS = (
    ("L3", "a missing sync, since the kernel keeps what a killed process wrote", ("M1", "M2")),
    ("L5", "syncs, and their order, since it damages what a store in good order left", ("M1", "M2", "M11", "M14")),
    ("L1", "an empty log, since no honest crash leaves one of ours empty", ("M4",)),
    ("L1", "limits, gates and delayed messages, of which its workload has none", ("M9", "M13", "M16")),
    ("L0", "files, since its store is in memory", ("M1", "M2", "M3", "M4", "M11", "M14")),
)
"""Which layer cannot see what and why, and the exhibits that show it."""


def _own_bugs():
    yield "## Bugs of our own that the layers found"
    yield ""
    if not OWN_BUGS:
        yield "None that got so far."
        return
    yield "| layer | what went wrong | what was changed | its test |"
    yield "| --- | --- | --- | --- |"
    for bug in OWN_BUGS:
        yield f"| {' | '.join(map(_plain, bug))} |"
