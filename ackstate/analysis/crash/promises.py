"""The promises that the crash layers hold a cursor to. No other place words them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Promise(StrEnum):
    """A promise; its text begins with its number, where design and documentation give it one."""

    I1 = "I1: an unacked message is never treated as acked"
    I2 = "I2: a durable receipt survives any crash"
    I3 = "I3: no crash redelivers more than the gauge, and the gauge counts nothing that cannot be redelivered"
    I4 = "I4: incremental counters agree with a full recount, and no limit is exceeded, not even by a byte"
    I5 = "I5: a store can be opened after any crash, also one of the recovery, and recovering twice gives the same"
    I6 = "I6: a snapshot and its deltas give the same state as a replay of everything"
    I7 = "I7: the durable mark-delete position never goes back, except by a reset"
    I8 = "I8: blocked is never stuck"
    I9 = "I9: a persist is of one instant, and is stored as a whole or not at all"
    I10 = "I10: unreadable is not absent, and written data can be read"
    I11 = "I11: stored data is bounded by the live state, and nothing is left behind"
    I12 = "I12: a message is never early, never lost, never with two consumers"
    I13 = "I13: an ack from before a reset does not count after it"
    I14 = "I14: a fenced owner changes nothing, and receives an error"
    I15 = "I15: accepted acks are written when due, and excluded only for a reason"
    I16 = "I16: a persist writes no more than its state needs"
    I17 = "I17: a deleted subscription leaves nothing, and a later one of its name is new"
    ERRORS = "nothing fails by itself, and a fault causes one of our errors"
    CONVERSATION = "a program that is not crashed continues, and answers as the conversation allows"
    REPAIRS = "a repair that is offered works, and gives up no more than announced"


def gravest(promises: Iterable[Promise]) -> Promise:
    """Return the first of some promises by number, which is the one to report."""
    return min(promises, key=list(Promise).index)


class PromiseBrokenError(AssertionError):
    """A promise was broken.

    Args:
        promise: The promise.
        found: The observation that contradicts it, as text.
        entry_count: The number of lost or invented entries.
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
