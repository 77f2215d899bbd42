"""Defines what a cursor tells its caller: receipts, results, reports, statistics; and its listeners: each change.

Changes are told in the order in which they took effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.cursor.formats import Format, Repair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyroaring import BitMap

    from ackstate.errors import AckStateError
    from ackstate.position import Position


class ReceiptStatus(Enum):
    """The promise of a receipt by itself; `ManagedCursor.durable` returns whether it is durable."""

    ACCEPTED = "accepted"


class Receipt(NamedTuple):
    """The answer to an accepted ack: it is in memory, which promises nothing about the disk.

    Attributes:
        number: Everything accepted up to this number must be durable before this receipt is.
        newly_acked: How many entries were not acked before.
        opened: Identity of the open cursor that gave it.
        entries: The acked entries, ledger -> bitmap, if a persist may leave some out; empty for a cumulative ack.
        status: ACCEPTED.
        batch: The batch of which it acked messages, but not the last one; None for whole entries.
    """

    number: int
    newly_acked: int
    opened: object
    entries: Mapping[int, BitMap]
    status: ReceiptStatus = ReceiptStatus.ACCEPTED
    batch: Position | None = None

    def __repr__(self) -> str:
        """Leave out the entries, which may be a million."""
        return f"<Receipt {self.number} for {self.newly_acked} newly acked, {self.status.value}>"


class RecoverySource(Enum):
    """Where a cursor's state came from when it was opened."""

    NEW = "new"
    JOURNAL = "journal"
    METADATA = "metadata store"


class PersistTarget(Enum):
    """Which way a persist took."""

    NOTHING = "nothing to write"
    DELTA = "delta appended to the cursor ledger"
    WHOLE = "whole state appended to the cursor ledger"
    SNAPSHOT = "whole state in a new cursor ledger"
    METADATA = "whole state in the metadata store"


class PersistResult(NamedTuple):
    """The result of a completed persist.

    Attributes:
        route: Which way it took.
        bytes_written: Size of the record.
        messages_covered: Change in the number of durable acked messages; negative if some were displaced.
        mark_delete: The durable mark-delete position.
        messages_held_back: Acked messages that it left for later, because they are young.
        messages_cut: Acked messages that the range limit left out of it.
        batches_cut: Partly acked batches that the limit on them left out of it.
        counts_cut: Delivery counts that it left out, because the metadata store had no room for them: all of them.
    """

    route: PersistTarget
    bytes_written: int
    messages_covered: int
    mark_delete: Position
    messages_held_back: int = 0
    messages_cut: int = 0
    batches_cut: int = 0
    counts_cut: int = 0


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """How a cursor came by its state when it was opened.

    Attributes:
        source: NEW for a cursor that never was, else where the state was read.
        records_replayed: Journal records folded.
        bytes_discarded: Size of a torn last record, whose write was never reported durable, or of the records that a
            repair gave up.
        discarded_offset: Where it begins in the journal, -1 without one.
        discarded_reason: Why it could not be read, empty without one.
        mark_delete: The mark-delete position found.
        range_count: How many individually deleted ranges were found.
        format: The format that it was written in.
        repair: The repair that was needed to read it.
        acks_given_up_min: Acked entries in readable records that the repair forgot: there may have been more.
        properties_given_up: Likewise the properties of the latest mark-delete.
        has_unknown_properties: Whether the record with the latest of these could not be read.
        cursor_properties_given_up: Whether the repair had no record to read the cursor properties from.
    """

    source: RecoverySource
    records_replayed: int
    bytes_discarded: int
    discarded_offset: int
    discarded_reason: str
    mark_delete: Position
    range_count: int
    format: Format = Format.NATIVE
    repair: Repair = Repair.NONE
    acks_given_up_min: int = 0
    properties_given_up: Mapping[str, int] = field(default_factory=dict)
    has_unknown_properties: bool = False
    cursor_properties_given_up: bool = False


@dataclass(frozen=True, slots=True)
class CursorStats:
    """A cursor at one instant.

    Attributes:
        redelivery_if_crashed: Acked messages that a recovery would not know.
        redelivery_unwritten: Those of them that wait for the next persist, or for one that is under way.
        redelivery_young: Those of them that the last persist held back because they were sent too recently.
        redelivery_cut: Those of them that the range limit left out.
        batches_unwritten: Partly acked batches with acks that no durable record holds; not counted in the messages.
        unpersisted_record_bytes: Size of the ranges acked in memory and not durable, as Pulsar would write them.
        range_count: Individually deleted ranges in memory.
        record_bytes: Their size as Pulsar would write them.
        backlog: Entries of the log that are not acked.
        bytes_persisted: Bytes written since the cursor was opened.
        persist_count: Records written since the cursor was opened.
        truncation_count: How often the range limit began to leave something out, since the cursor was opened.
        snapshot_count: Those of them that were the whole state in a new cursor ledger.
        journal_bytes: Size of the cursor ledger, or of the record in the metadata store, that a recovery would read.
        batches_cut: Partly acked batches that the limit on them left out of the last persist.
        ledger_write_count: Those of the records that went to a cursor ledger.
        ledger_bytes_written: Their bytes.
        ledger_error_count: How often a cursor ledger could not be written.
        metadata_write_count: Those of the records that went to the metadata store.
        metadata_error_count: How often that failed.
        young_age_ms: The age from which on acks are old enough to be persisted; 0 without generations.
        promotion_count: Times that young acks were persisted early because the acks that are not durable had reached
            their limit.
        promoted_message_count: How many acked messages that were.
    """

    redelivery_if_crashed: int
    redelivery_unwritten: int
    redelivery_young: int
    redelivery_cut: int
    batches_unwritten: int
    unpersisted_record_bytes: int
    range_count: int
    record_bytes: int
    backlog: int
    bytes_persisted: int
    persist_count: int
    truncation_count: int
    snapshot_count: int
    journal_bytes: int
    batches_cut: int = 0
    ledger_write_count: int = 0
    ledger_bytes_written: int = 0
    ledger_error_count: int = 0
    metadata_write_count: int = 0
    metadata_error_count: int = 0
    young_age_ms: int = 0
    promotion_count: int = 0
    promoted_message_count: int = 0


