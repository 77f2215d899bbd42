"""`ackstate crash`: run crash layers on our cursor, or on yours, and say whether every promise held."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from analysis.crash.campaign import OURS, Budget, CampaignError, Totals, read_totals, run_layer, write_totals
from analysis.trace.recorder import segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.progress import Progress

    from analysis.crash.layer import Layer

_KEEP_EVERY_S = 10.0
_RANGE = re.compile(r"L(\d)\.\.L(\d)")


@dataclass(frozen=True, slots=True)
class _Options:
    """What a layer may be told."""

    subject: str
    trace: Path | None


@dataclass(frozen=True, slots=True)
class _Entry:
    title: str
    make: Callable[[_Options], Layer]
    takes_subject: bool = False


def _schedules(_: _Options) -> Layer:
    from analysis.crash.layers.schedules import schedules

    return schedules


def _crash_states(_: _Options) -> Layer:
    from analysis.crash.layers.crash_states import crash_states

    return crash_states


def _system_calls(_: _Options) -> Layer:
    from analysis.crash.layers.system_calls import system_calls

    return system_calls


def _kills(options: _Options) -> Layer:
    from analysis.crash.layers.kills import kills

    return partial(kills, subject=options.subject, recording=options.trace)


def _power_cuts(options: _Options) -> Layer:
    from analysis.crash.layers.power_cuts import power_cuts

    return partial(power_cuts, subject=options.subject, recording=options.trace)


def _damage(_: _Options) -> Layer:
    from analysis.crash.layers.damage import damage

    return damage


def _zookeeper(_: _Options) -> Layer:
    from analysis.crash.layers.zookeeper import zookeeper

    return zookeeper


_LAYERS = {
    "L0": _Entry("schedules on a faulty memory store", _schedules),
    "L1": _Entry("crash states of a simulated disk", _crash_states),
    "L2": _Entry("the n-th system call fails or kills", _system_calls),
    "L3": _Entry("SIGKILL at random moments", _kills, takes_subject=True),
    "L4": _Entry("power cuts of a real file system", _power_cuts, takes_subject=True),
    "L5": _Entry("damaged media", _damage),
    "ZK": _Entry("ZooKeeper killed, stopped, taken over", _zookeeper),
}


def _chosen(text: str) -> list[str]:
    """Return the layers that a name, a range or ``all`` stands for."""
    if text == "all":
        return list(_LAYERS)
    match = _RANGE.fullmatch(text)
    names = [f"L{number}" for number in range(int(match[1]), int(match[2]) + 1)] if match else [text]
    if not names or not set(names) <= _LAYERS.keys():
        raise typer.BadParameter(
            f"{text!r} is no layer; there are {', '.join(_LAYERS)}, ranges such as L0..L5, and all"
        )
    return names


def _budget(text: str) -> str:
    try:
        Budget.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class CrashCommand:
    """The command.

    Attributes:
        show: Writes tables and lines to standard output.
        write_json: Writes one object there.
        progress: Makes what shows progress on standard error.
    """

    show: Callable[..., None]
    write_json: Callable[[dict[str, Any]], None]
    progress: Callable[[], Progress]

    def crash(  # noqa: PLR0913, PLR0917 - one for each option
        self,
        layer: Annotated[
            str, typer.Option(metavar="L0..L5|ZK|all", help="Which layer: a name, a range such as L0..L5, or all.")
        ] = "L0..L5",
        seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Of the first run; 1 by default.")] = None,
        budget: Annotated[
            str, typer.Option(metavar="TIME", callback=_budget, help="For each layer: 500ms, 60s, 5m, 2h.")
        ] = "10s",
        runs: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most this many runs of a layer.")] = None,
        subject: Annotated[
            str,
            typer.Option(
                metavar="WHAT",
                help="L3, L4: ours, ours-sqlite, ours-limited, naive, module:Class, or your command line.",
            ),
        ] = OURS,
        trace: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR", parser=Path, help="L3, L4: record what happened, for `ackstate trace` and Spark."
            ),
        ] = None,
        totals: Annotated[
            Path | None,
            typer.Option(metavar="FILE", parser=Path, help="Add to the totals in this file, and go on from its seeds."),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    ) -> None:
        """Crash our cursor, or yours, in every way that a layer knows, and judge what each recovery holds.

        A failure is printed as a seed and the shortest story that was found;
        the same layer with that seed begins with it. docs/crash-testing.md
        tells how to test your own.

        Exit status: 0 every promise held, or the layer cannot run here and says
        why; 1 a promise was broken; 2 it could not be done, or not be tested.
        """
        names, options = _chosen(layer), _Options(subject, trace)
        _check_subject(names, options)
        _check_trace(trace)
        campaign = _Campaign(
            {name: _LAYERS[name].make(options) for name in names},
            Budget.parse(budget, run_count_max=runs),
            totals,
            subject,
            self.progress,
        )
        _open_standard_descriptors()
        with _terminated_as_interrupted() as check:
            found, is_clean = campaign.run(seed, check)
        if json:
            self.write_json(_json(found))
        else:
            self.show(_table(found), *_remarks(found, options))
        if not is_clean:
            raise typer.Exit(1)
        if any(each.untested for each in found.values()):
            raise typer.Exit(2)


@dataclass(frozen=True, slots=True)
class _Campaign:
    layers: dict[str, Layer]
    budget: Budget
    totals_file: Path | None
    subject: str
    progress: Callable[[], Progress]

    def run(self, seed: int | None, check: Callable[[], None]) -> tuple[dict[str, Totals], bool]:
        """Run each layer for its budget; return their totals, and whether this campaign saw no promise broken.

        Args:
            seed: Of the first run.
            check: Called after each run; what it raises ends the campaign.
        """
        kept = read_totals(self.totals_file, subject=self.subject) if self.totals_file is not None else {}
        known = sorted(kept.keys() & self.layers.keys())
        if known and seed is not None:
            raise CampaignError(f"{self.totals_file} goes on from its own seeds for {', '.join(known)}: omit --seed")
        for name in self.layers:
            kept.setdefault(name, Totals(1 if seed is None else seed))
        # Hours of runs are not to end where they cannot be written.
        self._keep(kept)
        failed_before = {name: kept[name].failed_runs for name in self.layers}
        with self.progress() as progress:
            for name, layer in self.layers.items():
                self._run_one(name, layer, kept, progress, check)
        found = {name: kept[name] for name in self.layers}
        return found, all(each.failed_runs == failed_before[name] for name, each in found.items())

    def _run_one(
        self, name: str, layer: Layer, kept: dict[str, Totals], progress: Progress, check: Callable[[], None]
    ) -> None:
        task = progress.add_task(name, total=1.0)
        last_kept_s = time.monotonic()

        def watch(totals: Totals, share: float) -> None:
            nonlocal last_kept_s
            check()
            progress.update(task, description=_line(name, totals), completed=share, refresh=True)
            if time.monotonic() - last_kept_s > _KEEP_EVERY_S:
                self._keep(kept)
                last_kept_s = time.monotonic()

        try:
            run_layer(layer, kept[name], self.budget, watch=watch)
        finally:
            self._keep(kept)

    def _keep(self, kept: dict[str, Totals]) -> None:
        if self.totals_file is not None:
            write_totals(self.totals_file, kept, subject=self.subject)


def _open_standard_descriptors() -> None:
    """Open those that were closed: a pipe with such a number would be taken for one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextmanager
