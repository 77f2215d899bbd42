"""Replay one subscription's trace, a chunk at a time: how many acked messages would a crash bring back, at each event?

At an instant it is *acked so far* minus *covered by the last completed persist*. Both are running counts, so a chunk is
a few array operations; only what is newly acked needs sets, and those are bitmaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import numpy.typing as npt

from analysis.redelivery.acked import AckedFold, Chunk, Int64s
from analysis.redelivery.curve_sum import CAUSES
from analysis.redelivery.mark_delete import mark_delete_of
from analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNKNOWN = np.iinfo(np.int64).min
_LEFT_OUT = (EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED)
_SETTLING = (EventKind.RECOVER, EventKind.RESET)


class Folded(NamedTuple):
    """What the events of a chunk lead to, in parallel arrays; each value holds just after its event.

    Attributes:
        redelivery: Acked messages that a crash would bring back.
        if_written: The same, had the persist that is under way been written; equals `redelivery` without one.
        persisting: True from the beginning of a persist until its end; a failed one ends with the next that does not.
        alive: False from a crash until the recovery.
        causes: Of `redelivery`, by `curve_sum.CAUSES`, what the last completed persist left out: as young, and because
            of a limit, which all counts as one on ranges, as an event does not say which it was. None if nothing was.
    """

    redelivery: Int64s
    if_written: Int64s
    persisting: npt.NDArray[np.bool_]
    alive: npt.NDArray[np.bool_]
    causes: npt.NDArray[np.int64] | None


@final
class RedeliveryFold:
    """Carries one subscription's state from chunk to chunk.

    Memory: a bitmap of what was ever acked, and a few arrays of a chunk's length.
    """

    def __init__(self) -> None:
        self._acked = AckedFold()
        self._acked_count = 0
        # Counts of acked messages: what the last completed persist covered, and what the last begun one covers.
        self._durable_count = 0
        self._begun_count = 0
        self._persisting = False
        self._alive = True
        self._young, self._cut = LeftOut(), LeftOut()

    def complete_until(self, log: Mapping[int, int]) -> int:
        """Return the first ledger of a message log of which not all entries are acked, the last one if all are."""
        return complete_until(self._acked, log)

    def forget_below(self, ledger_id: int) -> None:
        """Keep nothing of the ledgers below one, all of whose entries are acked."""
        self._acked.forget_below(ledger_id)

    def fold(self, chunk: Chunk) -> Folded:
        """Replay the next chunk.

        Complexity: O(events log events + short entries), and one bitmap operation for each long run.
        """
        kind = chunk.kind
        acked = self._acked_count + np.cumsum(self._acked.take(chunk).counts(len(kind)))
        # What a persist leaves out is named after it began, and taken off what it covers from there on.
        left_out = np.cumsum(np.where(np.isin(kind, _LEFT_OUT), _length(chunk), 0))
        displaced = np.cumsum(np.where(kind == EventKind.DISPLACED, _length(chunk), 0))
        begun = _latest(np.where(kind == EventKind.PERSIST_BEGUN, acked + left_out, _UNKNOWN), self._begun_count)
        begun -= left_out
        # A recovery starts from what is durable: nothing that is acked then would be lost by another crash.
        settled = np.where(np.isin(kind, _SETTLING), acked + displaced, _UNKNOWN)
        settled = np.where(kind == EventKind.PERSIST_ENDED, begun + displaced, settled)
        durable = _latest(settled, self._durable_count) - displaced
        persisting = _latest_flag(
            kind == EventKind.PERSIST_BEGUN,
            np.isin(kind, (EventKind.PERSIST_ENDED, *_SETTLING)),
            before=self._persisting,
        )
        alive = _latest_flag(kind == EventKind.RECOVER, kind == EventKind.CRASH, before=self._alive)
        if len(kind):
            self._acked_count, self._begun_count = int(acked[-1]), int(begun[-1])
            self._durable_count = int(durable[-1])
            self._persisting, self._alive = bool(persisting[-1]), bool(alive[-1])
        if_written = acked - np.where(persisting, begun, durable)
        return Folded(acked - durable, if_written, persisting, alive, self._causes(chunk))

    def _causes(self, chunk: Chunk) -> Int64s | None:
        if not (np.isin(chunk.kind, _LEFT_OUT).any() or self._young.is_some or self._cut.is_some):
            return None
        causes = np.zeros((len(CAUSES), len(chunk.kind)), np.int64)
        causes[CAUSES.index("young")] = self._young.take(chunk, named=(EventKind.HELD_BACK,))
        causes[CAUSES.index("cut_by_ranges")] = self._cut.take(chunk, named=(EventKind.CUT_OFF, EventKind.DISPLACED))
        return causes


@final
class LeftOut:
    """How many messages the last completed persist left out for one reason, and any persist that displaced some."""

    def __init__(self) -> None:
        self._count = 0
        self._begun_count = 0

    @property
    def is_some(self) -> bool:
        """Whether there are some, or may be."""
        return bool(self._count or self._begun_count)

    def take(self, chunk: Chunk, *, named: tuple[EventKind, ...]) -> Int64s:
        """Return how many there are after each event of the next chunk."""
        kind = chunk.kind
        total = np.cumsum(np.where(np.isin(kind, named), _length(chunk), 0))
        # Of those some are not durable at once, whatever becomes of the persist.
        is_displaced = (kind == EventKind.DISPLACED) & (EventKind.DISPLACED in named)
        displaced = np.cumsum(np.where(is_displaced, _length(chunk), 0))
        begun = total - _latest(np.where(kind == EventKind.PERSIST_BEGUN, total, _UNKNOWN), -self._begun_count)
        known = np.where(kind == EventKind.PERSIST_ENDED, begun - displaced, _UNKNOWN)
        known = np.where(np.isin(kind, (*_SETTLING, EventKind.CRASH)), -displaced, known)
        count: Int64s = _latest(known, self._count) + displaced
        if len(kind):
            self._count, self._begun_count = int(count[-1]), int(begun[-1])
        return count


def complete_until(acked: AckedFold, log: Mapping[int, int]) -> int:
    """Return the first ledger of a message log of which not all entries are acked, the last one if all are."""
    return mark_delete_of(acked.acked, log).ledger_id


def _length(chunk: Chunk) -> Int64s:
    return chunk.last_entry - chunk.first_entry + 1


def _latest(values: Int64s, before: int) -> Int64s:
    """Carry each known value forward over the unknown ones that follow, beginning with `before`."""
    known = np.where(values != _UNKNOWN, np.arange(len(values)), -1)
    at = np.maximum.accumulate(known) if len(known) else known
    return np.where(at >= 0, values[at], before)


def _latest_flag(begins: npt.NDArray[np.bool_], ends: npt.NDArray[np.bool_], *, before: bool) -> npt.NDArray[np.bool_]:
    """Return, at each event, whether the latest beginning is later than the latest end."""
    marks = np.where(begins, 1, np.where(ends, 0, _UNKNOWN))
    return _latest(marks, int(before)).astype(np.bool_)
