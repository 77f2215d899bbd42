"""Begins the rounds by which a cursor's acks become durable."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from ackstate.cursor.persist.counters import PersistCounters
from ackstate.cursor.persist.planner import RecordPlanner
from ackstate.cursor.persist.rate_limiter import MarkDeleteRateLimiter
from ackstate.cursor.persist.round import Round
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.cursor.state.unpersisted_acks import EVERYTHING
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.errors import CursorClosedError
from ackstate.position import Position

if TYPE_CHECKING:
    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.journal.journal import Journal
    from ackstate.cursor.listener import Listeners
    from ackstate.cursor.state.ack_state import CursorAckState


_PAUSE_MS = 10


@final
class PersistTrigger:
    """The flush interval and the rate limit of one cursor. Only `ticked` and `persisted` have side effects.

    Args:
        state: Has the numbers of the accepted and of the durable changes.
        config: The interval and the rate.
        now_ms: The present.
    """

    def __init__(self, state: CursorAckState, config: CursorConfig, *, now_ms: int) -> None:
        self._state = state
        self._flush_interval_ms = config.flush_interval_ms
        self._limiter: MarkDeleteRateLimiter | None = None
        if config.mark_delete_rate_limit > 0:
            self._limiter = MarkDeleteRateLimiter(config.mark_delete_rate_limit, now_ms=now_ms)
        # The number that the limiter decided on last: the next decision waits until more was accepted.
        self._decided_number = 0
        self._last_persist_ms = self._last_tick_ms = now_ms

    def is_interval_over(self, *, now_ms: int) -> bool:
        """Return whether the last persist is at least a flush interval ago."""
        # A clock that went back may have gone back by hours: then the interval counts as over.
        return not 0 <= now_ms - self._last_persist_ms < self._flush_interval_ms

    def has_permit(self, *, now_ms: int) -> bool:
        """Return whether something was accepted since the last tick, and the rate limit allows to persist it now."""
        return self._limiter is not None and self._is_new() and self._limiter.can_acquire(now_ms)

    def ticked(self, *, is_due: bool, now_ms: int) -> None:
        """Take a permit, if there is one, for a persist that is due or for changes accepted since the last tick."""
        self._last_tick_ms = now_ms
        if self._limiter is not None and (is_due or self._is_new()):
            self._decided_number = self._state.accepted_number
            self._limiter.try_acquire(now_ms)

    def next_tick_ms(self) -> int:
        """Return when a persist may be due next, if no other reads the clock.

        Not before the interval is over since the last tick either, so that a persist that failed, or that had only
        young acks, is not tried again at once. Without an interval, that is 10 ms.
        """
        interval_ms = self._flush_interval_ms
        next_ms = max(self._last_persist_ms + interval_ms, self._last_tick_ms + max(interval_ms, _PAUSE_MS))
        if self._limiter is not None and self._is_new():
            return min(next_ms, self._limiter.next_permit_ms)
        return next_ms

    def persisted(self, *, now_ms: int) -> None:
        """Restart the flush interval."""
        self._last_persist_ms = now_ms

    def _is_new(self) -> bool:
        return self._state.accepted_number > max(self._decided_number, self._state.durable_number)


_NOTHING_DELIVERED = Position(0, -1)


@final
class YoungAge:
    """Separates young acks from old ones, by the time since their messages were certainly delivered.

    Args:
        seconds: The age; 0 for none.
    """

    def __init__(self, seconds: int) -> None:
        self.age_ms = seconds * 1000
        self.is_on = seconds > 0
        self.ruler = DeliveryRuler()
        """The times of deliveries."""

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position was sent by now."""
        if self.is_on:
            self._follow_clock(now_ms)
            self.ruler.record(position, now_ms)

    def persistable_up_to(self, *, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        if not self.is_on:
            return EVERYTHING
        self._follow_clock(now_ms)
        return self.ruler.old_up_to(self.age_ms, now_ms) or _NOTHING_DELIVERED

    def clear(self) -> None:
        """Forget all deliveries, as after a reset of the cursor."""
        self.ruler.clear()

    def _follow_clock(self, now_ms: int) -> None:
        """Set the ruler back if the clock went back by more than the age.

        Messages sent so far are then old after an age; else they would be young until the clock is where it was.
        """
        times, _ = self.ruler.marks()
        if times and times[-1] - now_ms > self.age_ms:
            self.ruler.set_back(times[-1] - now_ms)


@final
class Persister:
    """The parts that the rounds of one cursor share: its state, its journal, its trigger and its planner.

    Args:
        state: The acks.
        journal: Where records go.
        listeners: Receive each change.
        lock: Guards the state; never held while the storage is at work.
        config: When to write what.
        now_ms: The present.
    """

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
        self.lock = lock
        # Held through a whole round; taken before `lock`.
        self.writing = threading.Lock()
        self.closed = False
        self.is_truncated = False  # whether limits cut the last record
        self.young_age = YoungAge(config.become_old_ack_record_seconds)
        self.planner = RecordPlanner(state, journal, listeners, config, now_ms=now_ms)
        self.trigger = PersistTrigger(state, config, now_ms=now_ms)
        self.counters = PersistCounters()

    def check_open(self) -> None:
        """Raise `CursorClosedError` if the cursor is closed."""
        if self.closed:
            raise CursorClosedError(f"{self.journal.path}: the cursor is closed")

    def is_due(self, *, now_ms: int) -> bool:
        """Return whether the flush interval is over and something waits, or something is new and has a permit."""
        with self.lock:
            if self.trigger.is_interval_over(now_ms=now_ms):
                return self._has_work(self.persistable_up_to(now_ms=now_ms), now_ms=now_ms)
            return self.trigger.has_permit(now_ms=now_ms)

    @property
    def is_idle(self) -> bool:
        """Whether no persist can become due before something is accepted; to be read without the lock.

        An ack that is accepted meanwhile counts at the next call.
        """
        # Every tick of a broker reads this for each of its cursors, so it takes few look-ups and no call.
        state = self.state
        return (state.accepted_number <= state.durable_number and state.unpersisted.nothing_held_back) or self.closed

    def tick(self, *, now_ms: int) -> bool:
        """Return whether to persist now, and take a permit for it."""
        with self.lock:
            is_due = self.is_due(now_ms=now_ms)
            self.trigger.ticked(is_due=is_due, now_ms=now_ms)
            return is_due

    def next_tick_ms(self) -> int | None:
        """Return when `tick` is to be called; None if no persist can become due before something is accepted."""
        if self.is_idle:
            return None
        with self.lock:
            return self.trigger.next_tick_ms()

    def persistable_up_to(self, *, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        if not self.young_age.is_on:
            return EVERYTHING
        with self.lock:
            return self.young_age.persistable_up_to(now_ms=now_ms)

    def has_young(self, *, now_ms: int) -> bool:
        """Return whether an ack is held back, or would be, because it is young."""
        if not self.young_age.is_on:
            return False
        with self.lock:
            up_to = self.persistable_up_to(now_ms=now_ms)
            return self.state.unpersisted.count_between(up_to, EVERYTHING) > 0

    def begin(self, *, now_ms: int) -> Round | None:
        """Begin a round of the acks that are old enough; None if nothing waits.

        To be called with `writing` held, as every method that begins a round.

        Raises:
            CursorClosedError: The cursor is closed.
            PayloadTooLargeError: The ledger is not to be tried yet, and the metadata store has no room for the state.
        """
        return self._begin(self.persistable_up_to(now_ms=now_ms), now_ms=now_ms)

    def begin_promotion(self, record_bytes_max: int, *, now_ms: int) -> Round | None:
        """Begin a round that leaves at most `record_bytes_max` bytes of young acks: the oldest are written early.

        Raises:
            As `begin`.
        """
        with self.lock:
            self.check_open()
            unpersisted, up_to = self.state.unpersisted, self.persistable_up_to(now_ms=now_ms)
            raised = max(up_to, unpersisted.promotable_up_to(record_bytes_max) or self.state.mark_delete)
            promoted_count = unpersisted.count_between(up_to, raised)
        return self._begin(raised, promoted_count=promoted_count, now_ms=now_ms)

    def begin_closing(self, *, now_ms: int) -> Round | None:
        """Begin a round of everything, young acks too, that closes the cursor.

        In Pulsar's format it goes to the metadata store if it is small enough.

        Raises:
            As `begin`.
        """
        with self.lock:
            self.check_open()
            plan = self.planner.plan_closing()
            if plan is not None:
                return Round(self, plan, EVERYTHING, closes=True, now_ms=now_ms)
        return self._begin(EVERYTHING, closes=True, now_ms=now_ms)

    def begin_creation(self, *, in_metadata: bool, now_ms: int) -> Round | None:
        """Begin the round of a new cursor: a cursor ledger or, always in Pulsar's format, the metadata store."""
        with self.lock:
            self.state.require_persist()
            if in_metadata or not self.journal.form.has_deltas:
                return Round(self, self.planner.plan_creation(), EVERYTHING, now_ms=now_ms)
        return self._begin(EVERYTHING, now_ms=now_ms)

    def _begin(self, up_to: Position, *, promoted_count: int = 0, closes: bool = False, now_ms: int) -> Round | None:
        with self.lock:
            self.check_open()
            if not self._has_work(up_to, now_ms=now_ms):
                self.closed = closes
                self.counters.promoted(promoted_count)
                return None
            plan = self.planner.plan(up_to, now_ms=now_ms)
            return Round(self, plan, up_to, promoted_count=promoted_count, closes=closes, now_ms=now_ms)

    def nothing_written(self) -> PersistResult:
        """Return the result of a round that was not begun."""
        unpersisted = self.state.unpersisted
        return PersistResult(
            PersistTarget.NOTHING, 0, 0, self.state.persisted_mark_delete, unpersisted.held_count, unpersisted.cut_count
        )

    def wrote(self, target: PersistTarget, byte_count: int, *, now_ms: int) -> None:
        """Count a write that succeeded; to be called with the lock held."""
        self.trigger.persisted(now_ms=now_ms)
        self.planner.wrote(target, now_ms=now_ms)
        self.counters.wrote(target, byte_count)

    def _has_work(self, up_to: Position, *, now_ms: int) -> bool:
        planner = self.planner
        return self.state.is_dirty or self.state.unpersisted.can_promote(up_to) or planner.may_cover_more(now_ms=now_ms)
