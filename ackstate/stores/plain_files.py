"""Opens the files of a store: plain files only, without following links, and without blocking.

A link in a store's directory could lead anywhere, and its target would be read, locked or truncated. A named pipe
would block the caller for ever, and a device has no end. Writing a file with a second name (a hard link) would change
the file under that name too, so such a file is only read.

Only the owner may read a new store: the directory has mode 0700 and each file 0600. The modes of existing files are
left alone. `SECURITY.md` states the threats that this protects against.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from ackstate.cursor.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE_MODE = 0o600
"""The mode of each file that a store creates."""
_DIRECTORY_MODE = 0o700
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


def open_file(path: Path, flags: int) -> int:
    """Open a plain file and return its descriptor, or create a file that only its owner may read.

    Args:
        path: The path of the file; directories above it may be links.
        flags: The flags of `os.open`. A file that is opened for writing must have no second name.

    Raises:
        StoreError: The path is not a plain file, or is opened for writing and has a second name.
        OSError: The file cannot be opened, or is missing.
    """
    # Checked before opening, because opening a device can have an effect; checked again, since it may be replaced.
    check_plain_files([path])
    quick = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags | quick, FILE_MODE)
    try:
        found = os.fstat(descriptor)
        _check_plain(path, found)
        if flags & (os.O_WRONLY | os.O_RDWR):
            _check_one_name(path, found)
    except BaseException:
        os.close(descriptor)
        raise
    if flags & os.O_EXCL and stat.S_IMODE(found.st_mode) != FILE_MODE:
        # An unusual umask needs this; a file system without modes refuses it.
        with suppress(OSError):
            os.fchmod(descriptor, FILE_MODE)
    return descriptor


def open_to_read(path: Path) -> BinaryIO:
    """Open a plain file to read it from its start; raises as `open_file`."""
    return os.fdopen(open_file(path, os.O_RDONLY), "rb")


def read_start(path: Path, size: int) -> bytes:
    """Return the first bytes of a plain file, `size` at most; raises as `open_file`."""
    with open_to_read(path) as file:
        return file.read(size)


def create_empty(path: Path) -> None:
    """Create an empty file. An existing entry of that name is removed, never followed.

    Raises:
        OSError: It cannot be created, or a directory has the name.
    """
    path.unlink(missing_ok=True)
    os.close(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def make_directory(path: Path) -> None:
    """Create a missing directory that only its owner may enter, and its missing parents with the usual modes.

    An existing entry is left alone, even if it is no directory.

    Raises:
        OSError: It cannot be created.
    """
    try:
        path.mkdir(_DIRECTORY_MODE, parents=True)
    except FileExistsError:
        pass
    else:
        with suppress(OSError):
            path.chmod(_DIRECTORY_MODE)


def check_plain_files(paths: Iterable[Path]) -> None:
    """Check that all existing entries at some paths are plain files; open nothing, and follow no link.

    An entry that cannot be examined is skipped, since it may be missing: opening it reports the error.

    Raises:
        StoreError: One is not a plain file.
    """
    for path in paths:
        with suppress(OSError):
            _check_plain(path, os.lstat(path))


def check_files_to_write(paths: Iterable[Path]) -> None:
    """Check, like `check_plain_files`, that writing some files cannot change a file in another place.

    Raises:
        StoreError: One is not a plain file, or has a second name.
    """
    for path in paths:
        with suppress(OSError):
            found = os.lstat(path)
            _check_plain(path, found)
            _check_one_name(path, found)


def _check_plain(path: Path, found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "something else")
        raise StoreError(f"{path} must be a plain file, got {what}; nothing was changed")


def _check_one_name(path: Path, found: os.stat_result) -> None:
    if found.st_nlink > 1:
        raise StoreError(
            f"{path} must be a file with one name, got one with {found.st_nlink} (hard links), which writing would"
            " change too; copy the store and open the copy"
        )
