"""When and how a cursor's acks become durable: planned under a lock, written outside it, committed under it again."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.errors import AckStateError, CursorClosedError
from ackstate.position import Position
from cursor.ack_state import EVERYTHING
from cursor.journal import Content
from cursor.outcome import PersistResult, Route
from cursor.store import LedgerFencedError, LedgerNotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyroaring import BitMap

    from cursor.ack_state import AckState, Unpersisted
    from cursor.config import CursorConfig
    from cursor.journal import Journal


@dataclass(frozen=True, slots=True)
class Plan:
    """One persist, decided under the lock and carried out outside it."""

    route: Route
    content: Content
    taken: Unpersisted
    number: int


@final
class Persister:
    """The persists of one cursor, one at a time.

    Args:
        state: What is acked.
        journal: Where it goes.
        lock: Guards the state; never held while the storage is at work.
        config: When to write what.
        now_ms: The present.
    """

    def __init__(
        self, state: AckState, journal: Journal, *, lock: threading.RLock, config: CursorConfig, now_ms: int
    ) -> None:
        self.state = state
        self.journal = journal
        self.closed = False
        # Held through a whole persist; taken before `lock`.
        self.writing = threading.Lock()
        # Counts the calls that changed something since the cursor was opened. Invariant: durable <= accepted.
        self.accepted_number = self.durable_number = 0
        self.void_number = -1  # of the last that a reset made void
        self.bytes_persisted = self.persist_count = self.snapshot_count = self.truncation_count = 0
        self._lock = lock
        self._config = config
        self._ruler = DeliveryRuler()
        self._age_ms = config.become_old_ack_record_seconds * 1000
        self._last_persist_ms = now_ms
        self._was_cut = False

    @property
    def may_pass_by(self) -> bool:
        """Whether a persist may leave out an ack, so that a receipt must say which entries it is for."""
        return bool(self._age_ms) or self._config.range_count_max is not None

    @property
    def is_dirty(self) -> bool:
        """Whether something was accepted that no persist has looked at."""
        return self.accepted_number > self.durable_number

    def is_durable(self, number: int, entries: Mapping[int, BitMap]) -> bool:
        """Tell whether what was accepted up to a number is durable, and none of some entries was passed by."""
        with self._lock:
            return self.void_number < number <= self.durable_number and not self.state.is_undurable(entries)

    def is_due(self, *, now_ms: int) -> bool:
        """Tell whether the flush interval is over and something waits, or young acks became old."""
        if now_ms - self._last_persist_ms < self._config.flush_interval_ms:
            return False
        with self._lock:
            return self.is_dirty or self.state.can_promote(self.frontier(now_ms=now_ms))

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position was sent by now."""
        if self._age_ms:
            with self._lock:
                self._ruler.record(position, now_ms)

    def frontier(self, *, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        if not self._age_ms:
            return EVERYTHING
        with self._lock:
            return self._ruler.frontier(self._age_ms, now_ms) or Position(0, -1)

    def check_open(self) -> None:
        """Raise `CursorClosedError` if the cursor is closed."""
        if self.closed:
            raise CursorClosedError(f"{self.journal.path}: the cursor is closed")

    def persist(self, frontier: Position, *, now_ms: int) -> PersistResult:
        """Write what waits up to a frontier; to be called with `writing` held, as all that follow."""
        return self.carry_out(self.plan(frontier), now_ms=now_ms)

    def carry_out(self, plan: Plan | None, *, now_ms: int) -> PersistResult:
        """Write what was planned, and commit or abandon it."""
        if plan is None:
            state = self.state
            return PersistResult(Route.NOTHING, 0, 0, state.persisted_mark_delete, state.held_back, state.cut_off)
        written = 0
        try:
            written = self._write(plan)
        finally:
            if not written:
                self.abandon()
        return self.commit(plan, written, now_ms=now_ms)

    def reset(self, mark_delete: Position) -> int:
        """Write a reset and return its bytes; to be called with `writing` held, and `begin_anew` after it."""
        try:
            return self.journal.write_reset(Content(mark_delete, DeletedRanges(), BatchIndexes(), {}))
        except BaseException:
            # It may have happened: the next persist, even with nothing new, writes what the cursor has.
            with self._lock:
                self.accepted_number += 1
            raise

    def begin_anew(self, mark_delete: Position, written: int, *, now_ms: int) -> PersistResult:
        """Forget everything from before a reset that was written; to be called with both locks held."""
        self.state.reset(mark_delete)
        self._ruler.clear()
        self._was_cut = False
        self.void_number = self.accepted_number
        self.accepted_number += 1
        self.durable_number = self.accepted_number
        self._count_written(Route.RESET, written, now_ms=now_ms)
        return PersistResult(Route.RESET, written, 0, mark_delete)

    def plan(self, frontier: Position) -> Plan | None:
        """Take what the next record holds, at one instant; None if nothing waits."""
        with self._lock:
            self.check_open()
            if not self.is_dirty and not self.state.can_promote(frontier):
                return None
            journal, config = self.journal, self._config
            outgrown = journal.delta_bytes > max(journal.snapshot_bytes, config.compaction_bytes_min)
            full = journal.entry_count >= config.ledger_entry_count_max
            taken = self.state.begin_persist(frontier=frontier)
            if journal.needs_snapshot or outgrown or full:
                content = Content(taken.mark_delete, self.state.whole(), self.state.batch.copy(), taken.properties)
                return Plan(Route.SNAPSHOT, content, taken, self.accepted_number)
            content = Content(taken.mark_delete, taken.new, taken.batch, taken.properties)
            return Plan(Route.DELTA, content, taken, self.accepted_number)

    def _write(self, plan: Plan) -> int:
        write = self.journal.write_snapshot if plan.route is Route.SNAPSHOT else self.journal.append_delta
        return write(plan.content)

    def abandon(self) -> None:
        """Put back what was planned: it could not be written."""
        with self._lock:
            self.state.abandon_persist()

    def commit(self, plan: Plan, written: int, *, now_ms: int) -> PersistResult:
        """Count what was planned as durable: it was written and synced."""
        with self._lock:
            covered = self.state.end_persist(plan.taken)
            self.durable_number = plan.number
            # Counted where it begins: a limit that goes on cutting is one event, not one a persist.
            self.truncation_count += plan.taken.cut_count > 0 and not self._was_cut
            self._was_cut = plan.taken.cut_count > 0
            self._count_written(plan.route, written, now_ms=now_ms)
            held_back = self.state.held_back
            return PersistResult(plan.route, written, covered, plan.taken.mark_delete, held_back, plan.taken.cut_count)

    def _count_written(self, route: Route, written: int, *, now_ms: int) -> None:
        self._last_persist_ms = now_ms
        self.bytes_persisted += written
        self.persist_count += 1
        self.snapshot_count += route is not Route.DELTA


def persist_together(persisters: Iterable[Persister], *, now_ms: int) -> list[PersistResult | AckStateError]:
    """Persist many cursors of one store: all that append to their journals do so with one sync.

    Args:
        persisters: Of cursors that share a store, each once.
        now_ms: The present.

    Returns:
        For each, in order, the result, or the error that its own persist would have raised.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    ordered = list(persisters)
    if len(set(ordered)) < len(ordered) or len({id(persister.journal.store) for persister in ordered}) > 1:
        raise ValueError("cursors that are persisted together share a store, and each comes once")
    with ExitStack() as held:
        # In the order of identity, so that two calls at once cannot wait for each other.
        for persister in sorted(ordered, key=id):
            held.enter_context(persister.writing)
        outcomes: dict[Persister, PersistResult | AckStateError] = {}
        deltas: dict[Persister, Plan] = {}
        try:
            for persister in ordered:
                plan = _planned(persister, now_ms=now_ms)
                if isinstance(plan, Plan) and plan.route is Route.DELTA:
                    deltas[persister] = plan
                else:
                    outcomes[persister] = _concluded(persister, plan, now_ms=now_ms)
            outcomes |= _append_together(deltas, now_ms=now_ms)
        except BaseException:
            # What was planned and not written must not count as written by the next persist.
            for persister in deltas:
                persister.abandon()
            raise
    return [outcomes[persister] for persister in ordered]


def _planned(persister: Persister, *, now_ms: int) -> Plan | AckStateError | None:
    try:
        return persister.plan(persister.frontier(now_ms=now_ms))
    except AckStateError as error:
        return error


def _concluded(
    persister: Persister, plan: Plan | AckStateError | None, *, now_ms: int
) -> PersistResult | AckStateError:
    """Carry out a plan, if it is one, and return its result or error."""
    if isinstance(plan, AckStateError):
        return plan
    try:
        return persister.carry_out(plan, now_ms=now_ms)
    except AckStateError as error:
        return error


def _append_together(deltas: dict[Persister, Plan], *, now_ms: int) -> dict[Persister, PersistResult | AckStateError]:
    """Append all deltas with one sync; one by one if one of the ledgers is no longer its cursor's."""
    if not deltas:
        return {}
    prepared = {persister: persister.journal.prepare_delta(plan.content) for persister, plan in deltas.items()}
    store = next(iter(deltas)).journal.store
    try:
        store.ledgers.append_all(list(prepared.values()))
    except (LedgerFencedError, LedgerNotFoundError):
        for persister, (ledger_id, _) in prepared.items():
            persister.journal.not_appended(ledger_id)
        return {persister: _concluded(persister, plan, now_ms=now_ms) for persister, plan in deltas.items()}
    except StoreError as error:
        for persister in deltas:
            persister.abandon()
        return dict.fromkeys(deltas, error)
    return {
        persister: persister.commit(plan, persister.journal.appended(*prepared[persister]), now_ms=now_ms)
        for persister, plan in deltas.items()
    }
