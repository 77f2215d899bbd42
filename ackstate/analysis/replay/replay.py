"""Replays one subscription under a policy, a piece of its trace at a time, an epoch between two persists at a time.

The entries that each event acks first do not depend on the policy and are computed once
(`ackstate.analysis.replay.acked`). A policy decides when the cursor is persisted and which acks are then durable; both
hold for a whole epoch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.analysis.replay.acked import Bools, EventChunk, Int64s, NewlyAckedRuns
    from ackstate.position import Position


class Piece(NamedTuple):
    """Consecutive events of one subscription; only the last may be the death or the start of a process.

    Attributes:
        events: The events.
        news: The entries that they ack first.
        new_counts: The number of entries that each event acks first.
        acked: The number of entries acked before each event and after the last one, since the cursor was opened: one
            more number than events.
    """

    events: EventChunk
    news: NewlyAckedRuns
    new_counts: Int64s
    acked: Int64s

    def events_until(self, at_ms: Int64s) -> Int64s:
        """Return the number of events up to the end of some milliseconds."""
        return np.searchsorted(self.events.ts_ms, at_ms, "right")


class Epochs(NamedTuple):
    """Persists of one subscription in order, as parallel arrays: each starts an epoch.

    Attributes:
        at_ms: The time of the persist; it comes after all events of this millisecond.
        unpersisted: The number of acked messages that are not durable after it.
        young: Those of them that it held back as young.
        cut_by_ranges: Those that the range limit cut off.
        cut_by_bytes: Those that a byte limit cut off.
        cut_by_route: Those that only the narrower limit of the metadata store cut off.
        bytes_written: The bytes that it wrote.
        bytes_kept: The bytes that a recovery would read after it.
    """

    at_ms: Int64s
    unpersisted: Int64s
    young: Int64s
    cut_by_ranges: Int64s
    cut_by_bytes: Int64s
    cut_by_route: Int64s
    bytes_written: Int64s
    bytes_kept: Int64s

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Epochs:
        """Return the epochs of a row for each persist."""
        columns = np.array(rows, np.int64).reshape(len(rows), len(cls._fields))
        return cls(*columns.T)


class Replay(Protocol):
    """One subscription under one policy."""

    def take(self, piece: Piece, *, until_ms: int) -> Epochs:
        """Replay the next events, and return the persists before a time.

        Args:
            piece: None of its events is later than `until_ms`.
            until_ms: Not below that of the call before; a persist at exactly this time is returned by a later call.
        """
        ...

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        """Reopen the cursor after a crash, and return its acks by ledger; the caller owns them."""
        ...

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        """Reset the cursor, and persist its new acks at once, as far as the policy can; return the persist.

        Args:
            acked: All entries acked then, by ledger; not changed.
            mark_delete: The new mark-delete position, inclusive.
            now_ms: Not before any event or persist so far; all ticks before it must be done.

        Returns:
            One row: the state right after the reset, before other events of its millisecond.
        """
        ...


_RESTARTS = (EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER)
_OPENINGS = (EventKind.RECOVER, EventKind.RESET)


def is_restart(part: EventChunk) -> bool:
    """Whether a part from `pieces` describes a restart of a cursor, after a crash or a reset."""
    return len(part.kind) > 0 and part.kind[0] in _RESTARTS


def is_same_restart(before: EventChunk, after: EventChunk) -> Bools:
    """Return for each pair of consecutive events whether both describe one restart.

    One restart is described within one millisecond: first by its openings, events that are all RECOVER or all RESET and
    all have entries, or by one opening without entries; then by its REDELIVER events. Any other opening is another
    restart.
    """
    continues: Bools = (after.kind == EventKind.REDELIVER) & before.is_any_of(_RESTARTS)
    continues |= after.is_any_of(_OPENINGS) & (after.kind == before.kind) & (before.first_entry >= 0)
    continues &= (before.ts_ms == after.ts_ms) & ((after.first_entry >= 0) | (after.kind == EventKind.REDELIVER))
    return continues


def pieces(chunk: EventChunk) -> list[EventChunk]:
    """Cut a chunk after each crash, and before and after the events that describe one restart.

    A part may have no acks, but always has events.
    """
    cuts = {0, len(chunk.ts_ms)}
    cuts.update((np.flatnonzero(chunk.kind == EventKind.CRASH) + 1).tolist())
    restarts = chunk.is_any_of(_RESTARTS)
    if restarts.any():
        continues = is_same_restart(chunk.part(0, -1), chunk.part(1, len(restarts)))
        cuts.update((np.flatnonzero((restarts[1:] | restarts[:-1]) & ~continues) + 1).tolist())
    bounds = sorted(cuts)
    if len(bounds) == 2:
        return [chunk]
    return [chunk.part(begin, end) for begin, end in itertools.pairwise(bounds)]
