"""Builds the states that a power cut could leave of an `SqliteStore`, from copies of its two files.

SQLite appends pages to its log (WAL), each after a header, and syncs it, which is the commit; it copies them into the
database when it is opened and when it is closed, syncs that, and truncates the log. A call of the store does one or the
other, so the copies before and after it reveal each write in between: a frame's header, its page, a page of the
database. During a call the log may end after each of them and inside, from its synced size on, with any frame missing;
while the log is copied, any of the database's pages may be new, it may end after each, and the log is complete. The
index of the log is always missing, as if it had been lost. All of these states are checked.

The copies are made in this process, in a temporary directory, in memory if possible. Each distinct state is opened
once; some are opened again, and some of these openings are recorded and crashed in turn.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ackstate.analysis.crash.oracle import Broken, Promise
from ackstate.analysis.crash.runs import fast_parent
from ackstate.stores.sqlite import SqliteStore
from ackstate.stores.sqlite_database import DATABASE
from crash.promises import PromiseBrokenError
from wrapped_store import WrappedStore

# The log: https://www.sqlite.org/fileformat2.html section 4.1
_LOG_HEADER, _FRAME_HEADER, _PAGE, _SECTOR = 32, 24, 4096, 512
_FRAME = _FRAME_HEADER + _PAGE
IN_MEMORY = fast_parent()
_TWICE_ONE_IN = 4
_CRASHED_ONE_IN = 100
_CHANGES = frozenset({"create", "append", "append_many", "delete", "fence", "put", "close"})


class ProcessKilledError(BaseException):
    """The process that has the store open was killed; no `Exception`, so that none of its code continues."""


def broken_by_error(error):
    if isinstance(error, PromiseBrokenError):
        return Broken(error.promise, error.found, error.entry_count)
    return Broken(Promise.I10, f"{type(error).__name__}: {error}")


class Copy(NamedTuple):
    """The two files at one moment; `log` is empty if there is none."""

    database: bytes
    log: bytes


class LeftOver(NamedTuple):
    """The files after a power cut, and a description of the loss."""

    copy: Copy
    lost: str


def states_between(before, after):
    """Yield the states that a power cut could leave during a change of a store, before the call returns."""
    is_copied = len(after.log) < len(before.log)
    if not is_copied:
        yield from _torn_logs(before, after)
    log = before.log if is_copied else after.log
    pages = range(0, len(after.database), _PAGE)
    changed = [at for at in pages if before.database[at : at + _PAGE] != after.database[at : at + _PAGE]]
    for new in _sets(changed):
        database = _mixed(before.database, after.database, [(at, _PAGE) for at in new])
        yield LeftOver(Copy(database, log), f"of the pages at {changed} those at {list(new)} were copied from the log")
    for at in changed:
        database = _mixed(before.database, after.database, [(at, _SECTOR)])
        yield LeftOver(Copy(database, log), f"of the page at {at} only the first {_SECTOR} bytes were copied")
    if is_copied:
        yield LeftOver(Copy(after.database, before.log), "all pages were copied, and the log was not cut")
        yield LeftOver(Copy(after.database, b""), "all pages were copied, and the log is gone")


def _torn_logs(before, after):
    old, new = before.log, after.log
    first = len(_common_prefix(old, new))
    borders = [at for at in (0, *range(_LOG_HEADER, len(new) + 1, _FRAME)) if at >= first - _FRAME]
    for border in borders:
        for inside in (0, 8, _FRAME_HEADER, _FRAME_HEADER + _SECTOR, _FRAME_HEADER + _PAGE - 1):
            cut = border + inside
            if first <= cut < len(new):
                yield LeftOver(Copy(before.database, new[:cut] + old[cut:]), f"the log ends at {cut} of {len(new)}")
        if first <= border < len(new):
            zeros = new[:border].ljust(len(new), b"\0")
            yield LeftOver(Copy(before.database, zeros), f"the log is zeros from {border} of {len(new)} on")
            frame = new[:border] + bytes(_FRAME) + new[border + _FRAME :]
            yield LeftOver(Copy(before.database, frame[: len(new)]), f"the frame of the log at {border} is zeros")


def _common_prefix(one, other):
    if other.startswith(one):
        return one
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _sets(items):
    """Yield the empty set, each item alone, all but each item, and each prefix; not the full set."""
    yield ()
    for index, item in enumerate(items):
        yield (item,)
        yield [*items[:index], *items[index + 1 :]]
        yield items[:index]


def _mixed(old, new, places):
    """Return the old bytes with the new ones at some places; gaps before them are zeros."""
    mixed = bytearray(old)
    for at, size in places:
        if at > len(mixed):
            mixed.extend(bytes(at - len(mixed)))
        mixed[at : at + size] = new[at : at + size]
    return bytes(mixed)


@contextmanager
def temporary_place():
    """Yield a new directory, in memory if possible, which is removed at the end."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        yield Path(name)


