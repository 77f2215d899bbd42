"""Drives sequences of writes: one by itself, or many in lockstep, so that their writes share syncs.

A sequence, such as the takeover of a cursor, is a generator that yields each write and gets its result, or its error.
So it is written once, whether one cursor is opened or ten thousand are. A function that returns `Steps` does nothing
until it is driven by `run`, by `run_all`, or by ``yield from`` in another sequence. It may read the store itself.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

from ackstate.cursor.writes import Write, write_all
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.cursor.store import Store

_Result = TypeVar("_Result")
Steps = Generator[Write, int, _Result]


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
    """Execute independent sequences in lockstep: the first writes of all together, then the second ones, and so on.

    A crash leaves each of them as a crash between two of its steps does; see `GroupStore.write_all`. All are begun
    before the first write, so an invalid argument that a sequence finds before its first write changes nothing.

    Args:
        store: Where to write.
        sequences: They concern different ledgers and values.

    Returns:
        For each, in order, its result or its `AckStateError`. Any other error, of any of them, is raised at once, and
        the others end where they are.

    Complexity: as many `write_all` as the longest sequence has writes.
    """
    if len(sequences) == 1:
        return [_run_alone(store, sequences[0])]
    outcomes: dict[int, _Result | AckStateError] = {}
    waiting: dict[int, Write] = {}

    def advance(number: int, outcome: int | AckStateError | None) -> None:
        steps = sequences[number]
        try:
            if outcome is None:
                waiting[number] = next(steps)
            elif isinstance(outcome, AckStateError):
                waiting[number] = steps.throw(outcome)
            else:
                waiting[number] = steps.send(outcome)
        except StopIteration as end:
            outcomes[number] = end.value
        except AckStateError as error:
            outcomes[number] = error

    try:
        for number in range(len(sequences)):
            advance(number, None)
        while waiting:
            writes = dict(waiting)
            waiting.clear()
            for number, outcome in zip(writes, write_all(store, [*writes.values()]), strict=True):
                advance(number, outcome)
    finally:
        for steps in sequences:
            steps.close()
    return [outcomes[number] for number in range(len(sequences))]


def _run_alone(store: Store, steps: Steps[_Result]) -> _Result | AckStateError:
    try:
        return run(store, steps)
    except AckStateError as error:
        return error
