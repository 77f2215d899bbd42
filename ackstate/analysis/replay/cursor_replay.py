"""A replay by the cursor itself.

It drives the library's own cursor on a store in memory, and acks an epoch at once. It skips ticks at which the cursor
would do nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.curves import Epochs
from ackstate.analysis.trace.events import EventKind
from ackstate.cursor.cursor import ManagedCursor
from ackstate.cursor.formats import Format
from ackstate.cursor.persist import MarkDeleteRateLimiter
from ackstate.cursor.results import PersistTarget
from ackstate.delivery_ruler import MARKS_MAX
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.replay.acked import EventChunk, Int64s, NewlyAckedRuns
    from ackstate.analysis.replay.curves import Piece
    from ackstate.analysis.replay.policy import Policy
    from ackstate.cursor.results import PersistResult
    from ackstate.delivery_ruler import DeliveryRuler
    from ackstate.stores.base import LedgerStore, MetadataStore, Store


# The longest time to a permit, at the lowest rate that a decimal of 17 digits can express.
_PERMIT_MS_MAX = 2**62


@final
class PersistTicks:
    """The relevant ticks of one open cursor: those at which something may be persisted.

    A tick comes after all events of its millisecond. Times passed to the methods never fall.
    """

    def __init__(self, policy: Policy, *, opened_ms: int) -> None:
        config = policy.cursor
        self.tick_ms = policy.tick_ms
        self._flush_ms = config.flush_interval_ms
        self._limiter: MarkDeleteRateLimiter | None = None
        if config.mark_delete_rate_limit > 0:
            self._limiter = MarkDeleteRateLimiter(config.mark_delete_rate_limit, now_ms=opened_ms)
        self._flush_at = self.tick_at(opened_ms + self._flush_ms)
        self._permit_at = opened_ms  # or later than the last persist
        # The first ticks after new acks, rising; the first of them may be over. Invariant: all acks before the first
        # tick are persisted. Acks between it and the others were refused by the limiter, failed to be written, or wait
        # for the flush.
        self._waiting: list[int] = []

    @property
    def flush_at(self) -> int:
        """The next tick at which the flush interval is over."""
        return self._flush_at

    def tick_at(self, ts_ms: int) -> int:
        """Return the first tick at or after a time."""
        return -(-ts_ms // self.tick_ms) * self.tick_ms

    def acked(self, ts_ms: Int64s) -> None:
        """Record the times of new acks; rising, not below earlier ones."""
        if not len(ts_ms):
            return
        ticks = -(-ts_ms // self.tick_ms) * self.tick_ms
        ticks = ticks[np.flatnonzero(np.diff(ticks, prepend=ticks[0] - 1))]
        begin = int(bool(self._waiting) and self._waiting[-1] == ticks[0])
        self._waiting += ticks[begin:].tolist()

    def acked_at(self, ts_ms: int) -> None:
        """Record the time of one new ack, as `acked` does."""
        tick = self.tick_at(ts_ms)
        if not self._waiting or self._waiting[-1] != tick:
            self._waiting.append(tick)

    @property
    def quiet_until(self) -> int:
        """The last tick before which nothing will be due, for any acks."""
        if self._limiter is None:
            return self._flush_at
        return min(self._flush_at, self.tick_at(self._permit_at))

    def next_due(self) -> int | None:
        """Return the next tick at which the cursor persists the acks so far; None if none is pending."""
        if not self._waiting:
            return None
        due = max(self._waiting[0], self._flush_at)
        if self._limiter is not None:
            at = bisect_left(self._waiting, self._permit_at)
            if at < len(self._waiting):
                due = min(due, self._waiting[at])
        return due

    def persisted(self, at_ms: int) -> None:
        """Record a persist at a tick: it considered all acks until then."""
        del self._waiting[: bisect_right(self._waiting, at_ms)]
        self._flush_at = self.tick_at(max(at_ms + self._flush_ms, at_ms + 1))
        self._take_permit(at_ms)

    def settled(self, at_ms: int) -> None:
        """Record that all acks so far were considered, or dropped, between ticks."""
        self._waiting.clear()
        self._flush_at = self.tick_at(at_ms + self._flush_ms)

    def failed(self, at_ms: int) -> None:
        """Record a persist that could not be written: its acks wait for the flush, or for later acks.

        The limiter grants nothing twice: it is consulted again when there are more acks.
        """
        tried = bisect_right(self._waiting, at_ms)
        self._waiting[:tried] = [at_ms][:tried]
        self._flush_at = max(self._flush_at, at_ms + self.tick_ms)
        self._take_permit(at_ms)

    def _take_permit(self, at_ms: int) -> None:
        if self._limiter is not None:
            self._limiter.try_acquire(at_ms)
            times = range(at_ms + 1, _PERMIT_MS_MAX)
            self._permit_at = times[bisect_left(times, True, key=self._limiter.can_acquire)]


_ENTRY_BITS = 33


@final
class AgeFeed:
    """Feeds the deliveries of some events into a ruler that has all earlier ones."""

    def __init__(self, ruler: DeliveryRuler, events: EventChunk) -> None:
        self._ruler = ruler
        self._events = events
        self._taken = 0
        marks = ruler.positions
        deliveries = np.flatnonzero(events.kind == EventKind.DELIVER)
        before = np.array([marks[-1] if marks else (0, -1)], np.int64)
        told = np.column_stack((events.ledger_id[deliveries], events.last_entry[deliveries]))
        ledger_ids, entry_ids = np.concatenate((before, told)).T
        # Numbers in the order of the positions.
        _, ledger_numbers = np.unique(ledger_ids, return_inverse=True)
        highest = np.maximum.accumulate((ledger_numbers << _ENTRY_BITS) + entry_ids + 1)
        rises = deliveries[highest[1:] > highest[:-1]]
        rise_ms = events.ts_ms[rises]
        # The relevant events: the last delivery of each millisecond that is above all earlier ones.
        self.stops = rises[np.append(rise_ms[1:] > rise_ms[:-1], np.ones(min(len(rise_ms), 1), np.bool_))]

    def take(self, end: int) -> Sequence[int]:
        """Feed the events from the end of the last call up to an event, and return the times at which marks moved."""
        begin, until = np.searchsorted(self.stops, (self._taken, end))
        taken = self.stops[begin:until]
        self._taken = end
        times_ms: list[int] = self._events.ts_ms[taken].tolist()
        entries = zip(self._events.ledger_id[taken].tolist(), self._events.last_entry[taken].tolist(), strict=True)
        for entry, time_ms in zip(entries, times_ms, strict=True):
            self._ruler.record(Position(*entry), time_ms)
        return times_ms


@final
class StoreWithoutLedgers:
    """A store that creates no ledgers; it delegates all else to another store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def ledgers(self) -> LedgerStore:
        return cast("LedgerStore", self)

    @property
    def metadata(self) -> MetadataStore:
        return self._store.metadata

    def close(self) -> None:
        self._store.close()

    def create(self, owner: str) -> int:
        """Refuse to create a ledger."""
        raise StoreError(f"no ledger can be written for {owner}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store.ledgers, name)


_NO_LOG = {0: 0}
_NAME = "replayed"


@final
class CursorReplay:
    """Replays a subscription under a policy of the cursor.

    `log` has the entry count of each ledger at the end of the trace, rising: the state of the cursor does not depend on
    entries that are published later, because no ack names them.
    """

    kind: ClassVar[Literal["with a cursor"]] = "with a cursor"

    def __init__(self, policy: Policy, log: Mapping[int, int], *, opened_ms: int) -> None:
        self._policy = policy
        self._store = empty_store(policy)
        self._ledgers = LedgerMap.from_counts(log or _NO_LOG)
        age = policy.cursor.become_old_ack_record_seconds
        self._is_young = age != 0
        self._age_ms = 1_000 * age
        self._open(opened_ms)

    def _open(self, now_ms: int) -> None:
        self._cursor = ManagedCursor.open(
            self._store, topic=_NAME, subscription=_NAME, ledgers=self._ledgers,
            config=self._policy.cursor, now_ms=now_ms,
        )  # fmt: skip
        self._schedule = PersistTicks(self._policy, opened_ms=now_ms)
        # Times at which the ruler received marks, rising.
        self._sent_ms: list[int] = []
        self._asked_ms = now_ms - 1
        self._left_out = False

    def take(self, piece: Piece, *, until_ms: int) -> Epochs:
        """Replay events that are not after `until_ms`, which never falls, and return the persists before it."""
        return Epochs.of(self.take_events(piece.events, piece.news, until_ms=until_ms))

    def take_events(self, events: EventChunk, news: NewlyAckedRuns, *, until_ms: int) -> list[tuple[int, ...]]:
        """Replay events, given the entries that they ack first, and return a row of `Epochs` for each persist."""
        rows: list[tuple[int, ...]] = []
        waiting = _Waiting(events, news)
        self._schedule.acked(events.ts_ms[news.event])
        if self._is_young:
            rows += self._feed(events, waiting)
        rows += self._persist_until(until_ms, waiting)
        waiting.ack_events(self._cursor, len(events.ts_ms), now_ms=until_ms)
        # Older times have been checked.
        del self._sent_ms[: bisect_right(self._sent_ms, self._asked_ms - self._age_ms)]
        return rows

    @property
    def quiet_until_ms(self) -> int:
        """The last time before which the cursor neither persists nor looks for old acks, for any acks."""
        return self._schedule.quiet_until

    @property
    def cursor(self) -> ManagedCursor:
        """The cursor; `restart` replaces it."""
        return self._cursor

    def persists(self, until_ms: int) -> Iterator[tuple[int, ...]]:
        """Persist at the ticks before a time, one after another, and yield a row of `Epochs` for each."""
        return self._persist_until(until_ms, None)

    def look(self, now_ms: int) -> None:
        """Make the cursor look for old acks before any event at a time; earlier persists must be done."""
        if self._is_young:
            self._look_before(now_ms)

    def deliver(self, position: Position, *, now_ms: int) -> None:
        """Record a delivery in the cursor."""
        if not self._is_young:
            return
        marked = self._cursor.ruler.positions
        if not marked or position > marked[-1]:
            self._cursor.delivered(position, now_ms=now_ms)
            if not self._sent_ms or self._sent_ms[-1] != now_ms:
                self._sent_ms.append(now_ms)

    def acked(self, now_ms: int) -> None:
        """Called after a new ack was given to the cursor."""
        self._schedule.acked_at(now_ms)

    def promoted(self, now_ms: int, result: PersistResult) -> None:
        """Called after the cursor was persisted between ticks."""
        self._schedule.settled(now_ms)
        # The tick of that millisecond is still to come.
        self._note_left_out(result, now_ms - 1)

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        """Reset the cursor to `mark_delete`, inclusive, and all entries acked then; persist that as far as possible.

        All ticks before `now_ms` must be done. The row is the state right after it, before the events of its ms.
        """
        result = self._cursor.reset(self._ledgers.next_valid(mark_delete), now_ms=now_ms)
        for ledger_id, bitmap in acked.items():
            self._cursor.ack_entries(ledger_id, bitmap, now_ms=now_ms)
        # Acks after the reset itself are not durable yet.
        if self._cursor.redelivery_if_crashed:
            with suppress(StoreError):
                result = self._cursor.persist(now_ms=now_ms)
        self._schedule.settled(now_ms)
        self._sent_ms.clear()
        if self._cursor.view.is_dirty:
            self._schedule.acked_at(now_ms)
        # The tick of that millisecond is still to come.
        self._note_left_out(result, now_ms - 1)
        return Epochs.of([self.row(now_ms, result)])

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        """Reopen the cursor after a crash, and return its acks by ledger, which the caller owns."""
        self._open(now_ms)
        return acks_of(self._cursor)

    def _feed(self, events: EventChunk, waiting: _Waiting) -> Iterator[tuple[int, ...]]:
        """Feed delivery times to the cursor; yield the persists before the last event."""
        feed = AgeFeed(self._cursor.ruler, events)
        stop_ms = events.ts_ms[feed.stops]
        told = 0
        while told < len(stop_ms):
            now_ms = int(stop_ms[told])
            yield from self._persist_until(now_ms, waiting)
            due = self._schedule.next_due()
            quiet_until = self._schedule.flush_at if due is None else min(due, self._schedule.flush_at)
            if quiet_until < now_ms:
                self._look_before(now_ms)
                quiet_until = now_ms if self._left_out else self._idle_until(stop_ms[told:], due)
            told = int(np.searchsorted(stop_ms, quiet_until, "right"))
            sent_ms = feed.take(int(np.searchsorted(events.ts_ms, quiet_until, "right")))
            self._sent_ms += sent_ms[int(bool(sent_ms and self._sent_ms) and sent_ms[0] == self._sent_ms[-1]) :]
            self._asked_ms = max(self._asked_ms, int(stop_ms[told - 1]) - 1)

    def _idle_until(self, stop_ms: Int64s, due: int | None) -> int:
        """Return the time until which no search for old acks is needed: none is excluded, the flush interval is over.

        The ruler's answer does not change until marks are thinned; until then the last answer is as good as all.
        """
        last_ms = int(stop_ms[: max(MARKS_MAX - len(self._cursor.ruler.times), 1)][-1])
        return last_ms if due is None else min(last_ms, max(due, int(stop_ms[0])))

    def _persist_until(self, until_ms: int, waiting: _Waiting | None) -> Iterator[tuple[int, ...]]:
        while True:
            due = self._schedule.next_due()
            if due is not None and due < until_ms:
                until_more = due
            else:
                due, until_more = None, until_ms
            if self._left_out:
                due = self._more_due(until_more, due)
            if due is None:
                # Later acks follow; earlier ticks must not include them.
                self._asked_ms = max(self._asked_ms, until_ms - 1)
                return
            if waiting is not None:
                waiting.ack_until(self._cursor, due)
            row = self._persist(due)
            if row is not None:
                yield row

    def _persist(self, at_ms: int) -> tuple[int, ...] | None:
        try:
            result = self._cursor.tick(now_ms=at_ms)
        except StoreError:
            # Excluded acks stay excluded; the cursor alone decides when to retry.
            self._schedule.failed(at_ms)
            return None
        assert result is not None, f"nothing was due at {at_ms} ms"
        self._schedule.persisted(at_ms)
        self._note_left_out(result, at_ms)
        return self.row(at_ms, result)

    def _note_left_out(self, result: PersistResult, at_ms: int) -> None:
        self._asked_ms = at_ms
        self._left_out = result.messages_held_back > 0 or (
            result.route is PersistTarget.METADATA and result.messages_cut > 0
        )

    def row(self, at_ms: int, result: PersistResult) -> tuple[int, ...]:
        """Return a row of `Epochs` for a persist, from the current state."""
        if self._policy.cursor.format is Format.PULSAR:
            forget_old_records(self._store, self._cursor)
        stats = self._cursor.stats()
        return (
            at_ms, stats.redelivery_if_crashed, result.messages_held_back,
            *cut_by_cause(self._cursor, result, self._policy), result.bytes_written, stats.journal_bytes,
        )  # fmt: skip

    def _more_due(self, until_ms: int, due: int | None) -> int | None:
        """Return the first tick before a time at which excluded acks may be written, or else `due`."""
        begin = max(self._schedule.flush_at, self._schedule.tick_at(self._asked_ms + 1))
        for at_ms in self._more_ticks(begin, until_ms):
            self._asked_ms = at_ms
            if self._cursor.view.is_persist_due(now_ms=at_ms):
                return at_ms
        return due

    def _more_ticks(self, begin: int, until_ms: int) -> Iterator[int]:
        """Yield the ticks at which excluded acks may become due, rising."""
        if begin >= until_ms:
            return
        if not self._policy.ledger_writable:
            # After a back-off the cursor retries at a time that only its own check reveals.
            last = self._schedule.tick_at(until_ms - self._schedule.tick_ms)
            ticks = range(begin, last + 1, self._schedule.tick_ms)
            at = bisect_left(ticks, True, key=lambda now_ms: self._cursor.view.is_persist_due(now_ms=now_ms))
            yield from ticks[at : at + 1]
            return
        yield begin
        previous = begin
        for sent_ms in self._sent_ms[bisect_right(self._sent_ms, begin - self._age_ms) :]:
            at_ms = self._schedule.tick_at(sent_ms + self._age_ms)
            if at_ms >= until_ms:
                return
            if at_ms > previous:
                previous = at_ms
                yield at_ms

    def _look_before(self, now_ms: int) -> None:
        """Make the cursor look for old acks at the last tick before a time: the ruler stores the answer."""
        last = self._schedule.tick_at(now_ms - self._schedule.tick_ms)
        if last >= self._schedule.flush_at:
            self._cursor.view.is_persist_due(now_ms=last)


class _Waiting:
    """Acks of some events that have not been given to the cursor yet."""

    def __init__(self, events: EventChunk, news: NewlyAckedRuns) -> None:
        self._events = events
        self._news = news
        self._given = 0  # events

    def ack_until(self, cursor: ManagedCursor, at_ms: int) -> None:
        """Give the cursor the acks up to the end of a millisecond."""
        self.ack_events(cursor, int(np.searchsorted(self._events.ts_ms, at_ms, "right")), now_ms=at_ms)

    def ack_events(self, cursor: ManagedCursor, end: int, *, now_ms: int) -> None:
        """Give the cursor the acks of the events before `end`."""
        if end > self._given:
            acked = self._news.part(self._given, end).bitmaps()
            cursor.ack_bitmaps(acked, now_ms=now_ms)
            self._given = end


def empty_store(policy: Policy) -> Store:
    """Return a new store as the broker of a policy can use it."""
    return MemoryStore() if policy.ledger_writable else StoreWithoutLedgers(MemoryStore())


def forget_old_records(store: Store, cursor: ManagedCursor) -> None:
    """Drop the records in Pulsar's format that no recovery reads: all of a ledger but the last."""
    last = cursor.view.last_journal_entry
    if last is not None and isinstance(store, MemoryStore):
        entries, number = store.disk.ledger(last.ledger_id).entries, last.entry_id - 1
        while number >= 0 and entries[number]:
            entries[number] = b""
            number -= 1


def acks_of(cursor: ManagedCursor) -> dict[int, BitMap]:
    """Return the entries that a cursor has acked, by ledger."""
    acked = {ledger_id: bitmap.copy() for ledger_id, bitmap in cursor.deleted.bitmaps()}
    marked_ledger_id, marked_entry_id = cursor.mark_delete_position
    for ledger_id, count in cursor.ledgers.counts().items():
        end = count if ledger_id < marked_ledger_id else marked_entry_id + 1
        if ledger_id <= marked_ledger_id and end > 0:
            acked[ledger_id] = acked.get(ledger_id, BitMap()) | BitMap(range(end))
    return acked


def cut_by_cause(cursor: ManagedCursor, result: PersistResult, policy: Policy) -> tuple[int, int, int]:
    """Return the messages cut off by the range limit, the byte limit, and the metadata store's own limit."""
    cut, config = result.messages_cut, policy.cursor
    if not cut or result.route is not PersistTarget.METADATA:
        return cut, 0, 0
    limit = config.metadata_limits.range_count_max
    kept = cursor.deleted.range_count
    if limit is None or kept <= limit:
        return 0, cut, 0
    is_own = limit != config.list_limits.range_count_max
    return (0, 0, cut) if is_own else (cut, 0, 0)
