"""Records the reports of a `FaultedProgram`, cursor by cursor, and its broken promises."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.acked_set import AckedSet
from ackstate.analysis.crash.oracle import Broken, Oracle, State
from ackstate.analysis.crash.promises import Promise
from crash.observed_cursor import NEVER_OPENED, NUMBERING

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class ProgramLog:
    """The reports of one program, and the check of its recovery.

    Attributes:
        history: The steps and errors of the program, one line each.
        broken: The broken promises.
        counts: The counted events, by name.
        is_done: Whether the program ended by itself.

    Args:
        cursor_count: How many cursors the program has.
    """

    def __init__(self, cursor_count: int) -> None:
        self.history: list[str] = []
        self.broken: list[Broken] = []
        self.counts: Counter[str] = Counter()
        self.is_done = False
        self._oracles = [Oracle(NEVER_OPENED, knows_states=True) for _ in range(cursor_count)]

    def record(self, line: bytes) -> None:
        """Record a report of the program."""
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

    def judge(self, number: int, found: State) -> None:
        """Check the recovered state of a cursor against its reports."""
        for broken in self._oracles[number].judge(found):
            self.broken.append(broken._replace(found=f"cursor {number}: {broken.found}"))

    def breaks(self, promise: Promise, found: str) -> None:
        """Record a broken promise."""
        self.broken.append(Broken(promise, found))


_TOLD = {"writing": "write", "durable": "durable:", "naming": "set the properties"}


@final
class SaidAccount:
    """Replaces an oracle in a program, and reports the calls of its methods as lines: the name and the arguments.

    Args:
        say: Reports the fields of a line.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*arguments: object, **options: bool) -> None:
            self._say(note=name, takes=[encoded(each) for each in arguments], options=options)

        return note


def encoded(argument: Any) -> object:
    """Return an argument of a note as JSON."""
    match argument:
        case AckedSet():
            return {"bits": argument.bits, "elsewhere": sorted(argument.elsewhere)}
        case State():
            return {"state": [encoded(each) for each in argument]}
    return argument


def _decoded(plain: Any) -> Any:
    match plain:
        case {"bits": bits, "elsewhere": elsewhere}:
            return AckedSet(NUMBERING, bits, frozenset(map(tuple, elsewhere)))
        case {"state": fields}:
            return State(*map(_decoded, fields))
        case list():
            return tuple(map(_decoded, plain))
    return plain
