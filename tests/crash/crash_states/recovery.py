"""Opens the states that a power cut left, each distinct one once: most crash states are equivalent to another.

Two caches make this cheap, and both are sound. Equal bytes under equal names are the same disk, so a store is opened
once for each. Opening a store discards torn data, after which most of those disks are equal: the same bytes, except for
the number of zeros laid out in a log, and a store with the same answer to every request. The state and the writes of a
cursor depend only on these answers and on the later behaviour of the store, which depends on its memory and its disk;
so the cursors are opened once for each such pair. (The zeros only affect where the next write ends.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.oracle import Broken
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.simulated_crash import DiskHistory, put_together
from ackstate.analysis.crash.simulated_disk import SimulatedDisk
from ackstate.cursor.journal import term_floor
from ackstate.cursor.journal.journal import cursor_owner, cursor_path
from ackstate.cursor.journal.recovery import decode_record
from crash.crash_states.moments import differing
from crash.observed_cursor import TOPIC, open_cursor, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ackstate.analysis.crash.oracle import State
    from ackstate.analysis.crash.simulated_crash import CrashState
    from ackstate.cursor.store import Store, Versioned
    from ackstate.stores.store_directory import StoreDirectory
    from crash.crash_states.workload import Workload

_LATER_MS = 10_000_000
_ONE_IN = 13  # of the crash states of a recovery, besides those that are always checked
_BYTES_PER_LIVE_BYTE = 4
_BYTES_ALWAYS = 1_200  # allowance for dead bytes and frames in a store that compacts early

Files = tuple[tuple[str, bytes], ...]
StoreContent = tuple[tuple["Versioned | None", tuple[tuple[int, int], ...]], ...]


class RecoveredDisk(NamedTuple):
    """The result of opening one disk.

    Attributes:
        views: The state of each cursor; empty if they could not be opened.
        broken: A promise that the recovery itself broke.
    """

    views: Mapping[str, State]
    broken: Broken | None = None


@dataclass(slots=True)
class Counts:
    """The amount of work; `states_of_recoveries` were checked in addition to the requested states."""

    distinct_states: int = 0
    recoveries: int = 0
    states_of_recoveries: int = 0


@dataclass(slots=True)
class _Memory:
    of_files: dict[Files, RecoveredDisk] = field(default_factory=dict)
    of_content: dict[object, RecoveredDisk] = field(default_factory=dict)


@final
class Recoveries:
    """Opens the crash states of one workload.

    Args:
        workload: Defines the cursors.
        open_store: Opens a store in a directory.
    """

    def __init__(self, workload: Workload, open_store: Callable[[StoreDirectory], Store]) -> None:
        self._workload = workload
        self._open_store = open_store
        self._deep, self._shallow = _Memory(), _Memory()
        self.counts = Counts()

    def recover(self, files: Files) -> RecoveredDisk:
        """Return the result of opening a disk with some files, including crashes during the opening."""
        found = self._deep.of_files.get(files)
        if found is None:
            self.counts.distinct_states += 1
            found = self._deep.of_files[files] = self._opened(files, self._deep)
        return found

    def _recover_again(self, files: Files) -> RecoveredDisk:
        """Return the same for the state after a crash of a recovery, without crashing it again."""
        found = self._deep.of_files.get(files) or self._shallow.of_files.get(files)
        if found is None:
            self.counts.distinct_states += 1
            found = self._shallow.of_files[files] = self._opened(files, self._shallow)
        return found

    def _opened(self, files: Files, memory: _Memory) -> RecoveredDisk:
        disk = SimulatedDisk.from_state(files)
        # Any escaped error is a finding: a plain crash must not cause one.
        try:
            store = self._open_store(disk.directory())
            key = (written(disk), content_of(store, self._workload.subscriptions))
            found = self._deep.of_content.get(key) or memory.of_content.get(key)
            if found is not None:
                return found
            self.counts.recoveries += 1
            recovered = RecoveredDisk(open_cursors(store, self._workload))
            size = sum(len(content) for _, content in written(disk))
            live = live_size(store, self._workload.subscriptions)
            leftover = broken_by_leftovers(store, self._workload.subscriptions)
        except Exception as error:
            return RecoveredDisk({}, Broken(Promise.I10, f"{type(error).__name__}: {error}"))
        finally:
            # Break the reference cycle of a disk and its open directory: there are hundreds of thousands of them.
            disk.kill()
        if leftover is not None:
            recovered = RecoveredDisk(recovered.views, leftover)
        elif size > _BYTES_ALWAYS + _BYTES_PER_LIVE_BYTE * live:
            recovered = RecoveredDisk(recovered.views, Broken(Promise.I11, f"{size} bytes hold {live}"))
        elif memory is self._deep:
            recovered = RecoveredDisk(recovered.views, self._broken_by_a_crash(disk, recovered))
        memory.of_content[key] = recovered
        return recovered

    def _broken_by_a_crash(self, disk: SimulatedDisk, recovered: RecoveredDisk) -> Broken | None:
        """Recover after crashes of a recovery, and without a crash, and return the first difference."""
        for state in sample(disk):
            self.counts.states_of_recoveries += 1
            again = self._recover_again(state.files)
            broken = again.broken
            if broken is None:
                broken = differing(recovered.views, again.views)
            if broken is not None:
                return broken._replace(found=f"{broken.found}, after a crash of the recovery that left: {state}")
        return None


def written(disk: SimulatedDisk) -> Files:
    """Return the contents of a disk without the zeros laid out in a log, which are irrelevant."""
    return tuple([(name, content.rstrip(b"\0")) for name, content in disk.files().items()])


def sample(disk: SimulatedDisk) -> Iterator[CrashState]:
    """Yield crash states: after each call the worst, the mildest, and some of the others."""
    history, number = DiskHistory(disk.start), 0
    for call in (None, *disk.calls):
        if call is not None:
            history.follow(call)
        for place, outline in enumerate(history.outlines()):
            if place < 2 or number % _ONE_IN == 0:
                yield put_together(outline)
            number += 1


def open_cursors(store: Store, workload: Workload) -> dict[str, State]:
    """Open the cursors of a workload and return their states."""
    config = workload.config
    return {
        subscription: state_of(open_cursor(store, subscription, config=config, now_ms=_LATER_MS))
        for subscription in workload.subscriptions
    }


def content_of(store: Store, subscriptions: Iterable[str]) -> StoreContent:
    """Return a store's answers about some cursors: the lowest term, their records, and the lengths of their journals.

    The entries themselves are not included; they are read from the disk each time: two stores on equal disks with the
    same answers here have the same entries.
    """
    ledgers, metadata = store.ledgers, store.metadata
    held: list[tuple[Versioned | None, tuple[tuple[int, int], ...]]] = [(metadata.get(term_floor.PATH), ())]
    for subscription in subscriptions:
        path, owner = _names_of(subscription)
        ids = ledgers.owned_by(owner)
        held.append((metadata.get(path), tuple([(ledger_id, ledgers.last(ledger_id)) for ledger_id in ids])))
    return tuple(held)


@cache
def _names_of(subscription: str) -> tuple[str, str]:
    """Return a cursor's path and the owner of its ledgers."""
    path = cursor_path(TOPIC, subscription)
    return path, cursor_owner(path)


