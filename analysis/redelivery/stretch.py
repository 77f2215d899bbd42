"""What goes out and what is acked, one after another, where nothing is held up, and what a gate counts after each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from ackstate.analysis.redelivery.acked import Chunk, NewRuns
from ackstate.analysis.redelivery.mentions import are_among, earlier
from ackstate.analysis.redelivery.record_bytes import isolated_bytes
from ackstate.analysis.redelivery.record_growth import record_growth
from ackstate.analysis.redelivery.waiting_line import entries_by_ledger
from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from pyroaring import BitMap

    from ackstate.analysis.redelivery.acked import Bools, Int64s
    from ackstate.analysis.redelivery.mentions import Mentions
    from ackstate.analysis.redelivery.on_their_way import OnTheirWay
    from ackstate.analysis.redelivery.waiting_line import Times
    from ackstate.cursor.managed import ManagedCursor


class Steps(NamedTuple):
    """Deliveries and acks in order, as parallel arrays.

    Attributes:
        ts_ms: When.
        mention: Which mention says so; -1 for an ack that has moved.
        is_ack: Whether it is an ack.
        ledger_id: Of the message.
        entry_id: The same.
    """

    ts_ms: Int64s
    mention: Int64s
    is_ack: Bools
    ledger_id: Int64s
    entry_id: Int64s

    @classmethod
    def of(cls, mentions: Mentions, *, sent: Int64s, acked: Int64s, moved: Times, under_way: int) -> Self:
        """Bring them in order.

        Args:
            mentions: What the recording says.
            sent: Which mentions deliver their message.
            acked: Which mentions ack theirs.
            moved: Acks of other times, in order: they come before what is mentioned in their millisecond.
            under_way: The mentions before this one are of an event of which others have happened, and come first.
        """
        mention = np.concatenate((np.full(len(moved.ts_ms), -1), sent, acked))
        is_ack = np.ones(len(mention), np.bool_)
        is_ack[len(moved.ts_ms) : len(moved.ts_ms) + len(sent)] = False
        named = mentions.times(mention[len(moved.ts_ms) :])
        ts_ms, ledger_id, entry_id = (np.concatenate(each) for each in zip(moved, named, strict=True))
        is_later = (mention < 0) | (mention >= under_way)
        order = np.lexsort((is_ack, mention, is_later, ts_ms))
        return cls(ts_ms, mention, is_ack, ledger_id, entry_id).those(order)

    def those(self, which: slice | Int64s | Bools) -> Self:
        """Return some of them."""
        ts_ms, mention, is_ack = self.ts_ms[which], self.mention[which], self.is_ack[which]
        return type(self)(ts_ms, mention, is_ack, self.ledger_id[which], self.entry_id[which])


class Stretch(NamedTuple):
    """What really happens of some steps, and what a gate counts.

    Attributes:
        steps: They, but for acks of what is not on its way.
        reserved_bytes: What is reserved after each for the acks of what is on its way.
        used_bytes: That, and the size of what is acked and not durable; -1 from an ack on with which the mark-delete
            position leaves a ledger.
    """

    steps: Steps
    reserved_bytes: Int64s
    used_bytes: Int64s

    @classmethod
    def of(cls, steps: Steps, cursor: ManagedCursor, on_their_way: OnTheirWay) -> Self:
        """Return what happens to a cursor and the messages that are on their way."""
        named_at, acked_at = earlier(steps.ledger_id, steps.entry_id, steps.is_ack)
        is_sent = are_among(on_their_way, steps.ledger_id, steps.entry_id) | ~steps.is_ack[named_at]
        happens = ~steps.is_ack | (is_sent & (acked_at < 0))
        if not happens.all():
            steps = steps.those(happens)
        acks = np.flatnonzero(steps.is_ack)
        costs = isolated_bytes(steps.ledger_id, steps.entry_id)
        reserved = np.cumsum(np.where(steps.is_ack, -costs, costs)) + on_their_way.reserved_bytes
        growth = record_growth(cursor, steps.ledger_id[acks], steps.entry_id[acks])
        unpersisted = np.zeros(len(costs), np.int64)
        unpersisted[acks[: len(growth)]] = growth
        used = reserved + np.cumsum(unpersisted) + cursor.unpersisted_record_bytes
        if len(growth) < len(acks):
            used[acks[len(growth)] :] = -1
        return cls(steps, reserved, used)

    def mentioned_before(self, at: int, mentions: Mentions, under_way: int) -> int:
        """Return which mention is the first that does not come before one of them."""
        if self.steps.mention[at] >= 0:
            return int(self.steps.mention[at])
        return max(under_way, int(np.searchsorted(mentions.ts_ms, self.steps.ts_ms[at])))

    def come_after(self, at: int, acks: Times, under_way: int) -> Bools:
        """Return which of moved acks one of them comes after."""
        ts_ms = int(self.steps.ts_ms[at])
        if self.steps.mention[at] >= 0:
            return acks.ts_ms < ts_ms + int(self.steps.mention[at] >= under_way)
        ledger_id, entry_id = self.steps.ledger_id[at], self.steps.entry_id[at]
        is_below = (acks.ledger_id < ledger_id) | ((acks.ledger_id == ledger_id) & (acks.entry_id < entry_id))
        before: Bools = (acks.ts_ms < ts_ms) | ((acks.ts_ms == ts_ms) & is_below)
        return before

    def until(self, end: int) -> Self:
        """Return the first so many."""
        return type(self)(self.steps.those(slice(end)), self.reserved_bytes[:end], self.used_bytes[:end])

    def events(self) -> Chunk:
        """Return them as events."""
        kind = np.where(self.steps.is_ack, int(EventKind.ACK), int(EventKind.DELIVER))
        return Chunk(self.steps.ts_ms, kind, self.steps.ledger_id, self.steps.entry_id, self.steps.entry_id)

    def acked(self) -> NewRuns:
        """Return what each event acks."""
        acks = np.flatnonzero(self.steps.is_ack)
        return NewRuns(acks, self.steps.ledger_id[acks], self.steps.entry_id[acks], self.steps.entry_id[acks] + 1)

    def sent(self) -> dict[int, BitMap]:
        """Return the messages that go out, by ledger."""
        return entries_by_ledger(self.steps.ledger_id[~self.steps.is_ack], self.steps.entry_id[~self.steps.is_ack])
