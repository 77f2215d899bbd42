"""Plans a cursor's next record, and its place: a delta, a whole state in a new ledger, or the metadata store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.cursor.journal.format import CursorState
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.state.unpersisted_acks import EVERYTHING
from ackstate.stores.base import PayloadTooLargeError

if TYPE_CHECKING:
    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.journal.journal import Journal
    from ackstate.cursor.listener import Listeners
    from ackstate.cursor.state.ack_state import CursorAckState, Unpersisted
    from ackstate.cursor.state.persist_limits import PersistLimits
    from ackstate.position import Position

_LOG = logging.getLogger(__name__)
_COMPACTION_RATIO = 4  # An ack is written 1 + 1/4 times; a recovery reads up to 5 times the live state.
_RETRY_MS_MAX = 60_000


class Plan(NamedTuple):
    """The content and the place of one record.

    Attributes:
        target: Where it goes.
        content: The whole state or, for a delta, the new acks.
        taken: The acks that become durable with it.
    """

    target: PersistTarget
    content: CursorState
    taken: Unpersisted

    @property
    def appends(self) -> bool:
        """Whether it goes to the end of the open cursor ledger."""
        return self.target is PersistTarget.DELTA or self.target is PersistTarget.WHOLE


@final
class RecordPlanner:
    """Plans the records of one cursor. To be called with the cursor's lock held.

    Each plan has begun a persist of the state, which is to be ended or abandoned.

    Args:
        state: The acks.
        journal: Where records go.
        listeners: May limit the acks that a persist leaves unpersisted.
        config: The intervals and the limits.
        now_ms: The present.
    """

    def __init__(
        self, state: CursorAckState, journal: Journal, listeners: Listeners, config: CursorConfig, *, now_ms: int
    ) -> None:
        self._state = state
        self._journal = journal
        self._listeners = listeners
        self._config = config
        self._ledger_limits = config.ledger_limits
        self._ledger_begun_ms = now_ms
        self._ledger_failures = 0  # in a row
        self._retry_at_ms = now_ms
        self.may_hold_back = config.become_old_ack_record_seconds != 0 or (
            config.metadata_limits.range_count_max is not None
        )
        """Whether a persist may exclude an ack, so that a receipt must list its entries."""

    @property
    def counts_entries(self) -> bool:
        """Whether the limit on ranges counts acked entries, as Pulsar's words form does."""
        return self._ledger_limits.counts_entries

    def may_cover_more(self, *, now_ms: int) -> bool:
        """Return whether the metadata store has no room for all acks, and a ledger, to be tried again, may have."""
        may_write_ledger = self._journal.needs_ledger and not self._backs_off(now_ms=now_ms)
        # Batches do not matter here: a ledger may hold as many of them as the metadata store.
        return may_write_ledger and bool(self._state.unpersisted.cut)

    def plan(self, up_to: Position, *, now_ms: int) -> Plan:
        """Plan the next record.

        Raises:
            PayloadTooLargeError: The ledger is not to be tried yet, and the metadata store has no room for the state.
        """
        if self._backs_off(now_ms=now_ms):
            return self.plan_metadata(up_to)
        taken = self._begin(up_to, self._ledger_limits)
        if self._needs_new_ledger(now_ms=now_ms):
            return self._whole(PersistTarget.SNAPSHOT, taken)
        if not self._journal.form.has_deltas:
            return self._whole(PersistTarget.WHOLE, taken)
        content = CursorState(taken.mark_delete, taken.new, taken.batch, taken.properties)
        return Plan(PersistTarget.DELTA, content, taken)

    def plan_metadata(self, up_to: Position) -> Plan:
        """Plan as much of the whole state as the metadata store has room for.

        Raises:
            PayloadTooLargeError: The durable acks would not fit, or receipts could not name the excluded ones.
        """
        limits = self._config.metadata_limits
        while True:
            durable_count = self._state.durable_count
            taken = self._begin(up_to, limits)
            plan = self._whole(PersistTarget.METADATA, taken)
            deleted = plan.content.deleted
            size = len(self._journal.encode_record(plan.content))
            fits = size <= self._config.metadata_bytes_max
            is_within = limits.range_count_max is None or deleted.range_count <= limits.range_count_max
            if fits and is_within and taken.acked_count >= durable_count:
                return plan
            self._state.withdraw_persist()
            if fits or not is_within or not deleted.range_count or not self.may_hold_back:
                raise PayloadTooLargeError(
                    f"{self._journal.path}: {size} bytes and {deleted.range_count} ranges are durable or must become"
                    f" so, more than the metadata store may be given"
                )
            shrunk = min(deleted.range_count - 1, deleted.range_count * self._config.metadata_bytes_max // size)
            limits = limits._replace(range_count_max=shrunk)

    def plan_closing(self) -> Plan | None:
        """Plan the whole state for the metadata store, if Pulsar's format is used and the state is small enough."""
        config, state = self._config, self._state
        if self._journal.form.has_deltas:
            return None
        if self._ledger_limits.range_count_max and state.deleted.range_count > config.closing_range_count_max:
            return None
        plan = self._whole(PersistTarget.METADATA, self._begin(EVERYTHING, config.list_limits))
        if len(self._journal.encode_record(plan.content)) <= config.metadata_bytes_max:
            return plan
        state.withdraw_persist()
        return None

    def plan_creation(self) -> Plan:
        """Plan the record of a new cursor in Pulsar's format: in the metadata store, before the first ack."""
        return self._whole(PersistTarget.METADATA, self._state.begin_persist())

    def wrote(self, target: PersistTarget, *, now_ms: int) -> None:
        """Note a write that succeeded."""
        if target is not PersistTarget.METADATA:
            self._ledger_failures = 0
        if target is PersistTarget.SNAPSHOT:
            self._ledger_begun_ms = now_ms

    def ledger_failed(self, *, now_ms: int) -> None:
        """Note that a ledger could not be written: the next persist tries again, later ones wait twice as long each."""
        waits = self._ledger_failures
        pause_ms = self._config.ledger_retry_ms << min(waits - 1, 20) if waits else 0
        self._retry_at_ms = now_ms + min(pause_ms, _RETRY_MS_MAX)
        if not self._ledger_failures:
            _LOG.warning("%s: the cursor ledger cannot be written; trying the metadata store", self._journal.path)
        self._ledger_failures += 1

    def _begin(self, up_to: Position, limits: PersistLimits) -> Unpersisted:
        record_bytes_max = self._listeners.record_bytes_max()
        return self._state.begin_persist(up_to=up_to, limits=limits, record_bytes_max=record_bytes_max)

    def _whole(self, target: PersistTarget, taken: Unpersisted) -> Plan:
        deleted, batch = self._state.whole()
        return Plan(target, CursorState(taken.mark_delete, deleted, batch, taken.properties), taken)

    def _needs_new_ledger(self, *, now_ms: int) -> bool:
        journal, config = self._journal, self._config
        return (
            journal.needs_ledger
            or journal.entry_count >= config.ledger_entry_count_max
            or self._is_old(now_ms=now_ms)
            or (
                journal.delta_bytes > config.compaction_bytes_min
                and journal.delta_bytes > _COMPACTION_RATIO * journal.snapshot_bytes
                and journal.form.has_deltas
            )
        )

    def _is_old(self, *, now_ms: int) -> bool:
        # A clock that went back by as much ends the time, too: else it would last until the clock is where it was.
        return 0 < self._config.ledger_rollover_ms <= abs(now_ms - self._ledger_begun_ms)

    def _backs_off(self, *, now_ms: int) -> bool:
        """Return whether it is too early to try a ledger again; a clock that went back by more than a pause ends it."""
        return self._ledger_failures > 0 and 0 < self._retry_at_ms - now_ms <= _RETRY_MS_MAX