def broken_by_leftovers(store: Store, subscriptions: Iterable[str]) -> Broken | None:
    """Check that each just opened cursor has exactly the ledger that its record names; return the broken promise.

    Raises:
        CorruptStateError: A record cannot be read.
    """
    for subscription in subscriptions:
        path, owner = _names_of(subscription)
        value, owned = store.metadata.get(path), store.ledgers.owned_by(owner)
        named = None if value is None else decode_record(value.data).record.cursor_ledger_id
        if owned != ([] if named is None else [named]):
            return Broken(Promise.I11, f"{subscription}: ledgers {owned}, but the record names {named}")
    return None


def left_of(store: Store, subscription: str) -> str | None:
    """Return the parts of a subscription that a store has, in words; None for nothing."""
    path, owner = _names_of(subscription)
    if store.metadata.get(path) is not None:
        return "its record"
    owned = store.ledgers.owned_by(owner)
    return f"ledgers {owned}" if owned else None


def live_size(store: Store, subscriptions: Iterable[str]) -> int:
    """Return the total bytes of some cursors in a store."""
    size = 0
    for value, journals in content_of(store, subscriptions):
        size += 0 if value is None else len(value.data)
        size += sum(len(entry) for ledger_id, last in journals for entry in store.ledgers.read(ledger_id, 0, last + 1))
    return size
