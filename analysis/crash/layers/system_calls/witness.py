"""What the harness heard from a `FaultedProgram`, cursor by cursor, and what was wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.layers.system_calls.script import NUMBERING
from ackstate.analysis.crash.oracle import Broken, Oracle, State
from ackstate.analysis.crash.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.analysis.crash.acked_set import AckedSet
    from ackstate.analysis.crash.layers.system_calls.program import Held

_NOTHING: Held = {"acked": [], "marked": [], "batch": [], "properties": {}}


@final
class Witness:
    """What one program said, and what it left.

    Attributes:
        history: What the program did and met, one line each.
        broken: Every promise seen broken.
        counts: What occurred, by name.
        is_done: Whether the program ended by itself.

    Args:
        cursor_count: How many cursors the program has.
    """

    def __init__(self, cursor_count: int) -> None:
        self.history: list[str] = []
        self.broken: list[Broken] = []
        self.counts: Counter[str] = Counter()
        self.is_done = False
        self._oracles = [Oracle(_state(_NOTHING), knows_states=True) for _ in range(cursor_count)]

    def hear(self, line: bytes) -> None:
        """Take in what the program said."""
        said = json.loads(line)
        number = said.pop("cursor")
        oracle = self._oracles[number]
        match said:
            case {"opened": opened, "setting": setting}:
                self.history.append(f"cursor {number}: open, {setting}: {_state(opened)}")
                self.judge(number, opened)
                self._oracles[number] = Oracle(_state(opened), knows_states=True)
            case {"asked": text, "entries": runs}:
                self.history.append(text)
                oracle.asked(_acked(runs))
            case {"resetting": state, "to": text}:
                self.history.append(text)
                oracle.resetting(_state(state))
            case {"naming": names}:
                self.history.append(f"cursor {number}: set the properties {names}")
                oracle.naming(names)
            case {"writing": state, "leaves_out": excludes, "displaces": displaces}:
                self.history.append(f"cursor {number}: write {_state(state)}")
                oracle.writing(_state(state), excludes=excludes, displaces=displaces)
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
                self._take_answer(oracle, said)

    def _take_answer(self, oracle: Oracle, said: dict[str, Any]) -> None:
        match said:
            case {"accepted": runs, "gauge": gauge}:
                oracle.accepted(_acked(runs))
                oracle.gauged(gauge)
            case {"durable": runs}:
                oracle.durable(_acked(runs))
                self.history.append(f"  durable: {runs}")
            case {"written": route}:
                oracle.written()
                self.history.append(f"  written: {route}")
            case {"reset": True}:
                oracle.reset()
            case {"named": names}:
                oracle.named(names)
            case _:
                raise AssertionError(f"a program does not say {said}")

    def judge(self, number: int, found: Held) -> None:
        """Hold what a recovery of a cursor found against what was said of it."""
        for broken in self._oracles[number].judge(_state(found)):
            self.broken.append(broken._replace(found=f"cursor {number}: {broken.found}"))

    def breaks(self, promise: Promise, found: str) -> None:
        """Note a promise that was seen broken."""
        self.broken.append(Broken(promise, found))


def _state(held: Held) -> State:
    rest = {name: held[name] for name in ("batch", "properties") if held[name]}
    return State(_acked(held["acked"]), _acked(held["marked"]), rest, held.get("names", {}))


def _acked(runs: Iterable[Iterable[int]]) -> AckedSet:
    return NUMBERING.runs(runs)
