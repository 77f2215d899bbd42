"""Keeps one subscription's ack state: exact in memory, durable by journal, honest about the difference."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.batch_indexes import BatchIndexes
from ackstate.checks import check_count, member
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import INTERNAL_PREFIX, CursorState, Format, Repair, reopened
from ackstate.cursor.journal import Journal, cursor_path
from ackstate.cursor.persist import Persister, execute_one, persist_all, reset, result_of
from ackstate.cursor.recovery import report_of
from ackstate.cursor.results import Change, Listeners, Receipt, ReceiptStatus
from ackstate.cursor.state import CursorAckState
from ackstate.cursor.view import CursorView, EntryReader
from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import bitmap_of, checked_bitmaps_of, runs_of
from ackstate.errors import AckStateError, CursorClosedError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position, check_position, positions_of
from ackstate.stores.base import call_each
from ackstate.wire.native import check_properties, check_text_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from ackstate.cursor.recovery import StoredCursor
    from ackstate.cursor.results import CursorListener, CursorStats, PersistResult, RecoveryReport
    from ackstate.stores.base import Store
    from ackstate.wire.native import DeliveryCounts

_ACCEPTED = ReceiptStatus.ACCEPTED  # cached: the lookup of an enum's member is slow
_NO_ENTRIES: Mapping[int, BitMap] = MappingProxyType({})  # of a receipt that need not list them
_DEFAULTS = CursorConfig()
_new = tuple.__new__  # makes a named tuple in half the time of its class
# Bitmap operations take as long as this many single acks.
_FEW_MAX = 16
_INTEGERS = {int}


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorOpening:
    """A cursor to be opened or created.

    Attributes:
        topic: Not empty.
        subscription: Not empty.
        ledgers: The message log's ledgers; the caller continues to append to it.
        config: How to persist.
        repair: How to repair the stored cursor if it cannot be read. The repair is durable when the cursor is open.
        start: The position that a new cursor reads first, as in `ManagedCursor.reset`; None for the first entry.
        properties: Those of a new cursor, of the application and of the broker.
        check: Raises an error, before anything is written, unless the caller may open the cursor.

    Raises:
        TypeError, ValueError: The log is no `LedgerMap`, the start no position, or no record can hold a property.
    """

    topic: str
    subscription: str
    ledgers: LedgerMap
    config: CursorConfig = field(default_factory=CursorConfig)
    repair: Repair = Repair.NONE
    start: Position | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        if not isinstance(self.ledgers, LedgerMap):
            raise TypeError(f"ledgers must be a LedgerMap, such as log.ledgers, got a {type(self.ledgers).__name__}")
        if self.start is not None:
            check_position(self.start)
        check_text_properties(self.properties)


__all__ = ["ManagedCursor", "persist_all"]


@final
class ManagedCursor:
    """The ack state of one subscription of one topic. Made by `open`; safe for any number of threads.

    An ack is accepted into memory and becomes durable with a later `persist`, which `tick` calls when it is due. Acks
    of acked entries change nothing. Every ack raises `InvalidPositionError` if the log does not have an entry,
    `ValueError` or `TypeError` if an id is no integer in range; every change, `CursorClosedError` after `close`.

    Attributes:
        topic: The topic whose messages are acked.
        ledgers: The message log's ledgers that it was opened with.
        lock: Guards the state: hold it to decide on several of the cursor's numbers. No storage works under it.
        recovery_report: How the cursor came by its state when it was opened.
        reader: The read position, and the unacked entries from there on.
        ruler: Has the times of deliveries, which separate young acks from old ones: a replay feeds many at once.
        view: Answers everything else about the cursor, and changes nothing.
        check_open: Raises `CursorClosedError` if the cursor is closed.
        opened_ms: When it was opened.
    """

    def __init__(self, journal: Journal, ledgers: LedgerMap, *, config: CursorConfig, now_ms: int) -> None:
        self.topic = journal.topic
        self.ledgers = ledgers
        self.opened_ms = now_ms
        self.recovery_report: RecoveryReport
        self.lock = threading.RLock()
        self._acquire, self._release = self.lock.acquire, self.lock.release
        self._state = CursorAckState(ledgers)
        self._listeners = Listeners()
        self._persister = Persister(self._state, journal, self._listeners, lock=self.lock, config=config, now_ms=now_ms)
        self.ruler = self._persister.ruler
        self._opened = object()  # identifies this opening of the cursor in its receipts
        self._names_entries = self._persister.may_hold_back  # whether a receipt must list its entries
        self._counts_batches = config.batch_index_acks
        self._counts_deliveries = config.format is Format.NATIVE
        self.check_open = self._persister.check_open
        self.reader = EntryReader(self._state, lock=self.lock, check_open=self.check_open)
        self.view = CursorView(self._persister)

    @classmethod
    def open(  # noqa: PLR0913 - the names of a cursor are not packed
        cls,
        store: Store,
        *,
        topic: str,
        subscription: str,
        ledgers: LedgerMap,
        config: CursorConfig | None = None,
        repair: Repair | str = Repair.NONE,
        start: Position | None = None,
        properties: Mapping[str, str] | None = None,
        now_ms: int,
    ) -> ManagedCursor:
        """Open a subscription's cursor and take it over from its last owner: recover it, or create it if there is none.

        A new cursor, with its start and its properties, is durable when this returns. In Pulsar's format a mark-delete
        position may move (`ackstate.cursor.formats.reopened`); that is durable then, too.

        The arguments are those of `CursorOpening`; the store stays open when the cursor is closed.

        Raises:
            TypeError, ValueError: An argument is of another type, a name is empty, or a property too long.
            PayloadTooLargeError: The properties of a new cursor leave no room in its record; nothing was written.
            UnreadableCursorError: The stored cursor cannot be read; nothing was changed. The error names the repairs
                that help.
            UnsupportedVersionError: It has another version.
            InvalidPositionError: The durable state is beyond the message log, and was left as it is; Pulsar's
                mark-delete position may be.
            StoreError: The storage failed.
        """
        opening = CursorOpening(
            topic=topic, subscription=subscription, ledgers=ledgers, config=config or _DEFAULTS,
            repair=repair if type(repair) is Repair else member("repair", repair, Repair), start=start,
            properties=properties or {},
        )  # fmt: skip
        return cls._open(store, opening, now_ms=now_ms)

    @classmethod
    def _open(cls, store: Store, opening: CursorOpening, *, now_ms: int) -> ManagedCursor:
        """Open a cursor as `open`, with the arguments in one value."""
        journal, found = Journal.open(store, opening)
        cursor = cls(journal, opening.ledgers, config=opening.config, now_ms=now_ms)
        if found is None:
            cursor._create(opening, now_ms=now_ms)
        else:
            cursor._restore(found, now_ms=now_ms)
        return cursor

    def _create(self, opening: CursorOpening, *, now_ms: int) -> None:
        """Make a new cursor durable."""
        # One with a start goes to the metadata store, as every new one does in Pulsar's format. A ledger of it, left
        # over by a crash before its record was written, would look like a journal whose record was lost.
        state, start, journal = self._state, opening.start, self._persister.journal
        if opening.properties:
            journal.check_room_for(opening.properties)
            journal.cursor_properties = dict(opening.properties)
        if start is not None:
            first = state.ledgers.next_valid(Position(start[0], start[1] - 1))
            state.restore(CursorState(state.ledgers.previous(first), DeletedRanges(), BatchIndexes(), {}))
        begin = partial(Persister.begin_creation, in_metadata=start is not None, now_ms=now_ms)
        result_of(execute_one(self._persister, begin))
        self.recovery_report = report_of(None, journal.form.name, state.mark_delete)

    def _restore(self, found: StoredCursor, *, now_ms: int) -> None:
        """Begin with the stored cursor, and make necessary changes of it durable."""
        state, form = self._state, self._persister.journal.form
        report, content = report_of(found, form.name, state.mark_delete), found.recovered.content
        if not form.has_deltas:
            content = reopened(content, state.ledgers)
        is_changed = found.is_repaired or content.mark_delete != report.mark_delete or found.recovered.is_idle
        state.restore(content)
        if is_changed or found.form.name is not form.name:
            state.changed()  # A cursor in another format is converted by its next persist.
        if is_changed:
            result_of(execute_one(self._persister, partial(Persister.begin, now_ms=now_ms)))
        self.recovery_report = report

    @property
    def mark_delete_position(self) -> Position:
        """Every entry up to it, included, is acked."""
        return self._state.mark_delete

    @property
    def persisted_mark_delete_position(self) -> Position:
        """The last durable mark-delete position, or that of a failed reset if it is lower."""
        return self._state.persisted_mark_delete

    @property
    def read_position(self) -> Position:
        """Where `reader` reads next; always above the mark-delete position."""
        return self.reader.position

    @property
    def deleted(self) -> DeletedRanges:
        """The acked entries above the mark-delete position: to be read, not changed."""
        return self._state.deleted

    @property
    def cursor_properties(self) -> Mapping[str, str]:
        """The properties that the application and the broker attached to the cursor: to be read, not changed."""
        return self._persister.journal.cursor_properties

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages of the log that a recovery from the synced state would not have, and so redeliver.

        Exact; at most those, if the log was trimmed above the durable mark-delete position. Complexity: O(1); O(log
        ledgers) then; O(containers of the bitmaps) between a reset that failed and the next persist.
        """
        return self.view.redelivery_if_crashed

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers)."""
        return self.view.backlog

    def is_acked(self, position: Position) -> bool:
        """Return whether an entry is acked, by itself or by the mark-delete."""
        with self.lock:
            return self._state.is_acked(position)

    def durable(self, receipt: Receipt) -> bool:
        """Return whether the ack survives a crash: whether a write that covers it has been synced.

        An ack from before a reset does not count after it, so its receipt is not durable any more; nor is any while a
        reset is being written, or has failed and may have happened.

        Raises:
            ValueError: The receipt is from another cursor, or from before this one was opened.
        """
        if receipt.opened is not self._opened:
            raise ValueError("the receipt was not given by this open cursor")
        with self.lock:
            return self._state.is_durable(receipt)

    def stats(self) -> CursorStats:
        """Return the cursor's numbers, all of one instant."""
        return self.view.stats()

    def ack(self, position: Position, *, now_ms: int) -> Receipt:
        """Ack one entry."""
        # An ack takes so little that `with`, one extra call and the constructor of a named tuple would show in it.
        state = self._state
        self._acquire()
        try:
            if self._persister.closed:
                self.check_open()
            newly_acked = state.ack(position)
            if self._listeners.of_changes and newly_acked:
                ledger_id, entry_id = position
                self._listeners.changed(Change.ACKED, ((ledger_id, entry_id, entry_id),), now_ms=now_ms)
            entries = _named(position) if self._names_entries else _NO_ENTRIES
            return _new(Receipt, (state.accepted_number, newly_acked, self._opened, entries, _ACCEPTED, None))
        finally:
            self._release()

    def ack_many(self, positions: Sequence[Position], *, now_ms: int) -> Receipt:
        """Ack a list of entries, in any order, repeated or not: all of them or, if one is refused, none.

        An array of integers of shape (entries, 2), with the ledger id and the entry id of each, is a list, too.
        """
        return self.ack_bitmaps(checked_bitmaps_of(positions), now_ms=now_ms)

    def ack_entries(self, ledger_id: int, entry_ids: Iterable[int], *, now_ms: int) -> Receipt:
        """Ack many entries of one ledger: all of them or, if one is refused, none.

        Complexity: bitmap operations over the entries; up to 16 one by one.
        """
        few = _few_of(entry_ids)
        if few is not None and len(few) == 1:
            return self.ack(_new(Position, (ledger_id, few[0])), now_ms=now_ms)
        is_plain = not (self._names_entries or self._listeners.of_changes)
        if few and is_plain and type(ledger_id) is int and {*map(type, few)} == _INTEGERS:
            with self.lock:
                state = self._state
                if not self._persister.closed and 0 <= min(few) <= max(few) < self.ledgers.entry_count(ledger_id):
                    newly_acked = sum(map(state.ack, positions_of(ledger_id, few)))
                    receipt = (state.accepted_number, newly_acked, self._opened, _NO_ENTRIES, _ACCEPTED, None)
                    return _new(Receipt, receipt)
        ledger_id, _ = check_position(Position(ledger_id, 0))
        return self.ack_bitmaps({ledger_id: bitmap_of(few or entry_ids)}, now_ms=now_ms)

    def ack_bitmaps(self, entries: Mapping[int, BitMap], *, now_ms: int) -> Receipt:
        """Ack entries of many ledgers, all or none; errors as `ManagedCursor.ack_entries`.

        Complexity: bitmap operations over the entries; no loop.
        """
        with self.lock:
            self.check_open()
            new, newly_acked = self._state.ack_bitmaps(entries)
            if self._listeners.of_changes:
                runs = [run for item in new.items() for run in _bitmap_runs(*item)]
                self._listeners.changed(Change.ACKED, runs, now_ms=now_ms)
            return self._receipt(newly_acked, entries=entries)

    def ack_batch(self, position: Position, unacked_words: Iterable[int], *, now_ms: int) -> Receipt:
        """Ack messages of an entry that is a batch of them; the last one acks the entry.

        Args:
            position: The entry.
            unacked_words: The messages that this leaves unacked, as `BatchIndexes` has them; acked ones stay acked.
            now_ms: The present.

        Raises:
            ValueError, TypeError: A word does not fit signed 64 bits, or is not an integer.
        """
        position = check_position(position, entry_id_min=0)
        words = list(unacked_words)
        if not self._counts_batches and any(words):
            return self.ack_bitmaps({}, now_ms=now_ms)
        with self.lock:
            self.check_open()
            newly_acked, _ = self._state.ack_batch(position, words)
            if newly_acked:
                self._listeners.changed(Change.ACKED, ((*position, position.entry_id),), now_ms=now_ms)
            # Only entries are held back, never partly acked batches.
            if position in self._state.batch:
                return self._receipt(newly_acked, batch=position)
            return self._receipt(newly_acked, entries=_named(position))

    def count_deliveries(self, counts: DeliveryCounts) -> None:
        """Keep how often unacked messages were sent, and until when each waits; the next persist writes it.

        In Pulsar's format, which has no place for them, they are not kept.
        """
        if counts and self._counts_deliveries:
            with self.lock:
                self._state.count(counts)

    def is_count_durable(self, position: Position) -> bool:
        """Return whether no crash forgets how often an unacked message was sent.

        Also True where no persist would change that: in Pulsar's format, and if the store had no room for the count.
        """
        with self.lock:
            return self._state.counts.is_durable(position)

    def mark_lost(self, first: Position, last: Position, *, now_ms: int) -> Receipt:
        """Ack every entry from `first` to `last`, both included, because its data no longer exists.

        Args:
            first: Need not be an entry of the log, nor need `last`: those between are.
            last: Not below `first`, else `ValueError` is raised.
            now_ms: The present.

        Source: ``ManagedCursorImpl.skipNonRecoverableEntries`` of Apache Pulsar.
        """
        check_position(first)
        check_position(last)
        if last < first:
            raise ValueError(f"lost entries {Position(*first)} to {Position(*last)} end before they begin")
        runs = self.ledgers.runs_between(Position(first[0], first[1] - 1), Position(*last))
        lost = {ledger_id: bitmap_of(range(begin, end + 1)) for ledger_id, begin, end in runs}
        return self.ack_bitmaps(lost, now_ms=now_ms)

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
            InvalidPositionError: The position is below the mark-delete position.
            ValueError, TypeError: No record can hold the properties or the words.
        """
        words = list(unacked_words)
        position = check_position(position, entry_id_min=0 if any(words) else -1)
        if properties is not None:
            check_properties(properties)
        with self.lock:
            self.check_open()
            state, before, is_partly_acked = self._state, self._state.mark_delete, False
            if any(words):
                newly_acked, is_partly_acked = state.ack_up_to_batch(position, words, counts=self._counts_batches)
            else:
                newly_acked = state.ack_up_to(position)
            if properties is not None:
                state.properties = dict(properties)
                state.changed()
            if newly_acked and self._listeners.of_changes:
                runs = state.ledgers.runs_between(before, state.mark_delete)
                self._listeners.changed(Change.MARK_DELETED, runs, now_ms=now_ms)
            return self._receipt(newly_acked, batch=position if is_partly_acked else None)

    def skip(
        self, count: int, *, now_ms: int, counts_acked: bool = False, properties: Mapping[str, int] | None = None
    ) -> Receipt:
        """Ack the next `count` entries after the mark-delete position, or all there are.

        Args:
            count: How many; 0 or more.
            now_ms: The present.
            counts_acked: Whether entries that are acked already count among them.
            properties: As for `mark_delete`; Pulsar leaves none here.

        Raises:
            ValueError: The count is negative, or no record can hold the properties.

        Source: ``ManagedCursorImpl.asyncSkipEntries`` of Apache Pulsar. Complexity: as `AckView.position_after`.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        with self.lock:
            self.check_open()
            target = self.view.position_after(count, counts_acked=counts_acked)
            return self.mark_delete(target, properties=properties, now_ms=now_ms)

    def clear_backlog(self, *, now_ms: int) -> Receipt:
        """Ack everything that the log has."""
        with self.lock:
            return self.mark_delete(max(self.ledgers.last_confirmed, self._state.mark_delete), now_ms=now_ms)

    def delivered(
        self, position: Position, *, now_ms: int, consumer: str = "", positions: Iterable[Position] = ()
    ) -> None:
        """Note that everything up to a position, included, was sent by now. Acks are young until that is long ago.

        Args:
            position: The highest one sent.
            now_ms: The present.
            consumer: The receiver of the messages, for listeners.
            positions: The messages that this consumer received, for listeners.
        """
        position = check_position(position)
        with self.lock:
            self._persister.delivered(position, now_ms=now_ms)
            if self._listeners.of_deliveries:
                self._listeners.delivered(consumer, positions, now_ms=now_ms)

    def reset(self, position: Position, *, now_ms: int) -> PersistResult:
        """Seek: make a position the next to be read, with nothing acked from there on.

        When this returns the reset is durable, in a new epoch: no ack from before it counts after it. The properties of
        the mark-delete are gone, as in Pulsar; only Pulsar's ``__compaction`` keeps them, which name the compacted
        ledger. Those of the cursor stay. After a reset that failed all are as they were.

        Args:
            position: If the log does not have it, the next entry that it has; beyond its end, its end.
            now_ms: The present.

        Raises:
            StoreError: The write failed: the acks are as they were. Whether a recovery would find the cursor reset is
                unknown until the next persist. So until then no receipt is durable, and the gauges report the worse of
                the two outcomes.
            CursorFencedError: Another owner has the cursor.

        Source: ``ManagedCursorImpl.internalResetCursor`` of Apache Pulsar.
        """
        check_position(position)
        return reset(self._persister, self.reader, position, now_ms=now_ms)

    def set_cursor_properties(self, properties: Mapping[str, str]) -> None:
        """Replace the application's properties of the cursor; those of the broker stay. Durable when this returns.

        Raises:
            ValueError: A name belongs to the broker, or a name or a text is too long.
            TypeError: One is not text.
            PayloadTooLargeError: They would leave no room in the record: of `CursorConfig.metadata_bytes_max`, all
                properties must leave about 150 bytes. Nothing was changed.
            StoreError: The write failed; whether it happened is unknown.
            CursorFencedError: Another owner has the cursor.

        Source: ``ManagedCursorImpl.setCursorProperties`` of Apache Pulsar.
        """
        check_text_properties(properties)
        for name in properties:
            if name.startswith(INTERNAL_PREFIX):
                raise ValueError(f"cursor property {name!r}: names that begin with {INTERNAL_PREFIX!r} are internal")
        with self._persister.writing:
            self.check_open()
            before = self.cursor_properties
            internal = {name: text for name, text in before.items() if name.startswith(INTERNAL_PREFIX)}
            self._persister.journal.write_cursor_properties({**internal, **properties})

    def put_internal_property(self, name: str, text: str) -> None:
        """Set one of the broker's own properties. Durable when this returns.

        Raises:
            ValueError: The name does not begin with ``#pulsar.internal.``, or it or the text is too long.
            As `set_cursor_properties`.

        Source: ``ManagedCursorImpl.putCursorProperty`` of Apache Pulsar.
        """
        check_text_properties({name: text})
        if not name.startswith(INTERNAL_PREFIX):
            raise ValueError(f"cursor property {name!r}: internal names begin with {INTERNAL_PREFIX!r}")
        with self._persister.writing:
            self.check_open()
            before = self.cursor_properties
            if before.get(name) != text:
                self._persister.journal.write_cursor_properties({**before, name: text})

    def tick(self, *, now_ms: int) -> PersistResult | None:
        """Persist waiting acks if the flush interval is over, or the rate limit allows it; None if nothing was due.

        Raises:
            As `persist`.
        """
        return self.persist(now_ms=now_ms) if self._persister.tick(now_ms=now_ms) else None

    def persist(self, *, now_ms: int) -> PersistResult:
        """Write the acks that are neither durable nor too young, and sync. Later acks wait for the next persist.

        Raises:
            StoreError: The write failed: memory is as it was, nothing became durable, and the next persist tries again.
                After a write of only young acks that had become old, and for which the metadata store has no room, that
                is the first persist with other acks, or once the ledger may be tried again.
            CursorFencedError: Another owner has the cursor; no later persist can succeed.

        Complexity: O(new acks), amortised; a snapshot costs O(state), once the deltas outweigh the one before.
        """
        outcome = self._persister.report(execute_one(self._persister, partial(Persister.begin, now_ms=now_ms)))
        if isinstance(outcome, AckStateError):
            raise outcome
        return outcome

    def promote(self, record_bytes_max: int, *, now_ms: int) -> PersistResult:
        """Persist, and of the acks that are too young for it the oldest before their time.

        Args:
            record_bytes_max: How many bytes of `CursorView.unpersisted_record_bytes` may be left young; 0 or more.
            now_ms: The present.

        Raises:
            ValueError: The number of bytes is negative.
            As `persist`.
        """
        check_count("record_bytes_max", record_bytes_max, least=0)
        outcome = execute_one(self._persister, lambda each: each.begin_promotion(record_bytes_max, now_ms=now_ms))
        return result_of(self._persister.report(outcome))

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Persist everything, young acks too, and refuse every later call; closing twice does nothing.

        Raises:
            StoreError: The last persist failed; the cursor stays open, so that nothing is silently given up.
        """
        persister, result = self._persister, None
        # Acks accepted during the final write need another record.
        while not persister.closed:
            outcome = execute_one(persister, partial(Persister.begin_closing, now_ms=now_ms))
            if isinstance(outcome, CursorClosedError):
                return result  # Another thread has closed it.
            result = result_of(outcome)
        return result

    def add_listener(self, listener: CursorListener) -> None:
        """Register a listener; no-op if it is registered.

        Raises:
            ValueError: Another listener of its class is registered.
        """
        with self.lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: CursorListener) -> None:
        """Remove a listener; no-op if it is not registered."""
        with self.lock:
            self._listeners.remove(listener)

    def _receipt(
        self, newly_acked: int, *, entries: Mapping[int, BitMap] | None = None, batch: Position | None = None
    ) -> Receipt:
        """Return a receipt; that of an ack that changed nothing is as durable as everything before it."""
        named_entries = entries if entries is not None and self._names_entries else _NO_ENTRIES
        return Receipt(self._state.accepted_number, newly_acked, self._opened, named_entries, batch=batch)

    def __repr__(self) -> str:
        return f"<ManagedCursor {self._persister.journal.path} at {self._state.mark_delete}, {self.deleted!r}>"

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(state)."""
        with self.lock:
            self._state._check()
            assert self.read_position > self._state.mark_delete


