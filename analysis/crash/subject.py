"""What is crashed: anything that accepts acks, says which of them are durable, and knows after a crash what it holds.

Ours, yours, or a program in another language that speaks JSON lines (`ackstate.analysis.crash.conversation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class OperationKind(Enum):
    """What is asked of a subject."""

    ACK = "ack"
    """One entry was consumed."""
    MARK_DELETE = "mark_delete"
    """Every entry up to this one, included, was consumed; of lower ledgers, too."""
    PERSIST = "persist"
    """Make durable what has been accepted."""


class Operation(NamedTuple):
    """One request.

    Attributes:
        number: 0, 1, 2, ... in the order in which they are sent; of one life, from a start to its crash.
        kind: What is asked.
        ledger_id: Ledger of the entry; -1 for PERSIST.
        entry_id: The entry; -1 for PERSIST.
    """

    number: int
    kind: OperationKind
    ledger_id: int = -1
    entry_id: int = -1


class EntryRun(NamedTuple):
    """Neighbouring entries of a ledger, from `first` (included) to `end` (excluded)."""

    ledger_id: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a subject holds.

    Attributes:
        acked: Every entry that it will not deliver again, in any order; overlaps do no harm.
        redelivery_if_crashed: How many of them a crash now would bring back, if it keeps such a gauge.
    """

    acked: Sequence[EntryRun]
    redelivery_if_crashed: int | None = None


class CrashSubject(Protocol):
    """Ack state of one subscription in a directory. One object lives in one process until that is killed.

    Calls come one at a time unless it says otherwise by `persists_in_background`. Errors of its own may escape from any
    call: then the process ends, and what it had reported until then is held against it.
    """

    @property
    def persists_in_background(self) -> bool:
        """Whether PERSIST may be applied, and `receipts` read, in one thread while another applies the rest."""
        ...

    def start(self, directory: Path, ledgers: Mapping[int, int]) -> None:
        """Go on with what the directory holds, or begin there.

        Args:
            directory: Its own; empty at first. After a crash, what the crash left.
            ledgers: The message log: the number of entries of each ledger, by id.
        """
        ...

    def apply(self, operation: Operation) -> None:
        """Accept an ack; or persist what has been accepted, and return when that was tried."""
        ...

    def receipts(self) -> Sequence[int]:
        """Return the numbers of the operations that have become durable since this was called last."""
        ...

    def recover(self, directory: Path, ledgers: Mapping[int, int]) -> Report:
        """Open what a crash left, as `start`, and say what is known to be acked."""
        ...

    def report(self) -> Report:
        """Say what is acked now, durable or not."""
        ...


class GaugedSubject(CrashSubject, Protocol):
    """A subject that knows at any time what a crash would bring back, and is held to it."""

    @property
    def redelivery_if_crashed(self) -> int:
        """How many entries a crash now would bring back at most, of those accepted until now. Read after each ack."""
        ...
