"""The interface of a crashed program: it accepts acks, reports durable ones, and recovers its state after a crash.

A Python class, or a program in another language with JSON lines (`ackstate.analysis.crash.conversation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class OperationKind(Enum):
    """The kinds of requests to a subject."""

    ACK = "ack"
    """One entry was consumed."""
    MARK_DELETE = "mark_delete"
    """Every entry up to this one, included, was consumed; also of lower ledgers."""
    PERSIST = "persist"
    """Make the accepted operations durable."""


class Operation(NamedTuple):
    """One request.

    Attributes:
        number: 0, 1, 2, ... in the order in which they are sent; per process run, from a start to its crash.
        kind: The kind of the request.
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
    """The state of a subject.

    Attributes:
        acked: Every entry that is not delivered again, in any order; overlaps do no harm.
        redelivery_if_crashed: The number of them that a crash now would redeliver, if it has such a gauge.
    """

    acked: Sequence[EntryRun]
    redelivery_if_crashed: int | None = None


class CrashSubject(Protocol):
    """Ack state of one subscription in a directory. One object exists in one process until that is killed.

    Calls come one at a time unless `persists_in_background` is True. Any call may raise errors: then the process ends,
    and its reports so far are judged.
    """

    @property
    def persists_in_background(self) -> bool:
        """Whether PERSIST may be applied, and `receipts` read, in one thread while another applies the rest."""
        ...

    def start(self, directory: Path, ledgers: Mapping[int, int]) -> None:
        """Open the state in a directory, or create one.

        Args:
            directory: The directory of the subject; empty at first, later with the state after a crash.
            ledgers: The message log: the number of entries of each ledger, by id.
        """
        ...

    def apply(self, operation: Operation) -> None:
        """Accept an ack; or persist the accepted operations, and return after the attempt."""
        ...

    def receipts(self) -> Sequence[int]:
        """Return the numbers of the operations that have become durable since the previous call."""
        ...

    def recover(self, directory: Path, ledgers: Mapping[int, int]) -> Report:
        """Open the state after a crash, as `start`, and report the acked entries."""
        ...

    def report(self) -> Report:
        """Report the acked entries, durable or not."""
        ...


class GaugedSubject(CrashSubject, Protocol):
    """A subject that reports at any time how much a crash would redeliver; the report is judged."""

    @property
    def redelivery_if_crashed(self) -> int:
        """The maximum number of accepted entries that a crash now would redeliver. Read after each ack."""
        ...
