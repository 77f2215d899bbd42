"""The mark ``MADE``, which distinguishes a store that lost its database from a new store.

``MADE`` is in a store's directory as soon as its database has its name: a directory with the mark and without a
database is a store that lost it, not a new one.

12 bytes: ``ACKQ``, the version of the mark (1, little-endian), and the CRC-32C of these eight.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import google_crc32c

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores.directory_lock import sync_path

if TYPE_CHECKING:
    from pathlib import Path

MADE = "MADE"
"""The name of the mark in a store's directory."""
UNFINISHED_MARK = "MADE.new"
"""The leftover of a crash during the creation of the mark."""

_MAGIC = b"ACKQ"
_VERSION = 1
_MARK_BYTES = 12
_MARK_BYTES_MAX = 1024  # A newer one may be longer.


def is_marked(directory: Path) -> bool:
    """Return whether a store was created in a directory.

    Raises:
        CorruptStateError: The mark is damaged.
        UnsupportedVersionError: It has another version.
        OSError: It cannot be read.
    """
    try:
        with (directory / MADE).open("rb") as file:
            found = file.read(_MARK_BYTES_MAX)
    except FileNotFoundError:
        return False
    if found == _mark(_VERSION):
        return True
    if len(found) < _MARK_BYTES or google_crc32c.value(found[:-4]) != int.from_bytes(found[-4:], "little"):
        raise CorruptStateError(str(directory / MADE), offset=0, expected=_mark(_VERSION), found=found)
    if found[:4] != _MAGIC:
        raise CorruptStateError(str(directory / MADE), offset=0, expected=_MAGIC, found=found[:4])
    version = int.from_bytes(found[4:8], "little")
    if version > _VERSION:
        raise UnsupportedVersionError(
            f"{directory / MADE} has version {version}; this release reads up to version {_VERSION}"
        )
    raise CorruptStateError(str(directory / MADE), offset=4, expected=_VERSION, found=version)


def has_our_mark(directory: Path) -> bool:
    """Return whether a store, of any version, made the mark in a directory; False if there is none."""
    try:
        return (directory / MADE).read_bytes()[: len(_MAGIC)] == _MAGIC
    except OSError:
        return False


def make_mark(directory: Path) -> None:
    """Record, all or nothing, that a store was created here; the name of its database was synced before.

    Raises:
        OSError: It cannot be written.
    """
    unfinished = directory / UNFINISHED_MARK
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(_mark(_VERSION))
    sync_path(unfinished)
    unfinished.rename(directory / MADE)
    sync_path(directory)


def _mark(version: int) -> bytes:
    head = _MAGIC + version.to_bytes(4, "little")
    checksum: int = google_crc32c.value(head)
    return head + checksum.to_bytes(4, "little")
