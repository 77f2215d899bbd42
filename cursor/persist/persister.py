"""When and how a cursor's acks become durable: planned under a lock, written outside it, committed under it again."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.journal.format import CursorState
from ackstate.cursor.journal.shared_holes import FilledCount, filled
from ackstate.cursor.listener import Change
from ackstate.cursor.persist.rate_limiter import MarkDeleteRateLimiter
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.cursor.state.unpersisted_acks import EVERYTHING
from ackstate.cursor.state.young_age import YoungAge
from ackstate.cursor.store import PayloadTooLargeError, StoreError
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import CursorClosedError
from ackstate.wire.pulsar import LimitRule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.journal.journal import Journal
    from ackstate.cursor.listener import CursorListener
    from ackstate.cursor.state.ack_state import AckState, PersistLimits, Unpersisted
    from ackstate.errors import AckStateError
    from ackstate.position import Position
    from ackstate.wire.native_shared import BucketHoles


_LOG = logging.getLogger(__name__)
_LEDGER_RETRY_MS_MAX = 60_000
_COMPACTION_RATIO = 4  # An ack is written 1 + 1/4 times; a recovery reads up to 5 times the live state.


class PersistWatcher(Protocol):
    """Whoever bounds what is not durable, and wants to know when less of it is."""

    def record_bytes_max(self) -> int | None:
        """Return what the cursor's `unpersisted_record_bytes` may be at most; None for anything.

        Called with the cursor's lock held: to take another lock in here may wait for ever.
        """
        ...

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Take note that a persist has ended, and how; no lock is held."""
        ...


