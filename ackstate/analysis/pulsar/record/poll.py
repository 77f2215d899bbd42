"""One poll of a cursor: its acks in memory, and the state of its ledger as the broker reports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pyroaring import BitMap

from ackstate.analysis.pulsar.snapshot.internal_stats import acked
from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.pulsar.snapshot.internal_stats import CursorInternals
    from ackstate.position import Position

_OPEN, _NO_LEDGER = "Open", "NoLedger"
Entries = dict[int, BitMap]
"""Entries by ledger."""


@dataclass(frozen=True, slots=True)
class CursorPoll:
    """One cursor at one poll.

    Attributes:
        asked_ms: Time before the request, in ms since 1970.
        answered_ms: Time after the answer. The broker read its memory at some moment between the two.
        counts: Entries of each existing ledger of the topic.
        mark_delete: Every entry up to it, inclusive, is acked.
        deleted: The entries acked above it. Must not be changed.
        state: Pulsar's name of the cursor's state.
        cursor_ledger: The ledger that it writes to; -1 if it has not written since it was loaded.
        last_entry: The last entry there that was certainly written.
        load: Identifies the load of the topic: it differs after a reload. None if unknown.
        is_mark_delete_loaded: Whether the mark-delete certainly has not moved since the topic was loaded.
        is_after_failure: Whether the attempt to poll before this one failed.
        is_all_durable: Whether the broker itself reports that all acks are durable; one of Pulsar does not.
    """

    asked_ms: int
    answered_ms: int
    counts: Mapping[int, int]
    mark_delete: Position
    deleted: DeletedRanges = field(default_factory=DeletedRanges)
    state: str = _OPEN
    cursor_ledger: int = -1
    last_entry: int = -1
    load: tuple[str, int] | None = None
    is_mark_delete_loaded: bool = False
    is_after_failure: bool = False
    is_all_durable: bool = False

    @property
    def has_written(self) -> bool:
        """Whether the last record was written to the cursor ledger."""
        return self.state == _OPEN and self.last_entry >= 0

    @property
    def is_unwritten(self) -> bool:
        """Whether no record was written to a cursor ledger since the topic was loaded."""
        return self.state == _NO_LEDGER and self.cursor_ledger < 0

    def acked_entries(self) -> Entries:
        """Return all acked entries of the existing ledgers."""
        found: Entries = {}
        for ledger_id, count in self.counts.items():
            if ledger_id <= self.mark_delete.ledger_id:
                last = count if ledger_id < self.mark_delete.ledger_id else min(self.mark_delete.entry_id + 1, count)
                found[ledger_id] = BitMap(range(last))
        for ledger_id, bitmap in self.deleted.bitmaps():
            if ledger_id in self.counts:
                found[ledger_id] = found.get(ledger_id, BitMap()) | bitmap
        return {ledger_id: bitmap for ledger_id, bitmap in found.items() if bitmap}

    def deleted_entries(self) -> Entries:
        """Return the acked entries above the mark-delete in existing ledgers."""
        return {ledger_id: bitmap.copy() for ledger_id, bitmap in self.deleted.bitmaps() if ledger_id in self.counts}


class TopicPoll(NamedTuple):
    """The fields that all cursors of a topic share at one poll, as in `CursorPoll`."""

    asked_ms: int
    answered_ms: int
    counts: Mapping[int, int]
    load: tuple[str, int] | None = None
    is_after_failure: bool = False


def cursor_poll(
    cursor: CursorInternals, topic: TopicPoll, *, what: str, is_mark_delete_loaded: bool = False
) -> CursorPoll:
    """Return a poll from a broker's answer.

    Raises:
        SnapshotError: The mark-delete position or the ranges are not as Pulsar writes them.
    """
    mark_delete, deleted = acked(cursor, topic.counts, what=what)
    reported = cursor.redelivery_if_crashed
    return CursorPoll(
        topic.asked_ms, topic.answered_ms, topic.counts, mark_delete, deleted,
        state=cursor.state, cursor_ledger=cursor.cursor_ledger, last_entry=cursor.cursor_ledger_last_entry,
        load=topic.load, is_mark_delete_loaded=is_mark_delete_loaded,
        is_after_failure=topic.is_after_failure,
        is_all_durable=reported is not None and not reported.entries and not reported.batches,
    )  # fmt: skip


def minus(these: Mapping[int, BitMap], those: Mapping[int, BitMap]) -> Entries:
    """Return the entries of one set that another one lacks."""
    left = {ledger_id: bitmap - those.get(ledger_id, BitMap()) for ledger_id, bitmap in these.items()}
    return {ledger_id: bitmap for ledger_id, bitmap in left.items() if bitmap}


def runs(entries: Mapping[int, BitMap]) -> Iterator[tuple[int, int, int]]:
    """Yield ledger, first and last entry of each run, in order."""
    for ledger_id in sorted(entries):
        firsts, lasts = runs_of(entries[ledger_id])
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            yield ledger_id, first, last
