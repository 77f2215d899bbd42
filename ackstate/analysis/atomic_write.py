"""Writes files atomically, by rename or in a store, and opens lock files. No link is followed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO

from ackstate.analysis.location import StorePath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.location import Location


@contextmanager
def atomic_write(path: Location) -> Iterator[Path]:
    """Yield a temporary local file, which replaces `path` when the block ends without an error.

    The temporary file is empty and newly created: an unfinished file of an earlier run, or a link in its place, is
    removed first, and no link is followed. A link at `path` itself is replaced, not followed.
    """
    if isinstance(path, StorePath):
        with TemporaryDirectory() as directory:
            yield Path(directory, path.name)
            path.put(Path(directory, path.name))
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        # A write that finds no room does not name the file, and Arrow does not always put a message in the usual place.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomically(path: Location, text: str) -> None:
    """Write a text file that exists either complete or not at all; raises as `atomic_write`."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def open_lock(path: Path) -> BinaryIO:
    """Open a file that is locked and never read, or create it; its bytes stay."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666), "rb")
