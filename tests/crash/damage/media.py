"""Stores whose files can be extracted, damaged and replaced."""

from __future__ import annotations

import shutil
from contextlib import closing

from ackstate.stores import sqlite_database
from ackstate.stores.sqlite import SqliteStore
from crash.damage.kinds import LogFile, damages

Files = dict[str, bytes]
_DATABASE = sqlite_database.DATABASE
_LOG = f"{_DATABASE}-wal"
_LOG_HEADER_BYTES = 32
_FRAME_BYTES = 4096 + 24
_FRAME_KEY_BYTES = 16  # the part of a frame that marks the end of a transaction
_SECTOR_BYTES = 512
_PAGE_BYTES = 4096


class SqliteMedium:
    """`SqliteStore` in a directory that is created again for each copy; `RecordMedium` has the same methods."""

    name = "SqliteStore"
    # Whether a cut removes the newest writes; else records and entries are lost individually.
    loses_newest_first = True
    flips_max = 60  # of a file in a run, so that a run takes about a second

    def __init__(self, directory):
        self._directory = directory
        self._opened = None

    def write(self, work, *, is_closed):
        """Return the files of a store after some work, which was then closed or killed."""
        directory = self._empty_directory()
        with closing(SqliteStore(directory)) as store:
            work(store)
            files = _files_in(directory)
        return _files_in(directory) if is_closed else files

    def open(self, files):
        """Open a store with these files; close the one opened before."""
        directory = self._empty_directory()
        for name, data in files.items():
            (directory / name).write_bytes(data)
        return self.reopen()

    def reopen(self):
        """Open the last opened store again, after it was closed, in its present state."""
        self._opened = SqliteStore(self._directory / "store")
        return self._opened

    def damages(self, files, foreign, chance):
        for log in self.logs(files):
            yield from damages(files, log, foreign.get(log.name, b""), chance, flips=self.flips_max)

    def logs(self, files):
        found = []
        for name, data in files.items():
            if name == _DATABASE:
                borders = range(0, len(data) + 1, _PAGE_BYTES)
                found.append(LogFile(name, borders, cut_size_min=None, hides_last=False))
            else:
                borders = range(_LOG_HEADER_BYTES, len(data) + 1, _FRAME_BYTES)
                straddles = any(begin % _SECTOR_BYTES > _SECTOR_BYTES - _FRAME_KEY_BYTES for begin in borders[:-1])
                found.append(LogFile(name, borders, cut_size_min=0, hides_last=True, straddles=straddles))
        return found

    def _empty_directory(self):
        if self._opened is not None:
            self._opened.close()
        directory = self._directory / "store"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory


def _files_in(directory):
    names = (name for name in (_DATABASE, _LOG) if (directory / name).exists())
    files = {name: (directory / name).read_bytes() for name in names}
    return {name: data for name, data in files.items() if data}
