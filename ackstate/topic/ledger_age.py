"""Ends a ledger of a message log when it is old, so that trimming can delete it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ackstate.topic.message_log import MessageLog


@final
class LedgerAge:
    """How long the open ledger of a log has been open, as seen at each publish.

    Args:
        log: The log.
        rollover_ms: From this age on, in milliseconds, a publish begins a new ledger; 0 for never.
        now_ms: The present.
    """

    def __init__(self, log: MessageLog, rollover_ms: int, *, now_ms: int) -> None:
        self._log = log
        self._rollover_ms = rollover_ms
        self._ledger_id, self._begun_ms = log.ledgers.current_ledger_id, now_ms

    def is_over(self, *, now_ms: int) -> bool:
        """Return whether the open ledger is old. A clock that went back by as much counts, too."""
        ledger_id = self._log.ledgers.current_ledger_id
        if ledger_id != self._ledger_id:
            self._ledger_id, self._begun_ms = ledger_id, now_ms
        return 0 < self._rollover_ms <= abs(now_ms - self._begun_ms)
