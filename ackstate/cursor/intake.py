"""Accepts acks: changes the state under the cursor's lock, notifies listeners, and returns receipts."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.cursor.listener import Change, bitmap_runs, covered_runs
from ackstate.cursor.results import Receipt, ReceiptStatus
from ackstate.entry_bitmap import bitmap_of, checked_bitmaps_of
from ackstate.position import Position, check_position, positions_of
from ackstate.wire.native import check_properties

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.cursor.persist import Persister

ACCEPTED = ReceiptStatus.ACCEPTED
"""Cached: the lookup of an enum's member is slow."""
NO_ENTRIES: Mapping[int, BitMap] = MappingProxyType({})
"""The entries of a receipt that need not list them."""
new_receipt = partial(tuple.__new__, Receipt)
# Bitmap operations take as long as this many single acks.
_FEW_MAX = 16
_INTEGERS = {int}


@final
class AckIntake:
    """The acks of one open cursor, but for `ManagedCursor.ack`, which saves the extra call.

    Args:
        persister: The cursor's, with its state, lock, listeners and young age.
        counts_batches: Whether acks of single messages of a batch count.
    """

    def __init__(self, persister: Persister, *, counts_batches: bool) -> None:
        self.opened = object()
        """Identifies this opening of the cursor in its receipts."""
        self.names_entries = persister.planner.may_hold_back
        """Whether a receipt must list its entries."""
        self._persister = persister
        self._state = persister.state
        self._listeners = persister.listeners
        self.young_age = persister.young_age
        """Records deliveries: a replay feeds many at once."""
        self._lock = persister.lock
        self._counts_batches = counts_batches

    def ack_many(self, positions: Sequence[Position], *, now_ms: int) -> Receipt:
        return self.ack_bitmaps(checked_bitmaps_of(positions), now_ms=now_ms)

    def ack_entries(self, ledger_id: int, entry_ids: Iterable[int], *, now_ms: int) -> Receipt:
        is_plain = not (self.names_entries or self._listeners.of_changes)
        if is_plain and type(ledger_id) is int and (few := few_of(entry_ids)) and {*map(type, few)} == _INTEGERS:
            with self._lock:
                if not self._persister.closed and 0 <= min(few) <= max(few) < self._state.ledgers.entry_count(
                    ledger_id
                ):
                    ack, newly_acked = self._state.ack, 0
                    for position in positions_of(ledger_id, few):
                        newly_acked += ack(position)
                    number = self._state.accepted_number
                    return new_receipt((number, newly_acked, self.opened, NO_ENTRIES, ACCEPTED, None))
        ledger_id, _ = check_position(Position(ledger_id, 0))
        return self.ack_bitmaps({ledger_id: bitmap_of(entry_ids)}, now_ms=now_ms)

    def ack_bitmaps(self, entries: Mapping[int, BitMap], *, now_ms: int) -> Receipt:
        """Ack entries of many ledgers, all or none; errors as `ManagedCursor.ack_entries`.

        Complexity: bitmap operations over the entries; no loop.
        """
        with self._lock:
            self._persister.check_open()
            new, newly_acked = self._state.ack_bitmaps(entries)
            if self._listeners.of_changes:
                runs = [run for item in new.items() for run in bitmap_runs(*item)]
                self._listeners.changed(Change.ACKED, runs, now_ms=now_ms)
            return self._receipt(newly_acked, entries=entries)

    def ack_batch(self, position: Position, unacked_words: Iterable[int], *, now_ms: int) -> Receipt:
        position = check_position(position, entry_id_min=0)
        words = list(unacked_words)
        if not self._counts_batches and any(words):
            return self.ack_bitmaps({}, now_ms=now_ms)
        with self._lock:
            self._persister.check_open()
            newly_acked, _ = self._state.ack_batch(position, words)
            if newly_acked:
                self._listeners.changed(Change.ACKED, ((*position, position.entry_id),), now_ms=now_ms)
            # Only entries are held back, never partly acked batches.
            if position in self._state.batch:
                return self._receipt(newly_acked, batch=position)
            return self._receipt(newly_acked, entries=named(position))

    def mark_lost(self, first: Position, last: Position, *, now_ms: int) -> Receipt:
        check_position(first)
        check_position(last)
        if last < first:
            raise ValueError(f"lost entries {Position(*first)} to {Position(*last)} end before they begin")
        ledgers, lost = self._state.ledgers, {}
        for ledger_id in ledgers.ledgers_between(first[0] - 1, last[0] + 1):
            begin = max(first[1], 0) if ledger_id == first[0] else 0
            end = ledgers.entry_count(ledger_id)
            end = min(last[1] + 1, end) if ledger_id == last[0] else end
            lost[ledger_id] = bitmap_of(range(begin, end))
        return self.ack_bitmaps(lost, now_ms=now_ms)

    def mark_delete(
        self,
        position: Position,
        *,
        now_ms: int,
        properties: Mapping[str, int] | None = None,
        unacked_words: Iterable[int] = (),
    ) -> Receipt:
        words = list(unacked_words)
        position = check_position(position, entry_id_min=0 if any(words) else -1)
        if properties is not None:
            check_properties(properties)
        with self._lock:
            self._persister.check_open()
            state, before, is_partly_acked = self._state, self._state.mark_delete, False
            if any(words):
                newly_acked, is_partly_acked = state.ack_up_to_batch(position, words, counts=self._counts_batches)
            else:
                newly_acked = state.ack_up_to(position)
            if properties is not None:
                state.set_properties(properties)
            if newly_acked and self._listeners.of_changes:
                runs = covered_runs(state.ledgers, before, state.mark_delete)
                self._listeners.changed(Change.MARK_DELETED, runs, now_ms=now_ms)
            return self._receipt(newly_acked, batch=position if is_partly_acked else None)

    def _receipt(
        self, newly_acked: int, *, entries: Mapping[int, BitMap] | None = None, batch: Position | None = None
    ) -> Receipt:
        """Return a receipt; that of an ack that changed nothing is as durable as everything before it."""
        named_entries = entries if entries is not None and self.names_entries else NO_ENTRIES
        return Receipt(self._state.accepted_number, newly_acked, self.opened, named_entries, batch=batch)


def few_of(entry_ids: Iterable[int]) -> list[int] | None:
    """Return entry ids, valid or not, as a list; None if they are more than are acked one by one, or of no length."""
    try:
        if len(entry_ids) > _FEW_MAX:  # type: ignore[arg-type]
            return None
    except TypeError:
        return None
    if type(entry_ids) is list:
        return entry_ids
    return entry_ids.tolist() if hasattr(entry_ids, "tolist") else list(entry_ids)


def named(position: Position) -> Mapping[int, BitMap]:
    """Return one entry as receipts have them, ledger id -> bitmap."""
    entries = BitMap()
    entries.add(position[1])  # in half the time that it takes to build it from a list
    return {position[0]: entries}
