"""Replay one subscription under a policy, a piece of its trace at a time, an epoch between two persists at a time.

What each event acks first does not depend on the policy and is computed once (`analysis.redelivery.acked`). A policy
says when the cursor is persisted and what of it then is durable; both hold for a whole epoch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyroaring import BitMap

    from analysis.redelivery.acked import Chunk, Int64s, NewRuns
    from analysis.redelivery.mark_delete import PlacedRuns


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

    events: Chunk
    news: NewRuns
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

    def reset(self, acked: Mapping[int, BitMap], *, now_ms: int) -> None:
        """Put the cursor elsewhere: what is acked then is durable at once, and nothing else is acked.

        Args:
            acked: What is, by ledger: to be read, not changed.
            now_ms: Not before any event so far, nor a persist; no tick before it is still to come.
        """
        ...


_RESTARTS = (EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER)


def is_restart(part: Chunk) -> bool:
    """Whether a part that `pieces` made says how a cursor began anew, after a crash or a reset."""
    return len(part.kind) > 0 and part.kind[0] in _RESTARTS


def pieces(chunk: Chunk) -> list[Chunk]:
    """Cut a chunk after each crash, and before and after what says how the cursor began anew.

    A part may be empty of acks, never of events.
    """
    cuts = {0, len(chunk.ts_ms)}
    cuts.update((np.flatnonzero(chunk.kind == EventKind.CRASH) + 1).tolist())
    begins_anew = chunk.is_any_of(_RESTARTS)
    cuts.update((np.flatnonzero(begins_anew[1:] != begins_anew[:-1]) + 1).tolist())
    bounds = sorted(cuts)
    if len(bounds) == 2:
        return [chunk]
    return [chunk.part(begin, end) for begin, end in itertools.pairwise(bounds)]
