"""Notifies listeners of everything that changes a cursor, in the order in which the changes took effect."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, final

from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyroaring import BitMap

    from ackstate.cursor.results import PersistResult
    from ackstate.errors import AckStateError
    from ackstate.position import Position


class Change(Enum):
    """A change of a cursor. The text explains the entries that are reported with it."""

    ACKED = "entries were acked, one by one; they were not before"
    MARK_DELETED = "entries up to a position were acked; some may have been before"
    PERSIST_BEGUN = "a persist was planned: it covers every ack until now, except those of the next two changes"
    HELD_BACK = "entries that it excludes as young"
    CUT_OFF = "entries that it excludes because of a limit, and that were not durable"
    DISPLACED = "entries that it excludes because of a limit; they no longer count as durable, even if it fails"
    PERSIST_ENDED = "the acks that it covers are durable"
    PERSIST_FAILED = "it promises nothing"
    RESET = "the cursor was put elsewhere, and that is durable with all that is acked; entries that this acked"
    UNACKED = "entries that a reset gave back"


_WITHOUT_ENTRIES = frozenset((Change.PERSIST_BEGUN, Change.PERSIST_ENDED, Change.PERSIST_FAILED, Change.RESET))


class CursorListener:
    """Receives every change of one cursor. Override the methods that you need; the others do nothing.

    All but `persisted` are called with the cursor's lock held: be quick, raise nothing, take no other lock. Changes of
    one call took effect at once.
    """

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Called after each change.

        Args:
            change: The kind of change.
            runs: The entries, as (ledger id, first, last), `last` included.
            now_ms: The present of the call that made the change.
        """

    def delivered(self, consumer: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Called with the entries that a subscription sent to a consumer; the runs are as in `changed`."""

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Called with the outcome after each persist, without locks held; not after a reset or a close."""

    def record_bytes_max(self) -> int | None:
        """Return the most that the cursor's `unpersisted_record_bytes` may be after a persist; None for no limit."""
        return None


@final
class Listeners:
    """The listeners of one cursor, at most one of each class. Listeners that do not override a method cost nothing."""

    def __init__(self) -> None:
        self.all: tuple[CursorListener, ...] = ()
        self.of_changes: tuple[CursorListener, ...] = ()  # those that receive changes
        self.of_deliveries: tuple[CursorListener, ...] = ()
        self._of_bounds: tuple[CursorListener, ...] = ()

    def add(self, listener: CursorListener) -> None:
        """Register a listener, no-op if it is registered; ValueError if another one of its class is."""
        if listener in self.all:
            return
        if any(type(each) is type(listener) for each in self.all):
            raise ValueError(f"a cursor may have one listener of class {type(listener).__name__}, and it has another")
        self._register((*self.all, listener))

    def remove(self, listener: CursorListener) -> None:
        """Remove a listener; no-op if it is not registered."""
        self._register(tuple(each for each in self.all if each is not listener))

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Report a change; acks of no entries are none."""
        for listener in self.of_changes:
            if runs or change in _WITHOUT_ENTRIES:
                listener.changed(change, runs, now_ms=now_ms)

    def delivered(self, consumer: str, positions: Iterable[Position], *, now_ms: int) -> None:
        """Report the entries that were sent to a consumer."""
        runs = [(ledger_id, entry_id, entry_id) for ledger_id, entry_id in positions]
        for listener in self.of_deliveries:
            listener.delivered(consumer, runs, now_ms=now_ms)

    def record_bytes_max(self) -> int | None:
        """Return the lowest of their limits; None without one."""
        lowest = None
        for listener in self._of_bounds:
            limit = listener.record_bytes_max()
            if limit is not None and (lowest is None or limit < lowest):
                lowest = limit
        return lowest

    def _register(self, listeners: tuple[CursorListener, ...]) -> None:
        def overriding(method: Callable[..., object]) -> tuple[CursorListener, ...]:
            name = method.__name__
            return tuple(each for each in listeners if getattr(type(each), name) is not method)

        self.all = listeners
        self.of_changes = overriding(CursorListener.changed)
        self.of_deliveries = overriding(CursorListener.delivered)
        self._of_bounds = overriding(CursorListener.record_bytes_max)


def bitmap_runs(ledger_id: int, entries: BitMap) -> list[tuple[int, int, int]]:
    """Return the runs of some entries of a ledger."""
    firsts, lasts = runs_of(entries)
    return [(ledger_id, *run) for run in zip(firsts.tolist(), lasts.tolist(), strict=True)]
