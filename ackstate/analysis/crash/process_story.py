"""The story of a process run: one line per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.crash.acked_set import listed
from ackstate.analysis.crash.conversation import Accepted, Durable, Ready
from ackstate.analysis.crash.subject import Operation, OperationKind, Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.crash.conversation import Answer, SubjectError


def step_line(step: Operation | Answer | str) -> str:  # noqa: PLR0911 - one for each
    """Return one step of a process run as a line of its story."""
    match step:
        case str():
            return step
        case Operation(number, OperationKind.PERSIST):
            return f"asked {number}: persist"
        case Operation(number, kind, ledger_id, entry_id):
            return f"asked {number}: {kind.value} {ledger_id}:{entry_id}"
        case Ready():
            return "it is ready"
        case Accepted(number, None):
            return f"it accepted {number}"
        case Accepted(number, gauge):
            return f"it accepted {number}; a crash would bring back {gauge}"
        case Durable(numbers):
            return f"durable: {' '.join(map(str, numbers))}"
        case Report(acked, gauge):
            said = "" if gauge is None else f"; a crash would bring back {gauge}"
            return f"it holds {listed(sorted(acked))}{said}"
    raise AssertionError(step)


def complaint(error: SubjectError) -> tuple[str, ...]:
    """Return the end of the subject's standard error, unless the error quotes all of it."""
    if len(error.complaint) == 1 and str(error).endswith(f": {error.complaint[0]!r}"):
        return ()
    return ("the end of its standard error:", *(f"| {line}" for line in error.complaint)) if error.complaint else ()


def ledgers(log: Mapping[int, int]) -> str:
    """Return the ledgers of a message log as text."""
    return ", ".join(f"ledger {ledger_id} with {entry_count} entries" for ledger_id, entry_count in log.items())
