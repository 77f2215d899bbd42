"""A program that uses cursors on a store, continues after errors as a real one would, and reports its observations.

It reports lines of JSON; those about a cursor have its number as ``"cursor"``::

    {"opened": STATE, "setting": "native"}       it was opened with this state
    {"note": "durable", "takes": [ACKED], "options": {}}   a method of its oracle, with arguments
    {"doing": "..."}                             a step begins
    {"counted": "group_persists"}                a counted event occurred
    {"failed": "..."}                            a call raised one of our errors; it will be tried again
    {"broken": "...", "found": "..."}            a broken promise that only the program detects; it ends
    {"done": true}                               the script is over, and all is closed

STATE and ACKED are results of `crash.system_calls.program.encoded`.
"""

from __future__ import annotations

import json
import random
import sqlite3
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from ackstate.analysis.crash.oracle import AckedSet, Broken, Oracle, Promise, State
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from crash.observed_cursor import (
    NEVER_OPENED,
    NUMBERING,
    SUBSCRIPTIONS,
    ObservedCursor,
    open_cursor,
    persist_together,
    state_of,
)
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

    def record(self, line):
        said = json.loads(line)
        match said:
            case {"cursor": number, "note": name, "takes": arguments, "options": options}:
                arguments = [_decoded(each) for each in arguments]
                if name in _TOLD:
                    self.history.append(f"  cursor {number}: {_TOLD[name]} {arguments[0]}")
                getattr(self._oracles[number], name)(*arguments, **options)
            case {"cursor": number, "opened": opened, "setting": setting}:
                state = _decoded(opened)
                self.history.append(f"cursor {number}: open, {setting}: {state}")
                self.judge(number, state)
                self._oracles[number] = Oracle(state._replace(is_new=False), knows_states=True)
            case {"doing": text}:
                self.history.append(text)
            case {"failed": text}:
                self.history.append(f"  raised {text}")
            case {"counted": name}:
                self.counts[name] += 1
            case {"broken": promise, "found": found}:
                self.is_done = True
                self.breaks(Promise(promise), found)
            case {"done": True}:
                self.is_done = True
                self.history.append("close")
            case _:
                raise AssertionError(f"a program must not report {said}")

    def judge(self, number, found):
        """Check the recovered state of a cursor against its reports."""
        for broken in self._oracles[number].judge(found):
            self.broken.append(broken._replace(found=f"cursor {number}: {broken.found}"))

    def breaks(self, promise, found):
        self.broken.append(Broken(promise, found))


_TOLD = {"writing": "write", "durable": "durable:", "naming": "set the properties"}


class SaidAccount:
    """Replaces an oracle in a program, and reports the calls of its methods as lines: the name and the arguments."""

    def __init__(self, say):
        self._say = say

    def __getattr__(self, name):
        def note(*arguments, **options):
            self._say(note=name, takes=[encoded(each) for each in arguments], options=options)

        return note


def encoded(argument):
    match argument:
        case AckedSet():
            return {"bits": argument.bits, "elsewhere": sorted(argument.elsewhere)}
        case State():
            return {"state": [encoded(each) for each in argument]}
    return argument


def _decoded(plain):
    match plain:
        case {"bits": bits, "elsewhere": elsewhere}:
            return AckedSet(NUMBERING, bits, frozenset(map(tuple, elsewhere)))
        case {"state": fields}:
            return State(*map(_decoded, fields))
        case list():
            return tuple(map(_decoded, plain))
    return plain


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
    """The script of a program.

    Attributes:
        steps: The steps in order.
        setting: The initial configuration of the cursors.
        cursor_count: Number of cursors.
        endures: Whether it retries with its open objects before it reopens everything.
    """

    steps: tuple[Step, ...]
    setting: Setting = Setting.NATIVE
    cursor_count: int = 1
    endures: bool = False


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
            self._line(done=True)
        except _BrokenError as error:
            self._line(broken=error.promise, found=error.found)
        except Exception as error:  # Any other error is a finding.
            line = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({line.name} in {line.filename.rpartition('/')[2]})"
            self._line(broken=Promise.ERRORS, found=found)

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
                    raise _BrokenError(Promise.I10, f"{type(error).__name__}: {error}") from error
                self._line(failed=f"{type(error).__name__}: {error}")
                self._after_failure()
        raise _BrokenError(Promise.I5, f"it failed {_ATTEMPTS_MAX} times in a row")

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
            say = partial(self._line, cursor=number)
            say(opened=encoded(state_of(cursor)), setting=self._setting.value)
            opened.append(ObservedCursor(cursor, config, SaidAccount(say), self._count))
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
        self._line(doing=str(step))
        match step.kind:
            case StepKind.REOPEN:
                self._close()
                self._setting = self._setting if step.setting is None else Setting(step.setting)
            case StepKind.PERSIST_ALL:
                persist_together(self._opened, self._count, now_ms=self._now_ms)
            case _:
                self._opened[step.cursor].do(step, now_ms=self._now_ms)

    def _count(self, name):
        self._line(counted=name)

    def _line(self, **fields):
        self._say(json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def _is_failed_read(error):
    """Return whether SQLite reported it: SQLite also reports EIO of a read as damage (``SQLITE_IOERR_CORRUPTFS``)."""
    cause = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = cause.__cause__
    return cause is not None


class _BrokenError(Exception):
    """A broken promise detected by the program; never leaves this module."""

    def __init__(self, promise, found):
        super().__init__(promise)
        self.promise, self.found = promise, found
