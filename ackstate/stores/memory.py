"""Stores in memory for tests, with scripted faults: mutation n fails, or is the last one.

A `MemoryDisk` survives a crash. To crash, drop the `MemoryStore` and open a new one on the same ``store.disk``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar, final

from ackstate.stores.base import (
    ABSENT,
    METADATA_VALUE_BYTES_MAX,
    LedgerStore,
    MetadataStore,
    StoreError,
    StoreFullError,
    Versioned,
    children_prefix,
    fenced,
    no_ledger,
    other_version,
    outcome_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.errors import AckStateError

_Result = TypeVar("_Result")


class PowerCutError(StoreError):
    """The process that held this store is dead, as scripted; only a new store on the same disk is usable."""


class FaultKind(Enum):
    """The effect of a fault on the scripted mutation."""

    FAIL_BEFORE = "it fails and did not happen; the store survives"
    FAIL_AFTER = "it happened and fails nevertheless; the store survives"
    CRASH_BEFORE = "the process dies before it reaches the disk"
    CRASH_AFTER = "the process dies after it reached the disk"
    FULL = "the disk is full; it did not happen"
    SYNC_FAILED = "the sync fails and it is not on the disk; the store refuses every call until it is opened again"


_REACHES_DISK = frozenset({FaultKind.FAIL_AFTER, FaultKind.CRASH_AFTER})
_CRASHES = frozenset({FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER})
_BROKEN = "no ledger can be written, as scripted"
_ENDS_STORE = _CRASHES | {FaultKind.SYNC_FAILED}
_ERROR_OF = dict.fromkeys(_CRASHES, PowerCutError) | {FaultKind.FULL: StoreFullError}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at one mutation of a store."""

    mutation: int  # its number, as counted by `MemoryStore.mutation_count`: the first is 0
    kind: FaultKind

    def __post_init__(self) -> None:
        if self.mutation < 0:
            raise ValueError(f"mutation must be at least 0, got {self.mutation}")


@dataclass(slots=True)
class _MemoryLedger:
    owner: str
    writer: int  # The number of the opening that appends to it; 0 if it was fenced.
    entries: list[bytes] = field(default_factory=list)

    def fence(self) -> int:
        self.writer = 0
        return len(self.entries) - 1


@final
class MemoryDisk:
    """The contents that survive a crash. It is passed from store to store; only a replay changes what is on it."""

    def __init__(self) -> None:
        # One lock for all stores on the disk: a second owner in a test is a second store.
        self.lock = threading.Lock()
        self.ledgers: dict[int, _MemoryLedger] = {}
        self.values: dict[str, Versioned] = {}
        self.openings = 0
        # Above every id ever returned, also of deleted ledgers.
        self.next_ledger_id = 1
        # Above every version of every deleted value: a value that is created again never matches an old version.
        self.first_version = 0

    def make_ledger(self, owner: str, writer: int = 0) -> int:
        """Create an empty ledger, to which one opening may append, and return its id."""
        self.ledgers[self.next_ledger_id] = _MemoryLedger(owner, writer)
        self.next_ledger_id += 1
        return self.next_ledger_id - 1

    def ledger(self, ledger_id: int) -> _MemoryLedger:
        """Return a ledger; `LedgerNotFoundError` if there is none."""
        if ledger_id not in self.ledgers:
            raise no_ledger(ledger_id)
        return self.ledgers[ledger_id]

    def expect(self, path: str, version: int) -> None:
        """Raise `VersionMismatchError` unless a value is at a version, which may be `ABSENT`."""
        found = self.values[path].version if path in self.values else ABSENT
        if found != version:
            raise other_version(path, found, version)


