"""Generates any slice of the events of one subscription or one topic, from nothing but the seed.

Events have turns. Block q of `Traffic.block` entries has twice as many slots, even ones for deliveries, odd ones for
acks, one of each for each class. A class whose entries wait for n blocks has its first event in block n, and one in
every block from there: so the number of events before any slot is a sum over classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.generate.clock import Int64s, scattered
from ackstate.analysis.trace.generate.columns import ENTRIES_PER_LEDGER, columns_of, joined
from ackstate.analysis.trace.generate.outages import RECOVERY_MS, wall_ms
from ackstate.analysis.trace.generate.turns import Turns
from ackstate.analysis.workloads.traffic import UNACKED_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.trace.generate.clock import Arrivals
    from ackstate.analysis.trace.generate.outages import Flushes, Outage
    from ackstate.analysis.trace.generate.turns import Classes
    from ackstate.analysis.trace.rows import Events
    from ackstate.analysis.workloads.traffic import Traffic

_PUBLISHED_AT_ONCE = 64
_NEVER = 2**55
# CRASH and RECOVER, and for each message REDELIVER, DELIVER and ACK.
_CRASH_EVENTS, _LOST_EVENTS = 2, 3


class _EntryRuns(NamedTuple):
    """Events of runs of entries: the slot, the first entry (counted over all ledgers), the length, and the number."""

    slots: Int64s
    first: Int64s
    length: Int64s | int
    number: Int64s


@final
@dataclass(frozen=True)
class SubscriptionSeries:
    """A subscription's infinite series of events, numbered by `seq` from 0.

    Attributes:
        workload: The shape.
        arrivals: The times of the topic's slots.
        classes: Assigns entries to classes.
        messages_per_second: The mean rate, which converts waiting times into blocks.
        flushes: The persists of the cursor.
        outages: The outages of the broker, in order, at most one between two persists.
    """

    workload: Traffic
    arrivals: Arrivals
    classes: Classes
    messages_per_second: float
    flushes: Flushes
    outages: Sequence[Outage] = ()

    @cached_property
    def _delayed(self) -> Int64s:
        """For each class, the blocks from an entry's block to its delivery's: at least 1."""
        return np.maximum(self._blocks(self.workload.delay_ms or (0.0,) * self.workload.block), 1)

    @cached_property
    def _held(self) -> Int64s:
        """For each class, the blocks from an entry's block to its ack's: at least 1 more."""
        acked = np.array([ms is not None for ms in self.workload.ack_ms])
        waited = np.maximum(self._blocks([ms or 0.0 for ms in self.workload.ack_ms]), 1)
        return np.where(acked, self._delayed + waited, _NEVER)

    def _blocks(self, waits_ms: Sequence[float]) -> Int64s:
        per_ms = self.messages_per_second / 1_000 / self.workload.block
        return np.rint(np.array(waits_ms) * per_ms).astype(np.int64)

    @cached_property
    def _is_acked_in_order(self) -> bool:
        return not self.workload.delay_ms and len(set(self._held.tolist())) == 1

    @cached_property
    def _deliveries(self) -> Turns:
        if not self.workload.is_in_runs:
            return Turns(self._delayed, 0)
        # A run is delivered when its whole block is published.
        last = np.full(self.workload.block, _NEVER)
        last[-1] = 0
        return Turns(last, 0)

    @cached_property
    def _acks(self) -> Turns:
        first = self._held.copy()
        if self.workload.stuck:
            first[0] += UNACKED_MAX
        return Turns(first, 1)

    @cached_property
    def _lost(self) -> list[tuple[int, int]]:
        """For each outage, the slots from the first (inclusive) to the end (exclusive) whose acks it undoes."""
        slot = self.arrivals.first_slot
        return [(slot(outage.begun_ns), slot(outage.at_ns)) for outage in self.outages]

    @cached_property
    def _outage_events(self) -> Int64s:
        """Return the number of events of all earlier outages, before each outage and after the last."""
        lost = [int(np.diff(self._acks.before(np.array(slots)))[0]) for slots in self._lost]
        return np.cumsum([0, *(_CRASH_EVENTS + _LOST_EVENTS * count for count in lost)])

    @cached_property
    def outages_ns(self) -> Int64s:
        """The times at which the broker dies, on the clock of `arrivals`."""
        return np.array([outage.at_ns for outage in self.outages], np.int64)

    def before(self, slots: Int64s) -> Int64s:
        """Return the number of events before each slot."""
        at_ns = self.arrivals.at_ns(slots)
        outages = self._outage_events[np.searchsorted(self.outages_ns, at_ns, side="right")]
        return self._deliveries.before(slots) + self._acks.before(slots) + self.flushes.before(at_ns) + outages

    def slots_of(self, seqs: Int64s) -> Int64s:
        """Return for each seq the last slot that has at most this many events before it.

        Complexity: O(log of the slot) times the classes, each.
        """
        end = 2
        while self.before(np.array([end]))[0] <= seqs.max():
            end *= 2
        low, high = np.zeros_like(seqs), np.full_like(seqs, end)
        while (high - low > 1).any():
            middle = (low + high) // 2
            fits = self.before(middle) <= seqs
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low

    def cut_into(self, seqs: Int64s) -> list[Events]:
        """Return the events between each two neighbours of the rising `seqs`, each end exclusive."""
        slots = self.slots_of(seqs)
        starts = self.before(slots)
        return [
            self._between(int(slots[at]), int(slots[at + 1]) + 1).where(
                slice(int(seqs[at] - starts[at]), int(seqs[at + 1] - starts[at]))
            )
            for at in range(len(seqs) - 1)
        ]

    def _between(self, first: int, end: int) -> Events:
        """Return the events from slot `first` (inclusive) to slot `end` (exclusive)."""
        bounds_ns = self.arrivals.at_ns(np.array([first, end]))
        delivered, acked = self._delivered(first, end), self._acked(first, end)
        flushed = self.flushes.between(*self.flushes.before(bounds_ns).tolist())
        at_ns = np.concatenate((flushed[0], self.arrivals.at_ns(delivered.slots), self.arrivals.at_ns(acked.slots)))
        # Stable, so that a persist comes before other events of its instant.
        order = np.argsort(at_ns, kind="stable")
        at_ns = at_ns[order]
        kinds = (flushed[1], _same(EventKind.DELIVER, delivered), _same(EventKind.ACK, acked))
        events = columns_of(
            self._wall_ms(at_ns),
            np.concatenate(kinds)[order],
            np.concatenate((np.full(len(flushed[0]), -1), delivered.first, acked.first))[order],
            np.concatenate((flushed[0] * 0, _same(delivered.length, delivered), _same(1, acked)))[order],
            np.concatenate((flushed[2], delivered.number, acked.number))[order],
        )
        died = np.searchsorted(self.outages_ns, bounds_ns, side="right").tolist()
        return self._with_outages(events, at_ns, range(*died))

    def _with_outages(self, events: Events, at_ns: Int64s, outages: range) -> Events:
        begin, parts = 0, []
        for outage in outages:
            end = int(np.searchsorted(at_ns, self.outages_ns[outage]))
            parts += [events.where(slice(begin, end)), self._outage(outage)]
            begin = end
        return joined([*parts, events.where(slice(begin, len(at_ns)))]) if parts else events

    def _outage(self, index: int) -> Events:
        """Return the events of an outage: death, recovery, and the repeated delivery and ack of unpersisted entries."""
        lost = self._acked(*self._lost[index])
        died_ms = int(self._wall_ms(self.outages_ns[index : index + 1])[0]) - RECOVERY_MS
        none = np.full(_CRASH_EVENTS, -1)
        parts = [
            columns_of(
                np.array([died_ms, died_ms + RECOVERY_MS]), np.array([EventKind.CRASH, EventKind.RECOVER]),
                none, none * 0, none,
            )
        ]  # fmt: skip
        for kind in (EventKind.REDELIVER, EventKind.DELIVER, EventKind.ACK):
            number = np.full(len(lost.slots), -1) if kind == EventKind.REDELIVER else lost.number
            ts_ms = np.full(len(lost.slots), died_ms + RECOVERY_MS)
            parts.append(columns_of(ts_ms, _same(kind, lost), lost.first, _same(1, lost), number))
        return joined(parts)

    def _wall_ms(self, at_ns: Int64s) -> Int64s:
        """Return ms since the epoch; at an outage, the time of the recovery."""
        return wall_ms(at_ns, self.outages_ns)

    def _delivered(self, first: int, end: int) -> _EntryRuns:
        slots, blocks, classes = self._deliveries.between(first, end)
        size = self.workload.block
        if self.workload.is_in_runs:
            begins, ends = (self._run_begin(which) for which in (blocks, blocks + 1))
            return _EntryRuns(slots, begins, ends - begins, np.zeros_like(slots))
        source = blocks - self._delayed[classes]
        if self.workload.delay_ms:
            offsets = self.classes.offset_of(source, classes)
        else:
            # Here the turns follow the order of the log, by entry instead of by class.
            offsets, classes = classes, self.classes.class_of(source, classes)
        return _EntryRuns(slots, source * size + offsets, 1, self._consumer(source, classes))

    def _acked(self, first: int, end: int) -> _EntryRuns:
        slots, blocks, classes = self._acks.between(first, end)
        source = blocks - self._held[classes]
        if self._is_acked_in_order:
            offsets, classes = classes, self.classes.class_of(source, classes)
        else:
            offsets = self.classes.offset_of(source, classes)
        return _EntryRuns(slots, source * self.workload.block + offsets, 1, self._consumer(source, classes))

    def _consumer(self, blocks: Int64s, classes: Int64s) -> Int64s:
        consumers = self.workload.consumers
        if not self.workload.stuck:
            return classes % consumers
        is_full = (classes == 0) & (blocks >= UNACKED_MAX)
        return np.where(is_full, 1 + blocks % (consumers - 1), classes % consumers)

    def _run_begin(self, blocks: Int64s) -> Int64s:
        """Return the start of the run delivered in each block: somewhat before the block, in the same ledger."""
        size = self.workload.block
        before = (scattered(self.classes.key, ~blocks) % np.uint64(size)).astype(np.int64)
        begins = blocks * size
        return np.where(begins % ENTRIES_PER_LEDGER, begins - before, begins)

    def delivered_at_ms(self, blocks: Int64s, offsets: Int64s) -> Int64s:
        """Return the times at which a delayed workload's entries are due, -1 for entries that are not delayed."""
        classes = self.classes.class_of(blocks, offsets)
        slots = (blocks + self._delayed[classes]) * 2 * self.workload.block + 2 * classes
        delays = np.array(self.workload.delay_ms)
        return np.where(delays[classes] > 0, self._wall_ms(self.arrivals.at_ns(slots)), -1)


