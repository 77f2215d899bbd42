"""Sorts events of many subscriptions into the chunks of each, and checks them against earlier events."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.trace.bad_rows import SAMPLES_MAX, BadRows, Wrong
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind
from ackstate.analysis.trace.order import EventOrder, SeqOrder
from ackstate.analysis.trace.published import PublishedEntries
from ackstate.analysis.trace.rows import Events, TraceRows, count_wrong

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.trace.chunk_writer import ChunkWriter
    from ackstate.analysis.trace.rows import Int64s

# At 72 bytes each, about 300 MB; if there are too many subscriptions for whole chunks, chunks are cut short.
WAITING_MAX = 1 << 22


@final
class _PendingEvents:
    """The waiting events of one subscription, and the state of its earlier ones."""

    def __init__(self) -> None:
        self.waiting: list[Int64s] = []
        self.count = 0
        self.seqs = SeqOrder()
        self.order = EventOrder()


@final
class EventSorter:
    """Gathers rows by subscription and writes them chunk by chunk.

    Memory: `WAITING_MAX` rows; for each subscription about a kilobyte; a bitmap of the published and the acked entries
    of each topic.

    Args:
        writer: Receives the chunks.
        bad_rows: Receives the rows that contradict earlier ones; they are skipped.
        place: Returns the place of a row, by the number of its source and its own.
    """

    def __init__(self, writer: ChunkWriter, bad_rows: BadRows, place: Callable[[int, int], str]) -> None:
        self._writer = writer
        self._bad_rows = bad_rows
        self._place = place
        self._subscriptions: dict[tuple[str, str], _PendingEvents] = {}
        self._published = PublishedEntries()
        self._waiting = 0

    def add(self, rows: TraceRows, *, source: int) -> None:
        """Add the next rows of a source."""
        if not len(rows.key):
            return
        values = np.column_stack((rows.values, np.full(len(rows.values), source)))
        order = np.argsort(rows.key, kind="stable")
        values, ends = values[order], np.cumsum(np.bincount(rows.key, minlength=len(rows.keys)))
        for key, begin, end in zip(rows.keys, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            subscription = self._subscriptions.get(key)
            if subscription is None:
                subscription = self._subscriptions[key] = _PendingEvents()
            # A copy, because a view would keep the whole batch in memory.
            subscription.waiting.append(values[begin:end].copy())
            subscription.count += end - begin
            if subscription.count >= CHUNK_EVENTS:
                self._settle_chunks(key, subscription)
        self._waiting += len(values)
        if self._waiting >= WAITING_MAX:
            self._settle_all()

    def finish(self) -> None:
        """Write the waiting rows, and count acks of entries that were never published."""
        self._settle_all()
        for topic, count, sample in self._published.never():
            self._bad_rows.add(Wrong.NEVER_PUBLISHED, count, [f"{sample} of {topic}"])

    def _settle_all(self) -> None:
        for key, subscription in self._subscriptions.items():
            self._settle_chunks(key, subscription, least=1)
        self._waiting = 0

    def _settle_chunks(self, key: tuple[str, str], subscription: _PendingEvents, *, least: int = CHUNK_EVENTS) -> None:
        """Write chunks while there are at least `least` rows."""
        rows = np.concatenate(subscription.waiting) if subscription.waiting else np.zeros((0, 9), np.int64)
        while len(rows) >= least:
            self._settle(key, subscription, rows[:CHUNK_EVENTS])
            rows = rows[CHUNK_EVENTS:]
        subscription.waiting, subscription.count = [rows.copy()] if len(rows) else [], len(rows)

    def _settle(self, key: tuple[str, str], subscription: _PendingEvents, rows: Int64s) -> None:
        """Check rows against earlier ones, and write the valid ones as a chunk."""

        def shown(problem: Wrong, row: int) -> str:
            seq, number, source = rows[row, 6:].tolist()
            what = f"seq {seq}" if problem.name.startswith("SEQ") else EventKind(rows[row, 1]).name.lower()
            return f"{self._place(source, number)} ({what}, {' of '.join(filter(None, reversed(key)))})"

        wrong = subscription.seqs.judge(rows[:, 6])
        gaps = np.flatnonzero(wrong.pop(Wrong.SEQ_GAP))
        if len(gaps):
            samples = [shown(Wrong.SEQ_GAP, row) for row in gaps[:SAMPLES_MAX].tolist()]
            self._bad_rows.add(Wrong.SEQ_GAP, len(gaps), samples)
        rows = rows[~count_wrong(wrong, self._bad_rows, shown)]
        rows = rows[~count_wrong(
            {Wrong.TIME_BACK: subscription.order.judge_times(rows[:, 0])}, self._bad_rows, shown
        )]  # fmt: skip
        lives = subscription.order.judge_lives(_events(rows))
        rows = rows[~count_wrong({Wrong.TWO_CURSORS: lives}, self._bad_rows, shown)]
        events = _events(rows)
        self._published.follow(key, events)
        self._writer.write(key, events)


def _events(rows: Int64s) -> Events:
    return Events(*(np.ascontiguousarray(column) for column in rows.T[:6]))