@final
class MemoryStore:
    """A store whose disk is an object, with scripted faults; thread-safe.

    Mutations are the calls that write, and each append of an `append_many`. A refused one (fenced, not found, another
    version) does not count, nor does an append of nothing. Each is O(its own size).

    Args:
        disk: The disk of an earlier store; a new one by default. Several stores may share one at the same time.
        faults: At most one for each mutation of this store.
        metadata_value_bytes_max: The largest metadata value that can be written or read, in bytes; 64 MiB by default.

    >>> store = MemoryStore(faults=[Fault(1, FaultKind.CRASH_AFTER)])
    >>> ledger_id = store.ledgers.create("billing")
    >>> store.ledgers.append(ledger_id, [b"acked"])
    Traceback (most recent call last):
    ackstate.stores.memory.PowerCutError: mutation 1: the process dies after it reached the disk
    >>> MemoryStore(store.disk).ledgers.read(ledger_id, 0, 1)
    [b'acked']
    """

    def __init__(
        self,
        disk: MemoryDisk | None = None,
        *,
        faults: Sequence[Fault] = (),
        metadata_value_bytes_max: int = METADATA_VALUE_BYTES_MAX,
    ) -> None:
        self.disk = disk or MemoryDisk()  # It survives this store.
        self.mutation_count = 0  # the number of mutations started on this store, failed ones included
        self.fired_fault_count = 0  # how many scripted faults have occurred
        self.has_broken_ledgers = False  # whether `break_ledgers` is in effect
        self._faults = {fault.mutation: fault.kind for fault in faults}
        if len(self._faults) != len(faults):
            raise ValueError("two faults are scripted for one mutation")
        self._end: tuple[type[StoreError], str] | None = None  # why every later call is refused
        with self.disk.lock:
            self.disk.openings = self._opening = self.disk.openings + 1
        self.ledgers: LedgerStore = _MemoryLedgers(self)
        self.metadata: MetadataStore = _MemoryMetadata(self, metadata_value_bytes_max)

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self.disk.ledgers)} ledgers>"

    def inject(self, fault: Fault) -> None:
        """Script one more fault, at a future mutation; it replaces a fault that is scripted there."""
        if fault.mutation < self.mutation_count:
            raise ValueError(f"mutation {fault.mutation} is over: {self.mutation_count} were begun")
        self._faults[fault.mutation] = fault.kind

    def forget_faults(self) -> None:
        """Remove all scripted faults."""
        self._faults.clear()

    @property
    def is_over(self) -> bool:
        """Whether every later call is refused: after a crash, a failed sync, or `close`."""
        return self._end is not None

    def break_ledgers(self) -> None:
        """Fail every `create` and append, without effect, until `mend_ledgers`; metadata still works."""
        self.has_broken_ledgers = True

    def mend_ledgers(self) -> None:
        """End the effect of `break_ledgers`."""
        self.has_broken_ledgers = False

    def close(self) -> None:
        """Refuse every later call; no-op if closed or crashed."""
        with self.disk.lock:
            self._end = self._end or (StoreError, "the store is closed")

    def _mutate(self, change: Callable[[], _Result]) -> _Result:
        """Make a valid change, or cause the fault that is scripted for it. The caller holds the disk."""
        number = self.mutation_count
        self.mutation_count += 1
        kind = self._faults.get(number)
        if kind is None:
            return change()
        self.fired_fault_count += 1
        if kind in _REACHES_DISK:
            change()
        error, reason = _ERROR_OF.get(kind, StoreError), f"mutation {number}: {kind.value}"
        if kind in _ENDS_STORE:
            self._end = (error, reason)
        raise error(reason)


@final
class _Use:
    """Holds the disk of a store for a call, unless the store is over."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self._disk = store, store.disk

    # Methods instead of a generator, which would take half the time of an append.
    def __enter__(self) -> MemoryDisk:
        self._disk.lock.acquire()
        if self._store._end is not None:
            self._disk.lock.release()
            error, reason = self._store._end
            raise error(reason)
        return self._disk

    def __exit__(self, *error: object) -> None:
        self._disk.lock.release()


@final
class _MemoryLedgers(LedgerStore):
    def __init__(self, store: MemoryStore) -> None:
        self._store, self._use = store, _Use(store)

    def _create(self, owner: str) -> int:
        with self._use as disk:
            if self._store.has_broken_ledgers:
                raise StoreError(_BROKEN)
            return self._store._mutate(lambda: disk.make_ledger(owner, self._store._opening))

    def _append_many(self, appends: list[tuple[int, list[bytes]]]) -> list[int | AckStateError]:
        with self._use:  # Also for none, and raised only once.
            pass
        # Each is a mutation by itself, so that a crash can come between any two.
        return [outcome_of(self._append, *each) for each in appends]

    def _append(self, ledger_id: int, entries: list[bytes]) -> int:
        with self._use as disk:
            ledger = disk.ledger(ledger_id)
            if ledger.writer != self._store._opening:
                raise fenced(ledger_id)
            if self._store.has_broken_ledgers:
                raise StoreError(_BROKEN)
            if entries:
                self._store._mutate(lambda: ledger.entries.extend(entries))
            return len(ledger.entries) - 1

    def _read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        with self._use as disk:
            return disk.ledger(ledger_id).entries[first:end]

    def _last(self, ledger_id: int) -> int:
        with self._use as disk:
            return len(disk.ledger(ledger_id).entries) - 1

    def _delete(self, ledger_id: int) -> None:
        with self._use as disk:
            self._store._mutate(lambda: disk.ledgers.pop(ledger_id, None))

    def _fence(self, ledger_id: int) -> int:
        with self._use as disk:
            return self._store._mutate(disk.ledger(ledger_id).fence)

    def _owned_by(self, owner: str) -> list[int]:
        with self._use as disk:
            return [ledger_id for ledger_id, ledger in disk.ledgers.items() if ledger.owner == owner]

    def _owners(self) -> list[str]:
        with self._use as disk:
            return [ledger.owner for ledger in disk.ledgers.values()]


@final
class _MemoryMetadata(MetadataStore):
    def __init__(self, store: MemoryStore, value_bytes_max: int) -> None:
        super().__init__(value_bytes_max=value_bytes_max)
        self._store, self._use = store, _Use(store)

    def _get(self, path: str) -> Versioned | None:
        with self._use as disk:
            return disk.values.get(path)

    def _put(self, path: str, data: bytes, expected_version: int) -> int:
        with self._use as disk:
            disk.expect(path, expected_version)

            def change() -> int:
                version = disk.first_version if expected_version == ABSENT else expected_version + 1
                disk.values[path] = Versioned(data, version)
                return version

            return self._store._mutate(change)

    def _delete(self, path: str, expected_version: int) -> None:
        with self._use as disk:
            disk.expect(path, expected_version)

            def change() -> None:
                disk.first_version = max(disk.first_version, expected_version + 1)
                del disk.values[path]

            self._store._mutate(change)

    def _children(self, path: str) -> list[str]:
        prefix = children_prefix(path)
        with self._use as disk:
            return [each[len(prefix) :].partition("/")[0] for each in disk.values if each.startswith(prefix)]
