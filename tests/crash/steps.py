"""Seeded steps of a program that uses the cursors of one store, on one message log. L1, L2 and L5 do them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ackstate.position import Position


class StepKind(Enum):
    """The kind of a step."""

    ACK = "ack"
    ACK_BATCH = "ack messages of a batch"
    MARK_DELETE = "mark-delete"
    PERSIST = "persist"
    PERSIST_ALL = "persist all cursors with one sync"
    FALL_BACK = "persist while no ledger can be appended to"
    RESET = "reset"
    PROPERTIES = "set the cursor properties"
    REOPEN = "close and open again"
    REOPEN_STORE = "close the store and open it again"
    DELETE = "delete the subscription and create it again"
    KILL = "be killed"


class Step(NamedTuple):
    """One step; any step may be removed without making the others invalid."""

    kind: StepKind  # The kind of the step
    cursor: int = 0  # The number of the cursor, from 0
    position: Position = Position(-1, -1)  # ACK, ACK_BATCH, MARK_DELETE: the entry. RESET: the target
    # ACK: the number of entries from there on, every `stride`-th; 0 is one. ACK_BATCH: the messages, one bit each.
    # MARK_DELETE: a property that it has, 0 for none. PROPERTIES: the value. KILL: the number of calls
    amount: int = 0
    stride: int = 1  # See `amount`
    setting: Enum | None = None  # REOPEN: the setting of the reopened cursor; None for no change

    def __str__(self):
        return f"cursor {self.cursor}: {self._text()}"

    def entry_ids(self, entry_count):
        end = self.position.entry_id + max(self.amount, 1) * self.stride
        return range(self.position.entry_id, min(end, entry_count), self.stride)

    def _text(self):  # noqa: PLR0911 - one for each
        kind, position, amount = self.kind, self.position, self.amount
        match kind:
            case StepKind.ACK if amount > 1:
                return f"ack {amount} entries from {position} on, {self.stride} apart"
            case StepKind.ACK:
                return f"ack {position}"
            case StepKind.ACK_BATCH:
                return f"ack messages {amount:04b} of the batch {position}"
            case StepKind.MARK_DELETE | StepKind.RESET:
                return f"{kind.value} to {position}" + (f" with {amount}" if amount else "")
            case StepKind.PROPERTIES:
                return f"{kind.value} to {amount}"
            case StepKind.REOPEN if self.setting is not None:
                return f"{kind.value}: {self.setting.value}"
            case StepKind.KILL:
                return f"persist, close and start again, but be killed after {amount} calls of the disk; start again"
        return str(kind.value)


LEDGERS = {1: 24, 2: 0, 4: 30, 7: 20}
"""The message log: the number of entries of each ledger, by id. It does not change."""
BATCH_SIZE = 4
"""Messages of each entry that is acked as a batch."""
_WITH_ENTRIES = [ledger_id for ledger_id, count in LEDGERS.items() if count]
_BATCHES = 4  # per ledger: few, so that some are completed
_MARK_DELETE_STEP_MAX = 8


def steps(chance, kinds, *, cursor_count):
    """Return a step of each kind, in order, for any of some cursors.

    Each cursor acks an entry before a joint persist: otherwise no two would be written with one sync. The mark-delete
    positions advance slowly: otherwise no entry would be left to ack.
    """
    found = []
    mark_deletes = 0
    for kind in kinds:
        mark_deletes += kind is StepKind.MARK_DELETE
        if kind is StepKind.PERSIST_ALL:
            found += [_step(chance, StepKind.ACK, cursor, mark_deletes) for cursor in range(cursor_count)]
        found.append(_step(chance, kind, chance.randrange(cursor_count), mark_deletes))
    return found


def _step(chance, kind, cursor, mark_deletes):  # noqa: PLR0911 - one for each
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
