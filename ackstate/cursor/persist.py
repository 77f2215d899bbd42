"""Persists cursors: plans a record under the cursor's lock, writes it without the lock, commits it under the lock.

A record is a delta, a whole state in a new ledger or, where a ledger cannot be written, in the metadata store. All
cursors that append to their ledgers do so with one sync. Those that write a whole state, which takes several writes, do
so in threads, so that the store groups their writes. A reset writes a state in a new epoch: no ack from before counts
after it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from copy import copy
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

from ackstate.batch_indexes import BatchIndexes
from ackstate.checks import integer
from ackstate.cursor.formats import CursorState
from ackstate.cursor.results import Change, PersistResult, PersistTarget
from ackstate.cursor.state import EVERYTHING
from ackstate.deleted_ranges import DeletedRanges
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.errors import AckStateError, CorruptStateError, CursorClosedError
from ackstate.position import Position
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, PayloadTooLargeError, StoreError, call_each
from ackstate.wire.native import NO_COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from ackstate.cursor.config import CursorConfig, PersistLimits
    from ackstate.cursor.cursor import ManagedCursor
    from ackstate.cursor.journal import Journal
    from ackstate.cursor.results import Listeners
    from ackstate.cursor.state import CursorAckState, Unpersisted
    from ackstate.cursor.view import EntryReader


# Totals since the cursor was opened, by the names of the fields of `CursorStats`.
_COUNTERS = (
    "bytes_persisted", "persist_count", "truncation_count", "snapshot_count", "ledger_write_count",
    "ledger_bytes_written", "ledger_error_count", "metadata_write_count", "metadata_error_count", "promotion_count",
    "promoted_message_count",
)  # fmt: skip
_LOG = logging.getLogger(__name__)
_COMPACTION_RATIO = 4  # An ack is written 1 + 1/4 times; a recovery reads up to 5 times the live state.
_RETRY_MS_MAX = 60_000
_PAUSE_MS = 10
_SECOND_MS = 1000
_NOTHING_DELIVERED = Position(0, -1)


@final
class MarkDeleteRateLimiter:
    """Grants permits at a rate, at once or not at all; saves up those of one idle second, and gives one on credit.

    In a window of w ms it grants at most rate * (w / 1000 + 1) + 1.

    >>> limiter = MarkDeleteRateLimiter(1, now_ms=0)
    >>> [limiter.try_acquire(now_ms) for now_ms in (0, 999, 1000, 5000, 5000, 5000)]
    [True, False, True, True, True, False]
    """

    # If the clock goes back by up to a second, nothing extra is granted. A debt of a permit and more than a second is
    # from a clock that went back further: it is forgiven, and the count begins again from there.
    # A rate is the decimal that it is written as, and no time is ever rounded; Guava rounds each wait down to a
    # microsecond. Where a permit takes whole milliseconds the two decide alike, until Guava's roundings add up to a
    # millisecond.
    # Source: ``RateLimiter`` of Guava (``SmoothBursty`` with ``maxBurstSeconds`` 1), by which Pulsar's
    # ``ManagedCursorImpl`` limits writes. Its two fields are the one here: as long as permits are stored, the next
    # ticket is free at once.

    def __init__(self, permits_per_second: float, *, now_ms: int) -> None:
        rate = _exact_rate(permits_per_second)
        # The unit of time in which everything is whole: this many make a millisecond, and a permit takes _period.
        self._units_per_ms = rate.numerator
        self._period = rate.denominator * _SECOND_MS
        self._saved_max = self._units_per_ms * _SECOND_MS
        # When all that was granted is paid for. The time since then, up to a second, is saved.
        self._paid_at = integer("now_ms", now_ms) * self._units_per_ms

    def can_acquire(self, now_ms: int) -> bool:
        """Return whether `try_acquire` would grant a permit now; it changes nothing."""
        return not self._refuses(integer("now_ms", now_ms) * self._units_per_ms)

    def try_acquire(self, now_ms: int) -> bool:
        """Take a permit if there is one now, and return whether there was one; a refusal costs nothing."""
        now = integer("now_ms", now_ms) * self._units_per_ms
        if self._refuses(now):
            return False
        # At most now: a greater debt is from a clock that went back.
        self._paid_at = min(max(self._paid_at, now - self._saved_max), now) + self._period
        return True

    @property
    def next_permit_ms(self) -> int:
        """The first time at which there is a permit, by a clock that does not go back."""
        return -(-self._paid_at // self._units_per_ms)

    def _refuses(self, now: int) -> bool:
        return 0 < self._paid_at - now <= self._period + self._saved_max


def _exact_rate(permits_per_second: float) -> Fraction:
    if not isinstance(permits_per_second, int | float):
        raise TypeError(f"permits_per_second must be a number, got {permits_per_second!r}")
    if not 0 < permits_per_second < float("inf"):
        raise ValueError(f"permits_per_second must be above 0 and finite, got {permits_per_second!r}")
    return Fraction(str(permits_per_second))


class Plan(NamedTuple):
    """The content and the place of one record."""

    target: PersistTarget  # where it goes
    content: CursorState  # the whole state or, for a delta, the new acks
    taken: Unpersisted  # the acks that become durable with it
    count_cut_count: int = 0  # how many delivery counts have no room in it


@final
class Round:
    """One write, made with the cursor's lock held; later calls need `Persister.writing` and take the lock."""

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
        self._up_to = up_to  # acks above it are too young, also if the metadata store is used instead
        self._promoted_count = promoted_count  # how many young acks it persists early
        # Whether the cursor is closed with it, unless something is accepted before it is committed.
        self._closes = closes
        self._now_ms = now_ms
        # Whether it appends an entry to the open cursor ledger, which can be done together with other cursors.
        self.appends = plan.target is PersistTarget.DELTA or plan.target is PersistTarget.WHOLE
        self.is_open = True  # whether it was neither committed nor abandoned
        if persister.listeners.of_changes:
            self._notify_begun()

    def append(self) -> PersistResult:
        """Append to the open cursor ledger and commit; where that fails, as `append_failed`."""
        journal = self._persister.journal
        ledger_id, entry = journal.prepare(self._plan.content)
        try:
            journal.store.ledgers.append(ledger_id, (entry,))
        except AckStateError as error:
            return self.append_failed(error)
        return self.commit(journal.appended(ledger_id, entry))

    def prepare(self) -> tuple[int, bytes]:
        """Return the ledger and the entry to be appended, for an append together with other cursors."""
        return self._persister.journal.prepare(self._plan.content)

    def append_failed(self, error: AckStateError) -> PersistResult:
        """Write to the metadata store, because the entry that `prepare` returned could not be appended."""
        journal = self._persister.journal
        if isinstance(error, LedgerFencedError | LedgerNotFoundError):
            raise journal.fenced() from error
        if isinstance(error, CorruptStateError):
            unwritable = journal.unwritable(error)
            unwritable.__cause__ = error
            error = unwritable
        return self.fall_back(error)

    def write(self) -> PersistResult:
        """Write a whole state and commit it; where a ledger cannot be written, to the metadata store."""
        journal, plan = self._persister.journal, self._plan
        is_metadata = plan.target is PersistTarget.METADATA
        write = journal.write_record if is_metadata else journal.begin_ledger
        try:
            return self.commit(write(plan.content))
        except StoreError as error:
            if not is_metadata:
                return self.fall_back(error)
            self._persister.counters["metadata_error_count"] += 1
            raise
        finally:
            self.abandon()

    def fall_back(self, error: AckStateError) -> PersistResult:
        """Write to the metadata store, as the ledger could not be written; if that fails, raise the error given."""
        self.abandon()
        persister = self._persister
        persister.ledger_failed(now_ms=self._now_ms)
        try:
            with persister.lock:
                self._plan = persister.plan_metadata(self._up_to)
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
            covered = persister.state.end_persist(taken, are_counts_left_out=plan.count_cut_count > 0)
            if persister.listeners.of_changes:
                persister.listeners.changed(Change.PERSIST_ENDED, (), now_ms=now_ms)
            if taken.cut_count or taken.batch_cut_count or plan.count_cut_count:
                self._note_truncation()
            else:
                persister.is_truncated = False
            persister.wrote(plan.target, byte_count, now_ms=now_ms)
            if self._promoted_count:
                persister.promoted(self._promoted_count)
            if self._closes:
                persister.closed = not persister.state.is_dirty
            return PersistResult(
                plan.target, byte_count, covered, taken.mark_delete, taken.held_count,
                taken.cut_count, taken.batch_cut_count, plan.count_cut_count,
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
            persister.counters["truncation_count"] += 1
            _LOG.warning(
                "%s: limits leave %d acked messages, %d partly acked batches and %d delivery counts out of the durable"
                " state",
                persister.journal.path, taken.cut_count, taken.batch_cut_count, self._plan.count_cut_count,
            )  # fmt: skip


@final
class Persister:
    """The parts that the rounds of one cursor share, and what the next round writes."""

    def __init__(  # noqa: PLR0913 - named, not packed
        self,
        state: CursorAckState,
        journal: Journal,
        listeners: Listeners,
        *,
        lock: threading.RLock,
        config: CursorConfig,
        now_ms: int,
    ) -> None:
        self.state = state
        self.journal = journal
        self.listeners = listeners
        self.lock = lock  # guards the state; never held while the storage is at work
        # Held through a whole round; taken before `lock`.
        self.writing = threading.Lock()
        self.closed = False
        self.is_truncated = False  # whether limits cut the last record
        self.ruler = DeliveryRuler(config.become_old_ack_record_seconds * _SECOND_MS)  # tells young acks from old ones
        self.limiter: MarkDeleteRateLimiter | None = None
        if config.mark_delete_rate_limit > 0:
            self.limiter = MarkDeleteRateLimiter(config.mark_delete_rate_limit, now_ms=now_ms)
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.ledger_limits = config.ledger_limits
        # Whether a persist may exclude an ack, so that a receipt must list its entries.
        self.may_hold_back = self.ruler.age_ms > 0 or config.metadata_limits.range_count_max is not None
        self._config = config
        # The number that the limiter decided on last: the next decision waits until more was accepted.
        self._decided_number = 0
        self._last_persist_ms = self._last_tick_ms = self._ledger_begun_ms = self._retry_at_ms = now_ms
        self._ledger_failures = 0  # in a row

    def report(self, outcome: Outcome) -> Outcome:
        """Report the outcome of a persist, and return it; to be called without a lock."""
        for listener in self.listeners.all:
            listener.persisted(outcome)
        return outcome

    def check_open(self) -> None:
        """Raise `CursorClosedError` if the cursor is closed."""
        if self.closed:
            raise CursorClosedError(f"{self.journal.path}: the cursor is closed")

    # When

    def is_due(self, *, now_ms: int) -> bool:
        """Return whether the flush interval is over and something waits, or something is new and has a permit."""
        with self.lock:
            # A clock that went back may have gone back by hours: then the interval counts as over.
            if 0 <= now_ms - self._last_persist_ms < self._config.flush_interval_ms:
                return self.limiter is not None and self._is_new() and self.limiter.can_acquire(now_ms)
            return self._has_work(self._old_up_to(now_ms), now_ms=now_ms)

    @property
    def is_idle(self) -> bool:
        """Whether no persist can become due before something is accepted; to be read without the lock."""
        # An ack that is accepted meanwhile counts at the next call.
        # Every tick of a broker reads this for each of its cursors, so it takes few look-ups and no call.
        state = self.state
        return (state.accepted_number <= state.durable_number and state.unpersisted.nothing_held_back) or self.closed

    def tick(self, *, now_ms: int) -> bool:
        """Return whether to persist now; take a permit, if there is one, for that or for changes since."""
        with self.lock:
            is_due = self.is_due(now_ms=now_ms)
            self._last_tick_ms = now_ms
            if self.limiter is not None and (is_due or self._is_new()):
                self._decided_number = self.state.accepted_number
                self.limiter.try_acquire(now_ms)
            return is_due

    def next_tick_ms(self) -> int | None:
        """Return when `tick` is to be called; None if no persist can become due before something is accepted."""
        if self.is_idle:
            return None
        # Not before the interval is over since the last tick either, so that a persist that failed, or that had only
        # young acks, is not tried again at once. Without an interval, that is 10 ms.
        with self.lock:
            interval_ms = self._config.flush_interval_ms
            next_ms = max(self._last_persist_ms + interval_ms, self._last_tick_ms + max(interval_ms, _PAUSE_MS))
            if self.limiter is not None and self._is_new():
                return min(next_ms, self.limiter.next_permit_ms)
            return next_ms

    def _is_new(self) -> bool:
        return self.state.accepted_number > max(self._decided_number, self.state.durable_number)

    def has_young(self, *, now_ms: int) -> bool:
        """Return whether an ack is held back, or would be, because it is young."""
        with self.lock:
            return self.state.unpersisted.count_between(self._old_up_to(now_ms), EVERYTHING) > 0

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position was sent by now."""
        if self.ruler.age_ms:
            self._follow_clock(now_ms)
            self.ruler.record(position, now_ms)

    def _old_up_to(self, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        if not self.ruler.age_ms:
            return EVERYTHING
        self._follow_clock(now_ms)
        return self.ruler.old_up_to(now_ms) or _NOTHING_DELIVERED

    def _follow_clock(self, now_ms: int) -> None:
        """Set the ruler back if the clock went back by more than the age."""
        # Messages sent so far are then old after an age; else they would be young until the clock is where it was.
        times = self.ruler.times
        if times and times[-1] - now_ms > self.ruler.age_ms:
            self.ruler.set_back(times[-1] - now_ms)

    def _has_work(self, up_to: Position, *, now_ms: int) -> bool:
        unpersisted = self.state.unpersisted
        if self.state.is_dirty or unpersisted.can_promote(up_to):
            return True
        # The metadata store had no room for all acks, and a ledger, to be tried again, may have. Batches do not matter
        # here: a ledger may hold as many of them as the metadata store.
        return bool(unpersisted.cut) and self.journal.open_ledger_id is None and not self._backs_off(now_ms=now_ms)

    # Rounds: each plan has begun a persist of the state, which is to be ended or abandoned. `writing` is held for them.

    def begin(
        self, up_to: Position | None = None, *, promoted_count: int = 0, closes: bool = False, now_ms: int
    ) -> Round | None:
        """Begin a round of the acks up to a position, or of those that are old enough; None if nothing waits."""
        with self.lock:
            self.check_open()
            up_to = up_to or self._old_up_to(now_ms)
            if not self._has_work(up_to, now_ms=now_ms):
                self.closed = closes
                self.promoted(promoted_count)
                return None
            plan = self._plan(up_to, now_ms=now_ms)
            return Round(self, plan, up_to, promoted_count=promoted_count, closes=closes, now_ms=now_ms)

    def begin_promotion(self, record_bytes_max: int, *, now_ms: int) -> Round | None:
        """Begin a round that leaves at most `record_bytes_max` bytes of young acks: the oldest are written early."""
        with self.lock:
            self.check_open()
            unpersisted, up_to = self.state.unpersisted, self._old_up_to(now_ms)
            raised = max(up_to, unpersisted.promotable_up_to(record_bytes_max) or self.state.mark_delete)
            return self.begin(raised, promoted_count=unpersisted.count_between(up_to, raised), now_ms=now_ms)

    def begin_closing(self, *, now_ms: int) -> Round | None:
        """Begin a round of everything, young acks too, that closes the cursor."""
        with self.lock:
            self.check_open()
            plan = self._plan_closing()
            if plan is not None:
                return Round(self, plan, EVERYTHING, closes=True, now_ms=now_ms)
            return self.begin(EVERYTHING, closes=True, now_ms=now_ms)

    def begin_creation(self, *, in_metadata: bool, now_ms: int) -> Round | None:
        """Begin the round of a new cursor: a cursor ledger or, always in Pulsar's format, the metadata store."""
        with self.lock:
            self.state.changed()
            if in_metadata or not self.journal.form.has_deltas:
                plan = self._whole(PersistTarget.METADATA, self.state.begin_persist())
                return Round(self, plan, EVERYTHING, now_ms=now_ms)
            return self.begin(EVERYTHING, now_ms=now_ms)

    def nothing_written(self) -> PersistResult:
        """Return the result of a round that was not begun."""
        unpersisted = self.state.unpersisted
        return PersistResult(
            PersistTarget.NOTHING, 0, 0, self.state.persisted_mark_delete, len(unpersisted.held), len(unpersisted.cut)
        )

    def _plan(self, up_to: Position, *, now_ms: int) -> Plan:
        """Plan the next record; `PayloadTooLargeError` if the ledger must wait and the metadata store has no room."""
        if self._backs_off(now_ms=now_ms):
            return self.plan_metadata(up_to)
        taken = self._take(up_to, self.ledger_limits)
        if self._needs_new_ledger(now_ms=now_ms):
            return self._whole(PersistTarget.SNAPSHOT, taken)
        if not self.journal.form.has_deltas:
            return self._whole(PersistTarget.WHOLE, taken)
        content = CursorState(taken.mark_delete, taken.new, taken.batch, taken.properties, taken.counts)
        return Plan(PersistTarget.DELTA, content, taken)

    def plan_metadata(self, up_to: Position) -> Plan:
        """Plan as much of the whole state as the metadata store has room for."""
        # `PayloadTooLargeError`: the durable acks would not fit, or receipts could not name the excluded ones.
        limits = self._config.metadata_limits
        while True:
            durable_count = self.state.durable_count
            taken = self._take(up_to, limits)
            plan = self._whole(PersistTarget.METADATA, taken)
            deleted, counts = plan.content.deleted, plan.content.counts
            size = len(self.journal.encode_record(plan.content))
            if counts and size > self._config.metadata_bytes_max:  # Acks come first.
                plan = plan._replace(content=plan.content._replace(counts=NO_COUNTS), count_cut_count=len(counts))
                size = len(self.journal.encode_record(plan.content))
            fits = size <= self._config.metadata_bytes_max
            is_within = limits.range_count_max is None or deleted.range_count <= limits.range_count_max
            if fits and is_within and taken.acked_count >= durable_count:
                return plan
            self.state.withdraw_persist()
            if fits or not is_within or not deleted.range_count or not self.may_hold_back:
                raise PayloadTooLargeError(
                    f"{self.journal.path}: {size} bytes and {deleted.range_count} ranges are durable or must become"
                    f" so, more than the metadata store may be given"
                )
            shrunk = min(deleted.range_count - 1, deleted.range_count * self._config.metadata_bytes_max // size)
            limits = limits._replace(range_count_max=shrunk)

    def _plan_closing(self) -> Plan | None:
        """Plan the whole state for the metadata store, if Pulsar's format is used and the state is small enough."""
        config, state = self._config, self.state
        if self.journal.form.has_deltas:
            return None
        if self.ledger_limits.range_count_max and state.deleted.range_count > config.closing_range_count_max:
            return None
        plan = self._whole(PersistTarget.METADATA, self._take(EVERYTHING, config.list_limits))
        if len(self.journal.encode_record(plan.content)) <= config.metadata_bytes_max:
            return plan
        state.withdraw_persist()
        return None

    def _take(self, up_to: Position, limits: PersistLimits) -> Unpersisted:
        # Only what is held back or cut off can exceed it.
        record_bytes_max = self.listeners.record_bytes_max() if self.may_hold_back else None
        return self.state.begin_persist(up_to=up_to, limits=limits, record_bytes_max=record_bytes_max)

    def _whole(self, target: PersistTarget, taken: Unpersisted) -> Plan:
        deleted, batch, counts = self.state.whole()
        return Plan(target, CursorState(taken.mark_delete, deleted, batch, taken.properties, counts), taken)

    def _needs_new_ledger(self, *, now_ms: int) -> bool:
        journal, config = self.journal, self._config
        return (
            journal.open_ledger_id is None
            or journal.entry_count >= config.ledger_entry_count_max
            # A clock that went back by as much ends the time, too: else it would last until the clock is where it was.
            or 0 < config.ledger_rollover_ms <= abs(now_ms - self._ledger_begun_ms)
            or (
                journal.delta_bytes > config.compaction_bytes_min
                and journal.delta_bytes > _COMPACTION_RATIO * journal.snapshot_bytes
                and journal.form.has_deltas
            )
        )

    # What came of them, noted with the lock held

    def wrote(self, target: PersistTarget, byte_count: int, *, now_ms: int) -> None:
        """Count a write that succeeded, and restart the flush interval."""
        counters = self.counters
        self._last_persist_ms = now_ms
        counters["bytes_persisted"] += byte_count
        counters["persist_count"] += 1
        if target is PersistTarget.METADATA:
            counters["metadata_write_count"] += 1
            return
        counters["ledger_write_count"] += 1
        counters["ledger_bytes_written"] += byte_count
        self._ledger_failures = 0
        if target is PersistTarget.SNAPSHOT:
            counters["snapshot_count"] += 1
            self._ledger_begun_ms = now_ms

    def promoted(self, message_count: int) -> None:
        """Count a promotion of `message_count` messages; no-op for 0."""
        self.counters["promotion_count"] += message_count > 0
        self.counters["promoted_message_count"] += message_count

    def ledger_failed(self, *, now_ms: int) -> None:
        """Note that a ledger could not be written: the next persist tries again, later ones wait twice as long each."""
        waits = self._ledger_failures
        pause_ms = self._config.ledger_retry_ms << min(waits - 1, 20) if waits else 0
        self._retry_at_ms = now_ms + min(pause_ms, _RETRY_MS_MAX)
        if not waits:
            _LOG.warning("%s: the cursor ledger cannot be written; trying the metadata store", self.journal.path)
        self._ledger_failures += 1
        self.counters["ledger_error_count"] += 1

    def _backs_off(self, *, now_ms: int) -> bool:
        """Return whether it is too early to try a ledger again; a clock that went back by more than a pause ends it."""
        return self._ledger_failures > 0 and 0 < self._retry_at_ms - now_ms <= _RETRY_MS_MAX


_COMPACTION = "/__compaction"  # Pulsar's cursor whose properties name the ledger with the compacted topic


def reset(persister: Persister, reader: EntryReader, position: Position, *, now_ms: int) -> PersistResult:
    """Make a position the next to be read, with nothing acked from there on; errors as `ManagedCursor.reset`."""
    state = persister.state
    with persister.writing:
        with persister.lock:
            persister.check_open()
            position = state.ledgers.next_valid(Position(position[0], position[1] - 1))
            mark_delete = state.ledgers.previous(position)
            properties = state.properties if persister.journal.path.endswith(_COMPACTION) else {}
            state.begin_reset(mark_delete)
        content = CursorState(mark_delete, DeletedRanges(), BatchIndexes(), properties)
        target, byte_count = _write_reset(persister, content, now_ms=now_ms)
        with persister.lock:
            reader.reset(position)
            runs = _changed_runs(state, mark_delete) if persister.listeners.of_changes else {}
            state.apply_reset(mark_delete)
            state.properties = properties
            persister.ruler.clear()
            persister.is_truncated = False
            persister.wrote(target, byte_count, now_ms=now_ms)
            for change, entries in runs.items():
                persister.listeners.changed(change, entries, now_ms=now_ms)
            return PersistResult(target, byte_count, 0, mark_delete)


def _write_reset(persister: Persister, content: CursorState, *, now_ms: int) -> tuple[PersistTarget, int]:
    """Write a state without acks in a new epoch, and return where it went and its bytes."""
    journal = persister.journal
    journal.begin_epoch()
    try:
        try:
            return PersistTarget.SNAPSHOT, journal.begin_ledger(content)
        except StoreError as error:
            persister.ledger_failed(now_ms=now_ms)
            try:
                return PersistTarget.METADATA, journal.write_record(content)
            except StoreError as second:
                persister.counters["metadata_error_count"] += 1
                raise error from second
    except BaseException:
        journal.abandon_epoch()
        raise


def _changed_runs(state: CursorAckState, mark_delete: Position) -> dict[Change, list[tuple[int, int, int]]]:
    """Return the entries that the reset acks, and those that it gives back."""
    deleted = state.deleted.copy()
    deleted.remove_at_most(mark_delete)
    above = [(ledger_id, first, end - 1) for ledger_id, first, end in deleted.runs()]
    return {
        Change.RESET: state.ledgers.runs_between(state.mark_delete, mark_delete),
        Change.UNACKED: [*state.ledgers.runs_between(mark_delete, state.mark_delete), *above],
    }


Name = TypeVar("Name", bound=Hashable)
Outcome = PersistResult | AckStateError


def persist_all(
    cursors: Iterable[ManagedCursor], *, now_ms: int, executor: Executor | None = None
) -> list[PersistResult | AckStateError]:
    """Persist many cursors of one store: all that append to their journals do so with one sync.

    Those that begin a journal do so in threads; a store on a disk shares a sync among the threads that wait for one.

    Args:
        cursors: They share a store; each comes once.
        now_ms: The present.
        executor: Begins journals; None for a pool of 64 threads that lives for this call. No thread of it may be the
            caller's.

    Returns:
        For each, in order, the result, or the error that its own `persist` would have raised: one cursor that fails
        does not keep the others from being persisted.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    persisters = [cursor._persister for cursor in cursors]
    outcomes = execute(persisters, lambda each: each.begin(now_ms=now_ms), executor)
    return [persister.report(outcome) for persister, outcome in zip(persisters, outcomes, strict=True)]


def tick_all(
    cursors: Iterable[tuple[Name, ManagedCursor]], *, now_ms: int, executor: Executor | None = None
) -> dict[Name, Outcome]:
    """Persist those of many cursors that are due; return the result or the error of each of these by its name."""
    busy = [each for each in cursors if not each[1]._persister.is_idle]
    due = {name: cursor for name, cursor in busy if cursor._persister.tick(now_ms=now_ms)}
    return dict(zip(due, persist_all(due.values(), now_ms=now_ms, executor=executor), strict=True))


def close_all(
    cursors: Sequence[ManagedCursor], *, now_ms: int, executor: Executor | None = None
) -> list[AckStateError | None]:
    """Close many cursors of one store, sharing syncs; return for each None, or the error that keeps it open."""
    errors: dict[Persister, AckStateError] = {}
    persisters = [cursor._persister for cursor in cursors]
    while remaining := [each for each in persisters if not each.closed and each not in errors]:
        outcomes = execute(remaining, lambda each: each.begin_closing(now_ms=now_ms), executor)
        errors |= {
            persister: outcome
            for persister, outcome in zip(remaining, outcomes, strict=True)
            if isinstance(outcome, AckStateError) and not isinstance(outcome, CursorClosedError)
        }
    return [errors.get(persister) for persister in persisters]


def abandon(cursor: ManagedCursor) -> None:
    """Close a cursor without persisting anything, as its subscription was deleted; no-op if it is closed."""
    persister = cursor._persister
    with persister.writing, persister.lock:
        persister.closed = True


def has_record(cursor: ManagedCursor) -> bool:
    """Return whether the store has the record of this cursor, and not that of a later owner or of a deletion."""
    return cursor._persister.journal.has_record()


def result_of(outcome: Outcome) -> PersistResult:
    """Return the result, or raise the error."""
    if isinstance(outcome, AckStateError):
        raise outcome
    return outcome


def execute_one(persister: Persister, begin: Callable[[Persister], Round | None]) -> Outcome:
    """Write a round of one cursor, and return its result or its error: the hot path of `execute`."""
    with persister.writing:
        new_round = None
        try:
            new_round = begin(persister)
            if new_round is None:
                return persister.nothing_written()
            return new_round.append() if new_round.appends else new_round.write()
        except AckStateError as error:
            return error
        finally:
            # The next persist must not take planned but unwritten acks for written ones.
            if new_round is not None and new_round.is_open:
                new_round.abandon()


def execute(
    persisters: Sequence[Persister], begin: Callable[[Persister], Round | None], executor: Executor | None = None
) -> list[Outcome]:
    """Write a round of each cursor, and return results or errors in order; each write but a reset goes through here."""
    # ValueError: the cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    if len(persisters) == 1:
        return [execute_one(persisters[0], begin)]
    if len(set(persisters)) < len(persisters) or len({id(each.journal.store) for each in persisters}) > 1:
        raise ValueError("cursors that are persisted together must share a store, and each must come once")
    held: list[threading.Lock] = []
    try:
        # In the order of identity, so that two calls at once cannot wait for each other.
        for persister in sorted(persisters, key=id):
            persister.writing.acquire()
            held.append(persister.writing)
        return _execute(persisters, begin, executor)
    finally:
        for writing in held:
            writing.release()


def _execute(
    persisters: Sequence[Persister], begin: Callable[[Persister], Round | None], executor: Executor | None
) -> list[Outcome]:
    outcomes: dict[Persister, Outcome] = {}
    rounds: dict[Persister, Round] = {}
    failed: dict[Persister, AckStateError] = {}  # why the append of each was not made
    try:
        for persister in persisters:
            try:
                new_round = begin(persister)
            except AckStateError as error:
                outcomes[persister] = error
                continue
            if new_round is None:
                outcomes[persister] = persister.nothing_written()
            else:
                rounds[persister] = new_round
        appends = {persister: each.prepare() for persister, each in rounds.items() if each.appends}
        for (persister, (ledger_id, entry)), appended in zip(appends.items(), _append(appends), strict=True):
            if isinstance(appended, AckStateError):
                failed[persister] = appended
            else:
                outcomes[persister] = rounds[persister].commit(persister.journal.appended(ledger_id, entry))
        left = [each for each in rounds if each not in outcomes]
        written = call_each(
            lambda each: rounds[each].append_failed(failed[each]) if each in failed else rounds[each].write(),
            left,
            executor,
        )
        outcomes.update(zip(left, written, strict=True))
    finally:
        # The next persist must not take planned but unwritten acks for written ones.
        for each in rounds.values():
            if each.is_open:
                each.abandon()
    return [outcomes[persister] for persister in persisters]


def _append(appends: Mapping[Persister, tuple[int, bytes]]) -> Sequence[int | AckStateError]:
    """Append entries with one sync, and return for each its id, or why it was not appended."""
    if not appends:
        return []
    ledgers = next(iter(appends)).journal.store.ledgers
    try:
        return ledgers.append_many([(ledger_id, (entry,)) for ledger_id, entry in appends.values()])
    except AckStateError as error:
        return [copy(error) for _ in appends] if len(appends) > 1 else [error]
