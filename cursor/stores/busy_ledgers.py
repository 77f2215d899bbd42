"""Locks a ledger for one changing call at a time, within this process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Set


@final
class BusyLedgers:
    """The ledgers that a call of this process is changing."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        self._released = threading.Condition()

    @contextmanager
    def holding(self, ledger_ids: Set[int]) -> Iterator[None]:
        """Wait until no other call changes these ledgers, and block such calls meanwhile; not reentrant."""
        with self._released:
            self._released.wait_for(lambda: self._busy.isdisjoint(ledger_ids))
            self._busy |= ledger_ids
        try:
            yield
        finally:
            with self._released:
                self._busy -= ledger_ids
                self._released.notify_all()
