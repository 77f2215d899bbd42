"""A step of a program that uses the cursors of one store."""

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
    """One step; any step may be removed without making the others invalid.

    Attributes:
        kind: The kind of the step.
        cursor: The number of the cursor, from 0.
        position: ACK, ACK_BATCH, MARK_DELETE: the entry. RESET: the target.
        amount: ACK: the number of entries from there on, every `stride`-th; 0 is one. ACK_BATCH: the messages, one bit
            each. MARK_DELETE: a property that it has, 0 for none. PROPERTIES: the value. KILL: the number of calls.
        stride: See `amount`.
        setting: REOPEN: the setting of the reopened cursor; None for no change.
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
        """Return the entries of an ACK, in a ledger of `entry_count` entries."""
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
