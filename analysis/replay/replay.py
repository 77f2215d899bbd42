"""Replay one subscription under a policy, a piece of its trace at a time, an epoch between two persists at a time.

What each event acks first does not depend on the policy and is computed once (`ackstate.analysis.replay.acked`). A
policy says when the cursor is persisted and what of it then is durable; both hold for a whole epoch.
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
    from ackstate.analysis.replay.mark_delete import PlacedRuns
    from ackstate.position import Position


class Piece(NamedTuple):
    """Consecutive events of one subscription in which no process dies or begins, but for the last event.

    Attributes:
        events: They themselves.
        news: What they ack first.
        new_counts: How many entries each event acks first.
        acked: How many entries have been acked before each event and after the last, since the cursor was opened:
            one more number than events.
        placed: What they ack first, by position.
        acked_after: All that is acked after the last event, by ledger: to be read, not changed.
    """

    events: EventChunk
    news: NewlyAckedRuns
    new_counts: Int64s
    acked: Int64s
    placed: PlacedRuns
    acked_after: Mapping[int, BitMap]

    @property
    def new_ts_ms(self) -> Int64s:
        """When something was newly acked."""
        return self.events.ts_ms[self.new_counts > 0]

    def events_until(self, at_ms: Int64s) -> Int64s:
        """Return how many events had happened at the end of some milliseconds."""
        return np.searchsorted(self.events.ts_ms, at_ms, "right")


class Epochs(NamedTuple):
    """Persists of one subscription in order, as parallel arrays: each begins an epoch.

    Attributes:
        at_ms: When; after all that happened in this millisecond.
        undurable: How many acked messages are not durable after it.
        young: Those of them that it held back as young.
        cut_by_ranges: Those that the limit on ranges cut off.
        cut_by_bytes: Those that a limit on bytes cut off.
        cut_by_route: Those that only the narrower limit of the metadata store cut off.
        bytes_written: Size of what it wrote.
        bytes_kept: Size of what a recovery would read after it.
    """

    at_ms: Int64s
    undurable: Int64s
    young: Int64s
    cut_by_ranges: Int64s
    cut_by_bytes: Int64s
    cut_by_route: Int64s
    bytes_written: Int64s
    bytes_kept: Int64s

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Epochs:
        """Build from a row for each persist."""
        columns = np.array(rows, np.int64).reshape(len(rows), len(cls._fields))
        return cls(*columns.T)


class Replay(Protocol):
    """One subscription under one policy."""

    def take(self, piece: Piece, *, until_ms: int) -> Epochs:
        """Take the next events in, and return the persists before a time.

        Args:
            piece: None of its events is later than `until_ms`.
            until_ms: Not below that of the call before; a persist at this very time comes with a later call.
        """
        ...

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        """Open the cursor again after a crash, and return what is acked then, by ledger: the caller's to change."""
        ...

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        """Put the cursor elsewhere, and persist at once what is acked then, as far as the policy can; return how.

        Args:
            acked: All that is acked then, by ledger: to be read, not changed.
            mark_delete: Up to where everything is, included.
            now_ms: Not before any event so far, nor a persist; no tick before it is still to come.

        Returns:
            One row, the state right after the reset, before anything else of its millisecond.
        """
        ...


_RESTARTS = (EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER)
_OPENINGS = (EventKind.RECOVER, EventKind.RESET)


def is_restart(part: EventChunk) -> bool:
    """Whether a part made by `pieces` describes how a cursor restarted, after a crash or a reset."""
    return len(part.kind) > 0 and part.kind[0] in _RESTARTS


def is_same_restart(before: EventChunk, after: EventChunk) -> Bools:
    """Return for each pair of consecutive events whether both describe one restart.

    One restart is described within one millisecond: first by its openings, events that are all RECOVER or all RESET and
    all have entries, or by one without entries; then by its REDELIVER events. Any other opening is another restart.

    Args:
        before: The first event of each pair.
        after: The second one.
    """
    continues: Bools = (after.kind == EventKind.REDELIVER) & before.is_any_of(_RESTARTS)
    continues |= after.is_any_of(_OPENINGS) & (after.kind == before.kind) & (before.first_entry >= 0)
    continues &= (before.ts_ms == after.ts_ms) & ((after.first_entry >= 0) | (after.kind == EventKind.REDELIVER))
    return continues


def pieces(chunk: EventChunk) -> list[EventChunk]:
    """Cut a chunk after each crash, and before and after the events that describe one restart.

    A part may be empty of acks, never of events.
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
