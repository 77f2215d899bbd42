"""A file that appears by rename: whoever finds it finds all of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield where to write a file that appears at `path` when the block ends without an error.

    Raises:
        OSError: The disk is full or failed; what stood at `path` still stands.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
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
