"""Bugs to plant in a cursor, each as a function that gets ``monkeypatch.setattr``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ackstate.cursor import ManagedCursor, StoreError
from ackstate.cursor.journal.journal import Journal
from ackstate.cursor.persist.persister import Persister

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate import Position


def receipts_outlive_a_reset(patch: Callable[..., None]) -> None:
    """A receipt from before a reset counts after it."""
    reset = ManagedCursor.reset

    def forgiving(self: Any, position: Position, *, now_ms: int) -> Any:
        result = reset(self, position, now_ms=now_ms)
        self._persister.void_number = -1
        return result

    patch(ManagedCursor, "reset", forgiving)


def receipts_outlive_a_reset_that_failed(patch: Callable[..., None]) -> None:
    """A receipt goes on counting when a reset fails, though it may have happened."""
    reset = Persister.reset

    def believing(self: Any, mark_delete: Position, *, now_ms: int) -> Any:
        durable_number = self.durable_number
        try:
            return reset(self, mark_delete, now_ms=now_ms)
        except StoreError:
            self.durable_number = durable_number
            raise

    patch(Persister, "reset", believing)


def new_owner_keeps_the_term(patch: Callable[..., None]) -> None:
    """An owner that takes over does not raise the term of the one before."""
    take_over = Journal._take_over

    def same_term(self: Any, found: Any) -> Any:
        return take_over(self, replace(found, record=replace(found.record, term=found.record.term - 1)))

    patch(Journal, "_take_over", same_term)
