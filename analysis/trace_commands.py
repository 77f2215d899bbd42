"""`ackstate trace`: make traces from recordings and from what other brokers wrote, check them.

``ackstate trace RECORDING TRACE`` is short for ``ackstate trace convert RECORDING TRACE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - Typer reads it when the command is made
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ackstate.analysis.generate_command import GenerateCommand
from ackstate.analysis.path_argument import path_argument

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.progress import Progress

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class _ConvertByDefault(TyperGroup):
    """A group whose first word may be left out if it is `convert`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the word in."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["convert", *args]
        return super().parse_args(ctx, args or ["--help"])


def _bad_rows_max(text: str) -> Any:
    from ackstate.analysis.trace.bad_rows import BadRowsMax  # noqa: PLC0415 - needs the extra `spark`

    try:
        return BadRowsMax.parse(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True, slots=True)
class TraceCommands:
    """The commands.

    Attributes:
        show: Writes tables and lines to standard output.
        write_json: Writes one object there.
        progress: Begins a progress bar on standard error.
    """

    show: Callable[..., None]
    write_json: Callable[[dict[str, Any]], None]
    progress: Callable[[], AbstractContextManager[Progress]]

    def convert(
        self,
        sources: Annotated[
            list[Path],
            typer.Argument(
                metavar="FILE...",
                parser=path_argument,
                help="Recordings, JSON lines, logs of ACK commands, or Parquet with one row an event; - reads standard "
                "input.",
            ),
        ],
        out: Annotated[
            Path,
            typer.Argument(metavar="TRACE", parser=path_argument, help="The trace; one that is there is replaced."),
        ],
        bad_rows_max: Annotated[
            Any,
            typer.Option(
                metavar="N|X%", parser=_bad_rows_max, help="Refuse if more rows are bad than this, or this share."
            ),
        ] = "0",
        text_bytes_max: Annotated[
            int, typer.Option(metavar="N", min=1, help="How large the text of a file may be, decompressed.")
        ] = 16 << 30,
        json: JsonOption = False,
    ) -> None:
        """Turn recordings, or what other brokers wrote, into one Parquet trace.

        Text may be compressed with gzip. docs/traces.md describes the formats.
        Bad rows are left out and counted; too many refuse the whole.
        """
        from ackstate.analysis.trace.convert import convert  # noqa: PLC0415 - needs the extra `spark`

        with self.progress() as progress:
            task = progress.add_task("reading", total=None)

            def show(done: int, total: int | None) -> None:
                progress.update(task, completed=done, total=total)

            done = convert(
                sources, out, bad_rows_max=bad_rows_max, text_bytes_max=text_bytes_max, progress=show
            )  # fmt: skip
        if json:
            self.write_json({"trace": str(out), **done.to_json()})
        else:
            self.show(f"{out}: {done.events} events", *done.bad_rows.lines())

    def check(
        self,
        trace: Annotated[
            Path, typer.Argument(metavar="TRACE", parser=path_argument, help="A Parquet trace, directory or file.")
        ],
        json: JsonOption = False,
    ) -> None:
        """Check every event of a trace, and say what it holds.

        Exit status: 0, or 2 if something is wrong with it.
        """
        from ackstate.analysis.trace.check import check_events  # noqa: PLC0415 - needs the extra `spark`

        with self.progress() as progress:
            task = progress.add_task("reading", total=None)

            def show(done: int, total: int | None) -> None:
                progress.update(task, completed=done, total=total)

            found = check_events(trace, progress=show)
        if json:
            self.write_json(found.to_json())
        else:
            self.show(*found.lines())


def trace_app(commands: TraceCommands) -> typer.Typer:
    """Return the group `ackstate trace`."""
    app = typer.Typer(cls=_ConvertByDefault, add_completion=False, rich_markup_mode=None)
    app.command("convert", short_help="Turn recordings, or what other brokers wrote, into a trace.")(commands.convert)
    app.command("check", short_help="Check every event of a trace, and say what it holds.")(commands.check)
    generate = GenerateCommand(commands.show, commands.write_json, commands.progress).generate
    app.command("generate", short_help="Make a big trace of a given shape, in parallel.")(generate)
    return app
