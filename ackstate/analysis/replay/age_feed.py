"""Feeds delivery times and ack latencies of many events at once into a cursor's `YoungAge`.

A batch of deliveries may be recorded in the cursor's ruler at once, because it is not read in between. The latency of
an ack depends on the delivery time of its message, which later deliveries do not change until marks are thinned. So
batches end where marks are thinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.analysis.trace.events import EventKind
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.acked import EventChunk, Int64s, NewlyAckedRuns
    from ackstate.cursor.state.auto_age import AgeChooser
    from ackstate.cursor.state.young_age import YoungAge

_ENTRY_BITS = 33


class _Acks(NamedTuple):
    """Runs of individually acked entries whose delivery is known, in order, as parallel arrays."""

    event: Int64s
    ts_ms: Int64s
    first: Int64s
    last: Int64s


@final
class AgeFeed:
    """Feeds the deliveries and acks of some events into a `YoungAge` that has all earlier ones.

    Args:
        young: Receives the deliveries and latencies.
        events: In order of time.
        news: The entries that they ack first, by event.

    Attributes:
        stops: The relevant events. If no latency is observed, only the last delivery of a millisecond that is above all
            earlier ones is relevant.
    """

    def __init__(self, young: YoungAge, events: EventChunk, news: NewlyAckedRuns) -> None:
        self._young = young
        self._events = events
        times_ms, marked = young.ruler.marks()
        self._ledger_ids = np.unique([*{each.ledger_id for each in marked}, *_distinct(events.ledger_id)])
        deliveries = np.flatnonzero(events.kind == EventKind.DELIVER)
        keys = self._keys(events.ledger_id[deliveries], events.last_entry[deliveries])
        before = self._mark_keys(marked)[-1:] if marked else np.array([-1])
        highest = np.maximum.accumulate(np.concatenate((before, keys)))
        # The deliveries above all earlier ones, and those of them that create a mark; others move the last mark.
        self._rises = deliveries[highest[1:] > highest[:-1]]
        rise_ms = events.ts_ms[self._rises]
        is_later = np.append(rise_ms[1:] > rise_ms[:-1], np.ones(min(len(rise_ms), 1), np.bool_))
        self._lasts = self._rises[is_later]
        self._made_at = self._rises[np.roll(is_later, 1) & (rise_ms > (times_ms[-1] if times_ms else -1))]
        self._told = 0
        if young.chooser is None:
            self.stops = self._lasts
            return
        says = events.kind == EventKind.DELIVER
        says[news.event] = True
        self.stops = np.flatnonzero(says)
        self._acks = self._acks_of(news, deliveries, highest)

    def take(self, end: int) -> Sequence[int]:
        """Feed the events from the end of the last call up to an event, and return the times at which marks moved.

        Args:
            end: The first event that is not fed; its millisecond differs from that of the event before.
        """
        if self._young.chooser is None:
            return self._record(self._lasts, end)
        recorded: list[int] = []
        late: list[tuple[Int64s, Int64s]] = []
        while (thinned_at := self._thinned_at()) < end:
            recorded += self._record_rises(thinned_at)
            late.append(self._latencies(thinned_at))
            recorded += self._record_rises(thinned_at + 1)
        recorded += self._record_rises(end)
        late.append(self._latencies(end))
        _observe(self._young.chooser, *(np.concatenate(each) for each in zip(*late, strict=True)))
        return recorded

    def _thinned_at(self) -> int:
        """Return the delivery whose new mark exceeds the ruler's room, or the end of all events."""
        begin = int(np.searchsorted(self._made_at, self._told))
        beyond = begin + self._young.ruler.room
        return int(self._made_at[beyond]) if beyond < len(self._made_at) else len(self._events.ts_ms)

    def _record_rises(self, end: int) -> Sequence[int]:
        """Record the deliveries before an event, only the last of each millisecond."""
        begin, rises = np.searchsorted(self._rises, (self._told, end))
        told = self._rises[begin:rises]
        times_ms = self._events.ts_ms[told]
        return self._record(told[np.append(times_ms[1:] > times_ms[:-1], np.ones(min(len(told), 1), np.bool_))], end)

    def _record(self, deliveries: Int64s, end: int) -> Sequence[int]:
        begin, until = np.searchsorted(deliveries, (self._told, end))
        told = deliveries[begin:until]
        self._told = end
        times_ms: list[int] = self._events.ts_ms[told].tolist()
        entries = zip(self._events.ledger_id[told].tolist(), self._events.last_entry[told].tolist(), strict=True)
        self._young.ruler.record_many([Position(*each) for each in entries], times_ms)
        return times_ms

    def _acks_of(self, news: NewlyAckedRuns, deliveries: Int64s, highest: Int64s) -> _Acks:
        """Return the acks with a latency: those of delivered entries, except by a mark-delete."""
        first = self._keys(news.ledger_id, news.first)
        last = np.minimum(self._keys(news.ledger_id, news.end - 1), highest[np.searchsorted(deliveries, news.event)])
        counts = (first <= last) & (self._events.kind[news.event] != EventKind.MARK_DELETE)
        event = news.event[counts]
        return _Acks(event, self._events.ts_ms[event], first[counts], last[counts])

    def _latencies(self, end: int) -> tuple[Int64s, Int64s]:
        """Return the latencies of the next acks before an event, in order, and the number of acks of each."""
        taken = int(np.searchsorted(self._acks.event, end))
        acks = _Acks(*(column[:taken] for column in self._acks))
        self._acks = _Acks(*(column[taken:] for column in self._acks))
        if not taken:
            return acks.ts_ms, acks.ts_ms
        times_ms, positions = self._young.ruler.marks()
        sent_ms, marks = np.array(times_ms), self._mark_keys(positions)
        low, high = np.searchsorted(marks, acks.first), np.searchsorted(marks, acks.last)
        # A run has one part for each mark that it reaches.
        of_run = np.repeat(np.arange(taken), high - low + 1)
        mark = low[of_run] + np.arange(len(of_run)) - np.searchsorted(of_run, of_run)
        part_first = np.maximum(acks.first[of_run], np.append(-1, marks)[mark] + 1)
        part_last = np.minimum(acks.last[of_run], marks[mark])
        return acks.ts_ms[of_run] - sent_ms[mark], part_last - part_first + 1

    def _mark_keys(self, positions: Sequence[Position]) -> Int64s:
        ledger_ids, entry_ids = np.array(positions, np.int64).T
        return self._keys(ledger_ids, entry_ids)

    def _keys(self, ledger_ids: Int64s, entry_ids: Int64s) -> Int64s:
        """Return numbers in the order of the positions, consecutive for consecutive entries of a ledger."""
        keys: Int64s = (np.searchsorted(self._ledger_ids, ledger_ids) << _ENTRY_BITS) + entry_ids + 1
        return keys


def _distinct(ledger_ids: Int64s) -> Sequence[int]:
    if len(ledger_ids) and (ledger_ids == ledger_ids[0]).all():
        return (int(ledger_ids[0]),)
    found: list[int] = np.unique(ledger_ids).tolist()
    return found


def _observe(chooser: AgeChooser, latencies_ms: Int64s, counts: Int64s) -> None:
    """Observe latencies in order; the order only matters where earlier ones fade."""
    while len(counts):
        within = int(np.searchsorted(np.cumsum(counts), chooser.until_fading))
        part = np.searchsorted(chooser.bounds_ms, latencies_ms[:within], "right")
        weights = np.bincount(part, counts[:within])
        for bound in np.flatnonzero(weights).tolist():
            latency_ms = chooser.bounds_ms[bound - 1] if bound else chooser.bounds_ms[0] - 1
            chooser.observe(latency_ms, int(weights[bound]))
        if within < len(counts):
            chooser.observe(int(latencies_ms[within]), int(counts[within]))
        latencies_ms, counts = latencies_ms[within + 1 :], counts[within + 1 :]
