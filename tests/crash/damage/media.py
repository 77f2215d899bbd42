"""Stores whose files, or whose records and entries, can be extracted, damaged and replaced.

A store with checksums detects most damage before a recovery does. As records and entries, one by one and as a sound
store returns them, the recovery itself meets it, in both formats. Apache Pulsar's format has no checksum: there only
unreadable bytes count as damage, never a bit.
"""

import shutil
from contextlib import closing

from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.cursor.recovery import decode_record
from ackstate.stores import sqlite_database
from ackstate.stores.base import Versioned
from ackstate.stores.memory import MemoryDisk, MemoryStore
from ackstate.stores.sqlite import SqliteStore
from crash.damage.kinds import Damage, LogFile, Reach, damages, flipped
from crash.damage.story import SUBSCRIPTION
from crash.observed_cursor import TOPIC

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


_PATH = cursor_path(TOPIC, SUBSCRIPTION)
_RECORD = "record"
_UNREADABLE = b"\xff" * 12


class RecordMedium:
    """A cursor's data in a store, as files: ``record``, ``ledger 7``, which is empty, and ``ledger 7, entry 0``."""

    name = "records and entries"
    loses_newest_first = False
    flips_max = 60

    def __init__(self):
        self._disk = MemoryDisk()

    def write(self, work, **_):
        store = MemoryStore()
        work(store)
        value = store.metadata.get(_PATH)
        files = {} if value is None else {_RECORD: value.data}
        for ledger_id in store.ledgers.owned_by(cursor_owner(_PATH)):
            files[_ledger(ledger_id)] = b""
            entries = store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1)
            files |= {_entry(ledger_id, entry_id): entry for entry_id, entry in enumerate(entries)}
        return files

    def open(self, files):
        self._disk = disk = MemoryDisk()
        if _RECORD in files:
            disk.values[_PATH] = Versioned(files[_RECORD], 0)
        for ledger_id in _ledger_ids(files):
            disk.next_ledger_id = ledger_id
            disk.make_ledger(cursor_owner(_PATH))
            disk.ledgers[ledger_id].entries.extend(_entries(files, ledger_id))
        return MemoryStore(disk)

    def reopen(self):
        return MemoryStore(self._disk)

    def damages(self, files, foreign, chance):
        decoded = decode_record(files[_RECORD])
        ledger_id = decoded.record.cursor_ledger_id
        rest = {name: data for name, data in files.items() if name != _RECORD}
        # A record without a ledger was the whole state.
        yield Damage("the record is missing", rest, Reach.ANY if ledger_id is None else Reach.NONE)
        yield from _unreadable(files, [_RECORD], Reach.NONE)
        names = [] if ledger_id is None else [_entry(ledger_id, at) for at, _ in enumerate(_entries(files, ledger_id))]
        if decoded.form.has_deltas:
            for name in (_RECORD, *names):
                yield from self._flips(files, name, chance)
        if ledger_id is not None:
            yield from _of_journal(files, _ledger(ledger_id), names)

    def _flips(self, files, name, chance):
        bits = range(len(files[name]) * 8)
        some = sorted(chance.sample(bits, min(len(bits), self.flips_max)))
        yield from flipped(files, name, some, Reach.NONE)


def _of_journal(files, ledger, names):
    gone = {ledger, *names}
    yield Damage(f"{ledger} missing", {name: data for name, data in files.items() if name not in gone}, Reach.NONE)
    for at, name in enumerate(names):
        yield from _unreadable(files, [name], Reach.NONE)
        if at < len(names) - 1:
            yield from _unreadable(files, names[at:], Reach.NONE)
        # A ledger has no mark that more entries followed, but there always was a first entry.
        left = {other: data for other, data in files.items() if other not in names[at:]}
        yield Damage(f"{name} and all that follow missing", left, Reach.ANY if at else Reach.NONE)


def _unreadable(files, names, reach):
    what = names[0] if len(names) == 1 else f"{names[0]} and all that follow"
    for text, data in (("emptied", b""), ("zeros", bytes(20)), ("noise", _UNREADABLE)):
        yield Damage(f"{what}: {text}", {**files, **dict.fromkeys(names, data)}, reach)


def _ledger(ledger_id):
    return f"ledger {ledger_id}"


def _entry(ledger_id, entry_id):
    return f"{_ledger(ledger_id)}, entry {entry_id}"


def _ledger_ids(files):
    return sorted(int(name.split()[1]) for name in files if name != _RECORD and "," not in name)


def _entries(files, ledger_id):
    count = sum(name.startswith(f"{_ledger(ledger_id)}, ") for name in files)
    return [files[_entry(ledger_id, entry_id)] for entry_id in range(count)]
