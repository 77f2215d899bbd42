"""Turns the polls of one cursor into events of a trace, each with the interval in which it happened.

The acks in a broker's memory are known at each poll. Which of them are durable is inferred from the cursor ledger, by
these rules, each of which holds for any unmodified broker:

- The ledger has grown between two polls: a record became durable. It may cover every ack of the later poll.
- A record that ends after a poll may have begun before it, but at most two are under way at once. So if the ledger has
  grown by three or more entries since a poll, the last record covers the acks of that poll.
- A record may lack ranges beyond the limit on them, but never the mark-delete position.
- The first entry of a new cursor ledger has the mark-delete position and no ranges. Further ones began after it.
- Without an ack for a flush and two writes, everything is written, unless the ledger has its first entry alone.
- A write takes less than half a second: it may be durable that long before the poll after which the ledger has grown.
- After the topic was loaded again, its cursors have the state that was durable then, and later acks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.pulsar.cursor_look import Entries, minus, runs
from ackstate.analysis.trace.events import EventKind, PolledEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyroaring import BitMap

    from ackstate.analysis.pulsar.broker_settings import BrokerSettings
    from ackstate.analysis.pulsar.cursor_look import CursorLook

UNDER_WAY_MAX = 2
"""Records that a cursor writes at once: after an idle second Guava's limiter admits two."""
WRITE_MS = 500
"""A record that is being written becomes durable within this time, or fails."""


class _Interval(NamedTuple):
    """The time between two polls: after the earlier one was sent, before the later one was answered."""

    ts_ms: int
    until_ms: int


