"""Timed events of a generated broker: persists at an interval, and occasional deaths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.generate.clock import NS_PER_MS, Int64s, scattered

BEGIN_MS = 1_700_000_000_000
RECOVERY_MS = 2_000
# A crash falls between two milliseconds, so that no other event has its time.
_OFF_NS = NS_PER_MS // 2


@dataclass(frozen=True, slots=True)
class Flushes:
    """Persists at a fixed interval, the first one after one interval; each has a begin and an end.

    Attributes:
        interval_ms: At least 1.
    """

    interval_ms: int

    @property
    def length_ms(self) -> int:
        """The duration of a persist: a hundredth of the interval, at most 5 ms."""
        return min(5, self.interval_ms // 100)

    def before(self, at_ns: Int64s) -> Int64s:
        """Return the number of begins and ends up to each time, inclusive."""
        at_ms = at_ns // NS_PER_MS
        ended = np.maximum(at_ms - self.length_ms, 0) // self.interval_ms
        return np.asarray(at_ms // self.interval_ms + ended, np.int64)

    def between(self, first: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return times, kinds and persists' numbers of the begins and ends numbered from `first` to `end`, excluded."""
        indexes = np.arange(first, end)
        number, is_end = indexes // 2 + 1, indexes % 2
        at_ns = (number * self.interval_ms + is_end * self.length_ms) * NS_PER_MS
        return at_ns, np.where(is_end, EventKind.PERSIST_ENDED, EventKind.PERSIST_BEGUN), number


@dataclass(frozen=True, slots=True)
class Outage:
    """The broker's death, the same instant for all of its subscriptions.

    Attributes:
        at_ns: The time of death, on the clock of `Arrivals`, which stops until the recovery.
        begun_ns: When the last persist began that was complete then.
    """

    at_ns: int
    begun_ns: int


def wall_ms(at_ns: Int64s, outages_ns: Int64s) -> Int64s:
    """Return ms since the epoch; each outage up to then, inclusive, takes `RECOVERY_MS`."""
    passed = np.searchsorted(outages_ns, at_ns, side="right") if len(outages_ns) else 0
    return np.asarray(BEGIN_MS + at_ns // NS_PER_MS + RECOVERY_MS * passed, np.int64)


def outages(flushes: Flushes, count: int, *, end_ns: int, key: int) -> list[Outage]:
    """Spread outages over the time up to `end_ns`, each at a seeded moment between two persists of its own.

    Raises:
        ValueError: There are more than flush intervals.
    """
    interval_ns = flushes.interval_ms * NS_PER_MS
    persists = end_ns // interval_ns - 1
    if count > persists:
        raise ValueError(
            f"{count} crashes do not fit: the trace is too short for one in each flush interval of "
            f"{flushes.interval_ms} ms"
        )
    persist = 1 + (2 * np.arange(count) + 1) * persists // max(2 * count, 1)
    free_ms = flushes.interval_ms - flushes.length_ms
    late_ms = flushes.length_ms + (scattered(key, persist) % np.uint64(free_ms)).astype(np.int64)
    begun_ns, late_ns = persist * interval_ns, late_ms * NS_PER_MS + _OFF_NS
    return [Outage(begun + late, begun) for begun, late in zip(begun_ns.tolist(), late_ns.tolist(), strict=True)]
