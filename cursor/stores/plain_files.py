"""Is a store's file a file? A pipe in its place would keep whoever opens it waiting for ever; a device has no end."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from cursor.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_plain_files(paths: Iterable[Path]) -> None:
    """Make sure that whatever stands at some paths, or where their links lead, is a plain file; open nothing.

    What cannot be looked at is left to whoever opens it: it may be missing.

    Raises:
        StoreError: One is something else.
    """
    for path in paths:
        try:
            kind = stat.S_IFMT(path.stat().st_mode)
        except OSError:
            continue
        if kind != stat.S_IFREG:
            found = _KINDS.get(kind, "something else")
            raise StoreError(f"{path}: {found} stands where a store has a file; take it away, nothing was changed")
