"""Whoever wants to know of everything that changes a cursor, in the order in which it took effect."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyroaring import BitMap

    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position


class Change(Enum):
    """What happened to a cursor; the entries are those that it concerns."""

    ACKED = "entries were acked, one by one; they were not before"
    MARK_DELETED = "entries up to a position were acked; some may have been before"
    PERSIST_BEGUN = "a persist was planned: it covers every ack until now, but for what the next two name"
    HELD_BACK = "entries that it leaves out as young"
    CUT_OFF = "entries that it leaves out because of a limit, and that were not durable"
    DISPLACED = "entries that it leaves out because of a limit; they count as durable no more, even if it fails"
    PERSIST_ENDED = "what it covers is durable"
    PERSIST_FAILED = "it promises nothing"
    RESET = "the cursor was put elsewhere, and that is durable with all that is acked; entries that this acked"
    UNACKED = "entries that a reset gave back"


class CursorListener(Protocol):
    """Is told of every change of one cursor, under the cursor's lock: be quick, raise nothing, ask for no other lock.

    What is told in one call took effect at once.
    """

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Take note of a change, at the present that the call was given which made it."""
        ...

    def delivered(self, consumer: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Take note of entries that a subscription sent to a consumer."""
        ...


def covered_runs(ledgers: LedgerMap, lower: Position, upper: Position) -> list[tuple[int, int, int]]:
    """Return the entries of the log in ``(lower, upper]``, a run for each ledger."""
    if upper <= lower:
        return []
    runs = []
    for ledger_id in ledgers.ledgers_between(lower.ledger_id - 1, upper.ledger_id + 1):
        first = lower.entry_id + 1 if ledger_id == lower.ledger_id else 0
        last = upper.entry_id if ledger_id == upper.ledger_id else ledgers.entry_count(ledger_id) - 1
        if first <= last:
            runs.append((ledger_id, first, last))
    return runs


def bitmap_runs(ledger_id: int, entries: BitMap) -> list[tuple[int, int, int]]:
    """Return the runs of some entries of a ledger."""
    firsts, lasts = runs_of(entries)
    return [(ledger_id, *run) for run in zip(firsts.tolist(), lasts.tolist(), strict=True)]
