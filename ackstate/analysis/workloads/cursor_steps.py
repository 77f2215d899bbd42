"""Seeded steps of a program that uses the cursors of one store, on one message log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

LEDGERS = {1: 24, 2: 0, 4: 30, 7: 20}
"""The message log: the number of entries of each ledger, by id. It does not change."""
BATCH_SIZE = 4
"""Messages of each entry that is acked as a batch."""
_WITH_ENTRIES = [ledger_id for ledger_id, count in LEDGERS.items() if count]
_BATCHES = 4  # per ledger: few, so that some are completed
_MARK_DELETE_STEP_MAX = 8


def steps(chance: Random, kinds: Iterable[StepKind], *, cursor_count: int) -> list[Step]:
    """Return a step of each kind, in order, for any of some cursors.

    Each cursor acks an entry before a joint persist: otherwise no two would be written with one sync. The mark-delete
    positions advance slowly: otherwise no entry would be left to ack.
    """
    found: list[Step] = []
    mark_deletes = 0
    for kind in kinds:
        mark_deletes += kind is StepKind.MARK_DELETE
        if kind is StepKind.PERSIST_ALL:
            found += [_step(chance, StepKind.ACK, cursor, mark_deletes) for cursor in range(cursor_count)]
        found.append(_step(chance, kind, chance.randrange(cursor_count), mark_deletes))
    return found


def _step(chance: Random, kind: StepKind, cursor: int, mark_deletes: int) -> Step:  # noqa: PLR0911 - one for each
    ledger_id = chance.choice(_WITH_ENTRIES)
    position = Position(ledger_id, chance.randrange(LEDGERS[ledger_id]))
    match kind:
        case StepKind.ACK:
            return Step(kind, cursor, position, chance.choice((1, chance.randint(2, 9))), chance.randint(1, 3))
        case StepKind.ACK_BATCH:
            messages = chance.randrange(1, 1 << BATCH_SIZE)
            return Step(kind, cursor, Position(ledger_id, chance.randrange(_BATCHES)), messages)
        case StepKind.MARK_DELETE:
            ledger_id = _WITH_ENTRIES[0]
            end = min(LEDGERS[ledger_id], _MARK_DELETE_STEP_MAX * mark_deletes)
            carried = chance.choice((0, 1, chance.randrange(1 << 40)))
            return Step(kind, cursor, Position(ledger_id, chance.randrange(end)), carried)
        case StepKind.RESET:
            return Step(kind, cursor, position)
        case StepKind.PROPERTIES:
            return Step(kind, cursor, amount=chance.randrange(1_000))
        case StepKind.KILL:
            return Step(kind, cursor, amount=chance.randrange(24))
    return Step(kind, cursor)
