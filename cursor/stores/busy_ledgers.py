"""Locks a ledger for one changing call at a time, within this process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Set


@final
class BusyLedgers:
    """The ledgers that calls of this process are changing. Calls for the same ledger take turns in their order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._calls: dict[int, Set[int]] = {}  # number of a call, in order -> its ledgers; also those that wait
        self._released = threading.Condition()

    @contextmanager
    def holding(self, ledger_ids: Set[int]) -> Iterator[None]:
        """Wait until no earlier call changes these ledgers, and block later ones meanwhile; not reentrant."""
        with self._released:
            number = next(self._numbers)
            self._calls[number] = frozenset(ledger_ids)
        try:
            with self._released:
                self._released.wait_for(lambda: self._is_first(number))
            yield
        finally:
            with self._released:
                del self._calls[number]
                self._released.notify_all()

    def _is_first(self, number: int) -> bool:
        ledger_ids = self._calls[number]
        return all(each.isdisjoint(ledger_ids) for earlier, each in self._calls.items() if earlier < number)
