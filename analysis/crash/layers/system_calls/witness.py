"""What the harness heard from a `FaultedProgram`, cursor by cursor, and what was wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.layer import BrokenPromise
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.verdict import Verdict
from ackstate.analysis.trace.entry_set import EntrySet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ackstate.analysis.crash.layers.system_calls.program import Held

_NOTHING: Held = {"acked": [], "marked": [], "batch": [], "properties": {}}


@final
class Witness:
    """What one program said, and what it left.

    Attributes:
        history: What the program did and met, one line each.
        broken: Every promise seen broken.
        lost_durable: As `RunOutcome`.
        invented: As `RunOutcome`.
        gauge_mismatch: As `RunOutcome`.
        counts: What occurred, by name.
        is_done: Whether the program ended by itself.

    Args:
        cursor_count: How many cursors the program has.
    """

    def __init__(self, cursor_count: int) -> None:
        self.history: list[str] = []
        self.broken: list[BrokenPromise] = []
        self.lost_durable = self.invented = self.gauge_mismatch = 0
        self.counts: Counter[str] = Counter()
        self.is_done = False
        self._lives = [_Life({**_NOTHING, "names": {}}) for _ in range(cursor_count)]

    def hear(self, line: bytes) -> None:
        """Take in what the program said."""
        said = json.loads(line)
        number = said.pop("cursor")
        life = self._lives[number]
        match said:
            case {"opened": opened, "setting": setting}:
                self.history.append(f"cursor {number}: open, {setting}: {_told(opened)}")
                self.judge(number, opened)
                self._lives[number] = _Life(opened)
            case {"asked": text, "entries": runs}:
                self.history.append(text)
                life.asked = _union(life.asked, _entries(runs))
            case {"resetting": state, "to": text}:
                self.history.append(text)
                life.begin_reset(state)
            case {"naming": names}:
                self.history.append(f"cursor {number}: set the properties {names}")
                life.names.append(names)
            case {"writing": state}:
                self.history.append(f"cursor {number}: write {_told(state)}")
                life.begin_writing(said)
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
                self._take_answer(life, said)

    def _take_answer(self, life: _Life, said: dict[str, Any]) -> None:
        match said:
            case {"accepted": runs, "gauge": gauge}:
                life.accepted, life.gauge = _union(life.accepted, _entries(runs)), gauge
            case {"durable": runs}:
                life.durable = _union(life.durable, _entries(runs))
                self.history.append(f"  durable: {runs}")
            case {"written": route}:
                life.end_writing()
                self.history.append(f"  written: {route}")
            case {"reset": True}:
                life.end_reset()
            case {"named": names}:
                life.names = [names]
            case _:
                raise AssertionError(f"a program does not say {said}")

    def judge(self, number: int, found: Held) -> None:
        """Hold what a recovery of a cursor found against what was said of it."""
        life = self._lives[number]
        if found["names"] not in life.names:
            self.breaks(Promise.I9, f"cursor {number}: {found['names']}, after {life.names}")
        if life.is_reset(found):
            return
        verdict = life.verdict(found)
        self.lost_durable += len(verdict.lost_durable)
        self.invented += len(verdict.invented)
        self.gauge_mismatch += verdict.is_gauge_passed
        self.broken += verdict.broken()
        if not life.may_hold(found):
            written = "; ".join(map(_told, life.states[-2:]))
            self.breaks(Promise.I9, f"cursor {number}: {_told(found)}, after these were to be written last: {written}")

    def breaks(self, promise: Promise, found: str) -> None:
        """Note a promise that was seen broken."""
        self.broken.append(BrokenPromise(promise, found))


@final
class _Life:
    """What a cursor was asked, and what it said, since it was opened, or reset.

    Attributes:
        asked: Entries that may be acked.
        accepted: Those that are.
        durable: Those that survive a crash.
        gauge: How many a crash brings back at most; None if it has not been said.
        states: What a recovery may find: what was held at first, and what each persist since the last good one was to
            write.
        names: Likewise, of the cursor's properties.
    """

    def __init__(self, opened: Held) -> None:
        acked = _entries(opened["acked"])
        self.asked, self.accepted, self.durable = acked.copy(), acked.copy(), acked
        self.gauge: int | None = None
        self.states: list[Held] = [opened]
        self.names: list[dict[str, str]] = [opened["names"]]
        self._leaves_out = False
        # A reset that failed may have happened, until the next persist.
        self._reset: Held | None = None

    def begin_writing(self, said: dict[str, Any]) -> None:
        """Note that a persist begins."""
        self.states.append(said["writing"])
        self._leaves_out = self._leaves_out or said["leaves_out"]
        if said["displaces"]:
            # What is durable above the mark-delete position may give way.
            self.durable = _intersection(self.durable, _entries(said["writing"]["marked"]))
            self.gauge = None

    def end_writing(self) -> None:
        """Note that it succeeded."""
        self.states, self._reset = self.states[-1:], None

    def begin_reset(self, state: Held) -> None:
        """Note that a reset begins."""
        self._reset = state

    def end_reset(self) -> None:
        """Note that it succeeded: nothing from before it counts."""
        assert self._reset is not None
        acked = _entries(self._reset["acked"])
        self.asked, self.accepted, self.durable = acked.copy(), acked.copy(), acked
        self.gauge, self.states, self._leaves_out, self._reset = None, [self._reset], False, None

    def is_reset(self, found: Held) -> bool:
        """Tell whether a recovery found a reset that failed."""
        return self._reset is not None and _is_same(found, self._reset)

    def verdict(self, found: Held) -> Verdict:
        """Compare the entries."""
        acked = _entries(found["acked"])
        return Verdict(self.durable - acked, acked - self.asked, self.accepted - acked, self.gauge)

    def may_hold(self, found: Held) -> bool:
        """Tell whether it was written so; or a part of it, where a persist leaves out young acks or too many ranges."""
        if any(_is_same(found, state) for state in self.states):
            return True
        return self._leaves_out and any(_is_part(found, state) for state in self.states)


def _is_same(found: Held, state: Held) -> bool:
    return all(found[name] == state[name] for name in ("acked", "batch", "properties"))


def _is_part(found: Held, state: Held) -> bool:
    acked = _entries(found["acked"])
    return (
        found["properties"] == state["properties"]
        and not len(_entries(state["marked"]) - acked)
        and not len(acked - _entries(state["acked"]))
    )


def _entries(runs: Iterable[Sequence[int]]) -> EntrySet:
    entries = EntrySet()
    for ledger_id, first, end in runs:
        entries.add_run(ledger_id, first, end)
    return entries


def _union(some: EntrySet, more: EntrySet) -> EntrySet:
    for run in more.runs():
        some.add_run(*run)
    return some


def _intersection(some: EntrySet, others: EntrySet) -> EntrySet:
    return some - (some - others)


def _told(state: Held) -> str:
    extras = [f"{name} {state[name]}" for name in ("batch", "properties") if state[name]]
    return ", ".join([str(state["acked"]), *extras])
