"""Walks the live ledger of a Pulsar cursor, in which each entry is a whole state; nothing is written or fenced.

Entries have no times. Each owner of a topic begins a cursor ledger of its own and deletes the one before, and so does
an owner whose ledger is full, old or could not be written. So the first entry is the state after the last of these.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.ack_hole import unacked_in_holes
from ackstate.analysis.pulsar.ack_state_file import topics_of
from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import firsts
from ackstate.errors import AckStateError
from ackstate.position import Position
from ackstate.stores.base import LedgerNotFoundError
from ackstate.topic.subscriptions import subscription_name, subscription_paths
from ackstate.wire.pulsar import decode_cursor_info, decode_position_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.pulsar import PulsarLayout
    from ackstate.wire.pulsar import PositionInfo

_BYTES_AT_ONCE = 8 * 1024 * 1024
_ENTRIES_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """One record, and its difference from the record before. Entries of trimmed ledgers are not counted."""

    record: int  # the entry of the cursor ledger, from 0
    size_bytes: int
    mark_delete: str  # inclusive
    range_count: int
    entry_count: int  # individually acked entries
    batch_count: int  # partly acked batches
    acked: int = 0  # entries that the record before had not acked; 0 in the first record
    lost: int = 0  # entries that the record before had acked, and this one has not
    batches_lost: int = 0  # batches of which the record before had messages acked that this one has not
    why: str = ""  # of a loss, a key of `LOSSES`


LOSSES = {
    "reset": "the mark-delete position went back, as by a seek",
    "cut": "the highest acks are missing, as by a limit on ranges or batches, or a seek",
    "load": "acks among others are missing, as if the owner had loaded an older state",
}


@dataclass(frozen=True, slots=True)
class HoleAge:
    """The present holes whose first entry has been in a hole since the same record."""

    since_record: int  # 0 if it may be older
    hole_count: int
    first: str  # the first entry of the lowest


@dataclass(slots=True)
class CursorHistory:
    """What a cursor ledger tells."""

    topic: str
    subscription: str
    cursor_ledger_id: int | None = None  # None if the state is in the metadata store, which has no history
    record_count: int = 0
    first: HistoryRecord | None = None
    last: HistoryRecord | None = None
    acked: int = 0  # the sums over all records
    lost: int = 0
    losses: int = 0  # records with a loss
    changes: list[HistoryRecord] = field(default_factory=list)  # those that lost most, then acked most, in order
    holes: list[HoleAge] = field(default_factory=list)  # the oldest first


def cursor_history(cluster: PulsarLayout, topic: str, subscription: str, *, top: int) -> CursorHistory:
    """Return the history of one cursor, with at most `top` changes.

    Memory is bounded by some states and a pair of numbers for each record; time is that of decoding each record.

    Raises:
        AckStateError: There is no such cursor, the topic has partitions, or the ledger was deleted meanwhile.
        CorruptStateError: A record cannot be decoded.
        StoreError: The storage failed.
    """
    if (partitions := topics_of(cluster, topic)) != [topic]:
        raise AckStateError(f"{topic} has partitions: name one of them, such as {partitions[0]}")
    paths = {subscription_name(path): path for path in subscription_paths(cluster, topic)}
    found = cluster.metadata.get(paths[subscription]) if subscription in paths else None
    if found is None:
        there = ", ".join(map(repr, sorted(paths))) or "none"
        raise AckStateError(f"{topic} has no subscription {subscription!r}; its subscriptions are: {there}")
    history = CursorHistory(topic, subscription)
    ledger_id = decode_cursor_info(found.data).cursors_ledger_id
    if ledger_id < 0:
        return history
    history.cursor_ledger_id = ledger_id
    try:
        count = cluster.ledgers.last(ledger_id) + 1
        log = cluster.find_message_log(topic)  # after the last record: no record is beyond its end
        if log is None:
            raise AckStateError(f"{topic} was deleted meanwhile")
        walk = _Walk(history, log.ledgers)
        records = (walk.follow(*each) for each in enumerate(_entries(cluster, ledger_id, count)))
        changed = (each for each in records if each.acked or each.why)
        history.changes = nlargest(top, changed, key=lambda each: (each.lost + each.batches_lost, each.acked))
    except LedgerNotFoundError as error:
        raise AckStateError(f"cursor ledger {ledger_id} is gone, its owner has begun another: try again") from error
    history.changes.sort(key=lambda each: each.record)
    history.holes = walk.holes()
    return history


def _entries(cluster: PulsarLayout, ledger_id: int, count: int) -> Iterator[bytes]:
    number, size_bytes = 0, _BYTES_AT_ONCE
    while number < count:
        end = min(count, number + max(1, min(_ENTRIES_AT_ONCE, _BYTES_AT_ONCE // size_bytes)))
        entries = cluster.ledgers.read(ledger_id, number, end)
        yield from entries
        number, size_bytes = end, max(1, *map(len, entries))


@final
class _Walk:
    """The states of a cursor, one after the other."""

    def __init__(self, history: CursorHistory, ledgers: LedgerMap) -> None:
        self._history = history
        self._ledgers = ledgers
        self._state: PositionInfo | None = None
        self._was_reset = False  # whether the mark-delete position of the last state went back
        # Entries up to highs[i] and above highs[i - 1] have been below an acked one since record since[i].
        self._highs: list[Position] = []
        self._since: list[int] = []
        # Record -> entries below an acked one that it lost, each in its latest record only.
        self._lost: dict[int, DeletedRanges] = {}

    def follow(self, number: int, entry: bytes) -> HistoryRecord:
        """Add the next state to the history."""
        history = self._history
        what = f"record {number} of cursor ledger {history.cursor_ledger_id}"
        state = decode_position_info(entry, self._ledgers, what=what)
        state.deleted.remove_at_most(state.position)
        before, self._state = self._state or state, state
        lost, batches = _missing(before, state, self._ledgers), _batches_lost(before, state)
        highest = max((state.position, *(state.deleted.last_range() or ())[1:]))
        why = ""
        if lost or batches:
            # All at or below this are kept: entries if some are lost, else batches. A range's lower end is below it.
            span, kept = lost.span(), max(state.batch, default=state.position)
            why = "cut" if (span[0] >= highest if span else batches[0] >= kept) else "load"
            # The record of a seek still has the ranges from before it; the next one has not.
            why = "reset" if self._was_reset or state.position < before.position else why
        self._was_reset = state.position < before.position
        record = HistoryRecord(
            number, len(entry), str(state.position), state.deleted.range_count, len(state.deleted), len(state.batch),
            len(_missing(state, before, self._ledgers)), len(lost), len(batches), why,
        )  # fmt: skip
        history.first, history.last, history.record_count = history.first or record, record, number + 1
        history.acked, history.lost = history.acked + record.acked, history.lost + record.lost
        history.losses += bool(why)
        at = bisect_left(self._highs, highest)
        self._highs[at:], self._since[at:] = [highest], self._since[at : at + 1] or [number]
        if again := lost.take_at_most(highest):
            for entries in self._lost.values():
                entries.difference_update(again)
            self._lost = {each: entries for each, entries in self._lost.items() if entries} | {number: again}
        return record

    def holes(self) -> list[HoleAge]:
        """Return the holes of the last state, the oldest first."""
        counts: Counter[int] = Counter()
        lowest: dict[int, Position] = {}
        state = self._state
        for ledger_id, unacked in unacked_in_holes(state.deleted, self._ledgers, state.position) if state else ():
            starts = firsts(unacked)
            lost_in = {each: number for number, lost in self._lost.items() for each in lost.entries(ledger_id) & starts}
            for entry in starts:
                position = Position(ledger_id, entry)
                since = max(self._since[bisect_right(self._highs, position)], lost_in.get(entry, 0))
                counts[since] += 1
                lowest.setdefault(since, position)
        return [HoleAge(since, counts[since], str(lowest[since])) for since in sorted(counts)]


def _missing(acked: PositionInfo, state: PositionInfo, ledgers: LedgerMap) -> DeletedRanges:
    """Return the entries that are acked in one state and not in another."""
    missing = DeletedRanges.from_bitmaps(
        (ledger_id, rest)
        for ledger_id, bitmap in acked.deleted.bitmaps()
        if (rest := bitmap - state.deleted.entries(ledger_id))
    )
    missing.remove_at_most(state.position)
    (last_id, last_entry), (first_id, first_entry) = acked.position, state.position
    if acked.position > state.position:
        for ledger_id in {last_id, *ledgers.ledgers_between(first_id - 1, last_id)}:
            first = first_entry + 1 if ledger_id == first_id else 0
            end = last_entry + 1 if ledger_id == last_id else ledgers.entry_count(ledger_id)
            missing.add_entries(ledger_id, BitMap(range(first, max(first, end))) - state.deleted.entries(ledger_id))
    return missing


def _batches_lost(before: PositionInfo, state: PositionInfo) -> list[Position]:
    """Return the batches of which messages were acked before and are not in a state."""
    return [
        position
        for position, words in before.batch.items()
        if position > state.position
        and position not in state.deleted
        and words != (now := state.batch.get(position, ()))
        and (not now or any(new & ~old for old, new in zip([*words, *[0] * len(now)], now, strict=False)))
    ]
