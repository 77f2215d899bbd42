"""Counts the acked entries that are redelivered if a broker dies: those that are acked in its memory and not durable.

The unit is entries, which are messages if there are no batches; a broker does not report partly acked batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyroaring import BitMap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.pulsar.durable import DurableState
    from ackstate.analysis.pulsar.internal_stats import Acked
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.position import Position


class ComesBack(NamedTuple):
    """Acked entries that are redelivered: at least `low`, at most `high`, both inclusive."""

    low: int
    high: int
    why: str
    is_moving: bool = False  # whether something changed while the durable state was read

    @property
    def is_exact(self) -> bool:
        """Whether that is one number."""
        return self.low == self.high


class Acks(Protocol):
    """Acked entries, in memory or durable."""

    @property
    def mark_delete(self) -> Position: ...
    @property
    def deleted(self) -> DeletedRanges: ...


def exactly(before: Acked, after: Acked, durable: DurableState, counts: Mapping[int, int]) -> ComesBack:
    """Return the redelivered entries at the moment at which the durable state was read, between two looks at memory.

    Args:
        before: The acks in memory at the look before.
        after: Those at the look after.
        durable: What was read between.
        counts: The entries of each existing ledger of the topic; entries of others cannot be redelivered.

    Complexity: O(ledgers from the durable mark-delete on, and bytes of their acks).
    """
    low = high = 0
    for ledger_id, count in _existing(counts, after, durable.mark_delete.ledger_id):
        kept = acked_in(durable, ledger_id, count)
        later = acked_in(after, ledger_id, count)
        earlier = acked_in(before, ledger_id, count)
        low += len((earlier & later) - kept)
        high += len((earlier | later) - kept)
    _, cursor_ledger, last = durable.version
    place = (
        f"entry {last} of cursor ledger {cursor_ledger}" if cursor_ledger >= 0 else "its record in the metadata store"
    )
    is_moving, why = low != high, f"acked in memory, and not in {place}"
    if is_moving:
        why += "; more was acked while it was read"
    if durable.has_transactions and high:
        low, why = 0, f"{why}; acks of committed transactions are restored from a log of their own"
    return ComesBack(low, high, why, is_moving)


def at_most(acked: Acked, counts: Mapping[int, int], reason: str, *, unlisted_count: int = 0) -> ComesBack:
    """Return a bound for a cursor whose durable state is unknown for a reason: all that is acked and still exists.

    `unlisted_count` is the number of entries that exist in ledgers that the counts lack: they may be acked.
    """
    existing = [*_existing(counts, acked)]
    above = sum(len(acked.deleted.entries(ledger_id)) for ledger_id, _ in existing)
    below = sum(len(acked_in(acked, ledger_id, count)) for ledger_id, count in existing) - above + unlisted_count
    more = f", and {below:,} up to it that still exist" if below else ""
    return ComesBack(0, above + below, f"every entry acked above the mark-delete{more}: {reason}")


def _existing(counts: Mapping[int, int], acked: Acked, first_ledger_id: int = 0) -> Iterator[tuple[int, int]]:
    """Yield each existing ledger from one on, with its entries. One that is newer than the counts has acks alone."""
    yield from ((ledger_id, count) for ledger_id, count in counts.items() if ledger_id >= first_ledger_id)
    last = max(counts)
    newer = {acked.mark_delete.ledger_id, *(ledger_id for ledger_id, _ in acked.deleted.bitmaps())}
    yield from ((ledger_id, 0) for ledger_id in sorted(newer) if ledger_id > last)


def acked_in(acks: Acks, ledger_id: int, count: int) -> BitMap:
    """Return the acked entries of a ledger with a number of entries, or more: the broker counted them before."""
    below = acks.mark_delete
    end = count if ledger_id < below.ledger_id else below.entry_id + 1 if ledger_id == below.ledger_id else 0
    return BitMap(range(end)) | acks.deleted.entries(ledger_id)
