"""The promises that every schedule holds the product to, and what is raised when one is broken."""

from __future__ import annotations

from enum import Enum


class Promise(Enum):
    """What is promised, by number."""

    I1 = "an unacked message is never treated as acked"
    I2 = "a durable receipt survives any crash"
    I3 = "a crash brings back what the gauge said; one that saves more, less"
    I4 = "incremental counters agree with a full recount, and no limit is ever passed by a byte"
    I5 = "recovering twice gives the same, and a crash during recovery is survived"
    I6 = "snapshot and deltas say what a replay of everything says"
    I7 = "the durable mark-delete position never goes back but by a reset"
    I8 = "blocked is never stuck"
    I9 = "mark-delete position and ranges of a record are of one instant"
    I10 = "unreadable is not absent, and what was written can be read"
    I11 = "the journal is bounded by the live state"
    I12 = "a message is never early, never lost, never with two consumers"
    I13 = "an ack from before a reset does not count after it"
    I14 = "an owner that was fenced changes nothing, and is told so"
    I15 = "what was accepted is written when its time comes, and left out only for a reason"
    I16 = "a persist writes no more than its state needs"
    ERRORS = "nothing fails by itself"

    @property
    def text(self) -> str:
        """Its number and its words."""
        return f"{self.name}: {self.value}"


class PromiseBrokenError(AssertionError):
    """A promise was seen broken.

    Args:
        promise: Which.
        found: What was found instead, in words.
        entry_count: How many entries are concerned, where they are lost or invented.
    """

    def __init__(self, promise: Promise, found: str, *, entry_count: int = 1) -> None:
        super().__init__(found)
        self.promise = promise
        self.found = found
        self.entry_count = entry_count


def hold(promise: Promise, is_kept: bool, found: str) -> None:
    """Raise `PromiseBrokenError` unless a promise is kept."""
    if not is_kept:
        raise PromiseBrokenError(promise, found)
