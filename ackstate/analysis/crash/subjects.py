"""The cursor of this package as a subject, in the native format, on `SqliteStore`; and a deliberately naive one.

The cursor's journal is compacted often and its ledgers are short, so that crashes happen during each of these steps.

The naive subject writes the whole state as JSON into a temporary file, renames it, and never syncs. It survives
SIGKILL, because the kernel keeps written data, but not a power cut.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.subject import EntryRun, OperationKind, Report
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.cursor import ManagedCursor
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ackstate.analysis.crash.subject import Operation
    from ackstate.cursor.results import Receipt
    from ackstate.stores.base import Store


@final
class NaiveSubject:
    """Sets of acked entries, saved as a file."""

    persists_in_background = False

    def __init__(self) -> None:
        self._acked: dict[int, set[int]] = {}
        self._unsaved: list[int] = []
        self._saved: list[int] = []

    def start(self, directory: Path, ledgers: Mapping[int, int]) -> None:
        self._log = ledgers
        self._path = directory / "acked.json"
        if self._path.exists():
            stored = json.loads(self._path.read_text())
            self._acked = {int(ledger_id): set(entry_ids) for ledger_id, entry_ids in stored.items()}

    def apply(self, operation: Operation) -> None:
        if operation.kind is OperationKind.PERSIST:
            self._save()
            return
        self._unsaved.append(operation.number)
        acked = self._acked.setdefault(operation.ledger_id, set())
        if operation.kind is OperationKind.ACK:
            acked.add(operation.entry_id)
            return
        acked.update(range(operation.entry_id + 1))
        for ledger_id, count in self._log.items():
            if ledger_id < operation.ledger_id:
                self._acked[ledger_id] = set(range(count))

    def receipts(self) -> Sequence[int]:
        numbers, self._saved = self._saved, []
        return numbers

    def recover(self, directory: Path, ledgers: Mapping[int, int]) -> Report:
        self.start(directory, ledgers)
        return self.report()

    def report(self) -> Report:
        return Report([run for ledger_id, entry_ids in self._acked.items() for run in _runs(ledger_id, entry_ids)])

    def _save(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({ledger_id: sorted(acked) for ledger_id, acked in self._acked.items()}))
        temporary.rename(self._path)
        self._saved, self._unsaved = self._saved + self._unsaved, []


def _runs(ledger_id: int, entry_ids: set[int]) -> list[EntryRun]:
    runs = []
    for _, numbered in groupby(enumerate(sorted(entry_ids)), key=lambda item: item[1] - item[0]):
        neighbours = [entry_id for _, entry_id in numbered]
        runs.append(EntryRun(ledger_id, neighbours[0], neighbours[-1] + 1))
    return runs


TOPIC = "persistent://public/default/orders"
SUBSCRIPTION = "billing"
CONFIG = CursorConfig(compaction_bytes_min=256, ledger_entry_count_max=16)
_PERSISTS_A_SECOND = 100


class ManagedCursorSubject:
    """A `ManagedCursor` on a store; persists in the background."""

    persists_in_background = True

    def __init__(self, open_store: Callable[[Path], Store], *, config: CursorConfig = CONFIG) -> None:
        self._open_store = open_store
        self._config = config
        # Invariant: in the order in which they were given, in which they also become durable.
        self._waiting: deque[tuple[int, Receipt]] = deque()

    def start(self, directory: Path, ledgers: Mapping[int, int]) -> None:
        self._cursor = ManagedCursor.open(
            # In a directory that it creates, so that its name has to be synced, too.
            self._open_store(directory / "store"),
            topic=TOPIC,
            subscription=SUBSCRIPTION,
            ledgers=LedgerMap.from_counts(ledgers),
            config=self._config,
            now_ms=_now_ms(),
        )

    def apply(self, operation: Operation) -> None:
        """See `CrashSubject`. A failed persist is ignored; the next one tries again, and no receipt is given."""
        position = Position(operation.ledger_id, operation.entry_id)
        match operation.kind:
            case OperationKind.ACK:
                self._waiting.append((operation.number, self._cursor.ack(position, now_ms=_now_ms())))
            case OperationKind.MARK_DELETE:
                self._waiting.append((operation.number, self._cursor.mark_delete(position, now_ms=_now_ms())))
            case OperationKind.PERSIST:
                self._persist()

    def receipts(self) -> Sequence[int]:
        numbers = []
        while self._waiting and self._cursor.durable(self._waiting[0][1]):
            numbers.append(self._waiting.popleft()[0])
        return numbers

    @property
    def redelivery_if_crashed(self) -> int:
        with self._cursor.lock:
            return self._cursor.redelivery_if_crashed

    def recover(self, directory: Path, ledgers: Mapping[int, int]) -> Report:
        self.start(directory, ledgers)
        return self.report()

    def report(self) -> Report:
        with self._cursor.lock:
            runs = self._cursor.view.acked_runs()
            gauge = self._cursor.redelivery_if_crashed
        return Report([EntryRun(ledger_id, first, last + 1) for ledger_id, first, last in runs], gauge)

    def _persist(self) -> None:
        # Under a rate limit the cursor decides whether to write now.
        write = self._cursor.tick if self._config.mark_delete_rate_limit else self._cursor.persist
        with suppress(StoreError):
            write(now_ms=_now_ms())


@final
class Ours(ManagedCursorSubject):
    """The cursor on `SqliteStore`."""

    def __init__(self) -> None:
        super().__init__(SqliteStore)


@final
class OursLimited(ManagedCursorSubject):
    """The same under a rate limit, which refuses most of the requested persists."""

    def __init__(self) -> None:
        super().__init__(SqliteStore, config=replace(CONFIG, mark_delete_rate_limit=_PERSISTS_A_SECOND))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
