"""`ackstate crash` runs crash layers on a cursor, yours or ours, and reports whether every promise held."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import JsonOption, duration_option
from ackstate.analysis.crash.campaign import (
    OURS,
    RECEIPTS_MIN,
    Budget,
    CampaignError,
    Seen,
    Totals,
    as_json,
    junit,
    read_failures,
    read_totals,
    remarks,
    repeated,
    run_layer,
    table,
    write_failures,
    write_totals,
)
from ackstate.analysis.durations import Duration
from ackstate.analysis.location import write_atomically
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

    from ackstate.analysis.crash.runs import Layer

PROGRAM = "ackstate crash"
"""Named where a failed run is to be repeated; `make crash` replaces it."""
BudgetOption = Annotated[Duration, duration_option(least="1ms", help="For each layer: 500ms, 60s, 5m, 2h.")]
JUnitOption = Annotated[
    Path | None, typer.Option(metavar="FILE", parser=Path, help="Write the verdicts in the format of JUnit.")
]
_KEEP_EVERY_S = 10.0
_RANGE = re.compile(r"L(\d)\.\.L(\d)")


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A layer, made for a subject."""

    title: str
    make: Callable[[str], Layer]


def _layer(module: str, function: str) -> Callable[[str], Layer]:
    def make(subject: str) -> Layer:
        return partial(getattr(import_module(f"ackstate.analysis.crash.{module}"), function), subject=subject)

    return make


# `make crash` adds layers that look inside our own cursor (tests/crash/__main__.py).
LAYERS = {
    "L2": LayerEntry("killed at the n-th system call", _layer("kills", "call_kills")),
    "L3": LayerEntry("SIGKILL at random moments", _layer("kills", "kills")),
    "L4": LayerEntry("power cuts of a real file system", _layer("power_cuts", "power_cuts")),
    "L6": LayerEntry("power cuts of a simulated disk", _layer("traced_disk", "traced_cuts")),
}


def _chosen(text: str) -> list[str]:
    """Return the layers that a name, a range or ``all`` stands for."""
    match = _RANGE.fullmatch(text)
    names = list(LAYERS) if text == "all" else _numbered(int(match[1]), int(match[2])) if match else [text]
    if not names or not set(names) <= LAYERS.keys():
        raise typer.BadParameter(f"{text!r} is no layer; there are {', '.join(LAYERS)}, ranges such as L2..L4, and all")
    return names


def _numbered(first: int, last: int) -> list[str]:
    return [f"L{number}" for number in range(first, last + 1)]


def _share(share: float) -> float:
    if not 0 < share <= 1:
        raise typer.BadParameter(f"must be above 0 and at most 1, got {share:g}")
    return share


def crash(
    context: typer.Context,
    layer: Annotated[
        str, typer.Option(metavar="L2..L4|all", help="Which layer: a name, a range such as L2..L3, or all.")
    ] = "all",
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Seed of the first run; 1 by default.")] = None,
    budget: BudgetOption = Duration(10_000),
    runs: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most this many runs of a layer.")] = None,
    subject: Annotated[
        str,
        typer.Option(metavar="WHAT", help="ours, ours-limited, naive, module:Class, or your command line."),
    ] = OURS,
    receipts_min: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            callback=_share,
            help="The share of acks before a persist that need a receipt, or nothing was tested. "
            "Lower it for a subject that delays acks.",
        ),
    ] = RECEIPTS_MIN,
    totals: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=Path, help="Add to the totals in this file, and continue from its seeds."),
    ] = None,
    junit: JUnitOption = None,
    json: JsonOption = False,
) -> None:
    """Crash your cursor, or ours, in every way that a layer supports, and check each recovery.

    A failure is printed with the shortest failing story, and stored in one
    file; ackstate crash replay FILE repeats it.
    docs/guides/crash-test-your-cursor.md describes how to test your own cursor.

    Exit status: 0 every promise held; 1 a promise was broken; 2 the command
    failed, or it was not measured: no run was completed, no layer can run
    here, there were too few receipts, too few crashes after one, or writes
    that a layer does not see. If only some of the layers cannot run here,
    they are skipped, with the reason.
    """
    if context.invoked_subcommand is not None:
        return
    names = _chosen(layer)
    campaign = _Campaign(
        {name: LAYERS[name].make(subject) for name in names},
        Budget(budget.seconds, run_count_max=runs),
        totals,
        subject,
    )
    _execute(campaign, seed, receipts_min, junit, file="", json=json)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=Path, help="The file that a failed run left.")],
    subject: Annotated[
        str | None, typer.Option(metavar="WHAT", help="The subject, if it is elsewhere here; as of ackstate crash.")
    ] = None,
    budget: BudgetOption = Duration(10_000),
    junit: JUnitOption = None,
    json: JsonOption = False,
) -> None:
    """Repeat a failed run until it fails again, for at most the budget.

    FILE is what ackstate crash left, here or on another machine. Files of the
    subject are relative to the current directory. The first failure of each
    layer is repeated.

    Exit status: as of ackstate crash; 1 if it failed again.
    """
    stored, seeds = read_failures(file)
    if unknown := [name for name in seeds if name not in LAYERS]:
        raise CampaignError(f"{file}: {unknown[0]!r} is no layer; there are {', '.join(LAYERS)}")
    subject = stored if subject is None else subject
    layers = {name: repeated(LAYERS[name].make(subject), seed) for name, seed in seeds.items()}
    campaign = _Campaign(layers, Budget(budget.seconds), None, subject)
    _execute(campaign, None, RECEIPTS_MIN, junit, file=str(file), json=json)


