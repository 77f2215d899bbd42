"""A step of a program that uses the cursors of one store."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ackstate.position import Position


class StepKind(Enum):
    """What a program does next."""

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
    KILL = "be killed"


class Step(NamedTuple):
    """One step; steps may be left out and the others still make sense.

    Attributes:
        kind: What is done.
        cursor: With which cursor, from 0 on.
        position: ACK, ACK_BATCH, MARK_DELETE: the entry. RESET: where to.
        amount: ACK: how many entries from there on, every `stride`-th; 0 is one. ACK_BATCH: the messages, one bit each.
            MARK_DELETE: a property that it carries, 0 for none. PROPERTIES: the value. KILL: after so many calls.
        stride: See above.
        setting: REOPEN: how it is opened again; None for no change.
    """

    kind: StepKind
    cursor: int = 0
    position: Position = Position(-1, -1)
    amount: int = 0
    stride: int = 1
    setting: Enum | None = None

    def __str__(self) -> str:
        return f"cursor {self.cursor}: {self._text()}"

    def entry_ids(self, entry_count: int) -> range:
        """Return the entries that an ACK is for, in a ledger of so many."""
        end = self.position.entry_id + max(self.amount, 1) * self.stride
        return range(self.position.entry_id, min(end, entry_count), self.stride)

    def _text(self) -> str:  # noqa: PLR0911 - one for each
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
