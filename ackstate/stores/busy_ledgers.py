"""Locks a ledger for one changing call at a time, within this process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Set


@final
class BusyLedgers:
    """The ledgers that calls of this process are changing. Calls for the same ledger take turns in their order."""

    def __init__(self) -> None:
        # The calls for each ledger in their order; the first one holds the ledger, the others wait.
        self._calls: dict[int, list[object]] = {}
        self._released = threading.Condition(threading.Lock())

    @contextmanager
    def holding(self, ledger_ids: Set[int]) -> Iterator[None]:
        """Wait until no earlier call changes these ledgers, and block later ones meanwhile; not reentrant.

        Complexity: O(ledgers of the call), if no other call waits for one of them.
        """
        call = object()
        ledger_ids = frozenset(ledger_ids)
        with self._released:
            for ledger_id in ledger_ids:
                self._calls.setdefault(ledger_id, []).append(call)
        try:
            with self._released:
                self._released.wait_for(lambda: all(self._calls[each][0] is call for each in ledger_ids))
            yield
        finally:
            with self._released:
                self._leave(call, ledger_ids)

    def _leave(self, call: object, ledger_ids: Set[int]) -> None:
        is_awaited = False
        for ledger_id in ledger_ids:
            calls = self._calls[ledger_id]
            calls.remove(call)
            if calls:
                is_awaited = True
            else:
                del self._calls[ledger_id]
        if is_awaited:
            self._released.notify_all()
