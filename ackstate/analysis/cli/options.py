"""Arguments and options that several commands share, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperGroup

from ackstate.analysis.durations import Duration
from ackstate.analysis.location import Location, LocationError, location
from ackstate.checks import did_you_mean

NUMBER_MAX = 10**15
"""A limit for numbers whose sums must fit 64-bit counters."""
LONGEST = f"{NUMBER_MAX}ms"
"""The same limit for a duration."""


def path_argument(text: str) -> Path:
    """Return the path that a user named; an empty path would be the current directory, which is never meant."""
    if not str(text):
        raise typer.BadParameter("must not be empty")
    return Path(text)


def location_argument(text: str) -> Location:
    """Return the local path, or the location of the URL, that a user named."""
    try:
        return location(str(text))
    except LocationError as error:
        raise typer.BadParameter(str(error)) from None


def between(lowest: float, highest: float) -> Callable[[float], float]:
    """Return a check of an option's value, both ends included; Typer's own clutters the help with its bounds."""

    def check(number: float) -> float:
        # Written so that it holds for nan as well.
        if not lowest <= number <= highest:
            raise typer.BadParameter(f"must be from {lowest} to {highest}, got {number}")
        return number

    return check


def duration_option(
    *names: str,
    help: str,  # noqa: A002 - as in Typer
    plain_unit: str = "",
    least: str = "0s",
    most: str = "",
) -> Any:
    """Return an option whose parameter is a `Duration`."""
    lowest, highest = Duration.parse(least), Duration.parse(most) if most else None

    def parse(text: object) -> Duration:
        """Return the duration that a text names, if it is within the limits."""
        try:
            # A default is parsed, too. An equals sign comes from a short option: -t=90s.
            given = Duration.parse(str(text).removeprefix("="), plain_unit=plain_unit)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if given < lowest or (highest is not None and given > highest):
            limits = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            raise typer.BadParameter(f"must be {limits}, got {str(text)!r}")
        return given

    return typer.Option(*names, metavar="TIME", parser=parse, help=help)


JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
TraceArgument: TypeAlias = Annotated[
    Any,
    typer.Argument(
        metavar="TRACE",
        parser=location_argument,
        help="A Parquet trace, file or directory, or a directory of daily traces; may be a URL.",
    ),
]
BrokerDirectoryArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="DIR", parser=path_argument, help="The broker's directory: its store and its recording."),
]
TopicOption: TypeAlias = Annotated[str | None, typer.Option(metavar="T", help="Only cursors of this topic.")]
SubscriptionOption: TypeAlias = Annotated[str | None, typer.Option(metavar="S", help="Only cursors of this name.")]
FlushIntervalOption: TypeAlias = Annotated[
    Duration,
    duration_option("--flush-interval-ms", plain_unit="ms", most=LONGEST, help="Each cursor persists this often."),
]


def key_value_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Split settings given as ``key=value``."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise typer.BadParameter(f"a setting must be key=value, got {text!r}")
        if key.strip() in pairs:
            raise typer.BadParameter(f"the setting {key.strip()} is given twice")
        pairs[key.strip()] = value
    return pairs


class CommandGroup(TyperGroup):
    """A group of commands that suggests a command for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word."""
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            self.refuse(ctx, args[0])
        return super().resolve_command(ctx, args)

    def refuse(self, ctx: Any, name: str) -> None:
        """Raise an error about an unknown command."""
        ctx.fail(f"unknown command {name!r}{did_you_mean(name, self.commands)}")


def usage_error_text(error: Any) -> str:
    """Return the error in the words of a command, without a full stop."""
    possibilities = getattr(error, "possibilities", None)
    if possibilities is None:
        text: str = error.format_message()
        return text.rstrip(".")
    return f"unknown option {error.option_name}{did_you_mean(error.option_name, possibilities)}"
