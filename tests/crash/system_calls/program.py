"""A program that uses cursors on a store, continues after errors as a real one would, and says what it observes.

It says a tuple for each observation, those about a cursor with its number::

    "opened", number, state, setting           it was opened with this state
    "note", number, name, arguments, options   a method of its oracle, with arguments
    "doing", text                              a step begins
    "counted", name                            a counted event occurred
    "failed", text                             a call raised one of our errors; it will be tried again
    "broken", promise, found                   a broken promise that only the program detects; it ends
    "done",                                    the script is over, and all is closed
"""

from __future__ import annotations

import random
import sqlite3
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

from ackstate.analysis.crash.oracle import Broken, Oracle, Promise
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from crash.observed_cursor import NEVER_OPENED, SUBSCRIPTIONS, ObservedCursor, open_cursor, persist_together, state_of
from crash.promises import PromiseBrokenError
from crash.steps import Step, StepKind, steps


class ProgramLog:
    """The reports of one program, and the check of its recovery.

    Attributes:
        history: The steps and errors of the program, one line each.
        broken: The broken promises.
        counts: The counted events, by name.
        is_done: Whether the program ended by itself.
    """

    def __init__(self, cursor_count):
        self.history = []
        self.broken = []
        self.counts = Counter()
        self.is_done = False
        self._oracles = [Oracle(NEVER_OPENED, knows_states=True) for _ in range(cursor_count)]

    def record(self, *said):
        match said:
            case "note", number, name, arguments, options:
                if name in _TOLD:
                    self.history.append(f"  cursor {number}: {_TOLD[name]} {arguments[0]}")
                getattr(self._oracles[number], name)(*arguments, **options)
            case "opened", number, state, setting:
                self.history.append(f"cursor {number}: open, {setting}: {state}")
                self.judge(number, state)
                self._oracles[number] = Oracle(state._replace(is_new=False), knows_states=True)
            case "doing", text:
                self.history.append(text)
            case "failed", text:
                self.history.append(f"  raised {text}")
            case "counted", name:
                self.counts[name] += 1
            case "broken", promise, found:
                self.is_done = True
                self.breaks(promise, found)
            case ("done",):
                self.is_done = True
                self.history.append("close")
            case _:
                raise AssertionError(f"a program must not say {said}")

    def judge(self, number, found):
        """Check the recovered state of a cursor against its reports."""
        for broken in self._oracles[number].judge(found):
            self.broken.append(broken._replace(found=f"cursor {number}: {broken.found}"))

    def breaks(self, promise, found):
        self.broken.append(Broken(promise, found))


_TOLD = {"writing": "write", "durable": "durable:", "naming": "set the properties"}


class SaidAccount:
    """Replaces the oracle of a cursor in a program, and says the calls of its methods: the name and the arguments."""

    def __init__(self, say, number):
        self._say, self._number = say, number

    def __getattr__(self, name):
        return lambda *arguments, **options: self._say("note", self._number, name, arguments, options)


STEP_MS = 1_000
"""The time between two steps of a script."""
# Frequent compactions and short ledgers, so that faults hit each of them.
_NATIVE = CursorConfig(compaction_bytes_min=150, ledger_entry_count_max=12, ledger_retry_ms=0)


class Setting(Enum):
    """The configuration of the cursors."""

    NATIVE = "native"
    YOUNG = "young"
    """Native; acks of deliveries within two steps are not persisted before the cursor is closed."""
    PULSAR = "pulsar"
    """Pulsar's format, with a limit below the number of acked ranges: lower ranges displace durable ones."""

    @property
    def config(self):
        return _CONFIGS[self]


