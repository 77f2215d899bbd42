"""Builds the states that a power cut could leave of an `SqliteStore`, from copies of its two files.

SQLite appends pages to its log (WAL), each after a header, and syncs it, which is the commit; it copies them into the
database when it is opened and when it is closed, syncs that, and truncates the log. A call of the store does one or the
other, so the copies before and after it reveal each write in between: a frame's header, its page, a page of the
database. During a call the log may end after each of them and inside, from its synced size on, with any frame missing;
while the log is copied, any of the database's pages may be new, it may end after each, and the log is complete. The
index of the log is always missing, as if it had been lost. All of these states are checked.

The copies are made in this process, in a temporary directory, in memory if possible.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.oracle import Broken
from ackstate.analysis.crash.promises import Promise
from ackstate.stores.sqlite import SqliteStore
from ackstate.stores.sqlite_database import DATABASE
from crash.crash_states.execution import Execution
from crash.crash_states.moments import broken_by_error, differing, judge
from crash.crash_states.recovery import broken_by_leftovers, open_cursors
from crash.crash_states.story import Examined, WorkloadFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.crash.oracle import State
    from ackstate.cursor.store import LedgerStore, MetadataStore, Store
    from ackstate.cursor.writes import Write
    from ackstate.errors import AckStateError
    from crash.crash_states.moments import Moment
    from crash.crash_states.workload import Workload

# The log: https://www.sqlite.org/fileformat2.html section 4.1
_LOG_HEADER, _FRAME_HEADER, _PAGE, _SECTOR = 32, 24, 4096, 512
_FRAME = _FRAME_HEADER + _PAGE
_IN_MEMORY = Path("/dev/shm")
_TWICE_ONE_IN = 4


class Copy(NamedTuple):
    """The two files at one moment; `log` is empty if there is none."""

    database: bytes
    log: bytes


class LeftOver(NamedTuple):
    """The files after a power cut, and a description of the loss."""

    copy: Copy
    lost: str


def states_between(before: Copy, after: Copy) -> Iterator[LeftOver]:
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


def _torn_logs(before: Copy, after: Copy) -> Iterator[LeftOver]:
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


def _common_prefix(one: bytes, other: bytes) -> bytes:
    if other.startswith(one):
        return one
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _sets(items: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the empty set, each item alone, all but each item, and each prefix; not the full set."""
    yield ()
    for index, item in enumerate(items):
        yield (item,)
        yield [*items[:index], *items[index + 1 :]]
        yield items[:index]


def _mixed(old: bytes, new: bytes, places: Sequence[tuple[int, int]]) -> bytes:
    """Return the old bytes with the new ones at some places; gaps before them are zeros."""
    mixed = bytearray(old)
    for at, size in places:
        if at > len(mixed):
            mixed.extend(bytes(at - len(mixed)))
        mixed[at : at + size] = new[at : at + size]
    return bytes(mixed)