class RecordedStorage:
    """Opens one store again and again, and copies it after every call that changes it.

    Attributes:
        copies: The first is the initial state.
        stores: To be closed at the end.
    """

    def __init__(self, directory, start=None):
        self._directory = directory
        self._directory.mkdir(exist_ok=True)
        self._lives = 0
        self._calls_left = -1  # Negative: it lives for ever.
        self.copies = []
        self.stores = ExitStack()
        if start is None:
            SqliteStore(self.place).close()
            self.changed()
        else:
            write_copy(start, self.place)
            self.copies.append(start)

    @property
    def place(self):
        return self._directory / f"life-{self._lives}"

    def count_calls(self):
        """Return two for each change: during it, and after its sync."""
        return 2 * (len(self.copies) - 1)

    def open(self):
        self.check_alive()
        store = SqliteStore(self.place)
        self.stores.callback(store.close)
        self.changed()
        return WrappedStore(store, self._recorded)

    def kill(self):
        """Continue with a copy elsewhere: a killed process writes no more."""
        self._lives, self._calls_left = self._lives + 1, -1
        write_copy(self.copies[-1], self.place)

    def kill_after(self, call_count):
        """Kill the process later: after some more calls that change the store, the next one raises."""
        self._calls_left = call_count

    def check_alive(self):
        if self._calls_left == 0:
            raise ProcessKilledError
        self._calls_left -= 1

    def changed(self):
        self.copies.append(read_copy(self.place))

    def _recorded(self, name, call):
        def recorded(*args, **named):
            """Call the method; report the change even if it fails, because part of it may be on disk."""
            self.check_alive()
            try:
                return call(*args, **named)
            finally:
                self.changed()

        return recorded if name in _CHANGES else call


def read_copy(place):
    log = place / f"{DATABASE}-wal"
    return Copy((place / DATABASE).read_bytes(), log.read_bytes() if log.exists() else b"")


def write_copy(copy, place):
    place.mkdir()
    (place / DATABASE).write_bytes(copy.database)
    if copy.log:
        (place / f"{DATABASE}-wal").write_bytes(copy.log)


def states_of(copies):
    """Yield the states that a power cut could leave, each after the number of calls of the storage up to it.

    After an odd number a call is under way; after an even one it has returned, so that nothing may be lost.
    """
    for number in range(1, len(copies)):
        for torn in states_between(copies[number - 1], copies[number]):
            yield 2 * number - 1, torn
        yield 2 * number, LeftOver(copies[number], "nothing is lost")


class Recoveries:
    """Opens each distinct state once.

    Attributes:
        opened_count: How many distinct states were opened.
        crashed_count: How many states that a crash of a recovery could leave were opened in addition.
    """

    def __init__(self, recover, differing):
        self._recover, self._differing = recover, differing
        self._opened = {}
        self.opened_count = self.crashed_count = 0

    def open(self, copy):
        if copy not in self._opened:
            self._opened[copy] = self._open(copy)
        return self._opened[copy]

    def _open(self, copy):
        self.opened_count += 1
        with temporary_place() as place:
            try:
                if self.opened_count % _CRASHED_ONE_IN == 0:
                    return self._crashed(RecordedStorage(place / "first", copy), place)
                found = self._found(copy, place / "first")
                if self.opened_count % _TWICE_ONE_IN:
                    return found
                again = self._found(read_copy(place / "first"), place / "again")
            except Exception as error:  # A plain crash must not cause any error.
                return broken_by_error(error)
            return self._differing(found, again) or found

    def _found(self, copy, place):
        write_copy(copy, place)
        with closing(SqliteStore(place)) as store:
            return self._recover(store)

    def _crashed(self, storage, place):
        """Recover, and again after each crash of this recovery."""
        with storage.stores:
            found = self._recover(storage.open())
        for _, state in states_of(storage.copies):
            self.crashed_count += 1
            broken = self._differing(found, self._found(state.copy, place / "again"))
            if broken is not None:
                return broken._replace(found=f"{broken.found}, after a crash of the recovery that left: {state.lost}")
            shutil.rmtree(place / "again")
        return found