def _terminated_as_interrupted() -> Iterator[Callable[[], None]]:
    """Have SIGTERM end the block as Ctrl-C does, and neither of them, or a second one, disturb what cleans up.

    Yields what is to be called now and then: an exception that a signal raises in a callback of Python's own, such as
    those of a fork, is forgotten there.
    """
    was_asked: list[int] = []
    # Elsewhere signals cannot be had.
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def interrupt(number: int, _: object) -> None:
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


def _check_trace(trace: Path | None) -> None:
    if trace is not None and segments(trace):
        raise CampaignError(f"{trace} holds a recording already: name another directory, or remove this one")


def _check_subject(names: Sequence[str], options: _Options) -> None:
    if options.subject == OURS and options.trace is None:
        return
    strangers = [name for name in names if not _LAYERS[name].takes_subject]
    if strangers:
        raise ValueError(f"--subject and --trace are for L3 and L4; {', '.join(strangers)} looks inside our own")


def _line(name: str, totals: Totals) -> str:
    failed = f"{totals.failed_runs} failed runs" if totals.failed_runs else "clean"
    return f"{name} {_LAYERS[name].title}: {totals.cycles:,} cycles, {failed}"


def _table(found: dict[str, Totals]) -> Table:
    table = Table("layer", "", box=None, header_style="bold")
    for title in ("runs", "cycles", "a second", "lost\ndurable", "invented", "gauge\nwrong", "failed\nruns"):
        table.add_column(title, justify="right")
    for name, totals in found.items():
        numbers = (totals.runs, totals.cycles, _rate(totals), totals.lost_durable, totals.invented)
        more = (totals.gauge_mismatch, totals.failed_runs)
        table.add_row(name, _LAYERS[name].title, *(f"{number:,}" for number in (*numbers, *more)))
    return table


def _rate(totals: Totals) -> int:
    return round(totals.cycles / totals.seconds) if totals.seconds else 0


def _remarks(found: dict[str, Totals], options: _Options) -> list[str]:
    lines = []
    for name, totals in found.items():
        if totals.skipped:
            lines.append(f"{name} was skipped: {totals.skipped}")
        if totals.untested:
            lines.append(f"{name}: {totals.untested}")
        for failure in totals.failures:
            lines += ["", f"{name}, seed {failure['seed']}: {failure['promise']}: {failure['found']}"]
            lines += [f"  {line}" for line in failure["story"]]
            lines.append(f"  again: {_again(name, failure['seed'], options)}")
    return lines


def _again(name: str, seed: int, options: _Options) -> str:
    subject = [] if options.subject == OURS else ["--subject", options.subject]
    return shlex.join(["ackstate", "crash", "--layer", name, "--seed", str(seed), "--runs", "1", *subject])


def _json(found: dict[str, Totals]) -> dict[str, Any]:
    sums = ("runs", "cycles", "lost_durable", "invented", "gauge_mismatch", "failed_runs", "seconds")
    layers = [
        {"layer": name, "cycles_per_second": _rate(each), **asdict(each), "untested": each.untested}
        for name, each in found.items()
    ]
    return {name: sum(layer[name] for layer in layers) for name in sums} | {"layers": layers}
