"""Errors of BookKeeper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError

if TYPE_CHECKING:
    from ackstate.stores.bookkeeper_frames import Failure

LEDGER_EXISTS = -20
NO_SUCH_LEDGER = frozenset({-7, -25})
NO_SUCH_ENTRY = -13
BOOKIE_UNREACHABLE = -8
LEDGER_FENCED = -101


class BookKeeperError(StoreError):
    """BookKeeper refused a call.

    Attributes:
        code: BookKeeper's number of the error, ``BKException.Code``.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"BookKeeper: {failure.message} (code {failure.code})")
        self.code = failure.code


def error_of(failure: Failure) -> StoreError:
    """Return the error that reports a failure."""
    if failure.code == LEDGER_FENCED:
        return LedgerFencedError(f"BookKeeper: {failure.message}")
    if failure.code in NO_SUCH_LEDGER or failure.code == NO_SUCH_ENTRY:
        return LedgerNotFoundError(f"BookKeeper: {failure.message}")
    return BookKeeperError(failure)
