"""Lists the days of a directory of daily traces, and those that a state has not read yet."""

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

    A day on which nothing happened may be an empty directory; if the names are dates, none may be missing.

    Raises:
        TraceError: There are none, or one is missing.
        OSError: It cannot be read.
    """
    if not directory.is_dir():
        raise TraceError(f"{directory}: not a directory of daily traces")
    visible = sorted(each for each in directory.iterdir() if each.name[0] not in "._")
    days = [each for each in visible if each.is_dir() or each.name.endswith(".parquet")]
    if not days:
        raise TraceError(f"{directory}: no daily traces here, expected directories such as day=2026-11-20")
    for before, after in pairwise(days):
        _check_follows(before.name, after.name, directory)
    return days


def unread(directory: Location, days: Sequence[Location], checkpoint: Checkpoint | None) -> list[Location]:
    """Return the days after those of a checkpoint, which may have been deleted since.

    Raises:
        CheckpointError: A day of the checkpoint has changed, or a day was added before its last.
        TraceError: A day is missing.
    """
    if checkpoint is None:
        return list(days)
    last = checkpoint.last_day
    for day in days:
        if day.name > last:
            break
        if day.name not in checkpoint.days:
            if len(checkpoint.days) == checkpoint.day_count or day.name > next(iter(checkpoint.days)):
                raise CheckpointError(f"{day}: it was added after {last} was read; {_AGAIN}")
        elif fingerprint(day) != checkpoint.days[day.name]:
            raise CheckpointError(f"{day}: it has changed since it was read; {_AGAIN}")
    following = [day for day in days if day.name > last]
    if following:
        _check_follows(last, following[0].name, directory)
    return following


_AGAIN = "restore the earlier files, or read all days with another --state"


def fingerprint(day: Location) -> str:
    """Return a hash of the names, sizes and footers of a day's files; the footers list the size of every part.

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
        # Without dates in the names only their order can be checked.
        return
    if second > first + timedelta(days=1):
        missing = first + timedelta(days=1)
        raise TraceError(
            f"{directory}: the day {missing} is missing between {before} and {after}; add it, as an empty "
            "directory if nothing happened"
        )
