"""The workload: events of one topic and its one subscription, and the moments at which a process may die."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.analysis.trace import generate
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Frame
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from ackstate.analysis.trace.chunks import Events

SUBSCRIPTION = "calibrated"
_EVENTS = 3_000
_MESSAGES_PER_SECOND = 400.0
_LEDGER_FIRST = 1
# Of the generator's, which are too long for a trace of seconds to reach the next one.
ENTRIES_PER_LEDGER = 200
_PLAYED = (EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK)


class CalibrationError(AckStateError):
    """A process that was to be killed ended by itself, or did not follow its instructions."""


class Instant(NamedTuple):
    """A point in the life of a process.

    Attributes:
        played: How many of the workload's events have happened.
        until_ms: The broker has ticked before this time, which is excluded.
    """

    played: int
    until_ms: int


@final
class CalibrationWorkload:
    """Events in order, with each message published before the subscription uses it.

    Args:
        topic: Its name.
        events: Events of the kinds PUBLISH, DELIVER, ACK, with times that never fall, from a PUBLISH on. A DELIVER
            without entries is an attempt to send that a limit refused: it is played and not in the trace.
    """

    def __init__(self, topic: str, events: Sequence[Event]) -> None:
        self.topic = topic
        self.events = tuple(events)
        self.begin_ms = self.events[0].ts_ms
        self.end_ms = self.events[-1].ts_ms
        self._ts_ms = [event.ts_ms for event in self.events]

    @cached_property
    def own(self) -> tuple[Event, ...]:
        """The subscription's part of the trace."""
        return tuple(event for event in self.events if _is_own(event))

    @cached_property
    def _own_counts(self) -> list[int]:
        counts = np.cumsum([0, *map(_is_own, self.events)])
        return list(map(int, counts))

    def own_count(self, instant: Instant) -> int:
        """Return how many events of `own` have happened."""
        return self._own_counts[instant.played]

    @cached_property
    def log(self) -> dict[int, int]:
        """Ledger id -> entry count at the end."""
        return self.log_at(Instant(len(self.events), self.end_ms + 1))

    def log_at(self, instant: Instant) -> dict[int, int]:
        """Return ledger id -> entry count, rising, as far as was published."""
        log: dict[int, int] = {}
        for event in self.events[: instant.played]:
            if event.kind is EventKind.PUBLISH:
                log[event.ledger_id] = event.last_entry + 1
        return log

    def acked_at(self, instant: Instant) -> set[tuple[int, int]]:
        """Return the entries acked until then."""
        return {
            (event.ledger_id, entry)
            for event in self.events[: instant.played]
            if event.kind is EventKind.ACK
            for entry in range(event.first_entry, event.last_entry + 1)
        }

    def frames(self) -> Iterator[Frame]:
        """Yield the trace."""
        published = [event for event in self.events if event.kind is EventKind.PUBLISH]
        yield Frame(self.topic, "", published)
        yield Frame(self.topic, SUBSCRIPTION, list(self.own))

    def end_of(self, now_ms: int) -> Instant:
        """Return the end of a millisecond, after its tick."""
        return Instant(bisect_right(self._ts_ms, now_ms), now_ms + 1)

    def before_tick_at(self, now_ms: int) -> Instant:
        """Return when all of a millisecond has happened but its tick."""
        return Instant(bisect_right(self._ts_ms, now_ms), now_ms)

    def some_moment(self, chance: Random) -> Instant:
        """Return the end of a millisecond, all alike; between the end of the last one and the next nothing happens."""
        return self.end_of(chance.randrange(self.begin_ms, self.end_ms))

    def some_event(self, chance: Random) -> Instant:
        """Return the instant right after an event of the subscription."""
        number = chance.choice([number for number, event in enumerate(self.events) if _is_own(event)])
        return Instant(number + 1, self.events[number].ts_ms)


def made(shape: str, seed: int) -> CalibrationWorkload:
    """Return some seconds of a shape of `ackstate trace generate`, in ledgers of 200 entries.

    Raises:
        ValueError: There is no such shape.
    """
    plan = generate.TracePlan(
        shape, _EVENTS, seed=seed, subscriptions=1, topics=1, messages_per_second=_MESSAGES_PER_SECOND
    )  # fmt: skip
    series = plan.series_of(0, [])
    chunks = (*series.published(_EVENTS), *series.chunks(_EVENTS))
    events = [event for chunk in chunks for event in _events(chunk)]
    events.sort(key=lambda event: event.ts_ms)
    while not _is_own(events[-1]):
        events.pop()
    return CalibrationWorkload(f"persistent://public/default/{shape}-{seed}", events)


def _is_own(event: Event) -> bool:
    return event.kind is not EventKind.PUBLISH and event.ledger_id >= 0


def _events(columns: Events) -> Iterator[Event]:
    """Yield those that can be played, cut where a ledger ends."""
    for ts_ms, kind, ledger_id, first, last, number in zip(*(column.tolist() for column in columns), strict=True):
        if kind not in _PLAYED:
            continue
        base = (ledger_id - 1_000) * generate.ENTRIES_PER_LEDGER
        begin, end = base + first, base + last + 1
        while begin < end:
            ledger, entry = divmod(begin, ENTRIES_PER_LEDGER)
            until = min(end, begin - entry + ENTRIES_PER_LEDGER)
            yield Event(
                ts_ms, EventKind(kind), _LEDGER_FIRST + ledger, entry, entry + until - begin - 1,
                -1 if kind == EventKind.PUBLISH else number,
            )  # fmt: skip
            begin = until
