"""Seeded shapes of acks and of delayed messages."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from pyroaring import BitMap

from ackstate import Position
from ackstate.analysis.workloads.traffic import HOUR_MS
from ackstate.position_set import PositionSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    EntryIds = NDArray[np.uint32]

SEED = 20_240_611
TICK_MS = 1_000
LEDGER_SIZE = 50_000  # managedLedgerMaxEntriesPerLedger


def alternating(count: int) -> EntryIds:
    """Return every other entry: two consumers served in turn, of which one acks."""
    return np.arange(0, 2 * count, 2, dtype=np.uint32)


def clustered(run_count: int, *, width_mean: int = 100, seed: int = SEED) -> EntryIds:
    """Return runs of entries with gaps as long: Key_Shared consumers of unequal speed."""
    random = np.random.default_rng(seed)
    gaps, widths = random.geometric(1 / width_mean, (2, run_count))
    passed_gaps = np.repeat(np.cumsum(gaps), widths)
    return (passed_gaps + np.arange(len(passed_gaps))).astype(np.uint32)


def shuffled(entry_ids: EntryIds, *, seed: int = SEED) -> EntryIds:
    """Return the same entries in random order."""
    return np.random.default_rng(seed).permutation(entry_ids)


class DelayedLedger(NamedTuple):
    """Delayed messages of one ledger, from entry 0 on, with the delivery time of each."""

    ledger_id: int
    deliver_at_ms: NDArray[np.int64]

    def messages(self) -> list[tuple[Position, int]]:
        """Return each position with its time."""
        return [(Position(self.ledger_id, entry), time) for entry, time in enumerate(self.deliver_at_ms.tolist())]

    def as_bitmap(self) -> BitMap:
        """Return the entries."""
        return BitMap(range(len(self.deliver_at_ms)))


def mixed_delays(count: int, *, now_ms: int = 0, first_ledger_id: int = 1, seed: int = SEED) -> Iterator[DelayedLedger]:
    """Yield messages, all delayed, by any time up to an hour with equal probability."""
    random = np.random.default_rng(seed)
    for at, first in enumerate(range(0, count, LEDGER_SIZE)):
        times = now_ms + random.integers(1, HOUR_MS + 1, min(LEDGER_SIZE, count - first))
        yield DelayedLedger(first_ledger_id + at, times)


def bitmap_of(entry_ids: EntryIds) -> BitMap:
    """Return the entries as the library's own bitmap."""
    return BitMap(array("I", entry_ids.astype(np.uint32).tobytes()))


@final
class NothingAcked:
    """A subscription that has read all messages and acked none; it keeps track of the messages that it has sent."""

    def __init__(self, messages: Iterable[tuple[int, BitMap]]) -> None:
        self._unsent = PositionSet()
        for ledger_id, entry_ids in messages:
            self._unsent.update_entries(ledger_id, entry_ids)

    @property
    def unsent_count(self) -> int:
        """How many messages were not sent."""
        return len(self._unsent)

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """See `AckedAndSent`."""

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """See `AckedAndSent`."""
        unsent = PositionSet()
        unsent.update_between(self._unsent, first=first, end=end)
        return unsent

    def send(self, due: Iterable[tuple[int, BitMap]]) -> int:
        """Note that messages are in flight, and return their number."""
        count = 0
        for ledger_id, entry_ids in due:
            self._unsent.discard_entries(ledger_id, entry_ids)
            count += len(entry_ids)
        return count
