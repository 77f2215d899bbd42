"""Runs functions in alternating rounds, and shows and writes the measurements: median, minimum and maximum.

A time is never asserted: it is the machine's.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from os import sched_getaffinity
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = ("duckdb", "google-crc32c", "numpy", "protobuf", "pyarrow", "pyroaring", "pyspark")


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
    """A row: a measurement, and its reference."""

    what: str
    unit: str
    spread: Spread
    against: Against | None

    def __str__(self) -> str:
        middle, low, high, runs = self.spread
        beside = f"; {self.against.name} {self.against.figure:.4g}" if self.against else ""
        return f"{self.what}: {middle:.4g} {self.unit} ({low:.4g} to {high:.4g}, {runs} runs{beside})"


class BenchmarkReport:
    """The figures of one benchmark, shown as they come."""

    def __init__(self, name: str, about: str) -> None:
        self._name = name
        self._about = about
        self._figures: list[Figure] = []

    def time(self, what: str, unit: str, spread: Spread, against: Against | None = None) -> Spread:
        """Show a measurement and return it."""
        self._figures.append(Figure(what, unit, spread, against))
        print(self._figures[-1], flush=True)
        return spread

    def count(self, what: str, unit: str, number: float, against: Against | None = None) -> float:
        """Show a count and return it."""
        return self.time(what, unit, Spread(number, number, number, 1), against).median

    def compare(
        self, timings: Mapping[str, Timing], unit: str, *, beside: str = "", runs: int = 7,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> dict[str, Spread]:  # fmt: skip
        """Time several things in turn, and show each beside the one of that name."""
        spreads = timed_in_turn(timings, runs=runs, clock=clock)
        for name, spread in spreads.items():
            self.time(
                name, unit, spread, Against(beside, spreads[beside].median) if beside and name != beside else None
            )
        return spreads

    def publish(self) -> None:
        """Write ``results/<name>.json``."""
        figures = [asdict(figure) | {"spread": figure.spread._asdict()} for figure in self._figures]
        written = {"about": self._about, "environment": _environment(), "figures": _rounded(figures)}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self._name}.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")


class Screen(BenchmarkReport):
    """Shows and does not write: figures of another size than the committed ones."""

    def publish(self) -> None:
        """Write nothing."""


class TimedPart(NamedTuple):
    """The time of the part of a call that counts; a timed function returns it if not all of the call does."""

    nanoseconds: int


class Timing(NamedTuple):
    """A timed function: `thing`, called with a new result of `fresh` for each run; `fresh` is not timed."""

    thing: Callable[[Any], object]
    fresh: Callable[[], Any] = lambda: None
    each: float = 1
    """Divides each time: 1 for nanoseconds, 1_000_000 for milliseconds, the entries for ns an entry."""


def timed_in_turn(
    timings: Mapping[str, Timing], *, runs: int = 7, clock: Callable[[], int] = perf_counter_ns
) -> dict[str, Spread]:
    """Time things that are to be compared, after each once to warm up: a slow spell of the machine hits all of them."""
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


def run(name: str, about: str, parts: Mapping[str, Callable[[BenchmarkReport, int], None]]) -> None:
    """Run the parts of a benchmark that the command names, or all, and write the figures of all at full size."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all if none is named")
    parser.add_argument("--small", type=int, default=1, metavar="N", help="divide the sizes; nothing is written")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    report = (Screen if chosen.parts or chosen.small > 1 else BenchmarkReport)(name, about)
    for part in chosen.parts or parts:
        parts[part](report, chosen.small)
    report.publish()


def _environment() -> dict[str, object]:
    """Return the environment of the figures, without the identity of the machine."""
    return {
        "cores": len(sched_getaffinity(0)),
        "libraries": {library: version(library) for library in _LIBRARIES},
        "python": platform.python_version(),
    }


def _rounded(value: Any) -> Any:
    """Return JSON values with four digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
