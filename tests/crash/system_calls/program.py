"""A program that uses cursors on a store, continues after errors as a real one would, and reports its observations.

It reports lines of JSON; those about a cursor have its number as ``"cursor"``::

    {"opened": STATE, "setting": "native"}       it was opened with this state
    {"note": "durable", "takes": [ACKED], "options": {}}   a method of its oracle, with arguments
    {"doing": "..."}                             a step begins
    {"counted": "group_persists"}                a counted event occurred
    {"failed": "..."}                            a call raised one of our errors; it will be tried again
    {"broken": "...", "found": "..."}            a broken promise that only the program detects; it ends
    {"done": true}                               the script is over, and all is closed

STATE and ACKED are results of `crash.system_calls.program_log.encoded`.
"""

from __future__ import annotations

import json
import sqlite3
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.workloads.step import StepKind
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from crash.observed_cursor import (
    SUBSCRIPTIONS,
    ObservedCursor,
    open_cursor,
    persist_together,
    state_of,
)
from crash.system_calls.program_log import SaidAccount, encoded
from crash.system_calls.script import STEP_MS, Setting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ackstate.analysis.crash.oracle import Oracle
    from ackstate.analysis.workloads.step import Step
    from ackstate.cursor.store import Store
    from crash.system_calls.script import Script

# More attempts than any fault lasts.
_ATTEMPTS_MAX = 12
_FAILURES_ENDURED = 2


@final
class FaultedProgram:
    """One program in one process.

    Args:
        played: The script.
        directory: The directory of its store.
        open_store: Opens the store.
        say: Reports a line, which counts when this returns.
    """

    def __init__(
        self, played: Script, directory: Path, open_store: Callable[[Path], Store], say: Callable[[bytes], None]
    ) -> None:
        self._script, self._directory, self._open_store, self._say = played, directory, open_store, say
        self._setting = played.setting
        self._store: Store | None = None
        self._opened: list[ObservedCursor] = []
        self._now_ms = 0
        self._failures_in_a_row = 0

    def run(self) -> None:
        """Execute every step, and close at the end; no error escapes."""
        try:
            for step in self._script.steps:
                self._now_ms += STEP_MS
                self._until_done(lambda step=step: self._do(step))  # type: ignore[misc] # it is called at once
            self._until_done(self._close)
            self._line(done=True)
        except _BrokenError as error:
            self._line(broken=error.promise, found=error.found)
        except Exception as error:  # Any other error is a finding.
            line = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({line.name} in {line.filename.rpartition('/')[2]})"
            self._line(broken=Promise.ERRORS, found=found)

    def _until_done(self, act: Callable[[], None]) -> None:
        """Execute a step; after an error continue as a real program would, and retry."""
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
            config = self._setting.config
            cursor = open_cursor(self._store, SUBSCRIPTIONS[number], config=config, now_ms=self._now_ms)
            say = partial(self._line, cursor=number)
            say(opened=encoded(state_of(cursor)), setting=self._setting.value)
            opened.append(ObservedCursor(cursor, config, cast("Oracle", SaidAccount(say)), self._count))
        self._opened = opened
        if self._failures_in_a_row:
            self._count("reopenings_after_a_fault")

    def _drop(self) -> None:
        """Drop everything without closing it."""
        store, self._store, self._opened = self._store, None, []
        if store is not None:
            with suppress(AckStateError):
                store.close()

    def _close(self) -> None:
        for each in self._opened:
            each.close(now_ms=self._now_ms)
        self._drop()

    def _do(self, step: Step) -> None:
        self._line(doing=str(step))
        match step.kind:
            case StepKind.REOPEN:
                self._close()
                self._setting = self._setting if step.setting is None else Setting(step.setting)
            case StepKind.PERSIST_ALL:
                persist_together(self._opened, self._count, now_ms=self._now_ms)
            case _:
                self._opened[step.cursor].do(step, now_ms=self._now_ms)

    def _count(self, name: str) -> None:
        self._line(counted=name)

    def _line(self, **fields: Any) -> None:
        self._say(json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def _is_failed_read(error: BaseException) -> bool:
    """Return whether SQLite reported it: SQLite also reports EIO of a read as damage (``SQLITE_IOERR_CORRUPTFS``)."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = cause.__cause__
    return cause is not None


class _BrokenError(Exception):
    """A broken promise detected by the program; never leaves this module."""

    def __init__(self, promise: Promise, found: str) -> None:
        super().__init__(promise)
        self.promise, self.found = promise, found
