"""Checks the events of one subscription against earlier ones: `seq`, time, and whether they come from one cursor."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.trace.bad_rows import Wrong
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.rows import NO_SEQ, Events

if TYPE_CHECKING:
    from ackstate.analysis.trace.rows import Int64s, Mask

PERSIST_ENDS = (EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED)
PERSISTS = (EventKind.PERSIST_BEGUN, *PERSIST_ENDS)
LIVES = (EventKind.CRASH, EventKind.RECOVER)
"""The end of a process, and the start of the next one."""
_ACKS = (EventKind.ACK, EventKind.MARK_DELETE)
_SETTLED = (EventKind.PERSIST_ENDED, EventKind.CRASH, EventKind.RECOVER, EventKind.REDELIVER, EventKind.RESET)
ALIVE = (
    EventKind.DELIVER, *_ACKS, *PERSISTS, EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED, EventKind.RESET,
)  # fmt: skip
"""Events that only a live cursor causes."""
_GAPS_MAX = 1_000
_NONE = -1


@final
class SeqOrder:
    """Checks `seq`, which counts a subscription's events without gaps, from any start."""

    def __init__(self) -> None:
        self._highest: int | None = None
        # Missing ranges, [first, end), in order; beyond a fixed number, late rows count as duplicates.
        self._gaps: list[tuple[int, int]] = []

    def judge(self, seq: Int64s) -> dict[Wrong, Mask]:
        """Return which of the next rows are duplicates, late, or follow a gap; only the last kind is valid."""
        wrong = {problem: np.zeros(len(seq), np.bool_) for problem in (Wrong.SEQ_AGAIN, Wrong.SEQ_LATE, Wrong.SEQ_GAP)}
        given = np.flatnonzero(seq != NO_SEQ)
        if not len(given):
            return wrong
        said = seq[given]
        first = int(said[0]) - 1 if self._highest is None else self._highest
        before = np.maximum.accumulate(np.concatenate(([first], said)))[:-1]
        self._highest = max(first, int(said.max()))
        odd = np.flatnonzero(said != before + 1)
        for at in odd.tolist():
            wrong[self._judge_odd(int(said[at]), int(before[at]))][given[at]] = True
        return wrong

    def _judge_odd(self, seq: int, highest: int) -> Wrong:
        if seq > highest:
            if len(self._gaps) < _GAPS_MAX:
                self._gaps.append((highest + 1, seq))
            return Wrong.SEQ_GAP
        at = bisect_right(self._gaps, (seq, 2**63)) - 1
        if at < 0 or not self._gaps[at][0] <= seq < self._gaps[at][1]:
            return Wrong.SEQ_AGAIN
        first, end = self._gaps[at]
        self._gaps[at : at + 1] = [gap for gap in ((first, seq), (seq + 1, end)) if gap[0] < gap[1]]
        return Wrong.SEQ_LATE


@final
class EventOrder:
    """Checks the events of one subscription, or of a topic: times never fall, and only one cursor lives at a time.

    Two cursors under one name are detected by actions impossible for one: it acks, sends or persists after its crash
    and before a recovery; a persist begins while another is in progress, or one ends that did not begin; it is
    recovered while acks are in memory, without a recorded death.
    """

    def __init__(self) -> None:
        self._last_ms = -1
        # The latest relevant event of each kind, in order.
        self._context = Events(*(np.zeros(0, np.int64) for _ in Events._fields))

    def judge_times(self, ts_ms: Int64s) -> Mask:
        """Return which of the next events are earlier than a previous event."""
        highest = np.maximum.accumulate(np.concatenate(([self._last_ms], ts_ms)))
        self._last_ms = int(highest[-1])
        return np.asarray(ts_ms < highest[:-1], np.bool_)

    def judge_lives(self, events: Events) -> Mask:
        """Return which of the next events cannot come from a single cursor."""
        known = len(self._context.kind)
        every = Events(*(np.concatenate(pair) for pair in zip(self._context, events, strict=True)))
        kind, number = every.kind, every.number
        life, persist = _latest_before(kind, LIVES), _latest_before(kind, (*PERSISTS, *LIVES))
        settled = _latest_before(kind, (*_ACKS, *_SETTLED))
        is_dead = _kind_at(kind, life) == EventKind.CRASH
        is_persisting = _kind_at(kind, persist) == EventKind.PERSIST_BEGUN
        begun = np.where(is_persisting, number[persist], _NONE)
        is_other = (begun != _NONE) & (number != _NONE) & (number != begun)
        wrong = is_dead & np.isin(kind, ALIVE)
        wrong |= is_persisting & ((kind == EventKind.PERSIST_BEGUN) | (np.isin(kind, PERSIST_ENDS) & is_other))
        wrong |= (kind == EventKind.RECOVER) & np.isin(_kind_at(kind, settled), _ACKS)
        latest = [np.flatnonzero(np.isin(kind, group))[-1:] for group in (
            LIVES, (*PERSISTS, *LIVES), (*_ACKS, *_SETTLED)
        )]  # fmt: skip
        self._context = every.where(np.unique(np.concatenate(latest)).astype(np.int64))
        told: Mask = wrong[known:]
        return told


def _latest_before(kind: Int64s, group: tuple[EventKind, ...]) -> Int64s:
    """Return, for each event, the index of the latest of a group before it, -1 without one."""
    known = np.where(np.isin(kind, group), np.arange(len(kind)), _NONE)
    return np.maximum.accumulate(np.concatenate(([_NONE], known)))[:-1]


def _kind_at(kind: Int64s, index: Int64s) -> Int64s:
    return np.where(index >= 0, kind[index], 0)