class Plan(NamedTuple):
    """One persist, decided under the lock and carried out outside it."""

    route: PersistTarget
    content: CursorState
    taken: Unpersisted
    number: int
    buckets: Sequence[BucketHoles] = ()
    """What a whole state may refer to."""

    @property
    def appends(self) -> bool:
        """Whether it goes to the end of the open cursor ledger."""
        return self.route is PersistTarget.DELTA or self.route is PersistTarget.WHOLE


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
        self.watcher: PersistWatcher | None = None
        self.listener: CursorListener | None = None
        self._planned_ms = now_ms  # of the persist under way
        # Held through a whole persist; taken before `lock`.
        self.writing = threading.Lock()
        # Counts the calls that changed something since the cursor was opened. Invariant: durable <= accepted.
        self.accepted_number = self.durable_number = 0
        self.void_number = -1  # of the last that a reset made void
        self.bytes_persisted = self.persist_count = self.snapshot_count = self.truncation_count = 0
        self.ledger_write_count = self.ledger_bytes_written = self.ledger_error_count = 0
        self.metadata_write_count = self.metadata_error_count = 0
        self.promotion_count = self.promoted_message_count = 0
        self.young_age = YoungAge(config.become_old_ack_record_seconds)
        # Whether a persist may leave out an ack, so that a receipt must say which entries it is for.
        self.may_pass_by = self.young_age.is_on or config.metadata_limits.range_count_max is not None
        self._lock = lock
        self._config = config
        self._ledger_limits = config.ledger_limits
        self._limiter: MarkDeleteRateLimiter | None = None
        if config.mark_delete_rate_limit > 0:
            self._limiter = MarkDeleteRateLimiter(config.mark_delete_rate_limit, now_ms=now_ms)
        self._refused_number = 0  # what the limiter refused last: it is not asked again until more was accepted
        self._last_persist_ms = self._ledger_begun_ms = now_ms
        self._ledger_failures = 0  # in a row
        self._ledger_retry_at_ms = now_ms
        self._was_cut = False
        self._filled_count = FilledCount()

    @property
    def counts_entries(self) -> bool:
        """Whether the limit on ranges counts acked entries, as Pulsar's words form does."""
        return self._ledger_limits.rule is not LimitRule.EXACT

    @property
    def is_dirty(self) -> bool:
        """Whether something was accepted that no persist has looked at."""
        return self.accepted_number > self.durable_number

    def is_durable(self, number: int, entries: Mapping[int, BitMap], batch: Position | None) -> bool:
        """Tell whether what was accepted up to a number is durable, and none of some acks was passed by."""
        with self._lock:
            if not self.void_number < number <= self.durable_number or self.state.is_undurable(entries):
                return False
            return batch is None or not self.state.is_batch_cut(batch)

    def is_due(self, *, now_ms: int) -> bool:
        """Tell whether the flush interval is over and something waits, or the rate limit lets what is new through."""
        with self._lock:
            # A clock that went back may have gone back by hours: then the interval counts as over.
            if not 0 <= now_ms - self._last_persist_ms < self._config.flush_interval_ms:
                has_more = self.state.can_promote(self.frontier(now_ms=now_ms)) or self._may_cover_more(now_ms=now_ms)
                return self.is_dirty or has_more or self._must_let_go(now_ms=now_ms)
            return self._is_new() and self._limiter is not None and self._limiter.can_acquire(now_ms)

    def tick(self, *, now_ms: int) -> bool:
        """Tell whether to persist now, and take a permit for it."""
        with self._lock:
            is_due = self.is_due(now_ms=now_ms)
            if self._limiter is not None and (is_due or self._is_new()):
                self._refused_number = self.accepted_number
                self._limiter.try_acquire(now_ms)
            return is_due

    def _may_cover_more(self, *, now_ms: int) -> bool:
        """Tell whether the metadata store held less than was acked and a ledger, to be tried again, may hold more."""
        may_write_ledger = self.journal.needs_ledger and not self._backs_off(now_ms=now_ms)
        # Not batches: a ledger may hold as many as the metadata store, and left out are those beyond in either.
        return may_write_ledger and self.state.cut_off > 0

    def _must_let_go(self, *, now_ms: int) -> bool:
        """Tell whether the journal is old and keeps delay buckets from being deleted, though nothing is new."""
        return self._is_old(now_ms=now_ms) and self.journal.refers_to_retired

    def _is_old(self, *, now_ms: int) -> bool:
        # A clock that went back by as much ends the time, too: else it would last until the clock is where it was.
        return 0 < self._config.ledger_rollover_ms <= abs(now_ms - self._ledger_begun_ms)

    def _backs_off(self, *, now_ms: int) -> bool:
        """Tell whether it is too early to try a ledger again; a clock that went back by more than a pause ends it."""
        return self._ledger_failures > 0 and 0 < self._ledger_retry_at_ms - now_ms <= _LEDGER_RETRY_MS_MAX

    def _is_new(self) -> bool:
        return self.accepted_number > max(self._refused_number, self.durable_number)

    def frontier(self, *, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        with self._lock:
            return self.young_age.frontier(now_ms=now_ms)

    def range_count_to_persist(self, range_count_max: int) -> int:
        """Return how many ranges the state has at most, as `FilledCount.at_most` says it, or what the limit counts."""
        state, buckets = self.state, self.journal.known_buckets
        if self.counts_entries:
            # Not what the rule itself counts: an ack in a later ledger may add all of an earlier one to that.
            return len(state.deleted)
        if not buckets:
            return state.deleted.range_count
        return self._filled_count.at_most(
            state.deleted, buckets, range_count_max=range_count_max, acked_count=state.acked_count
        )

    def check_open(self) -> None:
        """Raise `CursorClosedError` if the cursor is closed."""
        if self.closed:
            raise CursorClosedError(f"{self.journal.path}: the cursor is closed")

    def persist(self, frontier: Position, *, now_ms: int) -> PersistResult:
        """Write what waits up to a frontier; to be called with `writing` held, as all that follow."""
        return self.carry_out(self.plan(frontier, now_ms=now_ms), frontier, now_ms=now_ms)

    def promote(self, record_bytes_max: int, *, now_ms: int) -> PersistResult:
        """Write what waits, and of what is too young the oldest until what is left takes at most so many bytes."""
        with self._lock:
            self.check_open()
            frontier = self.frontier(now_ms=now_ms)
            raised = max(frontier, self.state.frontier_leaving(record_bytes_max))
            promoted_count = self.state.undurable_count(frontier, raised)
        result = self.persist(raised, now_ms=now_ms)
        self.promotion_count += promoted_count > 0
        self.promoted_message_count += promoted_count
        return result

    def tell(self, outcome: PersistResult | AckStateError) -> None:
        """Tell the watcher, if there is one, how a persist ended; to be called without a lock."""
        if self.watcher is not None:
            self.watcher.persisted(outcome)

    def has_young(self, *, now_ms: int) -> bool:
        """Tell whether something acked is held back, or would be, because it is young."""
        if not self.young_age.is_on:
            return False
        with self._lock:
            return self.state.undurable_count(self.frontier(now_ms=now_ms), EVERYTHING) > 0

    def carry_out(self, plan: Plan | None, frontier: Position, *, now_ms: int) -> PersistResult:
        """Write what was planned, and commit or abandon it."""
        if plan is None:
            state = self.state
            return PersistResult(
                PersistTarget.NOTHING, 0, 0, state.persisted_mark_delete, state.held_back, state.cut_off
            )
        try:
            written = self._write(plan)
        except StoreError as error:
            if plan.route is PersistTarget.METADATA:
                self.abandon()
                self.metadata_error_count += 1
                raise
            return self.fall_back(error, frontier, now_ms=now_ms)
        except BaseException:
            self.abandon()
            raise
        return self.commit(plan, written, now_ms=now_ms)

    def fall_back(self, error: AckStateError, frontier: Position, *, now_ms: int) -> PersistResult:
        """Write what was planned for a cursor ledger to the metadata store; the ledger could not be written.

        Raises:
            CursorFencedError: Another owner has the cursor.
            StoreError: Nor could that be: the error given.
        """
        self.abandon()
        self._count_ledger_error(now_ms=now_ms)
        try:
            buckets = self.journal.buckets()
            with self._lock:
                plan = self._begun(self._plan_metadata(frontier, buckets), now_ms=now_ms)
            return self.carry_out(plan, frontier, now_ms=now_ms)
        except StoreError as second:
            error.add_note(f"nor was it written to the metadata store: {second}")
            raise error from second

    def create(self, *, now_ms: int) -> None:
        """Write a new cursor: with a cursor ledger or, as in Pulsar, in the metadata store before the first ack."""
        self.accepted_number += 1
        if self.journal.form.has_deltas:
            self.persist(EVERYTHING, now_ms=now_ms)
            return
        plan = self._plan_whole(PersistTarget.METADATA, self.state.begin_persist())
        self.carry_out(plan, EVERYTHING, now_ms=now_ms)

    def reset(self, mark_delete: Position, *, now_ms: int) -> tuple[PersistTarget, int]:
        """Write a reset; to be called with `writing` held, and `begin_anew` after it.

        Returns:
            Which way it took, and its bytes.
        """
        content = CursorState(mark_delete, DeletedRanges(), BatchIndexes(), {})
        with self._lock:
            # If it fails it may have happened: until the next persist, which writes what the cursor has even with
            # nothing new, no receipt counts.
            self.state.begin_reset(mark_delete)
            self.accepted_number += 1
            self.durable_number = self.void_number
        self.journal.begin_epoch()
        try:
            try:
                return PersistTarget.SNAPSHOT, self.journal.begin_ledger(content)
            except StoreError as error:
                self._count_ledger_error(now_ms=now_ms)
                try:
                    return PersistTarget.METADATA, self.journal.write_record(content)
                except StoreError as second:
                    self.metadata_error_count += 1
                    raise error from second
        except BaseException:
            self.journal.abandon_epoch()
            raise

    def begin_anew(self, mark_delete: Position, route: PersistTarget, written: int, *, now_ms: int) -> PersistResult:
        """Forget everything from before a reset that was written; to be called with both locks held."""
        self.state.reset(mark_delete)
        self.young_age.clear()
        self._was_cut = False
        self.void_number = self.accepted_number
        self.accepted_number += 1
        self.durable_number = self.accepted_number
        self._count_written(route, written, now_ms=now_ms)
        return PersistResult(route, written, 0, mark_delete)

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Write everything, young acks too; Pulsar's format to the metadata store if it is small enough.

        Then the cursor is closed, unless an ack came in meanwhile: that one wants a record of its own.

        Returns:
            None if another thread has closed the cursor before.
        """
        if self.closed:
            return None
        plan = self._plan_closing(now_ms=now_ms)
        if plan is None:
            result = self.persist(EVERYTHING, now_ms=now_ms)
        else:
            result = self.carry_out(plan, EVERYTHING, now_ms=now_ms)
        with self._lock:
            self.closed = not self.is_dirty
        return result

    def plan(self, frontier: Position, *, now_ms: int) -> Plan | None:
        """Take what the next record holds, at one instant; None if nothing waits.

        Raises:
            CursorClosedError: The cursor is closed.
            PayloadTooLargeError: The ledger is not to be tried yet, and the metadata store cannot take the state.
        """
        buckets = self._buckets(now_ms=now_ms)
        with self._lock:
            self.check_open()
            has_more = self.state.can_promote(frontier) or self._may_cover_more(now_ms=now_ms)
            if not (self.is_dirty or has_more or self._must_let_go(now_ms=now_ms)):
                return None
            if self._backs_off(now_ms=now_ms):
                return self._begun(self._plan_metadata(frontier, buckets), now_ms=now_ms)
            return self._begun(self._plan_ledger(frontier, buckets, now_ms=now_ms), now_ms=now_ms)

    def _plan_ledger(self, frontier: Position, buckets: Sequence[BucketHoles], *, now_ms: int) -> Plan:
        taken = self._begin(frontier, self._ledger_limits, buckets)
        if self._needs_new_ledger(now_ms=now_ms):
            return self._plan_whole(PersistTarget.SNAPSHOT, taken, buckets)
        if not self.journal.form.has_deltas:
            return self._plan_whole(PersistTarget.WHOLE, taken)
        content = CursorState(taken.mark_delete, taken.new, taken.batch, taken.properties)
        return Plan(PersistTarget.DELTA, content, taken, self.accepted_number)

    def _begun(self, plan: Plan, *, now_ms: int) -> Plan:
        """Tell the listener, if there is one, of a plan that will be carried out; to be called with the lock held."""
        self._planned_ms = now_ms
        if self.listener is not None:
            held, cut, displaced = self.state.left_out
            if displaced:
                cut = cut.copy()
                cut.difference_update(displaced)
            self.listener.changed(Change.PERSIST_BEGUN, (), now_ms=now_ms)
            for change, ranges in ((Change.HELD_BACK, held), (Change.CUT_OFF, cut), (Change.DISPLACED, displaced)):
                if ranges:
                    runs = [(ledger_id, first, end - 1) for ledger_id, first, end in ranges.runs()]
                    self.listener.changed(change, runs, now_ms=now_ms)
        return plan

    def _buckets(self, *, now_ms: int) -> Sequence[BucketHoles]:
        """Return the delay buckets that the next record may refer to, or that a limit on ranges must know.

        To be called without the cursor's lock: storage may work here.
        """
        is_limited = self._ledger_limits.range_count_max is not None
        is_whole = self._needs_new_ledger(now_ms=now_ms) or self._backs_off(now_ms=now_ms)
        return self.journal.buckets() if is_limited or is_whole or self.watcher is not None else ()

    def _begin(self, frontier: Position, limits: PersistLimits, buckets: Sequence[BucketHoles]) -> Unpersisted:
        """Take what the durable state has room for, holes that buckets hold not counted.

        A limit is given to the state as one on its own ranges: at first as many as there would be room for if those
        that go first made up whole filled ranges, and if they do not, as few as there is room for in any case.
        """
        state, range_count_max = self.state, limits.range_count_max
        if range_count_max is None or not buckets:
            return self._begin_within(frontier, limits)
        is_whole = frontier == EVERYTHING and not state.held_back
        if is_whole and self._filled_count.fits(
            state.deleted, buckets, range_count_max=range_count_max, acked_count=state.acked_count
        ):
            return self._begin_within(frontier, limits._replace(range_count_max=None))
        lowest = int(filled(state.deleted, buckets)[:range_count_max].sum())
        taken = self._begin_within(frontier, limits._replace(range_count_max=lowest))
        if lowest > range_count_max and len(filled(state.whole()[0], buckets)) > range_count_max:
            state.withdraw_persist()
            return self._begin_within(frontier, limits)
        return taken

    def _begin_within(self, frontier: Position, limits: PersistLimits) -> Unpersisted:
        record_bytes_max = None if self.watcher is None else self.watcher.record_bytes_max()
        return self.state.begin_persist(frontier=frontier, limits=limits, record_bytes_max=record_bytes_max)

    def _needs_new_ledger(self, *, now_ms: int) -> bool:
        journal, config = self.journal, self._config
        outgrown = max(_COMPACTION_RATIO * journal.snapshot_bytes, config.compaction_bytes_min)
        return (
            journal.needs_ledger
            or journal.entry_count >= config.ledger_entry_count_max
            or self._is_old(now_ms=now_ms)
            or (journal.form.has_deltas and journal.delta_bytes > outgrown)
        )

    def _plan_whole(self, route: PersistTarget, taken: Unpersisted, buckets: Sequence[BucketHoles] = ()) -> Plan:
        deleted, batch = self.state.whole()
        content = CursorState(taken.mark_delete, deleted, batch, taken.properties)
        return Plan(route, content, taken, self.accepted_number, buckets)

    def _plan_metadata(self, frontier: Position, buckets: Sequence[BucketHoles]) -> Plan:
        """Take as much of the whole state as the metadata store may hold.

        Raises:
            PayloadTooLargeError: What is durable would not fit, or receipts could not tell what was left out.
        """
        with self._lock:
            self.check_open()
            limits, counted_without = self._config.metadata_limits, buckets
            while True:
                durable_count = self.state.durable_count
                taken = self._begin(frontier, limits, counted_without)
                plan = self._plan_whole(PersistTarget.METADATA, taken, buckets)
                range_count = plan.content.deleted.range_count
                size = len(self.journal.encode_record(plan.content, buckets))
                fits = size <= self._config.metadata_bytes_max
                counted = len(filled(plan.content.deleted, counted_without)) if counted_without else range_count
                is_within = limits.range_count_max is None or counted <= limits.range_count_max
                if fits and is_within and taken.acked_count >= durable_count:
                    return plan
                self.state.withdraw_persist()
                if fits or not is_within or not range_count or not self.may_pass_by:
                    raise PayloadTooLargeError(
                        f"{self.journal.path}: {size} bytes and {range_count} ranges are durable or must become so,"
                        f" more than the metadata store may be given"
                    )
                shrunk = min(range_count - 1, range_count * self._config.metadata_bytes_max // size)
                # From here on it is bytes that count, and a range takes some in any case.
                limits, counted_without = limits._replace(range_count_max=shrunk), ()

    def _plan_closing(self, *, now_ms: int) -> Plan | None:
        """Take the whole state for the metadata store, if Pulsar's format is used and it is small enough."""
        config = self._config
        if self.journal.form.has_deltas:
            return None
        with self._lock:
            self.check_open()
            if self._ledger_limits.range_count_max and self.state.deleted.range_count > config.closing_range_count_max:
                return None
            plan = self._plan_whole(PersistTarget.METADATA, self._begin_within(EVERYTHING, self._config.list_limits))
            if len(self.journal.encode_record(plan.content)) <= config.metadata_bytes_max:
                return self._begun(plan, now_ms=now_ms)
            self.state.withdraw_persist()
            return None

    def _write(self, plan: Plan) -> int:
        if plan.appends:
            return self.journal.append(plan.content)
        write = self.journal.write_record if plan.route is PersistTarget.METADATA else self.journal.begin_ledger
        return write(plan.content, plan.buckets)

    def abandon(self) -> None:
        """Put back what was planned: it could not be written."""
        with self._lock:
            self.state.abandon_persist()
            if self.listener is not None:
                self.listener.changed(Change.PERSIST_FAILED, (), now_ms=self._planned_ms)

    def commit(self, plan: Plan, written: int, *, now_ms: int) -> PersistResult:
        """Count what was planned as durable: it was written and synced."""
        with self._lock:
            taken = plan.taken
            covered = self.state.end_persist(taken)
            if self.listener is not None:
                self.listener.changed(Change.PERSIST_ENDED, (), now_ms=now_ms)
            self.durable_number = plan.number
            # Counted where it begins: a limit that goes on cutting is one event, not one a persist.
            is_cut = taken.cut_count > 0 or taken.batch_cut_count > 0
            if is_cut and not self._was_cut:
                self.truncation_count += 1
                _LOG.warning(
                    "%s: limits leave %d acked messages and %d partly acked batches out of the durable state",
                    self.journal.path, taken.cut_count, taken.batch_cut_count,
                )  # fmt: skip
            self._was_cut = is_cut
            self._count_written(plan.route, written, now_ms=now_ms)
            held_back = self.state.held_back
            return PersistResult(
                plan.route, written, covered, taken.mark_delete, held_back, taken.cut_count, taken.batch_cut_count
            )

    def _count_written(self, route: PersistTarget, written: int, *, now_ms: int) -> None:
        self._last_persist_ms = now_ms
        self.bytes_persisted += written
        self.persist_count += 1
        if route is PersistTarget.METADATA:
            self.metadata_write_count += 1
            return
        self.ledger_write_count += 1
        self.ledger_bytes_written += written
        self._ledger_failures = 0
        if route is PersistTarget.SNAPSHOT:
            self.snapshot_count += 1
            self._ledger_begun_ms = now_ms

    def _count_ledger_error(self, *, now_ms: int) -> None:
        """Count a ledger that could not be written: the next persist tries again, those after wait ever longer."""
        waits = self._ledger_failures
        pause_ms = self._config.ledger_retry_ms << min(waits - 1, 20) if waits else 0
        self._ledger_retry_at_ms = now_ms + min(pause_ms, _LEDGER_RETRY_MS_MAX)
        if not self._ledger_failures:
            _LOG.warning("%s: the cursor ledger cannot be written; trying the metadata store", self.journal.path)
        self._ledger_failures += 1
        self.ledger_error_count += 1
