"""A program that uses cursors on a store, and goes on after an error as a real one would, saying what it sees.

It says it in lines of JSON, each with the number of the ``"cursor"`` that it is about, entries as runs from the first
(included) to the end (excluded)::

    {"opened": HELD, "setting": "native"}        it was opened, and holds this: a life begins
    {"asked": "ack 1:7", "entries": RUNS}        now it is asked for this, which may ack these
    {"accepted": RUNS, "gauge": 3}               and these are acked now; a crash brings back so many at most
    {"durable": RUNS}                            from now on these survive a crash
    {"writing": HELD, "leaves_out": false, "displaces": false}   a persist begins, of all this or some of it
    {"written": "delta appended ..."}            it succeeded, on this route
    {"resetting": HELD} and {"reset": true}      likewise
    {"naming": {"n": "1"}} and {"named": {"n": "1"}}   likewise, of the cursor's properties
    {"counted": "group persists"}                something occurred that is worth counting
    {"failed": "..."}                            a call raised one of our errors; it will be tried again
    {"broken": "...", "found": "..."}            a promise that only the program could see broken; it ends
    {"done": true}                               the script is over, and all is closed

HELD is what `held` returns.
"""

from __future__ import annotations

import json
import sqlite3
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.layers.system_calls.script import BATCH_SIZE, LEDGERS, NUMBERING, STEP_MS, Setting
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.workloads.step import StepKind
from ackstate.cursor.journal_format import Format
from ackstate.cursor.managed import ManagedCursor, persist_all
from ackstate.cursor.outcome import Route
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.ledger_map import LedgerMap

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ackstate.analysis.crash.acked_set import AckedSet
    from ackstate.analysis.crash.layers.system_calls.script import Script
    from ackstate.analysis.workloads.step import Step
    from ackstate.cursor.outcome import PersistResult, Receipt
    from ackstate.cursor.store import Store

    Runs = list[list[int]]
    Held = dict[str, Any]

# More than any fault lasts.
_ATTEMPTS_MAX = 12
_FAILURES_ENDURED = 2
_SUBSCRIPTIONS = ("billing", "shipping")
_COUNTED = {
    Route.NOTHING: "idle persists",
    Route.DELTA: "deltas",
    Route.WHOLE: "whole states",
    Route.SNAPSHOT: "snapshots",
    Route.METADATA: "states in metadata",
}


def open_cursor(store: Store, number: int, *, setting: Setting = Setting.NATIVE, now_ms: int = 0) -> ManagedCursor:
    """Open a cursor that a program has.

    Raises:
        AckStateError: As `ManagedCursor.open`.
    """
    return ManagedCursor.open(
        store,
        topic="orders",
        subscription=_SUBSCRIPTIONS[number],
        ledgers=LedgerMap.from_counts(LEDGERS),
        config=setting.config,
        now_ms=now_ms,
    )


def held(cursor: ManagedCursor) -> Held:
    """Return what a cursor holds, such that two that hold the same are equal.

    Returns:
        ``acked``: runs, in order, neighbours joined; ``marked``: those of them that the mark-delete position covers;
        ``batch``: ledger, entry and unacked words of each partly acked batch; ``properties``: of the mark-delete;
        ``names``: the cursor's.
    """
    marked = NUMBERING.up_to(*cursor.mark_delete_position)
    acked = marked | NUMBERING.runs(cursor.deleted.runs())
    return {
        "acked": runs_of(acked),
        "marked": runs_of(marked),
        "batch": [[*position, *cursor.batch[position]] for position in cursor.batch],
        "properties": dict(cursor.properties),
        "names": dict(cursor.cursor_properties),
    }


def runs_of(acked: AckedSet) -> Runs:
    """Return entries as JSON has them."""
    return [list(run) for run in acked.runs()]


