"""Bugs to plant in a cursor, each as a function that gets ``monkeypatch.setattr``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ackstate.cursor import ManagedCursor, StoreError
from ackstate.cursor.journal.journal import Journal
from ackstate.cursor.persist import reset as reset_module
from ackstate.cursor.state.ack_state import CursorAckState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate import Position


def receipts_outlive_a_reset(patch: Callable[..., None]) -> None:
    """A receipt from before a reset counts after it."""
    reset = ManagedCursor.reset

    def forgiving(self: Any, position: Position, *, now_ms: int) -> Any:
        result = reset(self, position, now_ms=now_ms)
        self._state.void_number = -1
        return result

    patch(ManagedCursor, "reset", forgiving)


def receipts_outlive_a_reset_that_failed(patch: Callable[..., None]) -> None:
    """A receipt goes on counting when a reset fails, though it may have happened."""
    begin_reset, write = CursorAckState.begin_reset, reset_module._write
    durable_numbers = {}

    def noting(self: Any, mark_delete: Position) -> None:
        durable_numbers[id(self)] = self.durable_number
        begin_reset(self, mark_delete)

    def believing(persister: Any, mark_delete: Position, *, now_ms: int) -> Any:
        try:
            return write(persister, mark_delete, now_ms=now_ms)
        except StoreError:
            persister.state.durable_number = durable_numbers[id(persister.state)]
            raise

    patch(CursorAckState, "begin_reset", noting)
    patch(reset_module, "_write", believing)


def new_owner_keeps_the_term(patch: Callable[..., None]) -> None:
    """An owner that takes over does not raise the term of the one before."""
    take_over = Journal._take_over

    def same_term(self: Any, found: Any) -> Any:
        return take_over(self, replace(found, record=replace(found.record, term=found.record.term - 1)))

    patch(Journal, "_take_over", same_term)
