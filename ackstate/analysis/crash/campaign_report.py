"""Reports the totals of a crash campaign: a table, remarks with one story for equal failures, or JSON.

A story that does not fit on a screen is shortened, and stored whole in a file that is named in its place.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ackstate.analysis.crash.campaign import OURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.analysis.crash.campaign import Totals

_STORY_LINES_MAX = 18
"""With the lines printed around it, a story fits on a screen of 24 lines."""
_STORY_FIRST_LINES = 2
_LINE_LENGTH_MAX = 150


def table(found: Mapping[str, Totals], titles: Mapping[str, str]) -> Table:
    """Return the sums as a table, a row for each layer; `titles` describe the layers by name."""
    table = Table("layer", "", box=None, header_style="bold")
    for title in ("runs", "cycles", "a second", "lost\ndurable", "invented", "gauge\nwrong", "failed\nruns"):
        table.add_column(title, justify="right")
    for name, totals in found.items():
        numbers = (totals.runs, totals.cycles, _rate(totals), totals.lost_durable, totals.invented)
        more = (totals.gauge_mismatch, totals.failed_runs)
        table.add_row(name, titles[name], *(f"{number:,}" for number in (*numbers, *more)))
    return table


def remarks(found: Mapping[str, Totals], untested: Mapping[str, str], subject: str, program: str) -> list[str]:
    """Return the lines below the table: skipped layers, untested promises, and the failures with their stories."""
    lines = []
    for name, totals in found.items():
        if totals.skipped:
            lines.append(f"{name} was skipped: {totals.skipped}")
        if untested[name]:
            lines.append(f"{name}: {untested[name]}")
        # A run that breaks two promises has one story.
        for (seed, story), failures in groupby(totals.failures, lambda each: (each["seed"], tuple(each["story"]))):
            lines += _failure_lines(name, seed, story, list(failures))
            lines.append(f"  again: {_again(program, name, seed, subject)}")
    return lines


def as_json(found: Mapping[str, Totals], untested: Mapping[str, str]) -> dict[str, Any]:
    """Return sums over all layers, and each layer with its failures; arguments as of `remarks`."""
    sums = ("runs", "cycles", "lost_durable", "invented", "gauge_mismatch", "failed_runs", "seconds")
    layers = [
        {"layer": name, "cycles_per_second": _rate(each), **asdict(each), "untested": untested[name]}
        for name, each in found.items()
    ]
    return {name: sum(layer[name] for layer in layers) for name in sums} | {"layers": layers}


def _failure_lines(name: str, seed: int, story: Sequence[str], failures: Iterable[dict[str, Any]]) -> list[str]:
    lines, notes = [""], []
    for failure in failures:
        lines.append(f"{name}, seed {seed}: {failure['promise']}: {failure['found']}")
        if failure["count"] > 1:
            notes.append(f"  {failure['count']:,} runs failed equally, the last with seed {failure['last_seed']}")
    return [*lines, *_shortened(story, lines[1:], f"ackstate-crash-{name}-seed-{seed}-"), *dict.fromkeys(notes)]


def _shortened(story: Sequence[str], titles: Sequence[str], file_prefix: str) -> list[str]:
    """Return a story with an indent; if it is too long, its first and last lines, and the file that holds all."""
    shown = [line if len(line) <= _LINE_LENGTH_MAX else f"{line[:_LINE_LENGTH_MAX]}..." for line in story]
    if len(shown) > _STORY_LINES_MAX:
        last_count = _STORY_LINES_MAX - _STORY_FIRST_LINES - 1
        left_out = f"... {len(shown) - _STORY_FIRST_LINES - last_count:,} lines are left out ..."
        shown = [*shown[:_STORY_FIRST_LINES], left_out, *shown[-last_count:]]
    if shown != list(story):
        try:
            shown.append(f"the whole story: {_stored(story, titles, file_prefix)}")
        except OSError as error:
            shown = [*story, f"the story could not be stored in a file: {error.strerror}"]
    return [f"  {line}" for line in shown]


def _stored(story: Sequence[str], titles: Sequence[str], prefix: str) -> str:
    """Store a story in a new file among the temporary ones, and return its path."""
    descriptor, path = tempfile.mkstemp(prefix=prefix, suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in (*titles, *story))
    return path


def _rate(totals: Totals) -> int:
    return round(totals.cycles / totals.seconds) if totals.seconds else 0


def _again(program: str, name: str, seed: int, subject: str) -> str:
    options = [] if subject == OURS else ["--subject", subject]
    return f"{program} {shlex.join(['--layer', name, '--seed', str(seed), '--runs', '1', *options])}"
