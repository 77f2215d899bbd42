"""Drives sequences of writes: one by itself, or many in lockstep, so that their writes share syncs.

A sequence, such as the takeover of a cursor, is a generator that yields each write and gets its result, or its error.
So it is written once, whether one cursor is opened or ten thousand are. A function that returns `Steps` does nothing
until it is driven by `run`, by `run_all`, or by ``yield from`` in another sequence. It may read the store itself.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from ackstate.errors import AckStateError
from ackstate.stores.writes import Write, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.stores.base import Store

_Result = TypeVar("_Result")
Steps = Generator[Write, int, _Result]

GROUP_MAX = 256
"""How many writes are executed together at most, so that other threads do not wait long for the store."""


def run(store: Store, steps: Steps[_Result]) -> _Result:
    """Execute one sequence, each write by a call of its own, and return its result or raise its error."""
    try:
        write = next(steps)
        while True:
            try:
                outcome = write.execute(store)
            except BaseException as error:
                write = steps.throw(error)
            else:
                write = steps.send(outcome)
    except StopIteration as end:
        result: _Result = end.value
        return result


def run_all(store: Store, sequences: Sequence[Steps[_Result]]) -> list[_Result | AckStateError]:
    """Execute independent sequences in lockstep: the first writes of a group together, then the second ones, and so on.

    A crash leaves each of them as a crash between two of its steps does; see `GroupStore.write_all`. All are begun
    before the first write, so an invalid argument that a sequence finds before its first write changes nothing.

    Returns:
        For each, in order, its result or its `AckStateError`. Any other error, of any of them, is raised at once, and
        the others end where they are.

    Complexity: for each `GROUP_MAX` sequences, as many `write_all` as the longest of them has writes.
    """
    if len(sequences) == 1:
        return [_run_alone(store, sequences[0])]
    lockstep = _Lockstep(store, sequences)
    try:
        lockstep.begin()
        while lockstep.waiting:
            lockstep.finish(list(islice(lockstep.waiting, GROUP_MAX)))
    finally:
        for steps in sequences:
            steps.close()
    return [lockstep.outcomes[number] for number in range(len(sequences))]


class _Lockstep(Generic[_Result]):
    def __init__(self, store: Store, sequences: Sequence[Steps[_Result]]) -> None:
        self._store = store
        self._sequences = sequences
        self.outcomes: dict[int, _Result | AckStateError] = {}
        self.waiting: dict[int, Write] = {}
        """The next write of each sequence that has not ended, by the number of the sequence."""

    def begin(self) -> None:
        """Advance all to their first writes."""
        for number in range(len(self._sequences)):
            self._advance(number, None)

    def finish(self, numbers: Sequence[int]) -> None:
        """Execute some sequences to their ends."""
        while numbers:
            writes = [self.waiting.pop(number) for number in numbers]
            for number, outcome in zip(numbers, write_all(self._store, writes), strict=True):
                self._advance(number, outcome)
            numbers = [number for number in numbers if number in self.waiting]

    def _advance(self, number: int, outcome: int | AckStateError | None) -> None:
        steps = self._sequences[number]
        try:
            if outcome is None:
                self.waiting[number] = next(steps)
            elif isinstance(outcome, AckStateError):
                self.waiting[number] = steps.throw(outcome)
            else:
                self.waiting[number] = steps.send(outcome)
        except StopIteration as end:
            self.outcomes[number] = end.value
        except AckStateError as error:
            self.outcomes[number] = error


def _run_alone(store: Store, steps: Steps[_Result]) -> _Result | AckStateError:
    try:
        return run(store, steps)
    except AckStateError as error:
        return error
