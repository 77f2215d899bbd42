"""The memory of an idle cursor, with a hundred thousand of them open in one process.

Each figure is the growth of a separate process.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate import LedgerMap, ManagedCursor
from benchmarks.measurement import BenchmarkReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.errors import AckStateError
    from ackstate.stores.base import Versioned

ABOUT = (
    "100 thousand open cursors in a process of its own, divided by their number; nothing waits in them to be "
    "persisted. Their store keeps nothing, so it weighs nothing. Resident: pages that the process grew by. Traced: "
    "memory from Python's allocator (`tracemalloc`), without the bitmaps that the C library holds. The message log is "
    "one for all of them, but where a row says that each has its own."
)
CURSORS = 100_000
LEDGER = 7


class KeepsNothing:
    """A store that accepts every write and holds none: each cursor that is opened on it is new."""

    def __init__(self) -> None:
        self._ids = count(1)

    @property
    def ledgers(self) -> KeepsNothing:
        """The logs."""
        return self

    @property
    def metadata(self) -> KeepsNothing:
        """The small values."""
        return self

    def create(self, _owner: str) -> int:
        """See `LedgerStore.create`."""
        return next(self._ids)

    def append(self, _ledger_id: int, _entries: Sequence[bytes]) -> int:
        """See `LedgerStore.append`."""
        return 0

    def append_many(self, appends: Sequence[tuple[int, Sequence[bytes]]]) -> list[int | AckStateError]:
        """See `LedgerStore.append_many`."""
        return [0] * len(appends)

    def last(self, _ledger_id: int) -> int:
        """See `LedgerStore.last`."""
        return 0

    def delete(self, _ledger_id: int) -> None:
        """See `LedgerStore.delete`."""

    def owned_by(self, _owner: str) -> list[int]:
        """See `LedgerStore.owned_by`."""
        return []

    def get(self, _path: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        return None

    def put(self, _path: str, _data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`."""
        return expected_version + 1


def log_of() -> LedgerMap:
    """Return a message log of one ledger."""
    return LedgerMap.from_counts({LEDGER: 1_000})


def cursors(acked: Sequence[int], *, logs: Sequence[LedgerMap]) -> list[ManagedCursor]:
    """Open cursors that have acked and persisted some entries; on one log, or on one each."""
    store, opened = KeepsNothing(), []
    for number in range(CURSORS):
        cursor = ManagedCursor.open(
            store, topic=f"topic-{number}", subscription="s", ledgers=logs[number % len(logs)], now_ms=0
        )
        if acked:
            cursor.ack_entries(LEDGER, acked, now_ms=0)
            cursor.persist(now_ms=0)
        opened.append(cursor)
    return opened


CASES = {
    "nothing acked": lambda: cursors((), logs=[log_of()]),
    "10 live ranges": lambda: cursors(range(5, 25, 2), logs=[log_of()]),
    "nothing acked, a log each": lambda: cursors((), logs=[log_of() for _ in range(CURSORS)]),
}
# Tracing is slow.
TRACED = ("nothing acked", "10 live ranges")


def resident() -> int:
    """Return the bytes of pages that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(case: str, measure: str) -> int:
    """Return by how many bytes this process grew when it opened the cursors of a case."""
    gc.disable()  # It would look through all of them again and again while they grow in number.
    if measure == "traced":
        tracemalloc.start()
        opened = CASES[case]()
        grown = tracemalloc.get_traced_memory()[0]
    else:
        before = resident()
        opened = CASES[case]()
        grown = resident() - before
    assert len(opened) == CURSORS  # They live until here.
    return grown


def in_new_process(case: str, measure: str) -> float:
    """Return the bytes a cursor of a case takes, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.bench_cursor_memory", case, measure]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(finished.stdout) / CURSORS


def measure_cursors(report: BenchmarkReport) -> None:
    """Weigh the cursors of every case."""
    for case in CASES:
        report.count(f"an idle cursor, {case}: resident", "bytes", in_new_process(case, "resident"))
    for case in TRACED:
        report.count(f"an idle cursor, {case}: traced", "bytes", in_new_process(case, "traced"))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(growth(*sys.argv[1:]))
    else:
        report = BenchmarkReport("cursor_memory", ABOUT)
        measure_cursors(report)
        report.publish()
