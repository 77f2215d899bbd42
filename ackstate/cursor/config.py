"""Defines how a cursor persists: its settings, with their units in their names."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.checks import check_count, member
from ackstate.cursor.formats import Format, NativeFormat, PulsarFormat
from ackstate.pulsar_conf import AS_WORDS, FLUSH_SECONDS, MARK_DELETE_RATE, RANGES_CACHE, fields_of, read_settings
from ackstate.selection import Keep, Selection, select
from ackstate.wire.pulsar import COMPRESSION_THRESHOLD_BYTES, Compression, LimitRule, RangeForm
from ackstate.wire.pulsar.ranges import Limits, limit_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ackstate.cursor.formats import JournalFormat
    from ackstate.deleted_ranges import DeletedRanges

__all__ = ["CursorConfig", "RangeForm"]


class PersistLimits(NamedTuple):
    """How much the durable state may hold."""

    range_count_max: int | None = None  # how many ranges; None for any number
    batch_count_max: int | None = None  # how many partly acked batches, the lowest first; None for any number
    # Whether ranges that `keep` prefers may take the place of durable ones. Otherwise durable ranges stay, even beyond
    # a limit that was lowered.
    displaces: bool = False
    # The unit of `range_count_max`: ranges, or the unit of a Pulsar release in the words form.
    rule: LimitRule = LimitRule.EXACT
    keep: Keep = Keep.LOWEST  # which ranges are persisted first

    @property
    def counts_entries(self) -> bool:
        """Whether `range_count_max` counts acked entries, as Pulsar's words form does."""
        return self.rule is not LimitRule.EXACT

    def has_room_for(self, ranges: DeletedRanges) -> bool:
        """Return whether all of them are within the limit. Complexity: O(1), or O(state) by a rule of Pulsar's."""
        if self.rule is LimitRule.EXACT:
            return self.range_count_max is None or ranges.range_count <= self.range_count_max
        return not self._limited_by_rule(ranges).excluded_count

    def select(self, ranges: DeletedRanges, *, always: DeletedRanges | None) -> DeletedRanges:
        """Return a copy of the ranges that are within the limit, with those of `always` even if they are not."""
        # If those of `always` leave a rule of Pulsar's no room for all ranges that it keeps, no other range is kept.
        assert self.range_count_max is not None
        if self.rule is LimitRule.EXACT:
            return select(ranges, range_count_max=self.range_count_max, keep=self.keep, always=always).kept
        kept = self._limited_by_rule(ranges).kept
        if always is None:
            return kept
        kept.update(always)
        return kept if self.has_room_for(kept) else always.copy()

    def _limited_by_rule(self, ranges: DeletedRanges) -> Selection:
        limits = Limits(self.range_count_max, rule=self.rule)
        return limit_ranges(ranges, form=RangeForm.WORDS, limits=limits)


UNLIMITED = PersistLimits()