class Change(Enum):
    """A change of a cursor. The text explains the entries that are reported with it."""

    ACKED = "entries were acked, one by one; they were not before"
    MARK_DELETED = "entries up to a position were acked; some may have been before"
    PERSIST_BEGUN = "a persist was planned: it covers every ack until now, except those of the next two changes"
    HELD_BACK = "entries that it excludes as young"
    CUT_OFF = "entries that it excludes because of a limit, and that were not durable"
    DISPLACED = "entries that it excludes because of a limit; they no longer count as durable, even if it fails"
    PERSIST_ENDED = "the acks that it covers are durable"
    PERSIST_FAILED = "it promises nothing"
    RESET = "the cursor was put elsewhere, and that is durable with all that is acked; entries that this acked"
    UNACKED = "entries that a reset gave back"


_WITHOUT_ENTRIES = frozenset((Change.PERSIST_BEGUN, Change.PERSIST_ENDED, Change.PERSIST_FAILED, Change.RESET))


class CursorListener:
    """Receives every change of one cursor. Override the methods that you need; the others do nothing.

    All but `persisted` are called with the cursor's lock held: be quick, raise nothing, take no other lock. Changes of
    one call took effect at once.
    """

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Called after each change.

        Args:
            change: The kind of change.
            runs: The entries, as (ledger id, first, last), `last` included.
            now_ms: The present of the call that made the change.
        """

    def delivered(self, consumer: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Called with the entries that a subscription sent to a consumer; the runs are as in `changed`."""

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Called with the outcome after each persist, without locks held; not after a reset or a close."""

    def record_bytes_max(self) -> int | None:
        """Return the most that the cursor's `unpersisted_record_bytes` may be after a persist; None for no limit."""
        return None


@final
class Listeners:
    """The listeners of one cursor, at most one of each class. Listeners that do not override a method cost nothing."""

    def __init__(self) -> None:
        self.all: tuple[CursorListener, ...] = ()
        self.of_changes: tuple[CursorListener, ...] = ()  # those that receive changes
        self.of_deliveries: tuple[CursorListener, ...] = ()
        self._of_bounds: tuple[CursorListener, ...] = ()

    def add(self, listener: CursorListener) -> None:
        """Register a listener, no-op if it is registered; ValueError if another one of its class is."""
        if listener in self.all:
            return
        if any(type(each) is type(listener) for each in self.all):
            raise ValueError(f"a cursor may have one listener of class {type(listener).__name__}, and it has another")
        self._register((*self.all, listener))

    def remove(self, listener: CursorListener) -> None:
        """Remove a listener; no-op if it is not registered."""
        self._register(tuple(each for each in self.all if each is not listener))

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """Report a change; acks of no entries are none."""
        for listener in self.of_changes:
            if runs or change in _WITHOUT_ENTRIES:
                listener.changed(change, runs, now_ms=now_ms)

    def delivered(self, consumer: str, positions: Iterable[Position], *, now_ms: int) -> None:
        """Report the entries that were sent to a consumer."""
        runs = [(ledger_id, entry_id, entry_id) for ledger_id, entry_id in positions]
        for listener in self.of_deliveries:
            listener.delivered(consumer, runs, now_ms=now_ms)

    def record_bytes_max(self) -> int | None:
        """Return the lowest of their limits; None without one."""
        lowest = None
        for listener in self._of_bounds:
            limit = listener.record_bytes_max()
            if limit is not None and (lowest is None or limit < lowest):
                lowest = limit
        return lowest

    def _register(self, listeners: tuple[CursorListener, ...]) -> None:
        def overriding(method: Callable[..., object]) -> tuple[CursorListener, ...]:
            name = method.__name__
            return tuple(each for each in listeners if getattr(type(each), name) is not method)

        self.all = listeners
        self.of_changes = overriding(CursorListener.changed)
        self.of_deliveries = overriding(CursorListener.delivered)
        self._of_bounds = overriding(CursorListener.record_bytes_max)
