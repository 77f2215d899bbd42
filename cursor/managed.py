"""One subscription's ack state: exact in memory, durable by journal, honest about the difference."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.ack_hole import ack_effect, hole_at, holes
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Repair
from ackstate.cursor.journal.journal import Journal
from ackstate.cursor.journal.pulsar import reopened
from ackstate.cursor.listener import Change, bitmap_runs, covered_runs
from ackstate.cursor.persist.group_persist import persist_together
from ackstate.cursor.persist.persister import Persister
from ackstate.cursor.results import CursorStats, PersistResult, Receipt, ReceiptStatus, RecoveryReport, RecoverySource
from ackstate.cursor.state.ack_state import AckState
from ackstate.cursor.topic_name import check_name
from ackstate.entry_bitmap import bitmap_of
from ackstate.errors import AckStateError
from ackstate.integers import check_count
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position, check_position
from ackstate.wire.native import check_properties
from ackstate.wire.native_pointer import check_cursor_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.ack_hole import AckEffect, AckHole
    from ackstate.batch_indexes import BatchIndexes
    from ackstate.cursor.journal.recovery import StoredCursor
    from ackstate.cursor.journal.shared_holes import SharedHoles
    from ackstate.cursor.listener import CursorListener
    from ackstate.cursor.persist.persister import PersistWatcher
    from ackstate.cursor.state.young_age import YoungAge
    from ackstate.cursor.store import Store
    from ackstate.deleted_ranges import DeletedRanges


INTERNAL_PREFIX = "#pulsar.internal."
"""What the names of cursor properties begin with that are not the application's."""

_ACCEPTED = ReceiptStatus.ACCEPTED  # An enum looks up its members in Python.