@dataclass(slots=True)
class _Open:
    """A cursor that is open, and the acks of which it is not known that they are durable."""

    number: int
    cursor: ManagedCursor
    setting: Setting
    waiting: list[tuple[Runs, Receipt]] = field(default_factory=list)

    @property
    def displaces(self) -> bool:
        return self.setting is Setting.PULSAR


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
        self._setting = played.setting
        self._store: Store | None = None
        self._opened: list[_Open] = []
        self._now_ms = 0
        self._failures_in_a_row = 0
        self._about = 0

    def run(self) -> None:
        """Do every step, closing at the end; no error escapes."""
        try:
            for step in self._script.steps:
                self._now_ms += STEP_MS
                self._until_done(lambda step=step: self._do(step))  # type: ignore[misc] # it is called at once
            self._until_done(self._close)
            self._line(done=True)
        except _BrokenError as error:
            self._line(broken=error.promise, found=error.found)
        except Exception as error:  # Whatever it is, it should have been one of ours.
            line = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({line.name} in {line.filename.rpartition('/')[2]})"
            self._line(broken=Promise.ERRORS, found=found)

    def _until_done(self, act: Callable[[], None]) -> None:
        """Do a step; after an error go on as a real program would, and try again."""
        for _ in range(_ATTEMPTS_MAX):
            try:
                self._open()
                act()
                self._failures_in_a_row = 0
                return
            except AckStateError as error:
                if isinstance(error, CorruptStateError | UnsupportedVersionError) and not _is_failed_read(error):
                    raise _BrokenError(Promise.I10, f"{type(error).__name__}: {error}") from error
                self._line(failed=f"{type(error).__name__}: {error}")
                self._after_failure()
        raise _BrokenError(Promise.I5, f"it failed {_ATTEMPTS_MAX} times in a row")

    def _after_failure(self) -> None:
        self._failures_in_a_row += 1
        if not self._script.endures or self._failures_in_a_row > _FAILURES_ENDURED:
            self._drop()

    def _open(self) -> None:
        """Open everything that is not open."""
        if self._opened:
            return
        self._drop()
        self._store = self._open_store(self._directory)
        opened = []
        for number in range(self._script.cursor_count):
            cursor = open_cursor(self._store, number, setting=self._setting, now_ms=self._now_ms)
            opened.append(_Open(number, cursor, self._setting))
            self._about = number
            self._line(opened=held(cursor), setting=self._setting.value)
        self._opened = opened
        if self._failures_in_a_row:
            self._line(counted="reopenings after a fault")

    def _drop(self) -> None:
        """Let go of everything as it is."""
        store, self._store, self._opened = self._store, None, []
        if store is not None:
            with suppress(AckStateError):
                store.close()

    def _close(self) -> None:
        for each in self._opened:
            self._begin_writing(each)
            result = each.cursor.close(now_ms=self._now_ms)
            if result is not None:
                self._written(each, result)
        self._drop()

    def _do(self, step: Step) -> None:
        match step.kind:
            case StepKind.REOPEN:
                self._close()
                self._setting = self._setting if step.setting is None else Setting(step.setting)
            case StepKind.PERSIST_ALL:
                self._persist_all()
            case StepKind.PERSIST:
                each = self._opened[step.cursor]
                self._begin_writing(each)
                self._written(each, each.cursor.persist(now_ms=self._now_ms))
            case StepKind.RESET:
                self._reset(self._opened[step.cursor], step)
            case StepKind.PROPERTIES:
                self._name(self._opened[step.cursor], {"n": str(step.amount)})
            case _:
                self._ack(self._opened[step.cursor], step)

    def _ack(self, each: _Open, step: Step) -> None:
        cursor, position, self._about = each.cursor, step.position, each.number
        if step.kind is StepKind.MARK_DELETE and position <= cursor.mark_delete_position:
            return  # An earlier one went further; how far depends on what was lost since.
        if step.kind is StepKind.MARK_DELETE:
            entries = runs_of(NUMBERING.up_to(*position))
        else:
            entries = [[position.ledger_id, position.entry_id, position.entry_id + 1]]
        self._line(asked=str(step), entries=entries)
        receipt = self._asked(cursor, step)
        acked = entries if cursor.is_acked(position) else []
        each.waiting.append((acked, receipt))
        self._line(accepted=acked, gauge=cursor.redelivery_if_crashed)
        self._tell_durable(each)

    def _asked(self, cursor: ManagedCursor, step: Step) -> Receipt:
        position, now_ms = step.position, self._now_ms
        cursor.delivered(position, now_ms=now_ms)
        match step.kind:
            case StepKind.ACK:
                return cursor.ack(position, now_ms=now_ms)
            case StepKind.ACK_BATCH:
                self._line(counted="batch acks")
                return cursor.ack_batch(position, [~step.amount & (1 << BATCH_SIZE) - 1], now_ms=now_ms)
            case _:
                properties = {"n": step.amount} if step.amount else None
                return cursor.mark_delete(position, properties=properties, now_ms=now_ms)

    def _persist_all(self) -> None:
        for each in self._opened:
            self._begin_writing(each)
        outcomes = persist_all([each.cursor for each in self._opened], now_ms=self._now_ms)
        errors, routes = [], []
        for each, outcome in zip(self._opened, outcomes, strict=True):
            if isinstance(outcome, AckStateError):
                errors.append(outcome)
            else:
                routes.append(outcome.route)
                self._written(each, outcome)
        if len([route for route in routes if route in {Route.DELTA, Route.WHOLE}]) > 1:
            self._line(counted="group persists")
        if len(routes) > 1 and Route.METADATA in routes:
            self._line(counted="group fallbacks")
        if errors:
            raise errors[0]

    def _begin_writing(self, each: _Open) -> None:
        self._about = each.number
        leaves_out = each.setting is not Setting.NATIVE
        self._line(writing=held(each.cursor), leaves_out=leaves_out, displaces=each.displaces)

    def _written(self, each: _Open, result: PersistResult) -> None:
        self._about = each.number
        self._line(written=result.route.value)
        self._line(counted=_COUNTED[result.route])
        if result.route is Route.METADATA and each.setting.config.format is Format.NATIVE:
            self._line(counted="fallbacks")
        self._line(accepted=[], gauge=each.cursor.redelivery_if_crashed)
        self._tell_durable(each)

    def _reset(self, each: _Open, step: Step) -> None:
        self._about = each.number
        ledger_id, entry_id = step.position
        entries = runs_of(NUMBERING.up_to(ledger_id, entry_id - 1))
        self._line(resetting={"acked": entries, "marked": entries, "batch": [], "properties": {}}, to=str(step))
        each.cursor.reset(step.position, now_ms=self._now_ms)
        each.waiting = []
        self._line(reset=True)
        self._line(counted="resets")

    def _name(self, each: _Open, names: dict[str, str]) -> None:
        self._about = each.number
        self._line(naming=names)
        each.cursor.set_cursor_properties(names)
        self._line(named=names)
        self._line(counted="cursor properties set")

    def _tell_durable(self, each: _Open) -> None:
        """Tell what has become durable; where that may give way again, all that is."""
        durable, waiting = [], []
        for acked, receipt in each.waiting:
            is_durable = each.cursor.durable(receipt)
            if is_durable:
                durable += acked
            if each.displaces or not is_durable:
                waiting.append((acked, receipt))
        each.waiting = waiting
        if durable:
            self._line(durable=durable)

    def _line(self, **fields: Any) -> None:
        self._say(json.dumps({"cursor": self._about, **fields}, separators=(",", ":")).encode() + b"\n")


def _is_failed_read(error: BaseException) -> bool:
    """Tell whether it is SQLite that says so: an EIO of a read, too, is damage to it (``SQLITE_IOERR_CORRUPTFS``)."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = cause.__cause__
    return cause is not None


class _BrokenError(Exception):
    """A promise that the program saw broken; never leaves this module."""

    def __init__(self, promise: Promise, found: str) -> None:
        super().__init__(promise)
        self.promise, self.found = promise, found
