"""Copies a closed file store, so that it can be inspected without changing a byte of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.cursor.store import StoreError
from ackstate.stores.directory_lock import LOCK, closed_to_others
from ackstate.stores.file_generation import holds_store, is_read_by_opening
from ackstate.stores.plain_files import check_plain_files
from ackstate.stores.system_errors import system_errors_in_our_words
from ackstate.stores.temporary_copy import TemporaryCopy

if TYPE_CHECKING:
    from pathlib import Path


def copy_files(directory: Path, *, bytes_max: int) -> TemporaryCopy:
    """Copy a closed store to a new temporary directory without changing a byte of it.

    Meanwhile others can copy the store, but not open it. Its files may have `bytes_max` bytes in total.

    Raises:
        AckStateError: See `ackstate.stores.file.FileStore.open_copy`.
    """
    with system_errors_in_our_words(directory):
        if not directory.is_dir():
            raise StoreError(f"{directory} is not an ackstate store: there is no such directory")
        check_plain_files(path for path in directory.iterdir() if path.name == LOCK or is_read_by_opening(path.name))
        copy = TemporaryCopy(directory)
        try:
            with closed_to_others(directory):
                names = [path.name for path in directory.iterdir()]
                if not holds_store(names):
                    raise StoreError(f"{directory} is not an ackstate store: it holds no log")
                copy.take([directory / name for name in filter(is_read_by_opening, names)], bytes_max=bytes_max)
        except BaseException:
            copy.cleanup()
            raise
        return copy
