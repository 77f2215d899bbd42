"""Writes files that appear whole, by rename, and lock files. No link is followed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield where to write a file that appears at `path` when the block ends without an error.

    An empty file of our own is there already: what an earlier run left unfinished, or a link that somebody put there,
    is removed first, and no link is followed. A link at `path` itself is replaced, not followed.

    Raises:
        OSError: The disk is full or failed; what stood at `path` still stands.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        # A write that finds no room does not say where, and Arrow not always what in the place for it.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all; raises as `whole_file`."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def open_lock(path: Path) -> BinaryIO:
    """Open a file that is locked and never read, or create it; its bytes stay.

    Raises:
        OSError: It cannot be created or opened, or is a symbolic link.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666), "rb")
