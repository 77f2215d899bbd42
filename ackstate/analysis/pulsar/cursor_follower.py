"""Turns the polls of one cursor into events of a trace, at the time of the poll that first shows them.

A poll has the acks in the broker's memory and, read a moment later, the durable state. After the events of a poll, the
acked entries of the trace that are not durable are those of the poll.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from pyroaring import BitMap

from ackstate.analysis.pulsar.redelivery import acked_in
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.pulsar.redelivery import Acks

Entries = dict[int, BitMap]
"""Entries by ledger."""


class CursorPoll(NamedTuple):
    """A cursor at one moment."""

    ts_ms: int
    counts: Mapping[int, int]  # entries of each existing ledger of the topic
    acked: Entries  # existing entries that are acked in the broker's memory
    durable: Entries  # existing entries that are durable, read after these
    version: tuple[int, ...]  # of the durable state
    cursor_ledger: int = -1  # that the broker writes to; -1 if it has not written since the topic was loaded
    published: int = 0  # entries since the topic was loaded
    is_after_failure: bool = False  # the attempt to poll before this one failed


@final
class CursorFollower:
    """Follows one cursor, poll by poll.

    Args:
        acked: The entries that the trace has as acked.
        is_new: Whether the trace has no event of the cursor.
    """

    def __init__(self, acked: Mapping[int, BitMap] | None = None, *, is_new: bool = True) -> None:
        self._acked: Entries = dict(acked or {})
        self._undurable: Entries = {}  # of these
        self._read: Entries = {}  # as durable, at the last poll
        self._is_new = is_new
        self._before: CursorPoll | None = None
        self._persists = 0

    def follow(self, poll: CursorPoll) -> list[Event]:
        """Return the events since the last poll, in order.

        Complexity: O(size of the bitmaps).
        """
        # An entry that has become durable since the last poll is acked. But the record of a seek still has the acks
        # that the seek takes back: they are durable, and not acked.
        acked = union(poll.acked, minus(poll.durable, self._read))
        self._read = poll.durable
        poll = poll._replace(acked=acked, durable=minus(poll.durable, minus(poll.durable, acked)))
        before, self._before = self._before, poll
        # Entries of ledgers that no longer exist cannot be redelivered.
        self._acked, self._undurable = (
            {each: bitmap for each, bitmap in entries.items() if each in poll.counts}
            for entries in (self._acked, self._undurable)
        )
        events = [*(self._opened(poll) if before is None else self._continued(before, poll))]
        self._acked, self._undurable = poll.acked, minus(poll.acked, poll.durable)
        return events

    def ended(self, now_ms: int) -> list[Event]:
        """Return the events of a cursor that is gone: nothing is acked. `follow` must not be called again."""
        if not self._acked and self._before is None:
            return []
        return [Event(now_ms, EventKind.RESET), *_named(now_ms, EventKind.REDELIVER, self._acked)]

    def _opened(self, poll: CursorPoll) -> Iterator[Event]:
        """Yield the state at the first poll, which is not of the traffic: what is durable was acked before."""
        found, gone = minus(poll.durable, self._acked), minus(self._acked, poll.durable)
        opening = EventKind.RECOVER if self._is_new else EventKind.RESET
        yield from _named(poll.ts_ms, opening, found)
        if not found and self._acked:
            yield Event(poll.ts_ms, opening)
        yield from _named(poll.ts_ms, EventKind.REDELIVER, gone)
        yield from _named(poll.ts_ms, EventKind.ACK, minus(poll.acked, poll.durable))

    def _continued(self, before: CursorPoll, poll: CursorPoll) -> Iterator[Event]:
        is_written = poll.version != before.version
        gone, lost = minus(self._acked, poll.acked), minus(self._acked, poll.durable)
        # A cursor ledger that is not the last is of another load, or its successor.
        may_be_loaded = poll.is_after_failure or -1 < before.cursor_ledger != poll.cursor_ledger
        if not is_loaded_again(before, poll):
            lost = gone if may_be_loaded else {}
        if lost:
            if lost != self._undurable:
                yield from self._persist(poll.ts_ms, lost)
            is_written = False
            yield Event(poll.ts_ms, EventKind.CRASH)
            yield Event(poll.ts_ms, EventKind.RECOVER)
        elif gone:
            lost = gone
            yield Event(poll.ts_ms, EventKind.RESET)
        if lost:
            yield from _named(poll.ts_ms, EventKind.REDELIVER, lost)
            self._acked, self._undurable = minus(self._acked, lost), {}
        yield from self._new(poll, is_written=is_written)

    def _new(self, poll: CursorPoll, *, is_written: bool) -> Iterator[Event]:
        new, excluded = minus(poll.acked, self._acked), minus(self._acked, poll.durable)
        later = minus(new, poll.durable)
        durable = minus(new, later)
        yield from _named(poll.ts_ms, EventKind.ACK, durable)
        if is_written or durable or excluded != self._undurable:
            yield from self._persist(poll.ts_ms, excluded)
        yield from _named(poll.ts_ms, EventKind.ACK, later)

    def _persist(self, ts_ms: int, excluded: Entries) -> Iterator[Event]:
        """Yield that all acks so far are durable, except some."""
        self._persists += 1
        displaced = minus(excluded, self._undurable)
        yield Event(ts_ms, EventKind.PERSIST_BEGUN, number=self._persists)
        yield from _named(ts_ms, EventKind.CUT_OFF, minus(excluded, displaced))
        yield from _named(ts_ms, EventKind.DISPLACED, displaced)
        yield Event(ts_ms, EventKind.PERSIST_ENDED, number=self._persists)


def is_loaded_again(before: CursorPoll, poll: CursorPoll) -> bool:
    """Return whether the topic was certainly loaded again between two polls."""
    return poll.published < before.published or before.cursor_ledger >= 0 > poll.cursor_ledger


def existing_entries(counts: Mapping[int, int], acks: Acks) -> Entries:
    """Return the acked entries that existing ledgers have."""
    found = {ledger_id: acked_in(acks, ledger_id, count) for ledger_id, count in counts.items()}
    for ledger_id, bitmap in found.items():
        bitmap.remove_range(counts[ledger_id], 1 << 32)
    return {ledger_id: bitmap for ledger_id, bitmap in found.items() if bitmap}


def union(these: Mapping[int, BitMap], those: Mapping[int, BitMap]) -> Entries:
    """Return the entries of two sets."""
    return {each: these.get(each, BitMap()) | those.get(each, BitMap()) for each in {*these, *those}}


def minus(these: Mapping[int, BitMap], those: Mapping[int, BitMap]) -> Entries:
    """Return the entries of one set that another one lacks."""
    left = {ledger_id: bitmap - those.get(ledger_id, BitMap()) for ledger_id, bitmap in these.items()}
    return {ledger_id: bitmap for ledger_id, bitmap in left.items() if bitmap}


def _named(ts_ms: int, kind: EventKind, entries: Mapping[int, BitMap]) -> Iterator[Event]:
    """Yield an event for each run, in order."""
    for ledger_id in sorted(entries):
        firsts, lasts = runs_of(entries[ledger_id])
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            yield Event(ts_ms, kind, ledger_id, first, last)
