"""A cursor for the crash harness: a log with a line for each ack, synced by persist. docs/guides runs it."""

import json
import os
import zlib
from pathlib import Path

from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report


class MyCursor:
    """The five methods and the flag of `CrashSubject`."""

    persists_in_background = False

    def start(self, directory: Path, ledgers: dict[int, int]) -> None:
        self.recover(directory, ledgers)

    def recover(self, directory: Path, ledgers: dict[int, int]) -> Report:
        self.ledgers = ledgers
        self.acked: list[tuple[int, int, int]] = []
        self.unsynced: list[int] = []
        self.durable: list[int] = []
        self.log = (directory / "acks.log").open("a+b")
        self.log.seek(0)
        whole = 0
        for line in self.log:
            if line[:9] != checksum(line[9:]):
                break
            self.acked.append(tuple(json.loads(line[9:])))
            whole += len(line)
        self.log.truncate(whole)
        self.sync()
        names = os.open(directory, os.O_RDONLY)
        os.fsync(names)
        os.close(names)
        return self.report()

    def apply(self, operation: Operation) -> None:
        if operation.kind is OperationKind.PERSIST:
            self.sync()
            self.durable, self.unsynced = self.durable + self.unsynced, []
            return
        kind, ledger_id, entry_id = operation.kind, operation.ledger_id, operation.entry_id
        runs = [(ledger_id, 0 if kind is OperationKind.MARK_DELETE else entry_id, entry_id + 1)]
        if kind is OperationKind.MARK_DELETE:
            runs += [(lower, 0, count) for lower, count in self.ledgers.items() if lower < ledger_id]
        for run in runs:
            line = json.dumps(run).encode() + b"\n"
            self.log.write(checksum(line) + line)
        self.acked += runs
        self.unsynced.append(operation.number)

    def receipts(self) -> list[int]:
        durable, self.durable = self.durable, []
        return durable

    def report(self) -> Report:
        return Report([EntryRun(*run) for run in self.acked])

    def sync(self) -> None:
        self.log.flush()
        os.fsync(self.log.fileno())


def checksum(line: bytes) -> bytes:
    """Return what stands before a line."""
    return b"%08x " % zlib.crc32(line)


class HastyCursor(MyCursor):
    """The same with one bug, which the page finds."""

    is_late = False

    def apply(self, operation: Operation) -> None:
        if self.is_late:
            self.sync()
        self.is_late = operation.kind is OperationKind.PERSIST
        if self.is_late:
            self.durable, self.unsynced = self.durable + self.unsynced, []
        else:
            super().apply(operation)
