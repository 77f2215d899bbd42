"""The output of `ackstate sweep` and `ackstate redelivery`: estimates in a format for programs, a report for people."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.atomic_write import atomic_write, write_atomically
from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import location_argument, path_argument

if TYPE_CHECKING:
    from rich.table import Table

    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.location import Location
    from ackstate.analysis.report.contents import Contents
    from ackstate.analysis.report.inputs import ReportInputs

# `make calibrate` writes it there.
_USUAL_CALIBRATION = Path("benchmarks/calibration.json")


FORMATS = ("json", "parquet", "csv", "html")
FormatOption = Annotated[
    str | None, typer.Option("--format", metavar="F", help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}; with --out.")
]
OutOption = Annotated[Any, typer.Option(metavar="FILE", parser=location_argument, help="Write it there; may be a URL.")]
ReportOption = Annotated[
    Any,
    typer.Option(metavar="FILE", parser=location_argument, help="Write a report there, one HTML file; may be a URL."),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", parser=path_argument, help=f"For the report; {_USUAL_CALIBRATION} if that exists."),
]
TraceSummaryOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", parser=path_argument, help="For the report: output of trace convert or generate, --json."
    ),
]


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """A requested report.

    Attributes:
        report: The file to write.
        calibration: An input beside the trace, as the next; see `ackstate.analysis.report.inputs`.
        trace_summary: See `calibration`.
    """

    report: Location
    calibration: Path | None = None
    trace_summary: Path | None = None

    @classmethod
    def wanted(
        cls,
        report: Location | None,
        *,
        calibration: Path | None,
        trace_summary: Path | None,
    ) -> ReportFiles | None:
        """Return the report, None if none is requested.

        Raises:
            typer.BadParameter: An input of the report is given without a report, or its directory does not exist.
        """
        if report is None:
            if any(each is not None for each in (calibration, trace_summary)):
                raise typer.BadParameter("--calibration and --trace-summary go with --report")
            return None
        _check_place(report)
        if calibration is None and _USUAL_CALIBRATION.is_file():
            calibration = _USUAL_CALIBRATION
        return cls(report, calibration, trace_summary)

    def read_inputs(self) -> ReportInputs:
        """Read the files, before Spark starts; raises as `ReportInputs.read`."""
        from ackstate.analysis.report.inputs import ReportInputs

        return ReportInputs.read(calibration=self.calibration, origin=self.trace_summary)

    def write(self, contents: Contents) -> None:
        """Write the report atomically."""
        from ackstate.analysis.report.page import render

        write_atomically(self.report, render(contents))


@dataclass(frozen=True, slots=True)
class Output:
    """The destination of the estimates.

    Attributes:
        form: One of `FORMATS`; None to show them.
        out: The file in that format; None to show them.
        report: The report, if one is requested.
    """

    form: str | None
    out: Location | None
    report: ReportFiles | None

    @classmethod
    def wanted(
        cls,
        form: str | None,
        out: Location | None,
        report: Location | None,
        *,
        calibration: Path | None,
        trace_summary: Path | None,
    ) -> Output:
        """Return the destination that the options name.

        Raises:
            typer.BadParameter: The options do not go together.
        """
        if (form is None) != (out is None):
            raise typer.BadParameter("--format and --out go together")
        if form is not None and form not in FORMATS:
            raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
        if form == "html":
            if report is not None:
                raise typer.BadParameter("--format html means --report: give one of them")
            form, out, report = None, None, out
        if out is not None:
            _check_place(out)
        files = ReportFiles.wanted(report, calibration=calibration, trace_summary=trace_summary)
        return cls(form, out, files)

    def deliver(self, result: SweepResult, *parts: Table | str, answer: dict[str, Any] | None) -> None:
        """Show the estimates, or write them atomically and print the names of the files; the report is already written.

        Args:
            result: The estimates.
            parts: Tables and lines for a terminal.
            answer: Printed instead, as JSON; None to print no JSON.
        """
        if self.out is None:
            console.show(*parts) if answer is None else console.write_json(answer)
        elif self.form == "json":
            write_atomically(self.out, console.json_text(result.to_json()))
        else:
            _write_table(result, self.out, is_parquet=self.form == "parquet")
        if answer is None and (lines := self._lines(result)):
            console.show(*lines)

    def _lines(self, result: SweepResult) -> list[str]:
        lines = []
        if self.out is not None:
            count = sum(len(each.estimates) for each in result.policies)
            lines.append(f"{self.out}: {count:,} estimates, {', '.join(each.label for each in result.policies[:3])}")
        if self.report is not None:
            lines.append(f"{self.report.report}: {self.report.report.stat().st_size / 1e6:.1f} MB")
        return lines


def command() -> str:
    """Return the command line of this process."""
    return shlex.join(["ackstate", *sys.argv[1:]])


def _check_place(file: Location) -> None:
    """Check, before Spark starts, that a file can be created there."""
    if file.is_dir() or (isinstance(file, Path) and not file.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{file}: the output must be a file in an existing directory")


def _write_table(result: SweepResult, out: Location, *, is_parquet: bool) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    rows = [{"policy": each.label} | estimate.to_row() for each in result.policies for estimate in each.estimates]
    with atomic_write(out) as unfinished:
        if is_parquet:
            parquet.write_table(pa.Table.from_pylist(rows), unfinished)
        else:
            csv.write_csv(pa.Table.from_pylist(rows), unfinished)
