"""A replay by counting, for policies under which each persist makes all acks durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, final

import numpy as np

from ackstate.analysis.replay.journal_size import JournalSize
from ackstate.analysis.replay.persist_ticks import PersistTicks
from ackstate.analysis.replay.replay import Epochs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyroaring import BitMap

    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.replay.replay import Piece
    from ackstate.position import Position


@final
class PlainReplay:
    """See `ackstate.analysis.replay.replay.Replay`.

    Complexity: O(events log events) in arrays, and a few steps for each persist.

    Args:
        policy: A policy that `persists_everything`.
        opened_ms: When the cursor is opened.
    """

    kind: ClassVar[Literal["counted"]] = "counted"

    def __init__(self, policy: Policy, *, opened_ms: int) -> None:
        self._policy = policy
        self._schedule = PersistTicks(policy, opened_ms=opened_ms)
        self._size = JournalSize(policy.cursor, opened_ms=opened_ms)
        self._acked: Mapping[int, BitMap] = {}

    def take(self, piece: Piece, *, until_ms: int) -> Epochs:
        self._schedule.acked(piece.new_ts_ms)
        at_ms = self._schedule.persist_until(until_ms)
        ends = piece.events_until(at_ms)
        self._acked = piece.acked_after
        written, kept = self._size.take(piece.placed, piece.acked_after, ends=ends, at_ms=at_ms)
        none = np.zeros(len(at_ms), np.int64)
        return Epochs(at_ms, none, none, none, none, none, written, kept)

    def follow(self, acked: Mapping[int, BitMap]) -> None:
        """Set the acks after the last piece."""
        self._acked = acked

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        self._acked = acked
        self._schedule.settled(now_ms)
        self._size.reset(acked, mark_delete, now_ms=now_ms)
        return Epochs.of([(now_ms, *[0] * (len(Epochs._fields) - 1))])

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        durable = {ledger_id: bitmap.copy() for ledger_id, bitmap in self._acked.items()}
        for ledger_id, bitmap in self._size.pending.items():
            durable[ledger_id] -= bitmap
        self._schedule = PersistTicks(self._policy, opened_ms=now_ms)
        self._size.reopened()
        return durable
