"""A program that uses a cursor on a store, and goes on after an error as a real one would, saying what it sees.

It says it in lines of JSON: the requests and answers of `analysis.crash.conversation`, each request before it is
carried out, and these, with entries of a run from the first (included) to the end (excluded)::

    {"opened": [[1, 0, 10], [4, 3, 4]]}   the cursor was opened; this it holds; numbers begin at 0 again
    {"writing": [[1, 0, 11]]}             a persist begins, of all this
    {"failed": "..."}                     a call raised one of our errors; it will be tried again
    {"broken": "...", "found": "..."}     a promise that only the program could see broken; it ends
    {"done": true}                        the script is over, and all is closed
"""

from __future__ import annotations

import json
import random
import sqlite3
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from analysis.crash.conversation import Accepted, Durable, answer_line, request_line
from analysis.crash.subject import Operation, OperationKind
from analysis.trace.entry_set import EntrySet
from cursor.config import CursorConfig
from cursor.managed import ManagedCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cursor.outcome import Receipt
    from cursor.store import Store

TYPED_PROMISE = "a failed call raises one of our errors"
HONEST_PROMISE = "I10: unreadable is not absent, and an honest fault is no damage"
OPENS_PROMISE = "I5: what a fault left opens again"
# Compacted all the time, in ledgers that are short: each of these is met by a fault.
_CONFIG = CursorConfig(compaction_bytes_min=150, ledger_entry_count_max=12, ledger_retry_ms=0)
_LEDGERS = {1: 40, 2: 0, 4: 30}
# More than any fault lasts.
_ATTEMPTS_MAX = 12
_FAILURES_ENDURED = 2
_CHECK_CANNOT_READ = f"unable to get the page. error code={sqlite3.SQLITE_IOERR_CORRUPTFS}"


class Reopen(NamedTuple):
    """A step of a script: close everything and open it again."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a program does.

    Attributes:
        steps: Operations, numbered from 0, and reopenings.
        endures: Whether it tries again with what it has open before it opens everything anew.
        ledgers: The message log: the number of entries of each ledger, by id.
    """

    steps: tuple[Operation | Reopen, ...]
    endures: bool = False
    ledgers: tuple[tuple[int, int], ...] = tuple(_LEDGERS.items())

    def cut(self, step_count: int) -> Script:
        """Return the script with its first steps only."""
        return Script(self.steps[:step_count], self.endures, self.ledgers)


