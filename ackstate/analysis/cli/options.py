"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ackstate.analysis.durations import Duration
from ackstate.analysis.location import Location, LocationError, location

NUMBER_MAX = 10**15
"""A limit for numbers whose sums must fit 64-bit counters."""
LONGEST = f"{NUMBER_MAX}ms"
"""The same limit for a duration."""


def path_argument(text: str) -> Path:
    """Return the path that a user named; an empty path would be the current directory, which is never meant.

    Raises:
        typer.BadParameter: It is empty.
    """
    if not str(text):
        raise typer.BadParameter("must not be empty")
    return Path(text)


def location_argument(text: str) -> Location:
    """Return the local path, or the location of the URL, that a user named.

    Raises:
        typer.BadParameter: It is empty, or a URL that cannot be used.
    """
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
    """Return an option whose parameter is a `Duration`.

    Args:
        names: As in `typer.Option`.
        help: As in `typer.Option`.
        plain_unit: The unit of a number without one; empty to require a unit.
        least: The shortest duration.
        most: The longest; empty for any.
    """
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
    """Split settings given as ``key=value``.

    Raises:
        typer.BadParameter: A text is not a setting, or a key is given twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise typer.BadParameter(f"a setting must be key=value, got {text!r}")
        if key.strip() in pairs:
            raise typer.BadParameter(f"the setting {key.strip()} is given twice")
        pairs[key.strip()] = value
    return pairs