@final
class ManagedCursor:
    """The ack state of one subscription of one topic. Made by `open`; safe for any number of threads.

    An ack is accepted into memory and becomes durable with a later `persist`, which `tick` calls when it is due. The
    message log grows by itself: the cursor only looks at its `LedgerMap`.

    Positions that the log never had are refused; acks of what is acked already change nothing and succeed.
    """

    def __init__(self, journal: Journal, ledgers: LedgerMap, *, config: CursorConfig, now_ms: int) -> None:
        self._ledgers = ledgers
        self._lock = threading.RLock()
        self._opened = object()
        self._state = AckState(ledgers, keep=config.keep)
        self._persister = Persister(self._state, journal, lock=self._lock, config=config, now_ms=now_ms)
        # Whether a receipt must say which entries it is for: a persist may pass some by.
        self._names_entries = self._persister.may_pass_by
        self._chooses_age = self._persister.young_age.is_chosen
        self._batch_index_acks = config.batch_index_acks
        self._recovery_report = RecoveryReport(
            RecoverySource.NEW, 0, 0, -1, "", self._state.mark_delete, 0, journal.form.name
        )
        self._read_position = ledgers.next_valid(self._state.mark_delete)

    @classmethod
    def open(  # noqa: PLR0913 - what identifies a cursor is named, not packed
        cls,
        store: Store,
        *,
        topic: str,
        subscription: str,
        ledgers: LedgerMap,
        config: CursorConfig | None = None,
        repair: Repair = Repair.NONE,
        shared_holes: SharedHoles | None = None,
        now_ms: int,
    ) -> ManagedCursor:
        """Open a subscription's cursor and take it over from whoever had it: recover it, or create it if there is none.

        A new cursor stands before the first entry of the log and is durable when this returns. In Pulsar's format a
        mark-delete position may move, as `ackstate.cursor.journal.pulsar.reopened` says; that is durable then, too.

        Args:
            store: Where the cursor's state lives; stays open when the cursor is closed.
            topic: Any text but the empty one.
            subscription: Likewise.
            ledgers: The message log's ledgers; the caller goes on appending to it.
            config: How to persist.
            repair: What to do if what the store holds cannot be read, instead of refusing; the report says what was
                done, and it is durable when this returns. Nothing is done to what can be read.
            shared_holes: The topic's delay buckets, for a whole state in the native format to refer to: holes that
                these hold take no bytes of it, and do not count against a limit on ranges. What was written so is read
                whether this is given or not.
            now_ms: The present.

        Raises:
            TypeError: The topic or the subscription is no text, or `ledgers` no `LedgerMap`.
            ValueError: The topic or the subscription is empty.
            UnreadableCursorError: What the store holds cannot be read; nothing was changed. It says which repairs would
                help, and is a `CorruptStateError`.
            UnsupportedVersionError: A newer release wrote it.
            InvalidPositionError: The durable state reaches beyond the end of the message log; in Pulsar's format the
                mark-delete position may.
            StoreError: The storage failed.
        """
        check_name("topic", topic)
        check_name("subscription", subscription)
        if not isinstance(ledgers, LedgerMap):
            raise TypeError(f"ledgers must be a LedgerMap, such as log.ledgers, got a {type(ledgers).__name__}")
        config = config or CursorConfig()
        form = config.journal_format
        journal, found = Journal.open(
            store, topic=topic, subscription=subscription, form=form, ledgers=ledgers, repair=repair,
            shared_holes=shared_holes,
        )  # fmt: skip
        cursor = cls(journal, ledgers, config=config, now_ms=now_ms)
        persister = cursor._persister
        if found is None:
            persister.create(now_ms=now_ms)
            return cursor
        is_moved = cursor._restore(found)
        # What is in another format is converted by the next persist; what was repaired or moved on, at once.
        persister.accepted_number += found.form.name is not form.name or found.is_repaired or is_moved
        if found.is_repaired or is_moved:
            cursor.persist(now_ms=now_ms)
        return cursor

    @property
    def lock(self) -> threading.RLock:
        """Guards the state: whoever decides on several of the cursor's numbers holds it. No storage works under it."""
        return self._lock

    @property
    def topic(self) -> str:
        """The topic whose messages are acked."""
        return self._persister.journal.topic

    @property
    def ledgers(self) -> LedgerMap:
        """The message log's ledgers that it was opened with."""
        return self._ledgers

    @property
    def mark_delete_position(self) -> Position:
        """Every entry up to it, included, is acked."""
        return self._state.mark_delete

    @property
    def persisted_mark_delete_position(self) -> Position:
        """The last durable mark-delete position, or that of a failed reset if it is lower.

        Never ahead of `mark_delete_position`.
        """
        return self._state.persisted_mark_delete

    @property
    def read_position(self) -> Position:
        """Where the next `read` begins; always above the mark-delete position.

        After the last entry of a ledger it may be the one that would follow there, as in Pulsar.
        """
        with self._lock:
            if self._read_position <= self._state.mark_delete:
                self._read_position = self._ledgers.next_valid(self._state.mark_delete)
            return self._read_position

    @property
    def deleted(self) -> DeletedRanges:
        """The acked entries above the mark-delete position: to be read, not changed."""
        return self._state.deleted

    @property
    def undurable(self) -> DeletedRanges:
        """Of these, what the last record does not hold, as `unpersisted_record_bytes` counts it; to be read only.

        Complexity: O(1); O(containers of the bitmaps) while a persist is under way.
        """
        return self._state.undurable

    @property
    def batch(self) -> BatchIndexes:
        """The partly acked batches: to be read, not changed."""
        return self._state.batch

    @property
    def properties(self) -> Mapping[str, int]:
        """What the latest mark-delete carried: to be read, not changed."""
        return self._state.properties

    @property
    def young_age(self) -> YoungAge:
        """Tells old acks from young ones; for who tells it of many deliveries at once, not each by `delivered`."""
        return self._persister.young_age

    @property
    def cursor_properties(self) -> Mapping[str, str]:
        """What the application attached to the cursor: to be read, not changed."""
        return self._persister.journal.cursor_properties

    @property
    def recovery_report(self) -> RecoveryReport:
        """How the cursor came by its state when it was opened."""
        return self._recovery_report

    @property
    def acked_count(self) -> int:
        """How many entries were acked since it was opened; never falls. Complexity: O(1)."""
        return self._state.acked_count

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages that a recovery from what is synced would not know, and so redeliver.

        Complexity: O(1); O(containers of the bitmaps) between a reset that failed and the next persist.
        """
        return self._state.redelivery_if_crashed

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked in memory and not durable, as Pulsar would write them.

        Complexity: O(1); O(containers of the bitmaps) between a reset that failed and the next persist.
        """
        return self._state.unpersisted_record_bytes

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers)."""
        with self._lock:
            return self._state.backlog

    def is_acked(self, position: Position) -> bool:
        """Tell whether an entry is acked, by itself or by the mark-delete."""
        with self._lock:
            return self._state.is_acked(position)

    def range_count_to_persist(self, range_count_max: int) -> int:
        """Return how many ranges a persist of everything would hold, those that only shared holes part counted as one.

        Without shared holes it is the very number, with them it may be too high: see `FilledCount.at_most`. If
        `counts_entries_to_persist`, it is the number of acked entries above the mark-delete position.

        Args:
            range_count_max: The limit that it is for.

        Complexity: O(1) without shared holes, else as there.
        """
        with self._lock:
            return self._persister.range_count_to_persist(range_count_max)

    @property
    def counts_entries_to_persist(self) -> bool:
        """Whether `CursorConfig.range_limit_rule` counts acked entries instead of ranges.

        As long as there are at most `range_count_max` of them, each rule persists all.
        """
        return self._persister.counts_entries

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """Take out of some entries of a ledger those that are acked. Complexity: O(containers of the bitmaps)."""
        with self._lock:
            mark_delete = self._state.mark_delete
            if ledger_id < mark_delete.ledger_id:
                entries.clear()
            elif ledger_id == mark_delete.ledger_id:
                entries.remove_range(0, mark_delete.entry_id + 1)
            entries -= self._state.deleted.entries(ledger_id)

    def unacked_between(self, first: Position, end: Position) -> list[tuple[int, BitMap]]:
        """Return the entries of the log that are not acked from `first` (included) to `end` (excluded), by ledger.

        Complexity: O(ledgers, and containers of their bitmaps).
        """
        with self._lock:
            first = max(first, self._state.mark_delete)
            found = []
            for ledger_id in self._ledgers.ledgers_between(first.ledger_id - 1, end.ledger_id + 1):
                entry_count = self._ledgers.entry_count(ledger_id)
                low = max(first.entry_id, 0) if ledger_id == first.ledger_id else 0
                high = min(end.entry_id, entry_count) if ledger_id == end.ledger_id else entry_count
                entries = BitMap(range(low, max(low, high)))
                self.discard_acked(ledger_id, entries)
                if entries:
                    found.append((ledger_id, entries))
            return found

    def is_unacked(self, position: Position) -> bool:
        """Tell whether the log has an entry that is not acked."""
        with self._lock:
            return position in self._ledgers and not self._state.is_acked(position)

    def hole_at(self, position: Position) -> AckHole | None:
        """Return the ack hole that an entry lies in; see `ackstate.ack_hole.hole_at`."""
        with self._lock:
            return hole_at(position, self._state.deleted, self._ledgers, self._state.mark_delete)

    def holes(self) -> list[AckHole]:
        """Return every ack hole, in order of position. Complexity: O(holes)."""
        with self._lock:
            return list(holes(self._state.deleted, self._ledgers, self._state.mark_delete))

    def ack_effect(self, position: Position) -> AckEffect:
        """Return what acking an entry now would change; see `ackstate.ack_hole.ack_effect`."""
        with self._lock:
            return ack_effect(position, self._state.deleted, self._ledgers, self._state.mark_delete)

    def unpersisted_bytes_added(self, position: Position) -> int:
        """Return at most how much acking an entry now would add to `unpersisted_record_bytes`; below 0 it frees some.

        Raises:
            InvalidPositionError: The log does not have the entry, and it is not acked.
            ValueError: An id is out of range.
        """
        with self._lock:
            return self._state.unpersisted_bytes_added(position)

    def unpersisted_bytes_freed(self, hole: AckHole) -> int:
        """Return at least how much acking a whole hole now takes off `unpersisted_record_bytes`; below 0 it adds."""
        with self._lock:
            return self._state.unpersisted_bytes_freed(hole)

    def durable(self, receipt: Receipt) -> bool:
        """Tell whether the ack survives a crash: whether a write that covers it has been synced.

        An ack from before a reset does not count after it, so its receipt is not durable any more; nor is any while a
        reset is being written, or has failed and may have happened.

        Raises:
            ValueError: The receipt is from another cursor, or from before this one was opened.
        """
        if receipt.opened is not self._opened:
            raise ValueError("the receipt was not given by this open cursor")
        return self._persister.is_durable(receipt.number, receipt.entries, receipt.batch)

    def stats(self) -> CursorStats:
        """Return the cursor's numbers, all of one instant."""
        with self._lock:
            state, persister = self._state, self._persister
            young, cut = state.held_back, state.cut_off
            return CursorStats(
                redelivery_if_crashed=state.redelivery_if_crashed,
                redelivery_unwritten=state.redelivery_if_crashed - young - cut,
                redelivery_young=young,
                redelivery_cut=cut,
                batches_unwritten=state.changed_batch_count,
                unpersisted_record_bytes=self._state.unpersisted_record_bytes,
                range_count=self._state.deleted.range_count,
                record_bytes=self._state.deleted.record_bytes,
                backlog=self._state.backlog,
                bytes_persisted=persister.bytes_persisted,
                persist_count=persister.persist_count,
                truncation_count=persister.truncation_count,
                snapshot_count=persister.snapshot_count,
                journal_bytes=persister.journal.snapshot_bytes + persister.journal.delta_bytes,
                batches_cut=state.batch_cut_count,
                ledger_write_count=persister.ledger_write_count,
                ledger_bytes_written=persister.ledger_bytes_written,
                ledger_error_count=persister.ledger_error_count,
                metadata_write_count=persister.metadata_write_count,
                metadata_error_count=persister.metadata_error_count,
                young_age_ms=persister.young_age.age_ms,
                young_age_reason=persister.young_age.reason,
                promotion_count=persister.promotion_count,
                promoted_message_count=persister.promoted_message_count,
            )

    def ack(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack one entry.

        Raises:
            InvalidPositionError: The log does not have the entry.
            ValueError: An id is out of range.
            CursorClosedError: The cursor is closed.
        """
        persister = self._persister
        # An ack takes so little that `with`, a call more and the constructor of a named tuple would show in it.
        self._lock.acquire()
        try:
            if persister.closed:
                persister.check_open()
            newly_acked = self._state.ack(position)
            number = persister.accepted_number = persister.accepted_number + newly_acked
            if newly_acked and persister.listener is not None:
                ledger_id, entry_id = position
                persister.listener.changed(Change.ACKED, ((ledger_id, entry_id, entry_id),), now_ms=now_ms)
        finally:
            self._lock.release()
        entries = self._named(position) if self._names_entries else {}
        if newly_acked and self._chooses_age:
            self._observe(entries, now_ms=now_ms)
        return tuple.__new__(Receipt, (number, newly_acked, self._opened, entries, _ACCEPTED, None))

    def ack_many(self, positions: Sequence[Position], *, now_ms: int) -> Receipt:
        """Ack a list of entries, in any order, repeated or not: all of them or, if one is refused, none.

        Raises:
            InvalidPositionError: The log does not have one of the entries.
            ValueError: An id is out of range.
            CursorClosedError: The cursor is closed.
        """
        by_ledger: dict[int, list[int]] = {}
        for position in positions:
            check_position(position, entry_id_min=0)
            by_ledger.setdefault(position[0], []).append(position[1])
        candidates = {ledger_id: bitmap_of(entry_ids) for ledger_id, entry_ids in by_ledger.items()}
        return self._ack_bitmaps(candidates, now_ms=now_ms)

    def ack_entries(self, ledger_id: int, entry_ids: Iterable[int], *, now_ms: int) -> Receipt:
        """Ack many entries of one ledger: all of them or, if one is refused, none.

        Raises:
            InvalidPositionError: The log does not have one of the entries.
            ValueError: An id is out of range.
            TypeError: Something is not an integer.
            CursorClosedError: The cursor is closed.

        Complexity: bitmap operations over the entries; no loop.
        """
        check_position(Position(ledger_id, 0))
        return self._ack_bitmaps({ledger_id: bitmap_of(entry_ids)}, now_ms=now_ms)

    def ack_bitmaps(self, entries: Mapping[int, BitMap], *, now_ms: int) -> Receipt:
        """Ack entries of many ledgers, all or none; whoever calls this tells `young_age` how late they came.

        Raises:
            InvalidPositionError: The log does not have one of the entries.
            CursorClosedError: The cursor is closed.

        Complexity: bitmap operations over the entries; no loop.
        """
        with self._lock:
            return self._accept_new(entries, self._newly_acked(entries, now_ms=now_ms))

    def ack_batch(self, position: Position, unacked_words: Iterable[int], *, now_ms: int) -> Receipt:
        """Ack messages of an entry that is a batch of them; the last one acks the entry.

        Args:
            position: The entry.
            unacked_words: The messages that this leaves unacked, as `BatchIndexes` has them; what was acked stays so.
            now_ms: The present.

        Raises:
            InvalidPositionError: The log does not have the entry.
            ValueError: An id is out of range, or a word does not fit signed 64 bits.
            TypeError: A word is not an integer.
            CursorClosedError: The cursor is closed.
        """
        position = check_position(position, entry_id_min=0)
        words = list(unacked_words)
        if not self._batch_index_acks and any(words):
            return self.ack_many((), now_ms=now_ms)
        with self._lock:
            self.check_open()
            newly_acked, changed = self._state.ack_batch(position, words)
            self._persister.accepted_number += changed and not newly_acked
            if newly_acked:
                self._tell(Change.ACKED, ((*position, position.entry_id),), now_ms=now_ms)
            if newly_acked and self._chooses_age:
                self._observe(self._named(position), now_ms=now_ms)
            # Batches are never held back, only the entry is that the last ack of one acks.
            if position in self._state.batch:
                return self._accept(newly_acked, batch=position)
            return self._accept(newly_acked, entries=self._named(position) if self._names_entries else None)

    def mark_lost(self, first: Position, last: Position, *, now_ms: int) -> Receipt:
        """Ack every entry from `first` to `last`, both included, because its data no longer exists.

        Args:
            first: Need not be an entry of the log, nor need `last`: those between are.
            last: Not below `first`.
            now_ms: The present.

        Raises:
            ValueError: An id is out of range, or `last` is below `first`.
            CursorClosedError: The cursor is closed.

        RecoverySource: ``ManagedCursorImpl.skipNonRecoverableEntries`` of Apache Pulsar.
        """
        check_position(first)
        check_position(last)
        if last < first:
            raise ValueError(f"lost entries {Position(*first)} to {Position(*last)} end before they begin")
        lost = {}
        for ledger_id in self._ledgers.ledgers_between(first[0] - 1, last[0] + 1):
            begin = max(first[1], 0) if ledger_id == first[0] else 0
            end = self._ledgers.entry_count(ledger_id)
            end = min(last[1] + 1, end) if ledger_id == last[0] else end
            lost[ledger_id] = bitmap_of(range(begin, end))
        return self._ack_bitmaps(lost, now_ms=now_ms)

    def mark_delete(
        self,
        position: Position,
        *,
        now_ms: int,
        properties: Mapping[str, int] | None = None,
        unacked_words: Iterable[int] = (),
    ) -> Receipt:
        """Ack every entry up to a position, included.

        Args:
            position: An entry of the log, or the position before a ledger's first; not below the mark-delete position.
                The mark-delete position itself and the log's last one are accepted even if their ledger was trimmed.
            now_ms: The present.
            properties: Replace those of the mark-delete before; None keeps them.
            unacked_words: If the entry is a batch of which only the first messages are acked, the others, as
                `BatchIndexes` has them. Then the mark-delete position stays before the entry.

        Raises:
            InvalidPositionError: The log does not have the position, or it is below the mark-delete position.
            ValueError: An id is out of range, or no record can hold the properties or the words.
            TypeError: The same, of a wrong type.
            CursorClosedError: The cursor is closed.
        """
        words = list(unacked_words)
        position = check_position(position, entry_id_min=0 if any(words) else -1)
        if properties is not None:
            check_properties(properties)
        with self._lock:
            self.check_open()
            before, was_changed = self._state.mark_delete, False
            if any(words):
                newly_acked, was_changed = self._state.ack_up_to_batch(position, words, counts=self._batch_index_acks)
            else:
                newly_acked = self._state.ack_up_to(position)
            if newly_acked and self._persister.listener is not None:
                self._tell(
                    Change.MARK_DELETED, covered_runs(self._ledgers, before, self._state.mark_delete), now_ms=now_ms
                )
            if properties is not None:
                self._state.properties = dict(properties)
            if not newly_acked and (was_changed or properties is not None or self._state.mark_delete != before):
                self._persister.accepted_number += 1
            return self._accept(newly_acked, batch=position if was_changed else None)

    def skip(
        self, count: int, *, now_ms: int, counts_acked: bool = False, properties: Mapping[str, int] | None = None
    ) -> Receipt:
        """Ack the next so many entries after the mark-delete position, or all there are.

        Args:
            count: How many; 0 or more.
            now_ms: The present.
            counts_acked: Whether entries that are acked already count among them.
            properties: As for `mark_delete`; Pulsar leaves none here.

        Raises:
            ValueError: The count is negative, or no record can hold the properties.
            TypeError: The same, of a wrong type.
            CursorClosedError: The cursor is closed.

        RecoverySource: ``ManagedCursorImpl.asyncSkipEntries`` of Apache Pulsar, with ``IndividualDeletedEntries``.

        Complexity: O(ledgers), with acked ones not counted O(runs that are passed).
        """
        if count < 0:
            raise ValueError(f"cannot skip {count} entries")
        with self._lock:
            self.check_open()
            target = self._state.position_after(count, counts_acked=counts_acked)
            return self.mark_delete(target, properties=properties, now_ms=now_ms)

    def clear_backlog(self, *, now_ms: int) -> Receipt:
        """Ack everything that the log has.

        Raises:
            CursorClosedError: The cursor is closed.
        """
        with self._lock:
            self.check_open()
            return self.mark_delete(max(self._ledgers.last_confirmed, self._state.mark_delete), now_ms=now_ms)

    @property
    def has_unread(self) -> bool:
        """Whether the log has entries at or above the read position, acked or not."""
        return self._ledgers.last_confirmed >= self.read_position

    @property
    def next_unread(self) -> Position:
        """The entry that `read` would return first, or that will be written next.

        Complexity: O(log ledgers), and that of `DeletedRanges.run_containing` for each acked run in between.
        """
        with self._lock:
            ledger_id, entry_id = self.read_position
            position = self._ledgers.next_valid(Position(ledger_id, entry_id - 1))
            while (run := self._state.deleted.run_containing(position)) is not None:
                position = self._ledgers.next_valid(Position(run.ledger_id, run.end - 1))
            return position

    def read(self, count_max: int) -> list[Position]:
        """Return up to `count_max` entries from the read position on that are not acked, and move past them."""
        with self._lock:
            self.check_open()
            positions: list[Position] = []
            # The log may have rolled since: what would have been the next entry never came to be.
            ledger_id, entry_id = self.read_position
            position = self._ledgers.next_valid(Position(ledger_id, entry_id - 1))
            last = self._ledgers.last_confirmed
            while len(positions) < count_max and position <= last:
                run = self._state.deleted.run_containing(position)
                if run is None:
                    positions.append(position)
                else:
                    position = Position(run.ledger_id, run.end - 1)
                self._read_position = Position(position.ledger_id, position.entry_id + 1)
                position = self._ledgers.next_valid(position)
            return positions

    def rewind(self, position: Position | None = None) -> None:
        """Read again from a position, or from the first entry that the mark-delete does not cover."""
        with self._lock:
            first = self._ledgers.next_valid(self._state.mark_delete)
            self._read_position = first if position is None else max(first, Position(*position))

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position, included, was sent by now: how long ago tells young acks from old.

        Raises:
            ValueError: An id is out of range.
        """
        check_position(position)
        with self._lock:
            self._persister.young_age.delivered(position, now_ms=now_ms)

    def reset(self, position: Position, *, now_ms: int) -> PersistResult:
        """Seek: make a position the next to be read, with nothing acked from there on.

        When this returns the reset is durable, in a new epoch: no ack from before it counts after it, whether it was
        persisted, waited, or came in meanwhile.

        Args:
            position: What the log has not, counts as the next entry that it has; beyond its end, as its end.
            now_ms: The present.

        Raises:
            ValueError: An id is out of range.
            StoreError: The write failed: what is acked is as it was, and whether a recovery would find the cursor reset
                is unknown until the next persist. So until then no receipt is durable, and the gauges say what the
                worse of the two would lose.
            CursorFencedError: Another owner has the cursor.
            CursorClosedError: The cursor is closed.
        """
        check_position(position)
        with self._persister.writing:
            with self._lock:
                self.check_open()
                position = self._ledgers.next_valid(Position(position[0], position[1] - 1))
                mark_delete = self._ledgers.previous(position)
            route, written = self._persister.reset(mark_delete, now_ms=now_ms)
            with self._lock:
                self._read_position = position
                given_back = [] if self._persister.listener is None else self._acked_above(mark_delete)
                before = self._state.mark_delete
                result = self._persister.begin_anew(mark_delete, route, written, now_ms=now_ms)
                self._tell(Change.RESET, covered_runs(self._ledgers, before, mark_delete), now_ms=now_ms)
                self._tell(Change.UNACKED, given_back, now_ms=now_ms)
                return result

    def set_cursor_properties(self, properties: Mapping[str, str]) -> None:
        """Replace what the application attached to the cursor; it is durable when this returns.

        Names that begin with ``#pulsar.internal.`` belong to the broker: those that are there stay.

        Raises:
            ValueError: A name belongs to the broker, or a name or a text is too long.
            TypeError: One is not text.
            CursorFencedError: Another owner has the cursor.
            StoreError: The write failed; whether it happened is unknown.
            CursorClosedError: The cursor is closed.

        RecoverySource: ``ManagedCursorImpl.setCursorProperties`` of Apache Pulsar.
        """
        check_cursor_properties(properties)
        for name in properties:
            if name.startswith(INTERNAL_PREFIX):
                raise ValueError(f"cursor property {name!r}: names that begin with {INTERNAL_PREFIX!r} are internal")
        with self._persister.writing:
            self.check_open()
            journal = self._persister.journal
            kept = {name: text for name, text in journal.cursor_properties.items() if name.startswith(INTERNAL_PREFIX)}
            journal.write_cursor_properties({**kept, **properties})

    def put_internal_property(self, name: str, text: str) -> None:
        """Set one of the broker's own cursor properties; it is durable when this returns.

        Raises:
            ValueError: The name does not begin with ``#pulsar.internal.``, or it or the text is too long.
            TypeError: One is not text.
            CursorFencedError: Another owner has the cursor.
            StoreError: The write failed; whether it happened is unknown.
            CursorClosedError: The cursor is closed.

        RecoverySource: ``ManagedCursorImpl.putCursorProperty`` of Apache Pulsar.
        """
        check_cursor_properties({name: text})
        self._write_internal_property(name, {name: text})

    def remove_internal_property(self, name: str) -> None:
        """Remove one of the broker's own cursor properties, if it is there; errors as for `put_internal_property`."""
        check_cursor_properties({name: ""})
        self._write_internal_property(name, {})

    def _write_internal_property(self, name: str, properties: Mapping[str, str]) -> None:
        if not name.startswith(INTERNAL_PREFIX):
            raise ValueError(f"cursor property {name!r}: internal names begin with {INTERNAL_PREFIX!r}")
        with self._persister.writing:
            self.check_open()
            journal = self._persister.journal
            others = {other: text for other, text in journal.cursor_properties.items() if other != name}
            if {**others, **properties} != journal.cursor_properties:
                journal.write_cursor_properties({**others, **properties})

    def is_dirty(self) -> bool:
        """Tell whether something was accepted that no persist has looked at."""
        return self._persister.is_dirty

    def is_persist_due(self, *, now_ms: int) -> bool:
        """Tell whether `tick` would persist now: something waits, or young acks became old."""
        return self._persister.is_due(now_ms=now_ms)

    def tick(self, *, now_ms: int) -> PersistResult | None:
        """Persist what waits if the flush interval is over, or the rate limit lets it through; None if nothing was due.

        Raises:
            As `persist`.
        """
        return self.persist(now_ms=now_ms) if self._persister.tick(now_ms=now_ms) else None

    def persist(self, *, now_ms: int) -> PersistResult:
        """Write what is not durable and not too young, sync, and report. Acks that arrive meanwhile wait for the next.

        Raises:
            StoreError: The write failed: memory is as it was, nothing became durable, and the next persist tries again.
                If it was for nothing but young acks that had become old, and the metadata store has no room for them,
                that is the next one before which something is acked, or the ledger may be tried again.
            CursorFencedError: Another owner has the cursor; no later persist can succeed.
            CursorClosedError: The cursor is closed.

        Complexity: O(what is new), amortised; a snapshot costs O(state), once the deltas outweigh the one before.
        """
        persister = self._persister
        return self._written(lambda: persister.persist(persister.frontier(now_ms=now_ms), now_ms=now_ms))

    def promote(self, record_bytes_max: int, *, now_ms: int) -> PersistResult:
        """Persist, and of the acks that are too young for it the oldest before their time.

        Args:
            record_bytes_max: So many bytes of `unpersisted_record_bytes` may be left young; 0 or more.
            now_ms: The present.

        Raises:
            ValueError: The number of bytes is negative.
            As `persist`.
        """
        check_count("record_bytes_max", record_bytes_max, least=0)
        return self._written(lambda: self._persister.promote(record_bytes_max, now_ms=now_ms))

    def has_young(self, *, now_ms: int) -> bool:
        """Tell whether `promote` could make something durable that `persist` would hold back."""
        return self._persister.has_young(now_ms=now_ms)

    def watch(self, watcher: PersistWatcher) -> None:
        """Let somebody bound what is not durable and know of every persist from now on.

        Raises:
            ValueError: Somebody else does already.
        """
        with self._lock:
            if self._persister.watcher not in {None, watcher}:
                raise ValueError(f"the cursor of {self._persister.journal.path} is watched already")
            self._persister.watcher = watcher

    def unwatch(self, watcher: PersistWatcher) -> None:
        """Let somebody watch no longer; one who does not is left alone."""
        with self._lock:
            if self._persister.watcher is watcher:
                self._persister.watcher = None

    def listen(self, listener: CursorListener | None) -> None:
        """Let somebody know of every change from now on; None is nobody.

        Raises:
            ValueError: Somebody else listens already.
        """
        with self._lock:
            if listener is not None and self._persister.listener not in {None, listener}:
                raise ValueError(f"somebody listens to the cursor of {self._persister.journal.path} already")
            self._persister.listener = listener

    def acked_runs(self) -> list[tuple[int, int, int]]:
        """Return every entry of the log that is acked, as (ledger id, first, last), `last` included, in order.

        Complexity: O(ledgers + ranges).
        """
        with self._lock:
            runs = covered_runs(
                self._ledgers, self._ledgers.previous(self._ledgers.first_position), self._state.mark_delete
            )
            return [*runs, *((ledger_id, first, end - 1) for ledger_id, first, end in self._state.deleted.runs())]

    def told_delivered(self, consumer: str, positions: Iterable[Position], *, now_ms: int) -> None:
        """Let the listener, if there is one, know what a subscription sent to a consumer."""
        with self._lock:
            if self._persister.listener is not None:
                runs = [(ledger_id, entry_id, entry_id) for ledger_id, entry_id in positions]
                self._persister.listener.delivered(consumer, runs, now_ms=now_ms)

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Persist everything, young acks too, and refuse every later call; closing twice does nothing.

        Raises:
            StoreError: The last persist failed; the cursor stays open, so that nothing is silently given up.
        """
        if self._persister.closed:
            return None
        while True:
            with self._persister.writing:
                result = self._persister.close(now_ms=now_ms)
            with self._lock:
                # An ack that came in while the last record was written wants a record of its own.
                if not self.is_dirty():
                    self._persister.closed = True
                    return result

    def check_open(self) -> None:
        """Raise `CursorClosedError` if the cursor is closed."""
        self._persister.check_open()

    def _written(self, write: Callable[[], PersistResult]) -> PersistResult:
        """Write, one at a time, and tell the watcher how it ended."""
        try:
            with self._persister.writing:
                result = write()
        except AckStateError as error:
            self._persister.tell(error)
            raise
        self._persister.tell(result)
        return result

    def _ack_bitmaps(self, candidates: Mapping[int, BitMap], *, now_ms: int) -> Receipt:
        with self._lock:
            new = self._newly_acked(candidates, now_ms=now_ms)
            if self._chooses_age:
                self._observe(new, now_ms=now_ms)
            return self._accept_new(candidates, new)

    def _newly_acked(self, candidates: Mapping[int, BitMap], *, now_ms: int) -> Mapping[int, BitMap]:
        self.check_open()
        new = self._state.ack_bitmaps(candidates)
        if self._persister.listener is not None:
            self._tell(Change.ACKED, [run for item in new.items() for run in bitmap_runs(*item)], now_ms=now_ms)
        return new

    def _accept_new(self, candidates: Mapping[int, BitMap], new: Mapping[int, BitMap]) -> Receipt:
        return self._accept(sum(map(len, new.values())), entries=candidates if self._names_entries else None)

    def _tell(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Tell the listener, if there is one; to be called with the lock held. Acks of nothing are none."""
        listener = self._persister.listener
        if listener is not None and (runs or change is Change.RESET):
            listener.changed(change, runs, now_ms=now_ms)

    def _acked_above(self, position: Position) -> list[tuple[int, int, int]]:
        """Return what is acked above a position."""
        deleted = self._state.deleted.copy()
        deleted.remove_at_most(position)
        runs = [(ledger_id, first, end - 1) for ledger_id, first, end in deleted.runs()]
        return [*covered_runs(self._ledgers, position, self._state.mark_delete), *runs]

    def _observe(self, entries: Mapping[int, BitMap], *, now_ms: int) -> None:
        with self._lock:
            self._persister.young_age.acked(entries, now_ms=now_ms)

    def _accept(
        self, newly_acked: int, *, entries: Mapping[int, BitMap] | None = None, batch: Position | None = None
    ) -> Receipt:
        """Answer an ack; one that changed nothing is as durable as everything before it."""
        self._persister.accepted_number += newly_acked > 0
        return Receipt(self._persister.accepted_number, newly_acked, self._opened, entries or {}, batch=batch)

    def _named(self, position: Position) -> Mapping[int, BitMap]:
        entries = BitMap()
        entries.add(position[1])  # in half the time that it takes to build it from a list
        return {position[0]: entries}

    def _restore(self, found: StoredCursor) -> bool:
        """Begin with what was found, and tell whether its mark-delete position had to move."""
        content, recovered = found.recovered.content, found.recovered
        source = RecoverySource.JOURNAL if found.entry_count else RecoverySource.METADATA
        self._recovery_report = RecoveryReport(
            RecoverySource.NEW if found.repair is Repair.START_ANEW else source,
            recovered.records_replayed,
            recovered.bytes_discarded,
            recovered.discarded_offset,
            recovered.discarded_reason,
            content.mark_delete,
            content.deleted.range_count,
            found.form.name,
            found.repair,
        )
        if not self._persister.journal.form.has_deltas:
            content = reopened(content, self._ledgers)
        self._state.restore(content.mark_delete, content.deleted, batch=content.batch, properties=content.properties)
        self._read_position = self._ledgers.next_valid(self._state.mark_delete)
        return content.mark_delete != recovered.content.mark_delete

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(state)."""
        with self._lock:
            self._state._check()
            assert self.read_position > self._state.mark_delete
            assert self._persister.durable_number <= self._persister.accepted_number


def persist_all(cursors: Iterable[ManagedCursor], *, now_ms: int) -> list[PersistResult | AckStateError]:
    """Persist many cursors of one store: all that append to their journals do so with one sync.

    Args:
        cursors: They share a store; each comes once.
        now_ms: The present.

    Returns:
        For each, in order, the result, or the error that its own `persist` would have raised: one cursor that fails
        does not keep the others from being persisted.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    persisters = [cursor._persister for cursor in cursors]
    outcomes = persist_together(persisters, now_ms=now_ms)
    for persister, outcome in zip(persisters, outcomes, strict=True):
        persister.tell(outcome)
    return outcomes
