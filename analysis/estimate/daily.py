"""A directory of daily traces: which days there are, and which of them a state has not seen."""

from __future__ import annotations

import hashlib
import re
from datetime import date, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from ackstate.analysis.replay.state_fields import CheckpointError
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.manifest import footer
from ackstate.analysis.trace.parquet import trace_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.estimate.checkpoint import Checkpoint
    from ackstate.analysis.location import Location

_DATE = re.compile(r"(?<!\d)(\d{4}-\d\d-\d\d)(?!\d)")


def days_of(directory: Location) -> list[Location]:
    """Return the daily traces of a directory, each a directory such as ``day=2026-11-20`` or a Parquet file, by name.

    A day on which nothing happened may be an empty directory; where names have dates, none may be missing.

    Raises:
        TraceError: There are none, or one is missing.
        OSError: It cannot be read.
    """
    if not directory.is_dir():
        raise TraceError(f"{directory}: no directory of daily traces")
    visible = sorted(each for each in directory.iterdir() if each.name[0] not in "._")
    days = [each for each in visible if each.is_dir() or each.name.endswith(".parquet")]
    if not days:
        raise TraceError(f"{directory}: no daily traces here, expected directories such as day=2026-11-20")
    for before, after in pairwise(days):
        _check_follows(before.name, after.name, directory)
    return days


def unread(directory: Location, days: Sequence[Location], checkpoint: Checkpoint | None) -> list[Location]:
    """Return the days after those that a checkpoint has seen; those may have been deleted since.

    Raises:
        CheckpointError: One that it has seen has changed, or one came later than it should have.
        TraceError: One is missing.
    """
    if checkpoint is None:
        return list(days)
    last = checkpoint.last_day
    for day in days:
        if day.name > last:
            break
        if day.name not in checkpoint.days:
            if len(checkpoint.days) == checkpoint.day_count or day.name > next(iter(checkpoint.days)):
                raise CheckpointError(f"{day}: it came after {last} was read; {_AGAIN}")
        elif fingerprint(day) != checkpoint.days[day.name]:
            raise CheckpointError(f"{day}: it has changed since it was read; {_AGAIN}")
    following = [day for day in days if day.name > last]
    if following:
        _check_follows(last, following[0].name, directory)
    return following


_AGAIN = "put back what was there, or give all days with another --state"


def fingerprint(day: Location) -> str:
    """Return what changes with a day: names, sizes and footers of its files, which list the size of every part.

    Complexity: O(footers); no event is read.
    """
    digest = hashlib.sha256()
    for file in files_of(day):
        size, end = footer(file)
        digest.update(f"{file.name} {size} ".encode() + end)
    return digest.hexdigest()


def files_of(day: Location) -> list[Location]:
    """Return the Parquet files of a day, which may have none."""
    return trace_files(day) if day.is_file() or any(day.iterdir()) else []


def _check_follows(before: str, after: str, directory: Location) -> None:
    dates = [_DATE.search(name) for name in (before, after)]
    try:
        first, second = (date.fromisoformat(found[1]) for found in dates if found)
    except ValueError:
        # Names without dates are in order, and that is all that is known.
        return
    if second > first + timedelta(days=1):
        missing = first + timedelta(days=1)
        raise TraceError(
            f"{directory}: the day {missing} is missing between {before} and {after}; put it there, as an empty "
            "directory if nothing happened"
        )
