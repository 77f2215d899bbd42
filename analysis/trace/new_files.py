"""Names the files of a trace that is being written, and commits them in a store, where nothing is renamed."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from ackstate.analysis.trace.manifest import listed_names, write_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.location import Location, StorePath


_OF_A_RUN = re.compile(r"part-\d+-[0-9a-f]{32}\.parquet")


class NewFiles(NamedTuple):
    """Where the files of a new trace are written.

    Attributes:
        directory: Local, one of its own; in a store, that of the trace.
        run: In a store, what makes their names unique; else empty.
    """

    directory: Location
    run: str = ""

    def file(self, number: int = 0) -> Location:
        """Return the file of a number; readers take files in order of their numbers."""
        return self.directory / f"part-{number:05}{self.run and '-'}{self.run}.parquet"


@contextmanager
def committed_in_store(directory: StorePath) -> Iterator[NewFiles]:
    """Yield where to write the files of a trace; its manifest, written last, makes them the trace.

    Files that the manifest listed before are deleted then. After an error those of the block are.

    Raises:
        OSError: The store failed; readers see what was there before.
    """
    files = NewFiles(directory, uuid4().hex)
    try:
        # What has no manifest has one from here on, so that readers do not see the new files beside it.
        if listed_names(directory) is None and (before := standing_names(directory)):
            write_manifest(directory, before)
        yield files
        before = standing_names(directory)
    except BaseException as error:
        _delete_all(directory, files.run)
        if isinstance(error, OSError):
            # Arrow says what is wrong and not where.
            raise directory.named(error) from error
        raise
    write_manifest(directory, [each.name for each in _files_of(directory, files.run)])
    # What cannot be deleted takes room, and nothing else.
    with suppress(OSError):
        for name in before:
            (directory / name).unlink(missing_ok=True)


def standing_names(directory: StorePath) -> frozenset[str]:
    """Return the files of the trace that is in a directory; none if there are only those of unfinished writers."""
    listed = listed_names(directory)
    if listed is not None:
        return listed
    names = (each.name for each in directory.glob("*.parquet"))
    return frozenset(name for name in names if not _OF_A_RUN.fullmatch(name))


def _files_of(directory: StorePath, run: str) -> Iterator[StorePath]:
    return directory.glob(f"part-*-{run}.parquet")


def _delete_all(directory: StorePath, run: str) -> None:
    with suppress(OSError):
        for each in _files_of(directory, run):
            each.unlink(missing_ok=True)
