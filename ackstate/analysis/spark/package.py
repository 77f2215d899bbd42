"""Packs our package into one zip file, as Spark sends it to workers that do not have it installed."""

from __future__ import annotations

import os
import zipfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.atomic_write import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = "ackstate"
# The earliest date of the format: the same release gives the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
SCRIPT = "from ackstate.analysis.cli import main\n\nmain()\n"
"""The script for `spark-submit`, which cannot run a module: it runs the command line."""


def write_package(path: Path) -> int:
    """Write the package of this installation, and return the number of its files.

    The file is written atomically. The same sources give the same bytes.

    Raises:
        OSError: The disk is full or failed; `path` is unchanged.
    """
    count = 0
    with atomic_write(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _sources():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
            count += 1
    return count


def _sources() -> Iterator[tuple[str, bytes]]:
    with as_file(files(_PACKAGE)) as directory:
        # In a checkout some of its folders are links.
        found = [Path(place, name) for place, _, names in os.walk(directory, followlinks=True) for name in names]
        for file in sorted(found):
            if "__pycache__" not in file.parts:
                yield f"{_PACKAGE}/{file.relative_to(directory).as_posix()}", file.read_bytes()