def _few_of(entry_ids: Iterable[int]) -> list[int] | None:
    """Return entry ids, valid or not, as a list; None if they are more than are acked one by one, or of no length."""
    try:
        if len(entry_ids) > _FEW_MAX:  # type: ignore[arg-type]
            return None
    except TypeError:
        return None
    if type(entry_ids) is list:
        return entry_ids
    return entry_ids.tolist() if hasattr(entry_ids, "tolist") else list(entry_ids)


def _bitmap_runs(ledger_id: int, entries: BitMap) -> list[tuple[int, int, int]]:
    """Return the runs of some entries of a ledger."""
    firsts, lasts = runs_of(entries)
    return [(ledger_id, *run) for run in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _named(position: Position) -> Mapping[int, BitMap]:
    """Return one entry as receipts have them, ledger id -> bitmap."""
    entries = BitMap()
    entries.add(position[1])  # in half the time that it takes to build it from a list
    return {position[0]: entries}


def open_cursors(
    store: Store, openings: Iterable[CursorOpening], *, now_ms: int, executor: Executor | None = None
) -> list[ManagedCursor | AckStateError]:
    """Open or create many cursors, as `ManagedCursor.open` each, in threads: a store on a disk lets them share syncs.

    A crash meanwhile leaves every cursor as a crash during its own `ManagedCursor.open` does.

    Args:
        store: Where the cursors' state lives; stays open.
        openings: The cursors.
        now_ms: The present.
        executor: As for `persist_all`.

    Returns:
        For each, in order, the cursor, or the error that its own `ManagedCursor.open` would have raised: one that
        fails does not keep the others from being opened.

    Raises:
        TypeError, ValueError: A cursor comes twice, or a name is of another type or empty; nothing was written.
    """
    openings = list(openings)
    if len({cursor_path(each.topic, each.subscription) for each in openings}) < len(openings):
        raise ValueError("cursors that are opened together must be different")
    return call_each(lambda each: ManagedCursor._open(store, each, now_ms=now_ms), openings, executor)