@final
class CursorFollower:
    """Follows one cursor, poll by poll."""

    def __init__(
        self, settings: BrokerSettings, *, known: Mapping[int, BitMap] | None = None, last_ms: int = -1
    ) -> None:
        self._settings = settings
        self._known: Entries = dict(known or {})
        self._last_ms = last_ms
        self._poll: CursorLook | None = None
        # Polls of the same cursor ledger since the one whose acks are certainly durable, the last one for each last
        # entry; and the poll since which nothing was acked, until that is known to be durable.
        self._history: deque[CursorLook] = deque()
        self._changed: CursorLook | None = None
        # Whether there are acks that may be durable without an event for it.
        self._has_pending = False
        # The latest poll whose acks are certainly durable, and whether there are exceptions.
        self._certain_poll: CursorLook | None = None
        self._has_exceptions = False

    def follow(self, poll: CursorLook) -> list[PolledEvent]:
        """Return the events since the last poll, in order."""
        before = self._poll
        begin_ms = poll.asked_ms if before is None and self._last_ms < 0 else before.asked_ms if before else -1
        interval = _Interval(max(self._last_ms, begin_ms), poll.answered_ms)
        acked = poll.acked_entries()
        existing = {each: bitmap for each, bitmap in self._known.items() if each in poll.counts}
        new, gone = minus(acked, existing), minus(existing, acked)
        self._known = acked
        if before is None or gone or _is_reloaded(before, poll):
            events = [*self._restarted(before, poll, interval, new, gone)]
        else:
            events = [*self._continued(before, poll, interval, new)]
        self._poll = poll
        if events:
            self._last_ms = events[-1].ts_ms
        return events

    def ended(self, now_ms: int) -> list[PolledEvent]:
        """Return the events of a cursor that is gone: nothing is acked. `follow` must not be called again."""
        if not self._known:
            return []
        begin_ms = max(self._last_ms, self._poll.asked_ms if self._poll else self._last_ms)
        interval = _Interval(begin_ms, max(now_ms, begin_ms))
        reset = PolledEvent(interval.ts_ms, EventKind.RESET, until_ms=interval.until_ms)
        return [reset, *_named(EventKind.REDELIVER, self._known, interval)]

    # --- A cursor that was found, loaded, or moved

    def _restarted(
        self, before: CursorLook | None, poll: CursorLook, interval: _Interval, new: Entries, gone: Entries
    ) -> Iterator[PolledEvent]:
        self._forget_history()
        if before is not None or gone:
            yield self._seen_early(interval)
        if gone:
            if before is None or _is_reloaded(before, poll):
                yield PolledEvent(interval.ts_ms, EventKind.CRASH, until_ms=interval.until_ms)
                yield PolledEvent(interval.ts_ms, EventKind.RECOVER, until_ms=interval.until_ms)
            else:
                yield PolledEvent(interval.ts_ms, EventKind.RESET, until_ms=interval.until_ms)
            yield from _named(EventKind.REDELIVER, gone, interval)
        yield from self._acks(poll, new, interval)
        # Entries of ledgers that no longer exist cannot be redelivered.
        cut = poll.deleted_entries() if poll.is_mark_delete_loaded else poll.acked_entries()
        yield from self._certain(poll, {} if poll.is_all_durable else cut, interval)
        self._note_change(poll)
        if poll.has_written:
            self._history.append(poll)

    # --- A cursor that continues

    def _continued(
        self, before: CursorLook, poll: CursorLook, interval: _Interval, new: Entries
    ) -> Iterator[PolledEvent]:
        is_same = before.has_written and poll.has_written and before.cursor_ledger == poll.cursor_ledger
        is_maybe_written = not is_same or poll.last_entry != before.last_entry
        if is_maybe_written and self._has_pending:
            yield self._seen_early(interval)
        yield from self._acks(poll, new, interval)
        if new:
            self._note_change(poll)
        covered, cut = self._covered(before, poll, is_same=is_same)
        if not is_same and covered is before and not cut:
            # Until its second entry, a new ledger may have had no ranges.
            yield from self._certain(before, before.deleted_entries(), interval)
        if covered is not None:
            yield from self._certain(covered, cut, interval)
        elif is_same and is_maybe_written and not self._has_exceptions and self._may_displace(poll):
            assert self._certain_poll is not None
            yield from self._certain(self._certain_poll, self._certain_poll.deleted_entries(), interval)
        elif is_maybe_written and self._has_pending:
            yield self._seen(interval)
        if not is_same:
            self._forget_history()
            self._note_change(poll)
        is_after_record = not self._history or self._history[-1].last_entry != poll.last_entry
        if poll.has_written and (new or is_after_record):
            if not is_after_record:
                self._history.pop()  # the same record covers both
            self._history.append(poll)

    def _covered(self, before: CursorLook, poll: CursorLook, *, is_same: bool) -> tuple[CursorLook | None, Entries]:
        """Return the latest poll whose acks are certainly durable, if it has more than before, and exceptions."""
        if not is_same and not poll.is_all_durable:
            return (None, {}) if before.is_unwritten and poll.is_unwritten else (before, self._lacking(before, poll))
        found = poll if poll.is_all_durable else self._latest_covered(poll)
        if found is None or not self._is_news(found):
            return None, {}
        is_whole = poll.is_all_durable or self._is_within_limit(found, poll)
        return found, {} if is_whole else found.deleted_entries()

    def _latest_covered(self, poll: CursorLook) -> CursorLook | None:
        """Return the latest poll whose acks a record of the present ledger certainly covers."""
        quiet_ms = self._settings.quiet_seconds * 1_000
        changed = self._changed
        if changed is not None and poll.asked_ms - changed.answered_ms >= quiet_ms and poll.last_entry > 0:
            self._changed = None
            return changed
        found = None
        while self._history and poll.last_entry - self._history[0].last_entry > UNDER_WAY_MAX:
            found = self._history.popleft()
        return found

    def _is_news(self, found: CursorLook) -> bool:
        known = self._certain_poll
        if known is None or found.answered_ms > known.answered_ms:
            return True
        return found.answered_ms == known.answered_ms and self._has_exceptions

    def _may_displace(self, poll: CursorLook) -> bool:
        """Whether a new record may lack ranges, because of the limit, that an earlier one had."""
        return self._certain_poll is not None and not self._is_within_limit(self._certain_poll, poll)

    def _lacking(self, before: CursorLook, poll: CursorLook) -> Entries:
        """Return the entries, acked at the earlier poll, that a ledger may lack which the cursor has got since."""
        is_new = poll.has_written and (before.has_written or before.is_unwritten)
        if is_new and poll.last_entry > 0:
            return {} if self._is_within_limit(before, poll) else before.deleted_entries()
        # An acked position may be only in memory if the cursor had no ledger.
        return before.deleted_entries() if is_new and before.has_written else before.acked_entries()

    def _is_within_limit(self, covered: CursorLook, poll: CursorLook) -> bool:
        """Whether no record between two polls can have excluded any range; each has at least one entry."""
        passed = sum(map(len, minus(poll.acked_entries(), covered.acked_entries()).values()))
        return passed + len(covered.deleted) <= self._settings.range_count_max

    # --- Events

    def _acks(self, poll: CursorLook, new: Entries, interval: _Interval) -> Iterator[PolledEvent]:
        is_cumulative = not poll.deleted and (self._poll is None or not self._poll.deleted)
        yield from _named(EventKind.MARK_DELETE if is_cumulative else EventKind.ACK, new, interval)
        self._has_pending |= bool(new)

    def _seen(self, interval: _Interval, *, number: int = -1) -> PolledEvent:
        """Return that every ack so far may be durable."""
        self._has_pending = False
        return PolledEvent(interval.ts_ms, EventKind.PERSIST_SEEN, number=number, until_ms=interval.until_ms)

    def _seen_early(self, interval: _Interval) -> PolledEvent:
        """Return that a record may have been under way at the earlier poll, and durable before it."""
        return self._seen(_Interval(max(interval.ts_ms - WRITE_MS, self._last_ms), interval.until_ms))

    def _certain(self, covered: CursorLook, cut: Entries, interval: _Interval) -> Iterator[PolledEvent]:
        """Yield that the acks of a poll are durable, with exceptions."""
        self._certain_poll, self._has_exceptions = covered, bool(cut)
        yield self._seen(interval, number=covered.answered_ms)
        yield from _named(EventKind.CUT_OFF, cut, interval)

    def _note_change(self, poll: CursorLook) -> None:
        self._changed = poll if poll.has_written else None

    def _forget_history(self) -> None:
        self._history.clear()
        self._changed = None


def _is_reloaded(before: CursorLook, poll: CursorLook) -> bool:
    """Return whether the topic may have been loaded again between two polls."""
    if before.load is not None and poll.load is not None and before.load != poll.load:
        return True
    if before.cursor_ledger == poll.cursor_ledger:
        # A broker that does not report the load, as one that embeds this library, may keep the ledger.
        return poll.is_after_failure and (before.load is None or poll.load is None)
    # A cursor without a ledger gets one. A new ledger instead of another one is a reload, unless the load is the same.
    return before.cursor_ledger >= 0 and (before.load is None or poll.load is None or poll.cursor_ledger < 0)


def _named(kind: EventKind, entries: Mapping[int, BitMap], interval: _Interval) -> Iterator[PolledEvent]:
    for run in runs(entries):
        yield PolledEvent(interval.ts_ms, kind, *run, until_ms=interval.until_ms)
