"""One subscription's ack state: exact in memory, durable by journal, honest about the difference."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ackstate.deleted_ranges import DeletedRanges, bitmap_of
from ackstate.errors import CursorClosedError, InvalidPositionError
from ackstate.position import Position, check_position
from cursor.config import CursorConfig
from cursor.journal import Journal
from cursor.outcome import CursorStats, PersistResult, Receipt, RecoveryReport, Route, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.ledger_map import LedgerMap
    from cursor.journal import Recovered
    from cursor.store import Store


@dataclass(frozen=True, slots=True)
class _Plan:
    """One persist, decided under the lock and carried out outside it."""

    route: Route
    mark_delete: Position
    content: DeletedRanges
    properties: Mapping[str, int]
    number: int
    acked_count: int


@final
class ManagedCursor:
    """The ack state of one subscription of one topic. Made by `open`; safe for any number of threads.

    An ack is accepted into memory and becomes durable with a later `persist`, which `tick` calls when it is due. The
    message log grows by itself: the cursor only looks at its `LedgerMap`.

    Positions that the log never had are refused; acks of what is acked already change nothing and succeed.
    """

    def __init__(self, journal: Journal, ledgers: LedgerMap, *, config: CursorConfig, now_ms: int) -> None:
        self._journal = journal
        self._ledgers = ledgers
        self._config = config
        self._lock = threading.RLock()
        self._persist_lock = threading.Lock()
        self._closed = False
        self._opened = object()
        self._mark_delete = ledgers.previous(Position(ledgers.first_ledger_id, 0))
        self._persisted_mark_delete = self._mark_delete
        self._deleted = DeletedRanges()
        # Invariant: the acks above the mark-delete that are not durable are those in _pending (accepted since the last
        # plan) and those in _in_flight (being written). Neither shares an entry with the other or with the disk. They
        # stay apart, so that each only ever grows until it is dropped whole, and their size with it.
        self._pending = DeletedRanges()
        self._in_flight = DeletedRanges()
        self._properties: Mapping[str, int] = {}
        # Counted since the open. Invariant: durable <= accepted, for numbers of acks as for numbers of messages.
        self._accepted_number = self._durable_number = 0
        self._acked_count = self._durable_count = 0
        self._last_persist_ms = now_ms
        self._bytes_persisted = self._persist_count = self._snapshot_count = 0
        self._recovery_report = RecoveryReport(Source.NEW, 0, 0, -1, "", self._mark_delete, 0)
        self._read_position = ledgers.next_valid(self._mark_delete)

    @classmethod
    def open(  # noqa: PLR0913 - what identifies a cursor is named, not packed
        cls,
        store: Store,
        *,
        topic: str,
        subscription: str,
        ledgers: LedgerMap,
        config: CursorConfig | None = None,
        now_ms: int,
    ) -> ManagedCursor:
        """Open a subscription's cursor and take it over from whoever had it: recover it, or create it if there is none.

        A new cursor stands before the first entry of the log and is durable when this returns.

        Args:
            store: Where the cursor's state lives; stays open when the cursor is closed.
            topic: Any text.
            subscription: Any text.
            ledgers: The message log's ledgers; the caller goes on appending to it.
            config: How to persist.
            now_ms: The present.

        Raises:
            CorruptStateError: What the store holds cannot be read; nothing was changed.
            UnsupportedVersionError: A newer release wrote it.
            InvalidPositionError: The durable state reaches beyond the end of the message log.
            StoreError: The storage failed.
        """
        journal, recovered = Journal.open(store, topic=topic, subscription=subscription)
        cursor = cls(journal, ledgers, config=config or CursorConfig(), now_ms=now_ms)
        if recovered is None:
            cursor._accepted_number += 1
            cursor.persist(now_ms=now_ms)
        else:
            cursor._restore(recovered)
        return cursor

    @property
    def mark_delete_position(self) -> Position:
        """Every entry up to it, included, is acked."""
        return self._mark_delete

    @property
    def persisted_mark_delete_position(self) -> Position:
        """The last durable mark-delete position; never ahead of `mark_delete_position`."""
        return self._persisted_mark_delete

    @property
    def read_position(self) -> Position:
        """The next entry to be read for the first time; always above the mark-delete position."""
        return self._read_position

    @property
    def deleted(self) -> DeletedRanges:
        """The acked entries above the mark-delete position: to be read, not changed."""
        return self._deleted

    @property
    def recovery_report(self) -> RecoveryReport:
        """How the cursor came by its state when it was opened."""
        return self._recovery_report

    @property
    def redelivery_if_crashed(self) -> int:
        """Acked messages that a recovery from what is synced would not know, and so redeliver. Complexity: O(1)."""
        return self._acked_count - self._durable_count

    @property
    def unpersisted_record_bytes(self) -> int:
        """Size of the ranges acked in memory and not durable, as Pulsar would write them. Complexity: O(1)."""
        return self._pending.record_bytes + self._in_flight.record_bytes

    @property
    def backlog(self) -> int:
        """Entries of the log that are not acked. Complexity: O(log ledgers)."""
        with self._lock:
            behind = self._ledgers.count_between(self._mark_delete, self._ledgers.last_confirmed)
            return behind - len(self._deleted)

    def is_acked(self, position: Position) -> bool:
        """Tell whether an entry is acked, by itself or by the mark-delete."""
        with self._lock:
            return position <= self._mark_delete or position in self._deleted

    def durable(self, receipt: Receipt) -> bool:
        """Tell whether the ack survives a crash: whether a write that covers it has been synced.

        Raises:
            ValueError: The receipt is from another cursor, or from before this one was opened.
        """
        if receipt.opened is not self._opened:
            raise ValueError("the receipt was not given by this open cursor")
        return receipt.number <= self._durable_number

    def stats(self) -> CursorStats:
        """Return the cursor's numbers, all of one instant."""
        with self._lock:
            return CursorStats(
                redelivery_if_crashed=self.redelivery_if_crashed,
                redelivery_unwritten=self.redelivery_if_crashed,
                unpersisted_record_bytes=self.unpersisted_record_bytes,
                range_count=self._deleted.range_count,
                record_bytes=self._deleted.record_bytes,
                backlog=self.backlog,
                bytes_persisted=self._bytes_persisted,
                persist_count=self._persist_count,
                snapshot_count=self._snapshot_count,
                journal_bytes=self._journal.snapshot_bytes + self._journal.delta_bytes,
            )

    def ack(self, position: Position, *, now_ms: int) -> Receipt:  # noqa: ARG002
        """Ack one entry.

        Raises:
            InvalidPositionError: The log does not have the entry.
            ValueError: An id is out of range.
            CursorClosedError: The cursor is closed.
        """
        check_position(position, entry_id_min=0)
        with self._lock:
            self._check_open()
            if position <= self._mark_delete or position in self._deleted:
                return self._receipt(0)
            self._ledgers.check_written(position)
            self._deleted.add(position)
            self._pending.add(position)
            return self._accept(1)

    def ack_many(self, positions: Sequence[Position], *, now_ms: int) -> Receipt:  # noqa: ARG002
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
        return self._ack_bitmaps(candidates)

    def ack_entries(self, ledger_id: int, entry_ids: Iterable[int], *, now_ms: int) -> Receipt:  # noqa: ARG002
        """Ack many entries of one ledger: all of them or, if one is refused, none.

        Raises:
            InvalidPositionError: The log does not have one of the entries.
            ValueError: An id is out of range.
            TypeError: Something is not an integer.
            CursorClosedError: The cursor is closed.

        Complexity: bitmap operations over the entries; no loop.
        """
        check_position(Position(ledger_id, 0))
        return self._ack_bitmaps({ledger_id: bitmap_of(entry_ids)})

    def mark_delete(
        self, position: Position, *, now_ms: int, properties: Mapping[str, int] | None = None  # noqa: ARG002
    ) -> Receipt:  # fmt: skip
        """Ack every entry up to a position, included.

        Args:
            position: An entry of the log, or the position before a ledger's first; not below the mark-delete position.
            now_ms: The present.
            properties: Replace those of the mark-delete before; None keeps them.

        Raises:
            InvalidPositionError: The log does not have the position, or it is below the mark-delete position.
            ValueError: An id is out of range.
            CursorClosedError: The cursor is closed.
        """
        check_position(position)
        position = Position(*position)
        with self._lock:
            self._check_open()
            if position < self._mark_delete:
                raise InvalidPositionError(
                    f"mark-delete to {position} would go back from {self._mark_delete}; only a reset may"
                )
            if position.entry_id >= 0 and position != self._mark_delete:
                self._ledgers.check_written(position)
            elif not self._ledgers.has_ledger(position.ledger_id):
                raise InvalidPositionError(f"ledger {position.ledger_id} is not in the message log")
            covered = self._ledgers.count_between(self._mark_delete, position)
            newly_acked = covered - self._move_mark_delete(position)
            if properties is not None:
                self._properties = dict(properties)
            return self._accept(newly_acked)

    def read(self, count_max: int) -> list[Position]:
        """Return up to `count_max` entries from the read position on that are not acked, and move past them."""
        with self._lock:
            self._check_open()
            positions: list[Position] = []
            # The log may have rolled since: what would have been the next entry never came to be.
            position = self._ledgers.next_valid(
                Position(self._read_position.ledger_id, self._read_position.entry_id - 1)
            )
            last = self._ledgers.last_confirmed
            while len(positions) < count_max and position <= last:
                run = self._deleted.run_containing(position)
                if run is None:
                    positions.append(position)
                else:
                    position = Position(run.ledger_id, run.end - 1)
                position = self._ledgers.next_valid(position)
            self._read_position = position
            return positions

    def rewind(self, position: Position | None = None) -> None:
        """Read again from a position, or from the first entry that the mark-delete does not cover."""
        with self._lock:
            first = self._ledgers.next_valid(self._mark_delete)
            self._read_position = first if position is None else max(first, Position(*position))

    def is_dirty(self) -> bool:
        """Tell whether something was accepted that is not durable."""
        return self._accepted_number > self._durable_number

    def is_persist_due(self, *, now_ms: int) -> bool:
        """Tell whether `tick` would persist now."""
        return self.is_dirty() and now_ms - self._last_persist_ms >= self._config.flush_interval_ms

    def tick(self, *, now_ms: int) -> PersistResult | None:
        """Persist if something waits and the flush interval is over; None if nothing was due.

        Raises:
            As `persist`.
        """
        return self.persist(now_ms=now_ms) if self.is_persist_due(now_ms=now_ms) else None

    def persist(self, *, now_ms: int) -> PersistResult:
        """Write what is not durable, sync, and report. Acks that arrive meanwhile wait for the next persist.

        Raises:
            StoreError: The write failed: memory is as it was, nothing became durable, and the next persist tries again.
            CursorFencedError: Another owner has the cursor; no later persist can succeed.
            CursorClosedError: The cursor is closed.

        Complexity: O(what is new), amortised; a snapshot costs O(state), once the deltas outweigh the one before.
        """
        with self._persist_lock:
            plan = self._plan()
            if plan is None:
                return PersistResult(Route.NOTHING, 0, 0, self._persisted_mark_delete)
            written = 0
            try:
                written = self._write(plan)
            finally:
                if not written:
                    self._abandon_plan()
            return self._commit(plan, written, now_ms=now_ms)

    def close(self, *, now_ms: int) -> PersistResult | None:
        """Persist everything and refuse every later call; closing twice does nothing.

        Raises:
            StoreError: The last persist failed; the cursor stays open, so that nothing is silently given up.
        """
        if self._closed:
            return None
        result = self.persist(now_ms=now_ms)
        self._closed = True
        return result

    def _ack_bitmaps(self, candidates: Mapping[int, BitMap]) -> Receipt:
        with self._lock:
            self._check_open()
            new = {ledger_id: self._not_acked(ledger_id, bitmap) for ledger_id, bitmap in candidates.items()}
            for ledger_id, bitmap in new.items():
                if bitmap:
                    self._ledgers.check_written(Position(ledger_id, bitmap.max()))
            for ledger_id, bitmap in new.items():
                self._deleted.add_entries(ledger_id, bitmap)
                self._pending.add_entries(ledger_id, bitmap)
            return self._accept(sum(map(len, new.values())))

    def _not_acked(self, ledger_id: int, candidates: BitMap) -> BitMap:
        if ledger_id < self._mark_delete.ledger_id:
            return bitmap_of(())
        new = candidates - self._deleted.entries(ledger_id)
        if ledger_id == self._mark_delete.ledger_id:
            new.remove_range(0, self._mark_delete.entry_id + 1)
        return new

    def _accept(self, newly_acked: int) -> Receipt:
        self._advance_mark_delete()
        self._acked_count += newly_acked
        self._accepted_number += 1
        return self._receipt(newly_acked)

    def _receipt(self, newly_acked: int) -> Receipt:
        return Receipt(self._accepted_number, newly_acked, self._opened)

    def _advance_mark_delete(self) -> None:
        """Move the mark-delete over every acked entry that follows it, across the ends of ledgers."""
        reached = self._mark_delete
        while (run := self._deleted.run_containing(self._ledgers.next_valid(reached))) is not None:
            reached = Position(run.ledger_id, run.end - 1)
        if reached != self._mark_delete:
            self._move_mark_delete(reached)

    def _move_mark_delete(self, position: Position) -> int:
        """Set the mark-delete position and return how many entries up to it were acked one by one before."""
        self._mark_delete = position
        self._pending.remove_at_most(position)
        self._read_position = max(self._read_position, self._ledgers.next_valid(position))
        return self._deleted.remove_at_most(position)

    def _check_open(self) -> None:
        if self._closed:
            raise CursorClosedError(f"{self._journal.path}: the cursor is closed")

    def _restore(self, recovered: Recovered) -> None:
        last = self._ledgers.last_confirmed
        reached = recovered.deleted.last_range()
        highest = reached[1] if reached else recovered.mark_delete
        if highest > last and highest.entry_id >= 0:
            raise InvalidPositionError(
                f"{self._journal.path}: the durable state reaches {highest}, the message log ends at {last}"
            )
        self._mark_delete = self._persisted_mark_delete = recovered.mark_delete
        self._deleted = recovered.deleted
        self._properties = recovered.properties
        self._recovery_report = RecoveryReport(
            Source.JOURNAL,
            recovered.records_replayed,
            recovered.bytes_discarded,
            recovered.discarded_offset,
            recovered.discarded_reason,
            recovered.mark_delete,
            recovered.deleted.range_count,
        )
        self._read_position = self._ledgers.next_valid(self._mark_delete)
        self._advance_mark_delete()

    def _plan(self) -> _Plan | None:
        """Take what the next record holds, at one instant; None if nothing waits."""
        with self._lock:
            self._check_open()
            if not self.is_dirty():
                return None
            journal = self._journal
            outgrown = journal.delta_bytes > max(journal.snapshot_bytes, self._config.compaction_bytes_min)
            snapshot = journal.needs_snapshot or outgrown
            self._in_flight, self._pending = self._pending, DeletedRanges()
            return _Plan(
                Route.SNAPSHOT if snapshot else Route.DELTA,
                self._mark_delete,
                self._deleted.copy() if snapshot else self._in_flight,
                self._properties,
                self._accepted_number,
                self._acked_count,
            )

    def _write(self, plan: _Plan) -> int:
        write = self._journal.write_snapshot if plan.route is Route.SNAPSHOT else self._journal.append_delta
        return write(plan.mark_delete, plan.content, properties=plan.properties)

    def _abandon_plan(self) -> None:
        """Put back what a failed write was to cover."""
        with self._lock:
            self._pending.update(self._in_flight)
            self._pending.remove_at_most(self._mark_delete)
            self._in_flight = DeletedRanges()

    def _commit(self, plan: _Plan, written: int, *, now_ms: int) -> PersistResult:
        with self._lock:
            covered = plan.acked_count - self._durable_count
            self._in_flight = DeletedRanges()
            self._persisted_mark_delete = plan.mark_delete
            self._durable_number = plan.number
            self._durable_count = plan.acked_count
            self._last_persist_ms = now_ms
            self._bytes_persisted += written
            self._persist_count += 1
            self._snapshot_count += plan.route is Route.SNAPSHOT
            return PersistResult(plan.route, written, covered, plan.mark_delete)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(state)."""
        with self._lock:
            for ranges in (self._deleted, self._pending, self._in_flight):
                ranges._check()
            first = self._deleted.first_range()
            assert first is None or first[0] > self._mark_delete or first[1] > self._mark_delete
            assert self._persisted_mark_delete <= self._mark_delete
            assert self._read_position > self._mark_delete
            assert self._durable_number <= self._accepted_number
            assert self._durable_count <= self._acked_count
            beyond = self._pending.copy()
            assert beyond.update(self._deleted) == len(self._deleted) - len(self._pending)