@final
class _Recorder:
    """Opens one store again and again, and copies it after every call that changes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lives = 0
        self.copies: list[Copy] = []
        self.stores = ExitStack()

    @property
    def place(self) -> Path:
        return self._directory / f"life-{self._lives}"

    def count_calls(self) -> int:
        """Return two for each change: during it, and after its sync. The first copy is the initial state."""
        return 2 * max(0, len(self.copies) - 1)

    def open(self) -> Store:
        """Open the store, recorded from here on."""
        if not self.copies:
            SqliteStore(self.place).close()
            self.changed()
        store = SqliteStore(self.place)
        self.stores.callback(store.close)
        self.changed()
        return _RecordedStore(store, self)

    def kill(self) -> None:
        """Continue with a copy elsewhere: a killed process writes no more."""
        self._lives += 1
        write_copy(self.copies[-1], self.place)

    def changed(self) -> None:
        self.copies.append(read_copy(self.place))


def read_copy(place: Path) -> Copy:
    """Read the two files of a store."""
    log = place / f"{DATABASE}-wal"
    return Copy((place / DATABASE).read_bytes(), log.read_bytes() if log.exists() else b"")


def write_copy(copy: Copy, place: Path) -> None:
    """Create a directory with the two files."""
    place.mkdir()
    (place / DATABASE).write_bytes(copy.database)
    if copy.log:
        (place / f"{DATABASE}-wal").write_bytes(copy.log)


@final
class _RecordedStore:
    """A store that reports every call that changed it."""

    def __init__(self, store: SqliteStore, recorder: _Recorder) -> None:
        self._store, self._recorder = store, recorder
        self.ledgers: LedgerStore = _Recorded(store.ledgers, recorder)  # type: ignore[assignment]
        self.metadata: MetadataStore = _Recorded(store.metadata, recorder)  # type: ignore[assignment]

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """Execute writes in one transaction; report the change even if it fails."""
        try:
            return self._store.write_all(writes)
        finally:
            self._recorder.changed()

    def close(self) -> None:
        self._store.close()
        self._recorder.changed()


@final
class _Recorded:
    _CHANGES = frozenset({"create", "append", "append_all", "delete", "fence", "put"})

    def __init__(self, part: object, recorder: _Recorder) -> None:
        self._part, self._recorder = part, recorder

    def __getattr__(self, name: str) -> object:
        call = getattr(self._part, name)
        if name not in self._CHANGES:
            return call

        def recorded(*args: object, **named: object) -> object:
            """Call the method; report the change even if it fails, because part of it may be on disk."""
            try:
                return call(*args, **named)
            finally:
                self._recorder.changed()

        return recorded


def examine_sqlite(workload: Workload) -> Examined:
    """Execute a workload on an `SqliteStore`, and check its crash states up to the first that breaks a promise."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as name:
        recorder = _Recorder(Path(name))
        execution = Execution(
            workload,
            recorder.open,
            count_calls=recorder.count_calls,
            kill=recorder.kill,
            kill_after=lambda _: None,  # Only between two calls: a connection cannot be abandoned in the middle of one.
        )
        failure = None
        with recorder.stores:
            try:
                execution.run()
            except Exception as error:  # On a disk without faults no error may escape.
                broken = broken_by_error(error)
                failure = WorkloadFailure(broken, execution.step, (f"recovery: {broken.found}",))
        judging = _SqliteJudge(Path(name), workload)
        failure = judging.first_failure(recorder.copies, execution.moments) or failure
        counts = execution.counts + Counter(sqlite_states=judging.judged, recoveries=judging.recoveries)
        return Examined(judging.judged, counts, failure)


@final
class _SqliteJudge:
    def __init__(self, directory: Path, workload: Workload) -> None:
        self._directory = directory
        self._workload = workload
        self._opened: dict[Copy, Mapping[str, State] | Broken] = {}
        self.judged = self.recoveries = 0

    def first_failure(self, copies: Sequence[Copy], moments: Sequence[Moment]) -> WorkloadFailure | None:
        """Check the states that a power cut could leave between two copies, and return the first failure."""
        for number in range(1, len(copies)):
            before, after = copies[number - 1], copies[number]
            torn, whole = states_between(before, after), [LeftOver(after, "nothing is lost")]
            for made, states in ((2 * number - 1, torn), (2 * number, whole)):
                here = [moment for moment in moments if moment.first_call <= made <= moment.last_call]
                for state in states:
                    failure = self._failure_in(state, here, is_worst=made == 2 * number)
                    if failure is not None:
                        return failure
        return None

    def _failure_in(self, state: LeftOver, moments: Sequence[Moment], *, is_worst: bool) -> WorkloadFailure | None:
        self.judged += 1
        opened = self._open(state.copy)
        for moment in moments:
            broken = opened if isinstance(opened, Broken) else judge(opened, moment, is_worst=is_worst)
            if broken is not None:
                told = (f"power cut: {state.lost}", f"recovery: {broken.found}")
                return WorkloadFailure(broken, moment.step, told)
        return None

    def _open(self, copy: Copy) -> Mapping[str, State] | Broken:
        if copy not in self._opened:
            self._opened[copy] = self._reopen(copy)
        return self._opened[copy]

    def _reopen(self, copy: Copy) -> Mapping[str, State] | Broken:
        self.recoveries += 1
        first, again = self._directory / "first", self._directory / "again"
        try:
            write_copy(copy, first)
            with closing(SqliteStore(first)) as store:
                views = open_cursors(store, self._workload)
                leftover = broken_by_leftovers(store, self._workload.subscriptions)
                if leftover is not None:
                    return leftover
                if self.recoveries % _TWICE_ONE_IN:
                    return views
                write_copy(read_copy(first), again)
                with closing(SqliteStore(again)) as store_again:
                    views_again = open_cursors(store_again, self._workload)
        except Exception as error:  # A plain crash must not cause any error.
            return Broken(Promise.I10, f"{type(error).__name__}: {error}")
        finally:
            for place in (first, again):
                shutil.rmtree(place, ignore_errors=True)
        return differing(views, views_again) or views