def script(seed: int) -> Script:
    """Return a script of 11 to 31 steps that a seed decides, with a reopening in its middle."""
    chance = random.Random(f"script {seed}")  # noqa: S311 - a workload, not a secret
    kinds = [OperationKind.ACK, OperationKind.MARK_DELETE, OperationKind.PERSIST, None]
    chosen = chance.choices(kinds, weights=(50, 6, 36, 8), k=chance.randint(10, 30))
    steps: list[Operation | Reopen] = []
    reached = 0
    for number, kind in enumerate(chosen):
        if kind is None:
            steps.append(Reopen())
        elif kind is OperationKind.PERSIST:
            steps.append(Operation(number, kind))
        else:
            reached += kind is OperationKind.MARK_DELETE
            ledger_id = chance.choice((1, 4))
            below = min(_LEDGERS[ledger_id], 8 * reached) if kind is OperationKind.MARK_DELETE else _LEDGERS[ledger_id]
            steps.append(Operation(number, kind, 1 if reached < 4 else ledger_id, chance.randrange(below)))
    steps.insert(len(steps) // 2, Reopen())
    return Script(tuple(steps), endures=chance.random() < 0.5)


def open_cursor(store: Store, ledgers: Mapping[int, int]) -> ManagedCursor:
    """Open the cursor that a program has.

    Raises:
        AckStateError: As `ManagedCursor.open`.
    """
    log = LedgerMap.from_counts(dict(ledgers))
    return ManagedCursor.open(store, topic="orders", subscription="billing", ledgers=log, config=_CONFIG, now_ms=0)


def acked(cursor: ManagedCursor, ledgers: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return what a cursor holds as acked: runs (ledger, first, end) in order, neighbours joined."""
    reached = cursor.mark_delete_position
    entries = EntrySet()
    for ledger_id, count in ledgers.items():
        if ledger_id < reached.ledger_id:
            entries.add_run(ledger_id, 0, count)
    entries.add_run(reached.ledger_id, 0, reached.entry_id + 1)
    for run in cursor.deleted.runs():
        entries.add_run(*run)
    return list(entries.runs())


@final
class FaultedProgram:
    """One program in one process.

    Args:
        played: What it does.
        directory: Of its store.
        open_store: Opens the store.
        say: Takes a line, which counts as said when this returns.
    """

    def __init__(
        self, played: Script, directory: Path, open_store: Callable[[Path], Store], say: Callable[[bytes], None]
    ) -> None:
        self._script, self._directory, self._open_store, self._say = played, directory, open_store, say
        self._ledgers = dict(played.ledgers)
        self._store: Store | None = None
        self._cursor: ManagedCursor | None = None
        self._waiting: dict[int, Receipt] = {}
        self._next_number = 0
        self._failures_in_a_row = 0

    def run(self) -> None:
        """Do every step, closing at the end; no error escapes."""
        try:
            for step in self._script.steps:
                self._until_done(step)
            self._until_done(Reopen())
            self._line(done=True)
        except _BrokenError as error:
            self._line(broken=error.promise, found=error.found)
        except Exception as error:  # Whatever it is, it should have been one of ours.
            line = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({line.name} in {line.filename.rpartition('/')[2]})"
            self._line(broken=TYPED_PROMISE, found=found)

    def _until_done(self, step: Operation | Reopen) -> None:
        """Do a step; after an error go on as a real program would, and try again."""
        for _ in range(_ATTEMPTS_MAX):
            try:
                self._do(step)
                self._failures_in_a_row = 0
                return
            except AckStateError as error:
                if isinstance(error, CorruptStateError | UnsupportedVersionError) and not _is_failed_read(error):
                    raise _BrokenError(HONEST_PROMISE, f"{type(error).__name__}: {error}") from error
                self._line(failed=f"{type(error).__name__}: {error}")
                self._after_failure()
        raise _BrokenError(OPENS_PROMISE, f"it failed {_ATTEMPTS_MAX} times in a row")

    def _do(self, step: Operation | Reopen) -> None:
        if self._cursor is None:
            self._open()
        if isinstance(step, Reopen):
            self._close()
        else:
            self._apply(step)

    def _after_failure(self) -> None:
        self._failures_in_a_row += 1
        if not self._script.endures or self._failures_in_a_row > _FAILURES_ENDURED:
            self._drop()

    def _open(self) -> None:
        self._drop()
        self._store = self._open_store(self._directory)
        self._cursor = open_cursor(self._store, self._ledgers)
        self._waiting, self._next_number = {}, 0
        self._line(opened=acked(self._cursor, self._ledgers))

    def _drop(self) -> None:
        """Let go of everything as it is."""
        store, self._store, self._cursor = self._store, None, None
        if store is not None:
            with suppress(AckStateError):
                store.close()

    def _close(self) -> None:
        assert self._cursor is not None
        assert self._store is not None
        self._line(writing=acked(self._cursor, self._ledgers))
        self._cursor.close(now_ms=0)
        self._tell_durable()
        self._drop()

    def _apply(self, step: Operation) -> None:
        cursor = self._cursor
        assert cursor is not None
        operation = step._replace(number=self._next_number)
        position = Position(operation.ledger_id, operation.entry_id)
        if step.kind is OperationKind.MARK_DELETE and position <= cursor.mark_delete_position:
            return  # An earlier one went further; how far depends on what was lost since.
        self._next_number += 1
        self._say(request_line(operation))
        match operation.kind:
            case OperationKind.ACK:
                self._waiting[operation.number] = cursor.ack(position, now_ms=0)
            case OperationKind.MARK_DELETE:
                self._waiting[operation.number] = cursor.mark_delete(position, now_ms=0)
            case OperationKind.PERSIST:
                self._line(writing=acked(cursor, self._ledgers))
                cursor.persist(now_ms=0)
        self._say(answer_line(Accepted(operation.number, cursor.redelivery_if_crashed)))
        self._tell_durable()

    def _tell_durable(self) -> None:
        cursor = self._cursor
        assert cursor is not None
        durable = [number for number, receipt in self._waiting.items() if cursor.durable(receipt)]
        for number in durable:
            del self._waiting[number]
        if durable:
            self._say(answer_line(Durable(tuple(durable))))

    def _line(self, **fields: Any) -> None:
        self._say(json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def _is_failed_read(error: BaseException) -> bool:
    """Tell whether it is SQLite that says so: an EIO of a read, too, is damage to it (``SQLITE_IOERR_CORRUPTFS``)."""
    cause: BaseException | None = error
    # Its check of all pages does not raise it, but tells it in words.
    while cause is not None and not isinstance(cause, sqlite3.Error) and _CHECK_CANNOT_READ not in str(cause):
        cause = cause.__cause__
    return cause is not None


class _BrokenError(Exception):
    """A promise that the program saw broken; never leaves this module."""

    def __init__(self, promise: str, found: str) -> None:
        super().__init__(promise)
        self.promise, self.found = promise, found
