"""Checks that every acked entry was published, at the end, because topics and subscriptions come in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.trace.rows import Events, Int64s

_ACKS = (EventKind.ACK, EventKind.MARK_DELETE)
# A longer run is cheaper as a run than entry by entry.
_SHORT_RUN_MAX = 64
_Bitmaps = dict[int, BitMap]


@final
class PublishedEntries:
    """The published and the acked entries of each topic.

    Nothing is checked for a topic without PUBLISH events, nor before its first published ledger.
    """

    def __init__(self) -> None:
        self._published: dict[str, _Bitmaps] = {}
        self._acked: dict[str, _Bitmaps] = {}

    def follow(self, key: tuple[str, str], events: Events) -> None:
        """Add the next events of a (topic, subscription)."""
        topic, subscription = key
        if subscription:
            _add(self._acked.setdefault(topic, {}), events.where(np.isin(events.kind, _ACKS)))
        else:
            _add(self._published.setdefault(topic, {}), events.where(events.kind == EventKind.PUBLISH))

    def never(self) -> Iterator[tuple[str, int, str]]:
        """Yield each topic with entries that were acked but never published: their number, and the first one."""
        for topic, published in self._published.items():
            ledgers = sorted(ledger_id for ledger_id, bitmap in published.items() if bitmap)
            if not ledgers:
                continue
            left = _without(self._acked.get(topic, {}), published)
            first = ledgers[0], published[ledgers[0]].min()
            left = {ledger_id: bitmap for ledger_id, bitmap in left.items() if ledger_id >= first[0]}
            if first[0] in left:
                left[first[0]].remove_range(0, first[1])
            count = sum(map(len, left.values()))
            if count:
                ledger_id = min(ledger_id for ledger_id, bitmap in left.items() if bitmap)
                yield topic, count, f"{ledger_id}:{left[ledger_id].min()}"


def _add(bitmaps: _Bitmaps, events: Events) -> None:
    for ledger_id in np.unique(events.ledger_id).tolist():
        of_ledger = events.ledger_id == ledger_id
        first, end = events.first_entry[of_ledger], events.last_entry[of_ledger] + 1
        bitmap = bitmaps.setdefault(ledger_id, BitMap())
        is_long = end - first > _SHORT_RUN_MAX
        for run in zip(first[is_long].tolist(), end[is_long].tolist(), strict=True):
            bitmap.add_range(*run)
        entries = np.unique(_spelled_out(first[~is_long], end[~is_long]))
        if len(entries):
            bitmap |= BitMap(entries.astype(np.uint32))


def _spelled_out(first: Int64s, end: Int64s) -> Int64s:
    length = end - first
    offsets = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    entries: Int64s = np.repeat(first, length) + offsets
    return entries


def _without(these: _Bitmaps, those: _Bitmaps) -> _Bitmaps:
    return {ledger_id: bitmap - those.get(ledger_id, BitMap()) for ledger_id, bitmap in these.items()}
