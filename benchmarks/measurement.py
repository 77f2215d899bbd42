"""Runs a function several times, and stores, shows and writes the measurements.

A time is never asserted: it is the machine's. A count of bytes is, against its limit.
"""

from __future__ import annotations

import gc
import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from os import sched_getaffinity
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ackstate import DeletedRanges
    from benchmarks.peers import Peer

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
_COLUMNS = ("what", "unit", "median", "min", "max", "runs", "against", "ratio")
_TEXT_COLUMNS = ("what", "unit")
_LIBRARIES = (
    "duckdb", "google-crc32c", "intervaltree", "numpy", "protobuf", "pyarrow", "pyroaring", "pyspark",
    "sortedcontainers",
)  # fmt: skip


class Spread(NamedTuple):
    """The measurements of several runs of a function."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, measured: Iterable[float]) -> Self:
        """Summarize the measurements of all runs, at least one."""
        found = list(measured)
        return cls(median(found), min(found), max(found), len(found))


class Against(NamedTuple):
    """The reference of a figure: a limit, or another measurement of that work, maybe from `figure` to `high`."""

    name: str
    figure: float
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a table."""

    what: str
    unit: str
    spread: Spread
    against: Against | None
    is_count: bool


class BenchmarkReport:
    """The figures of one benchmark, in order."""

    def __init__(self, name: str, about: str) -> None:
        self._name = name
        self._about = about
        self._figures: list[Figure] = []

    def time(self, what: str, unit: str, spread: Spread, against: Against | None = None) -> Spread:
        """Store a measurement and return it."""
        self._figures.append(Figure(what, unit, spread, against, is_count=False))
        return spread

    def count(self, what: str, unit: str, number: float, against: Against | None = None) -> float:
        """Keep a count and return it; one held against ``limit`` fails the command when it is above."""
        spread = Spread(number, number, number, 1)
        self._figures.append(Figure(what, unit, spread, against, is_count=True))
        return number

    def publish(self) -> None:
        """Print the table, write ``results/<name>.json``, and check the counts."""
        written = {
            "about": self._about,
            "environment": environment(),
            "figures": [_rounded(figure) for figure in self._figures],
        }
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(written, indent=1, sort_keys=True)
        (RESULTS / f"{self._name}.json").write_text(text + "\n")
        Console(width=160).print(_terminal_table(self._name, written["figures"]))
        print(self._about)
        self._check_counts()

    def _check_counts(self) -> None:
        for figure in self._figures:
            if figure.is_count and figure.against and figure.against.name == "limit":
                assert figure.spread.median <= figure.against.figure, f"over its limit: {figure}"


class Screen(BenchmarkReport):
    """Shows and does not keep: figures of another size than the committed ones."""

    def publish(self) -> None:
        for figure in self._figures:
            median, low, high, runs = figure.spread
            held = f", {figure.against.name} {figure.against.figure:.3g}" if figure.against else ""
            Console(width=160).print(
                f"{figure.what}: {median:.3g} {figure.unit} ({low:.3g} to {high:.3g}, {runs} runs{held})"
            )


class TimedPart(NamedTuple):
    """The time of the part of a call that counts; a timed function returns it if not all of the call does."""

    nanoseconds: int


class Timing(NamedTuple):
    """A timed function: `thing`, called with a new result of `fresh` for each run; `fresh` is not timed."""

    thing: Callable[[Any], object]
    fresh: Callable[[], Any]
    each: float
    """Divides each time: 1 for nanoseconds, 1_000_000 for milliseconds, the entries for ns an entry."""


def timed(thing: Callable[[T], object], fresh: Callable[[], T], *, runs: int = 7, each: float = 1) -> Spread:
    """Time one thing, `runs` times after once to warm up; see `Timing`."""
    return timed_in_turn({"": Timing(thing, fresh, each)}, runs=runs)[""]


def timed_in_turn(
    timings: Mapping[str, Timing], *, runs: int = 7, clock: Callable[[], int] = perf_counter_ns
) -> dict[str, Spread]:
    """Time several things that are to be compared, in rounds: a slow spell of the machine hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in timings}
    for timing in timings.values():
        timing.thing(timing.fresh())
    # Not once per run: a collection leaves the caches cold, and a timed call may take a microsecond.
    gc.collect()
    gc.disable()
    for _ in range(runs):
        for name, (thing, fresh, each) in timings.items():
            argument = fresh()
            start = clock()
            result = thing(argument)
            whole = clock() - start
            taken[name].append((result.nanoseconds if isinstance(result, TimedPart) else whole) / each)
    gc.enable()
    return {name: Spread.of(times) for name, times in taken.items()}


def check_equal(peer: Peer, ranges: DeletedRanges) -> None:
    """Refuse to time a peer that does not hold the same and count the same."""
    assert list(peer.runs()) == list(ranges.runs())
    assert (peer.range_count, peer.record_bytes) == (ranges.range_count, ranges.record_bytes)


def environment() -> dict[str, object]:
    """Return the environment of the figures, without the identity of the machine."""
    return {
        "cores": len(sched_getaffinity(0)),
        "libraries": {library: version(library) for library in _LIBRARIES},
        "python": platform.python_version(),
    }


def _rounded(figure: Figure) -> dict[str, Any]:
    row = asdict(figure)
    spread, against = figure.spread, figure.against
    row["spread"] = {"high": _four(spread.high), "low": _four(spread.low), "median": _four(spread.median)}
    row["runs"] = spread.runs
    row["against"] = against and {
        "name": against.name,
        "figure": _four(against.figure),
        "high": against.high and _four(against.high),
    }
    return row


def _four(number: float) -> float:
    return float(f"{number:.4g}")


def _terminal_table(name: str, figures: list[dict[str, Any]]) -> Table:
    shown = Table(title=name, title_justify="left")
    for column in _COLUMNS:
        shown.add_column(column, no_wrap=True, justify="left" if column in _TEXT_COLUMNS else "right")
    for figure in figures:
        spread, against = figure["spread"], figure["against"]
        numbers = [_shown(spread[part]) for part in ("median", "low", "high")]
        held = _held_against(spread["median"], against)
        shown.add_row(figure["what"], figure["unit"], *numbers, str(figure["runs"]), *held)
    return shown


def _held_against(median: float, against: dict[str, Any] | None) -> tuple[str, str]:
    if against is None:
        return "", ""
    low, high = against["figure"], against["high"]
    if high is None:
        return f"{against['name']} {_shown(low)}", _shown(median / low)
    return f"{against['name']} {_shown(low)} to {_shown(high)}", f"{_shown(median / high)} to {_shown(median / low)}"


def _shown(figure: float) -> str:
    """Return three digits, or all of a whole number."""
    if figure >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.3g}"
