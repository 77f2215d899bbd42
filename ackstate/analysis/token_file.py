"""Reads the files that hold tokens, and warns about one that other users can read."""

from __future__ import annotations

import logging
import os
import re
import stat
from typing import TYPE_CHECKING

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BYTES_MAX = 64 * 1024
_TOKEN = re.compile(rb"[!-~]+")


def read_token(path: Path) -> str:
    """Return the token in a file, without the blanks around it; error messages never contain it.

    A warning is logged if anyone but the file's owner may read or change it. A pipe, as a shell creates for
    ``<(command)``, is read without a warning.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_mode & _OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            _LOG.warning("%s: the mode of a token file must be 0600, got %04o: others can use the token", path, mode)
        content = file.read(_BYTES_MAX + 1)
    token = content.strip()
    if len(content) > _BYTES_MAX or not _TOKEN.fullmatch(token):
        raise AckStateError(f"{path}: expected a token, which is one word of ASCII")
    return token.decode()