_CONFIGS = {
    Setting.NATIVE: _NATIVE,
    Setting.YOUNG: replace(_NATIVE, become_old_ack_record_seconds=2 * STEP_MS // 1_000),
    Setting.PULSAR: replace(_NATIVE, format=Format.PULSAR, range_count_max=3, metadata_range_count_max=2),
}


@dataclass(frozen=True, slots=True)
class Script:
    """The script of a program."""

    steps: tuple[Step, ...]  # The steps in order
    setting: Setting = Setting.NATIVE  # The initial configuration of the cursors
    cursor_count: int = 1  # Number of cursors
    endures: bool = False  # Whether it retries with its open objects before it reopens everything


_WEIGHTS = {
    StepKind.ACK: 40,
    StepKind.ACK_BATCH: 8,
    StepKind.MARK_DELETE: 10,
    StepKind.PERSIST: 24,
    StepKind.PERSIST_ALL: 16,
    StepKind.RESET: 4,
    StepKind.PROPERTIES: 6,
    StepKind.REOPEN: 6,
}


def script(seed):
    chance = random.Random(f"script {seed}")
    cursor_count = chance.choice((1, 2, 2))
    setting = chance.choice((Setting.NATIVE, *Setting))
    kinds = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=chance.randint(6, 14))
    kinds.insert(len(kinds) // 2, StepKind.REOPEN)
    played = tuple(
        step._replace(setting=chance.choice(tuple(Setting))) if step.kind is StepKind.REOPEN else step
        for step in steps(chance, kinds, cursor_count=cursor_count)
    )
    return Script(played, setting, cursor_count, endures=chance.random() < 0.5)


# More attempts than any fault lasts.
_ATTEMPTS_MAX = 12
_FAILURES_ENDURED = 2


class FaultedProgram:
    """One program in one process."""

    def __init__(self, played, directory, open_store, say):
        self._script, self._directory, self._open_store, self._say = played, directory, open_store, say
        self._setting = played.setting
        self._store = None
        self._opened = []
        self._now_ms = 0
        self._failures_in_a_row = 0

    def run(self):
        """Execute every step, and close at the end; no error escapes."""
        try:
            for step in self._script.steps:
                self._now_ms += STEP_MS
                self._until_done(lambda step=step: self._do(step))  # it is called at once
            self._until_done(self._close)
            self._say("done")
        except PromiseBrokenError as error:
            self._say("broken", error.promise, error.found)
        except Exception as error:  # Any other error is a finding.
            line = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({line.name} in {line.filename.rpartition('/')[2]})"
            self._say("broken", Promise.ERRORS, found)

    def _until_done(self, act):
        """Execute a step; after an error continue as a real program would, and retry."""
        for _ in range(_ATTEMPTS_MAX):
            try:
                self._open()
                act()
                self._failures_in_a_row = 0
                return
            except AckStateError as error:
                if isinstance(error, CorruptStateError | UnsupportedVersionError) and not _is_failed_read(error):
                    raise PromiseBrokenError(Promise.I10, f"{type(error).__name__}: {error}") from error
                self._say("failed", f"{type(error).__name__}: {error}")
                self._after_failure()
        raise PromiseBrokenError(Promise.I5, f"it failed {_ATTEMPTS_MAX} times in a row")

    def _after_failure(self):
        self._failures_in_a_row += 1
        if not self._script.endures or self._failures_in_a_row > _FAILURES_ENDURED:
            self._drop()

    def _open(self):
        """Open everything that is not open."""
        if self._opened:
            return
        self._drop()
        self._store = self._open_store(self._directory)
        opened = []
        for number in range(self._script.cursor_count):
            config = self._setting.config
            cursor = open_cursor(self._store, SUBSCRIPTIONS[number], config=config, now_ms=self._now_ms)
            self._say("opened", number, state_of(cursor), self._setting.value)
            opened.append(ObservedCursor(cursor, config, SaidAccount(self._say, number), self._count))
        self._opened = opened
        if self._failures_in_a_row:
            self._count("reopenings_after_a_fault")

    def _drop(self):
        """Drop everything without closing it."""
        store, self._store, self._opened = self._store, None, []
        if store is not None:
            with suppress(AckStateError):
                store.close()

    def _close(self):
        for each in self._opened:
            each.close(now_ms=self._now_ms)
        self._drop()

    def _do(self, step):
        self._say("doing", str(step))
        match step.kind:
            case StepKind.REOPEN:
                self._close()
                self._setting = self._setting if step.setting is None else Setting(step.setting)
            case StepKind.PERSIST_ALL:
                persist_together(self._opened, self._count, now_ms=self._now_ms)
            case _:
                self._opened[step.cursor].do(step, now_ms=self._now_ms)

    def _count(self, name):
        self._say("counted", name)


def _is_failed_read(error):
    """Return whether SQLite reported it: SQLite also reports EIO of a read as damage (``SQLITE_IOERR_CORRUPTFS``)."""
    cause = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = cause.__cause__
    return cause is not None