@dataclass(frozen=True, slots=True)
class CursorConfig:
    """Settings of one cursor.

    Attributes:
        format: In which bytes it is written; it is read in either, and converted by its next persist.
        flush_interval_ms: `ManagedCursor.tick` persists acks that are not yet durable when the last persist is at least
            this long ago; a crash redelivers at most the acks of such an interval. 0 persists at every tick. Pulsar:
            ``managedLedgerCursorPositionFlushSeconds``.
        mark_delete_rate_limit: Above 0, `tick` also persists as soon as something was acked since the tick before, at
            most this many times a second, with a burst of one second. Acks beyond the limit wait for later acks or the
            flush interval. With 0, only the flush interval counts. Pulsar: ``managedLedgerDefaultMarkDeleteRateLimit``.
        compaction_bytes_min: The journal is compacted into a snapshot when the deltas since the last one outweigh it
            four times, but not before they take this many bytes: a tiny state is not rewritten at every persist.
        ledger_entry_count_max: How many entries a ledger may have: the next one is the whole state in a new ledger.
            Pulsar: ``managedLedgerCursorMaxEntriesPerLedger``.
        ledger_rollover_ms: The age from which on a ledger is not continued either; 0 for any age.
            Pulsar: ``managedLedgerCursorRolloverTimeInSeconds``.
        range_count_max: How many ranges the durable state may hold. None, the default, is any number in the native
            format, because the journal makes them cheap, and 10,000 in Pulsar's. In the native format ranges that are
            durable already stay durable, even beyond a limit that was lowered; in Pulsar's, as in Pulsar, those that
            `keep` prefers take their place. Pulsar: ``managedLedgerMaxUnackedRangesToPersist``.
        range_limit_rule: What `range_count_max` counts in Pulsar's format. EXACT, the default, counts ranges in either
            form. The others decide as a Pulsar release does. In WORDS these count acked entries and keep or exclude
            whole ledgers: up to 5.0.0-M1 the first ledger with acks is always kept, however many ranges it has, and 5.0
            keeps it only within the limit. In LIST, 4.2 keeps one range more than the limit. `keep` must be LOWEST.
        keep: Which ranges become durable first when there are more.
        batch_count_max: How many partly acked batches Pulsar's format holds, the lowest first; None for any number. The
            native format holds all. Pulsar: ``managedLedgerMaxBatchDeletedIndexToPersist``.
        metadata_range_count_max: How many ranges the metadata store may be given, when a ledger cannot be written or,
            in Pulsar's format, when a cursor is closed. None, the default, is any number in the native format and 1,000
            in Pulsar's. Pulsar: ``managedLedgerMaxUnackedRangesToPersistInMetadataStore``.
        metadata_bytes_max: How many bytes it may be given: fewer than a ZooKeeper server accepts. A state for which a
            record of that size has no room goes to a cursor ledger, also when a cursor is opened. Cursor properties
            that leave no room for the rest of a record are refused; those from before the limit was lowered stay. The
            record of a new cursor is written under any limit.
        range_form: How a cursor ledger in Pulsar's format holds the acks.
            Pulsar: ``managedLedgerPersistIndividualAckAsLongArray``.
        compression: How a record of the metadata store in Pulsar's format is compressed; one without properties only,
            as Pulsar could not read another. Opening a cursor leaves its record in the compression that it has.
            Pulsar: ``managedCursorInfoCompressionType``.
        compression_bytes_min: Smaller records are not compressed.
            Pulsar: ``managedCursorInfoCompressionThresholdInBytes``.
        batch_index_acks: Whether acks of single messages of a batch count; else one is ignored until all its messages
            are acked. Pulsar: ``acknowledgmentAtBatchIndexLevelEnabled``.
        become_old_ack_record_seconds: Above 0, only acks of messages that were sent at least this long ago are
            persisted, until the cursor is closed; the broker reports messages sent to `ManagedCursor.delivered`. The
            mark-delete position is persisted in any case. Pulsar's issue 19966: ``becomeOldAckRecordSeconds``.
        ledger_retry_ms: After a ledger could not be written the next persist tries again. If that fails, too, the
            ledger is tried again after this time, and after twice as long with each further failure, up to a minute;
            meanwhile the metadata store is used.
    """

    format: Format = Format.NATIVE
    flush_interval_ms: int = 1_000
    mark_delete_rate_limit: float = 0
    compaction_bytes_min: int = 64 * 1024
    ledger_entry_count_max: int = 50_000
    ledger_rollover_ms: int = 4 * 3_600_000
    range_count_max: int | None = None
    range_limit_rule: LimitRule = LimitRule.EXACT
    keep: Keep = Keep.LOWEST
    batch_count_max: int | None = 10_000
    metadata_range_count_max: int | None = None
    metadata_bytes_max: int = 900_000
    range_form: RangeForm = RangeForm.WORDS
    compression: Compression = Compression.NONE
    compression_bytes_min: int = COMPRESSION_THRESHOLD_BYTES
    batch_index_acks: bool = True
    become_old_ack_record_seconds: int = 0
    ledger_retry_ms: int = 1_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", member("format", self.format, Format))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _NULLABLE:
                check_count(name, value, least=least)
        if not isinstance(self.mark_delete_rate_limit, int | float) or not isfinite(self.mark_delete_rate_limit):
            raise TypeError(f"mark_delete_rate_limit must be a finite number, got {self.mark_delete_rate_limit!r}")
        for name, kind in _ENUMS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        if self.range_limit_rule is not LimitRule.EXACT:
            rule = f"range_limit_rule={self.range_limit_rule.name}"
            if self.format is not Format.PULSAR:
                raise ValueError(f"format must be PULSAR with {rule}, got {self.format.name}")
            if self.keep is not Keep.LOWEST:
                raise ValueError(f"keep must be LOWEST with {rule}, got {self.keep.name}")

    @property
    def ledger_limits(self) -> PersistLimits:
        """How much a cursor ledger may hold."""
        if self.range_form is RangeForm.LIST or self.range_limit_rule is LimitRule.EXACT:
            return self.list_limits
        return self.list_limits._replace(range_count_max=self._pulsar_range_count_max, rule=self.range_limit_rule)

    @property
    def list_limits(self) -> PersistLimits:
        """How much a list of ranges may hold. The metadata store has a list with each `range_form`."""
        if self.format is Format.NATIVE:
            return PersistLimits(self.range_count_max, keep=self.keep)
        one_more = self.range_limit_rule is LimitRule.PULSAR_4_2
        return PersistLimits(
            self._pulsar_range_count_max + one_more, self.batch_count_max, displaces=True, keep=self.keep
        )

    @property
    def metadata_limits(self) -> PersistLimits:
        """How much the metadata store may hold: its own limits, but no more than a list may hold."""
        listed = self.list_limits
        ranges = self.metadata_range_count_max if self.format is Format.NATIVE else self.closing_range_count_max
        limits = [limit for limit in (ranges, listed.range_count_max) if limit is not None]
        return listed._replace(range_count_max=min(limits, default=None))

    @property
    def _pulsar_range_count_max(self) -> int:
        return _PULSAR_RANGES if self.range_count_max is None else self.range_count_max

    @property
    def closing_range_count_max(self) -> int:
        """The most ranges with which a cursor in Pulsar's format is closed into the metadata store."""
        limit = self.metadata_range_count_max
        return _PULSAR_RANGES_IN_METADATA if limit is None else limit

    @property
    def journal_format(self) -> JournalFormat:
        """The format that turns states into bytes."""
        if self.format is Format.NATIVE:
            return NativeFormat()
        return PulsarFormat(self.range_form, self.compression, self.compression_bytes_min)

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> CursorConfig:
        """Return the settings by which a Pulsar broker's cursors would persist; the others have their defaults.

        A ``managedLedgerDefaultMarkDeleteRateLimit`` of 0 or less is no limiter: each ack is written, so the interval
        is 0 then. The format stays native; `dataclasses.replace` chooses Pulsar's, and with it the `range_limit_rule`
        of a release, which no key names. Keys that do not concern a cursor are ignored.

        Args:
            source: The keys and their values, or the path of a ``broker.conf``.

        Raises:
            ValueError: A value that concerns a cursor is malformed, or a key is misspelt; the text names both.
            TypeError: A value that concerns a cursor is not text.
            OSError: The file cannot be read.
        """
        return cls(**cursor_settings(source))


