"""A directory with a trace for each day, which is read as one trace: by day, and in each day by chunk."""

from __future__ import annotations

import re
from datetime import date, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.manifest import MANIFEST
from ackstate.analysis.trace.parquet import Span, check_trace
from ackstate.analysis.trace.times import RULE, WALL_CLOCK_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.location import Location

DAY_SEQ = 2**44
"""`seq` of a day is less than this, so that the chunks of successive days can be concatenated."""
_DATE = re.compile(r"(?<!\d)(\d{4}-\d\d-\d\d)(?!\d)")


class Day(NamedTuple):
    """One trace of several, or the only one."""

    path: Location
    covered: Span


def days_of(path: Location) -> list[Location]:
    """Return the traces at a path: the path itself, or each day of a directory of daily traces, by name.

    A day is a directory such as ``day=2026-11-20``, or a Parquet file with a date in its name. If nothing happened, its
    directory may be empty, and is left out. If the names are dates, none may be missing.

    Raises:
        TraceError: A day is missing, or there is a trace beside the days.
        OSError: The directory cannot be read.
    """
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    visible: list[Location] = sorted(each for each in path.iterdir() if each.name[0] not in "._")
    directories = [each for each in visible if each.is_dir()]
    files = [each for each in visible if each not in directories and each.name.endswith(".parquet")]
    strangers = [file for file in files if not _DATE.search(file.name)]
    if strangers:
        if day := next((each for each in directories if _DATE.search(each.name)), None):
            raise TraceError(f"{path}: {strangers[0].name} is no day, unlike {day.name}: keep the traces apart")
        return [path]
    days = sorted([*directories, *files])
    for before, after in pairwise(days):
        _check_follows(before.name, after.name, path)
    if days and not (found := [day for day in days if day.is_file() or any(day.iterdir())]):
        raise TraceError(f"{path}: no day has a trace")
    return found if days else [path]


def check_days(path: Location) -> list[Day]:
    """Check the trace at a path, or those of all days: `check_trace` of each, and that each begins after the last.

    Raises:
        TraceError: As `days_of` or `check_trace`; or a day begins too early, or is another kind of trace.
        UnsupportedVersionError: A newer release wrote one of them.
        OSError: A directory cannot be read.
    """
    days = [Day(each, check_trace(each)) for each in days_of(path)]
    for before, after in pairwise(days):
        last, covered = before.covered, after.covered
        if covered.begin_ms <= last.end_ms:
            raise TraceError(
                f"{after.path}: it begins at {covered.begin_ms} ms, and {before.path.name} ends at {last.end_ms} ms: a "
                "day must begin after the previous one; split them where there is no event"
            )
        if (covered.begin_ms in WALL_CLOCK_MS) != (last.end_ms in WALL_CLOCK_MS):
            raise TraceError(
                f"{after.path}: all days must have times of the same clock, got {covered.begin_ms} ms after "
                f"{before.path.name} ended at {last.end_ms} ms: write {RULE}"
            )
        if covered.has_intervals != last.has_intervals:
            raise TraceError(f"{after.path}: another kind of trace than {before.path.name}: keep the traces apart")
    return days


def span_of(days: Sequence[Day]) -> Span:
    """Return the extent of successive days, or of the only trace."""
    spans = [day.covered for day in days]
    if len(spans) == 1:
        return spans[0]
    return spans[-1]._replace(
        begin_ms=spans[0].begin_ms,
        chunk_count=sum(each.chunk_count for each in spans),
        row_groups_max=max(each.row_groups_max for each in spans),
        size_bytes=sum(each.size_bytes for each in spans),
        dropped_events=sum(each.dropped_events for each in spans),
        days=tuple(day.path.name for day in days),
    )


def _check_follows(before: str, after: str, directory: Location) -> None:
    dates = [_DATE.search(name) for name in (before, after)]
    try:
        first, second = (date.fromisoformat(found[1]) for found in dates if found)
    except ValueError:
        # Without dates in the names only their order can be checked.
        return
    if second > first + timedelta(days=1):
        raise TraceError(
            f"{directory}: the day {first + timedelta(days=1)} is missing between {before} and {after}; add it, as an "
            "empty directory if nothing happened"
        )