def _execute(
    campaign: _Campaign, seed: int | None, receipts_min: float, junit_file: Path | None, *, file: str, json: bool
) -> None:
    """Run a campaign, report, and exit with its status; `file` has its failures, unless it is empty."""
    _open_standard_descriptors()
    ending: BaseException | None = None
    with _terminated_as_interrupted() as check:
        try:
            campaign.run(seed, check)
        except (KeyboardInterrupt, AckStateError, OSError) as error:
            for line in getattr(error, "complaint", ()):
                typer.echo(f"| {line}", err=True)
            # Failures until then are still reported.
            if not campaign.found:
                raise
            ending = error
    untested = {name: seen.untested(receipts_min=receipts_min) for name, seen in campaign.seen.items()}
    if junit_file is not None:
        write_atomically(junit_file, junit(campaign.found, campaign.seen, untested))
    has_failed = any(seen.has_failed for seen in campaign.seen.values())
    if has_failed and not file:
        try:
            file = write_failures(campaign.found, campaign.subject)
        except OSError as error:
            console.complain(f"the failures could not be stored in a file: {error.strerror}")
    if json:
        console.write_json(as_json(campaign.found, campaign.seen, untested, file))
    else:
        titles = {name: entry.title for name, entry in LAYERS.items()}
        lines = remarks(campaign.found, campaign.seen, untested, file)
        again = [f"{PROGRAM} replay {shlex.quote(file)}"] if has_failed and file else []
        console.show(table(campaign.found, titles), *lines, *again)
    _end(campaign, untested, ending)


def _end(campaign: _Campaign, untested: dict[str, str], ending: BaseException | None) -> None:
    """Exit with the status of the campaign: a broken promise outweighs everything else."""
    seen = campaign.seen.values()
    if any(each.has_failed for each in seen):
        if ending is not None:
            console.complain("interrupted" if isinstance(ending, KeyboardInterrupt) else str(ending))
        raise typer.Exit(1)
    if ending is not None:
        raise ending
    if all(each.skipped for each in seen):
        raise CampaignError("nothing was tested: no layer that was chosen can run here")
    if any(untested.values()):
        raise typer.Exit(2)


@dataclass(frozen=True, slots=True)
class _Campaign:
    """Runs the chosen layers one after the other."""

    layers: dict[str, Layer]
    budget: Budget
    totals_file: Path | None
    subject: str
    found: dict[str, Totals] = field(default_factory=dict)  # Totals of the layers that were started
    seen: dict[str, Seen] = field(default_factory=dict)  # Results of this campaign by layer

    def run(self, seed: int | None, check: Callable[[], None]) -> None:
        """Run each layer for its budget."""
        kept = read_totals(self.totals_file, subject=self.subject) if self.totals_file is not None else {}
        known = sorted(kept.keys() & self.layers.keys())
        if known and seed is not None:
            raise CampaignError(f"{self.totals_file} has its own next seeds for {', '.join(known)}: omit --seed")
        for name in self.layers:
            kept.setdefault(name, Totals(1 if seed is None else seed))
        # Fail now rather than after hours of runs if the totals cannot be written.
        self._keep(kept)
        with console.progress(auto_refresh=False) as progress:
            for name, layer in self.layers.items():
                self._run_one(name, layer, kept, progress, check)

    def _run_one(
        self, name: str, layer: Layer, kept: dict[str, Totals], progress: Progress, check: Callable[[], None]
    ) -> None:
        task = progress.add_task(name, total=1.0)
        self.found[name], self.seen[name] = kept[name], (seen := Seen())
        last_kept_s, failures_kept = time.monotonic(), kept[name].failed_runs

        def watch(totals: Totals, share: float) -> None:
            """Show the progress of the layer; store its totals every few seconds, and after each failure."""
            nonlocal last_kept_s, failures_kept
            # A failure is stored at once, in case this process is killed.
            if time.monotonic() - last_kept_s > _KEEP_EVERY_S or totals.failed_runs > failures_kept:
                self._keep(kept)
                last_kept_s, failures_kept = time.monotonic(), totals.failed_runs
            check()
            progress.update(task, description=_line(name, totals), completed=share, refresh=True)

        try:
            run_layer(layer, kept[name], self.budget, seen=seen, watch=watch)
        except BaseException:
            # A layer that could not start has nothing to report.
            if not seen.runs:
                del self.found[name], self.seen[name]
            raise
        finally:
            self._keep(kept)

    def _keep(self, kept: dict[str, Totals]) -> None:
        if self.totals_file is not None:
            write_totals(self.totals_file, kept, subject=self.subject)


def _line(name: str, totals: Totals) -> str:
    failed = f"{totals.failed_runs} failed runs" if totals.failed_runs else "clean"
    return f"{name} {LAYERS[name].title}: {totals.cycles:,} cycles, {failed}"


def _open_standard_descriptors() -> None:
    """Open closed standard descriptors: a pipe could otherwise get the number of one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextmanager
def _terminated_as_interrupted() -> Iterator[Callable[[], None]]:
    """Make SIGTERM end the block as Ctrl-C does; neither signal interrupts the cleanup, nor does a second one.

    Yields a check to be called regularly: an exception that a signal raises in a callback of Python's own, such as
    those of a fork, is lost.
    """
    was_asked: list[int] = []
    # Only the main thread can handle signals.
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def interrupt(number: int, _: object) -> None:
        """Ignore all further signals, and end the block."""
        was_asked.append(number)
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    def check() -> None:
        if was_asked:
            raise KeyboardInterrupt

    def forget(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            unraisable(what)

    before = {number: signal.signal(number, interrupt) for number in signals}
    unraisable, sys.unraisablehook = sys.unraisablehook, forget
    try:
        yield check
    finally:
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            signal.signal(number, handler)
