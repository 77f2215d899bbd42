"""Performs one write of a cursor: planned under its lock, written without it, committed or abandoned under it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from ackstate.cursor.listener import Change
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.errors import CorruptStateError
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError

if TYPE_CHECKING:
    from ackstate.cursor.persist.persister import Persister
    from ackstate.cursor.persist.planner import Plan
    from ackstate.errors import AckStateError
    from ackstate.position import Position

_LOG = logging.getLogger(__name__)


@final
class Round:
    """One write, made with the cursor's lock held; later calls need `Persister.writing` and take the lock themselves.

    Args:
        persister: The cursor's.
        plan: The record to write.
        up_to: Acks above it are too young, also if the metadata store is used instead.
        promoted_count: How many young acks it persists early.
        closes: Whether the cursor is closed with it, unless something is accepted before it is committed.
        now_ms: The present.

    Attributes:
        appends: Whether it appends an entry to the open cursor ledger, which can be done together with other cursors.
        is_open: Whether it was neither committed nor abandoned.
    """

    def __init__(  # noqa: PLR0913 - named, not packed
        self,
        persister: Persister,
        plan: Plan,
        up_to: Position,
        *,
        promoted_count: int = 0,
        closes: bool = False,
        now_ms: int,
    ) -> None:
        self._persister = persister
        self._plan = plan
        self._up_to = up_to
        self._promoted_count = promoted_count
        self._closes = closes
        self._now_ms = now_ms
        self.appends = plan.appends
        self.is_open = True
        if persister.listeners.of_changes:
            self._notify_begun()

    def prepare(self) -> tuple[int, bytes]:
        """Return the ledger and the entry to be appended."""
        return self._persister.journal.prepare(self._plan.content)

    def append_failed(self, error: AckStateError) -> PersistResult:
        """Write to the metadata store, because the entry that `prepare` returned could not be appended.

        Raises:
            CursorFencedError: Another owner has the cursor.
            StoreError: The write failed; nothing became durable.
        """
        journal = self._persister.journal
        if isinstance(error, LedgerFencedError | LedgerNotFoundError):
            raise journal.fenced() from error
        if isinstance(error, CorruptStateError):
            unwritable = journal.unwritable(error)
            unwritable.__cause__ = error
            error = unwritable
        return self.fall_back(error)

    def write(self) -> PersistResult:
        """Write a whole state and commit it; where a ledger cannot be written, to the metadata store.

        Raises:
            CursorFencedError: Another owner has the cursor.
            StoreError: The write failed; nothing became durable.
        """
        journal, plan = self._persister.journal, self._plan
        is_metadata = plan.target is PersistTarget.METADATA
        write = journal.write_record if is_metadata else journal.begin_ledger
        try:
            return self.commit(write(plan.content))
        except StoreError as error:
            if not is_metadata:
                return self.fall_back(error)
            self._persister.counters.metadata_error_count += 1
            raise
        finally:
            self.abandon()

    def fall_back(self, error: AckStateError) -> PersistResult:
        """Write to the metadata store instead, because the ledger could not be written.

        Raises:
            CursorFencedError: Another owner has the cursor.
            StoreError: The metadata store could not be written either: the error given.
        """
        self.abandon()
        persister = self._persister
        persister.planner.ledger_failed(now_ms=self._now_ms)
        persister.counters.ledger_error_count += 1
        try:
            with persister.lock:
                self._plan = persister.planner.plan_metadata(self._up_to)
                self.is_open = True
                if persister.listeners.of_changes:
                    self._notify_begun()
            return self.write()
        except StoreError as second:
            error.add_note(f"nor was it written to the metadata store: {second}")
            raise error from second

    def commit(self, byte_count: int) -> PersistResult:
        """Count the plan as durable: it was written and synced."""
        persister, plan, now_ms = self._persister, self._plan, self._now_ms
        taken = plan.taken
        with persister.lock:
            self.is_open = False
            covered = persister.state.end_persist(taken)
            if persister.listeners.of_changes:
                persister.listeners.changed(Change.PERSIST_ENDED, (), now_ms=now_ms)
            if taken.cut_count or taken.batch_cut_count:
                self._note_truncation()
            else:
                persister.is_truncated = False
            persister.wrote(plan.target, byte_count, now_ms=now_ms)
            if self._promoted_count:
                persister.counters.promoted(self._promoted_count)
            if self._closes:
                persister.closed = not persister.state.is_dirty
            return PersistResult(
                plan.target, byte_count, covered, taken.mark_delete, persister.state.unpersisted.held_count,
                taken.cut_count, taken.batch_cut_count,
            )  # fmt: skip

    def abandon(self) -> None:
        """Note that the plan was not written, unless it was committed or abandoned before."""
        persister = self._persister
        with persister.lock:
            if self.is_open:
                self.is_open = False
                persister.state.abandon_persist()
                persister.listeners.changed(Change.PERSIST_FAILED, (), now_ms=self._now_ms)

    def _notify_begun(self) -> None:
        listeners, now_ms = self._persister.listeners, self._now_ms
        unpersisted = self._persister.state.unpersisted
        held, cut, displaced = unpersisted.held, unpersisted.cut, unpersisted.displaced
        if displaced:
            cut = cut.copy()
            cut.difference_update(displaced)
        listeners.changed(Change.PERSIST_BEGUN, (), now_ms=now_ms)
        for change, ranges in ((Change.HELD_BACK, held), (Change.CUT_OFF, cut), (Change.DISPLACED, displaced)):
            runs = [(ledger_id, first, end - 1) for ledger_id, first, end in ranges.runs()]
            listeners.changed(change, runs, now_ms=now_ms)

    def _note_truncation(self) -> None:
        """Count and log the begin of a period in which a limit cuts: one event, not one per persist."""
        persister, taken = self._persister, self._plan.taken
        if not persister.is_truncated:
            persister.is_truncated = True
            persister.counters.truncation_count += 1
            _LOG.warning(
                "%s: limits leave %d acked messages and %d partly acked batches out of the durable state",
                persister.journal.path, taken.cut_count, taken.batch_cut_count,
            )  # fmt: skip
