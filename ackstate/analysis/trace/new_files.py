"""Names the files of a trace that is being written, and commits them in a store, which cannot rename files."""

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
    """The destination of the files of a new trace.

    Attributes:
        directory: A new local directory; in a store, the directory of the trace.
        run: In a store, a unique part of their names; else empty.
    """

    directory: Location
    run: str = ""

    def file(self, number: int = 0) -> Location:
        """Return the file of a number; readers read files in order of their numbers."""
        return self.directory / f"part-{number:05}{self.run and '-'}{self.run}.parquet"


@contextmanager
def committed_in_store(directory: StorePath) -> Iterator[NewFiles]:
    """Yield the destination of the files of a trace; its manifest, written last, commits them.

    The files of the previous manifest are then deleted. After an error the new files are deleted instead.

    Raises:
        OSError: The store failed; readers see the previous trace.
    """
    files = NewFiles(directory, uuid4().hex)
    try:
        # A trace without a manifest gets one first, so that readers do not see the new files beside it.
        if listed_names(directory) is None and (before := present_names(directory)):
            write_manifest(directory, before)
        yield files
        before = present_names(directory)
    except BaseException as error:
        _delete_all(directory, files.run)
        if isinstance(error, OSError):
            # Arrow's message lacks the path.
            raise directory.named(error) from error
        raise
    write_manifest(directory, [each.name for each in _files_of(directory, files.run)])
    # Leftovers that cannot be deleted only take space.
    with suppress(OSError):
        for name in before:
            (directory / name).unlink(missing_ok=True)


def present_names(directory: StorePath) -> frozenset[str]:
    """Return the files of the trace in a directory, ignoring those of unfinished writers."""
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