@final
@dataclass(frozen=True)
class TopicSeries:
    """A topic's PUBLISH events, on its subscriptions' clock.

    Attributes:
        subscription: Any of its subscriptions; those of one topic share its clock and delays.
    """

    subscription: SubscriptionSeries

    @property
    def _at_once(self) -> int:
        return 1 if self.subscription.workload.delay_ms else _PUBLISHED_AT_ONCE

    def count(self, end_slot: int) -> int:
        """Return the number of events before a slot."""
        return -(-end_slot // (2 * self._at_once))

    def cut_into(self, seqs: Int64s) -> list[Events]:
        """Return the events between each two neighbours of the rising `seqs`, each end exclusive."""
        return [self._between(*pair) for pair in zip(seqs[:-1].tolist(), seqs[1:].tolist(), strict=True)]

    def _between(self, first: int, end: int) -> Events:
        entries = np.arange(first, end) * self._at_once
        series = self.subscription
        at_ns = series.arrivals.at_ns(2 * entries)
        block = series.workload.block
        is_delayed = bool(series.workload.delay_ms)
        due = series.delivered_at_ms(entries // block, entries % block) if is_delayed else np.full(len(entries), -1)
        kinds = np.full(len(entries), EventKind.PUBLISH)
        return columns_of(wall_ms(at_ns, series.outages_ns), kinds, entries, np.full(len(entries), self._at_once), due)


def _same(value: Int64s | int, runs: _EntryRuns) -> Int64s:
    return np.broadcast_to(np.asarray(value, np.int64), runs.slots.shape)
