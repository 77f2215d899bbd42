"""A deliberately naive subject: the whole state as JSON into a temporary file, and a rename. It never syncs.

It survives SIGKILL, because the kernel keeps written data, but not a power cut.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.subject import EntryRun, OperationKind, Report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ackstate.analysis.crash.subject import Operation


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
