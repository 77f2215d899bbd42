"""Opens the files that hold tokens, and warns about one that other users can read."""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_token_file(path: Path) -> BinaryIO:
    """Open a token file to read it; log a warning if anyone but its owner may read or change it.

    A pipe, as a shell creates for ``<(command)``, is read without a warning.
    """
    file = path.open("rb")
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        _LOG.warning("%s: the mode of a token file must be 0600, got %04o: others can use the token", path, mode)
    return file
