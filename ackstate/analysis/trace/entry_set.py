"""Sets of entries of many ledgers, for comparing accepted with recovered acks.

Deliberately not `DeletedRanges`: the judge of the cursor shares no code with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, final

from pyroaring import BitMap

from ackstate.analysis.trace.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.analysis.trace.recording import Frame


@final
class EntrySet:
    """A set of (ledger, entry), stored as one bitmap per ledger."""

    def __init__(self) -> None:
        self._bitmaps: dict[int, BitMap] = {}

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> Self:
        """Return the entries of runs ``(ledger_id, first, end)``, `end` excluded."""
        found = cls()
        for run in runs:
            found.add_run(*run)
        return found

    def __len__(self) -> int:
        return sum(map(len, self._bitmaps.values()))

    def add(self, ledger_id: int, entries: BitMap) -> None:
        """Add entries of a ledger."""
        self._bitmaps.setdefault(ledger_id, BitMap()).update(entries)

    def add_run(self, ledger_id: int, first: int, end: int) -> None:
        """Add entries from `first` (included) to `end` (excluded)."""
        if first < end:
            self._bitmaps.setdefault(ledger_id, BitMap()).add_range(first, end)

    def remove_run(self, ledger_id: int, first: int, end: int) -> None:
        """Remove entries from `first` (included) to `end` (excluded)."""
        if ledger_id in self._bitmaps and first < end:
            self._bitmaps[ledger_id].remove_range(first, end)

    def remove_before(self, ledger_id: int, entry_id: int) -> None:
        """Remove the entries before one, those of lower ledgers too."""
        self._bitmaps = {each: bitmap for each, bitmap in self._bitmaps.items() if each >= ledger_id}
        self.remove_run(ledger_id, 0, entry_id)

    def copy(self) -> EntrySet:
        """Return an independent copy."""
        twin = EntrySet()
        twin._bitmaps = {ledger_id: bitmap.copy() for ledger_id, bitmap in self._bitmaps.items()}
        return twin

    def __sub__(self, other: EntrySet) -> EntrySet:
        left = EntrySet()
        for ledger_id, bitmap in self._bitmaps.items():
            left._bitmaps[ledger_id] = bitmap - other._bitmaps.get(ledger_id, BitMap())
        return left

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(ledger_id, first, end)`` in order, `end` excluded."""
        for ledger_id in sorted(self._bitmaps):
            bitmap = self._bitmaps[ledger_id]
            lasts = bitmap - bitmap.shift(-1)
            for first, last in zip(bitmap - bitmap.shift(1), lasts, strict=True):
                yield ledger_id, first, last + 1


@final
class SubscriptionHistory:
    """The acks of one subscription in a recording: the accepted ones, and those with a completed persist."""

    def __init__(self) -> None:
        self.accepted = EntrySet()
        self.promised = EntrySet()
        self._begun = EntrySet()
        self.last_ts_ms = 0
        self.last_kind: EventKind | None = None

    def follow(self, frame: Frame) -> None:
        """Add the next events."""
        for event in frame.events:
            run = (event.ledger_id, event.first_entry, event.last_entry + 1)
            match event.kind:
                case EventKind.ACK | EventKind.MARK_DELETE:
                    self.accepted.add_run(*run)
                case EventKind.PERSIST_BEGUN:
                    self._begun = self.accepted.copy()
                case EventKind.HELD_BACK | EventKind.CUT_OFF:
                    self._begun.remove_run(*run)
                case EventKind.DISPLACED:
                    self._begun.remove_run(*run)
                    self.promised.remove_run(*run)
                case EventKind.PERSIST_ENDED:
                    self.promised = self._begun.copy()
                case EventKind.RECOVER | EventKind.RESET:
                    if event.ledger_id >= 0:
                        self.accepted.add_run(*run)
                    self.promised = self.accepted.copy()
                case EventKind.REDELIVER:
                    self.accepted.remove_run(*run)
                    self.promised.remove_run(*run)
            self.last_ts_ms, self.last_kind = event.ts_ms, event.kind


def histories(frames: Iterable[Frame]) -> dict[tuple[str, str], SubscriptionHistory]:
    """Read a whole recording and return the history of each (topic, subscription)."""
    found: dict[tuple[str, str], SubscriptionHistory] = {}
    for frame in frames:
        if frame.subscription:
            found.setdefault((frame.topic, frame.subscription), SubscriptionHistory()).follow(frame)
    return found