def cursor_settings(source: Mapping[str, str] | str | Path) -> dict[str, Any]:
    """Return the arguments of `CursorConfig` that a broker's properties set; errors as `from_pulsar_conf`."""
    values = read_settings(source, "CursorConfig")
    found = fields_of(values, "CursorConfig")
    if "range_form" in found:
        # Words are a form of the cached set alone.
        forms = [values[key] for key in (AS_WORDS, RANGES_CACHE) if values.get(key) is not None]
        if values.get(AS_WORDS) is None and all(forms):
            del found["range_form"]
        else:
            found["range_form"] = RangeForm.WORDS if all(forms) else RangeForm.LIST
    if "compression" in found:
        found["compression"] = Compression[found["compression"]]
    if MARK_DELETE_RATE in values or FLUSH_SECONDS in values:
        # If one of the two is given, the other has Pulsar's default.
        rate = values.get(MARK_DELETE_RATE, 1.0)
        interval_ms = found.get("flush_interval_ms", 60_000)
        found["mark_delete_rate_limit"], found["flush_interval_ms"] = (rate, interval_ms) if rate > 0 else (0, 0)
    return found


_PULSAR_RANGES = 10_000
_PULSAR_RANGES_IN_METADATA = 1_000

_ENUMS = {"range_limit_rule": LimitRule, "keep": Keep, "range_form": RangeForm, "compression": Compression}
_LEAST = {
    "flush_interval_ms": 0,
    "compaction_bytes_min": 0,
    "ledger_entry_count_max": 1,
    "ledger_rollover_ms": 0,
    "range_count_max": 0,
    "batch_count_max": 0,
    "metadata_range_count_max": 0,
    "metadata_bytes_max": 1,
    "compression_bytes_min": 0,
    "become_old_ack_record_seconds": 0,
    "ledger_retry_ms": 0,
}
_NULLABLE = ("range_count_max", "batch_count_max", "metadata_range_count_max")
