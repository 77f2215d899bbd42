"""Reads cursor settings from a Pulsar ``broker.conf``. Only `read_properties` opens a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from ackstate.properties import check_spelling, decode_properties, flag, given, number, whole_number
from ackstate.wire.pulsar import Compression, RangeForm

if TYPE_CHECKING:
    from collections.abc import Mapping

RANGES = "managedLedgerMaxUnackedRangesToPersist"
BATCHES = "managedLedgerMaxBatchDeletedIndexToPersist"
METADATA_RANGES = "managedLedgerMaxUnackedRangesToPersistInMetadataStore"
METADATA_RANGES_ALIAS = "managedLedgerMaxUnackedRangesToPersistInZooKeeper"  # of old releases; above 0 it wins
LEDGER_ENTRIES = "managedLedgerCursorMaxEntriesPerLedger"
ROLLOVER_SECONDS = "managedLedgerCursorRolloverTimeInSeconds"
MARK_DELETE_RATE = "managedLedgerDefaultMarkDeleteRateLimit"
FLUSH_SECONDS = "managedLedgerCursorPositionFlushSeconds"
AS_WORDS = "managedLedgerPersistIndividualAckAsLongArray"
COMPRESSION = "managedCursorInfoCompressionType"
COMPRESSION_BYTES = "managedCursorInfoCompressionThresholdInBytes"
RANGES_CACHE = "managedLedgerUnackedRangesOpenCacheSetEnabled"  # without it there are no words
BATCH_INDEX_ACKS = "acknowledgmentAtBatchIndexLevelEnabled"
BECOME_OLD_SECONDS = "becomeOldAckRecordSeconds"

CURSOR_KEYS = (
    RANGES, BATCHES, METADATA_RANGES, METADATA_RANGES_ALIAS, LEDGER_ENTRIES, ROLLOVER_SECONDS, MARK_DELETE_RATE,
    FLUSH_SECONDS, AS_WORDS, RANGES_CACHE, COMPRESSION, COMPRESSION_BYTES, BATCH_INDEX_ACKS, BECOME_OLD_SECONDS,
)  # fmt: skip
# Pulsar's default of one of the two when only the other is given.
_MARK_DELETE_RATE_DEFAULT = 1.0
_FLUSH_SECONDS_DEFAULT = 60


class CursorSettings(TypedDict, total=False):
    """Arguments of `CursorConfig`; those that are missing keep its defaults."""

    flush_interval_ms: int
    mark_delete_rate_limit: float
    ledger_entry_count_max: int
    ledger_rollover_ms: int
    range_count_max: int
    batch_count_max: int
    metadata_range_count_max: int
    range_form: RangeForm
    compression: Compression
    compression_bytes_min: int
    batch_index_acks: bool
    become_old_ack_record_seconds: int


def read_properties(path: str | Path) -> dict[str, str]:
    r"""Read a properties file in UTF-8 or, if it is not that, in Latin-1, which every file is.

    Raises:
        OSError: The file cannot be read.
        ValueError: A ``\u`` is not followed by four hexadecimal digits.
    """
    return decode_properties(Path(path).read_bytes())


def cursor_settings(properties: Mapping[str, str]) -> CursorSettings:
    """Return the settings of cursors in a broker's properties; a blank value counts as missing, as in Pulsar.

    Raises:
        ValueError: A value of a key that concerns a cursor is malformed or out of range, or a key that is not Pulsar's
            looks like a misspelling of such a key.
        TypeError: A value of such a key is not text.
    """
    check_spelling(properties, CURSOR_KEYS)
    found: dict[str, object] = {
        "range_count_max": whole_number(properties, RANGES, least=0),
        "batch_count_max": whole_number(properties, BATCHES, least=0),
        "metadata_range_count_max": _metadata_ranges(properties),
        "ledger_entry_count_max": whole_number(properties, LEDGER_ENTRIES, least=1),
        "compression": _compression(properties),
        "compression_bytes_min": whole_number(properties, COMPRESSION_BYTES, least=0),
        "batch_index_acks": flag(properties, BATCH_INDEX_ACKS),
        "become_old_ack_record_seconds": whole_number(properties, BECOME_OLD_SECONDS, least=0),
        **_pace(properties),
    }
    if (seconds := whole_number(properties, ROLLOVER_SECONDS, least=0)) is not None:
        found["ledger_rollover_ms"] = 1000 * seconds
    if (as_words := flag(properties, AS_WORDS)) is not None:
        found["range_form"] = RangeForm.WORDS if as_words else RangeForm.LIST
    if flag(properties, RANGES_CACHE) is False:
        found["range_form"] = RangeForm.LIST
    return cast("CursorSettings", {name: value for name, value in found.items() if value is not None})


def _metadata_ranges(properties: Mapping[str, str]) -> int | None:
    alias = whole_number(properties, METADATA_RANGES_ALIAS, least=-1)
    limit = whole_number(properties, METADATA_RANGES, least=0)
    return alias if alias is not None and alias > 0 else limit


def _pace(properties: Mapping[str, str]) -> dict[str, float]:
    """Return when to write; if one of the two keys is given, the other has Pulsar's default."""
    rate, flush = number(properties, MARK_DELETE_RATE), whole_number(properties, FLUSH_SECONDS, least=1)
    if rate is None and flush is None:
        return {}
    rate = _MARK_DELETE_RATE_DEFAULT if rate is None else rate
    if rate <= 0:
        return {"mark_delete_rate_limit": 0, "flush_interval_ms": 0}
    return {"mark_delete_rate_limit": rate, "flush_interval_ms": 1000 * (flush or _FLUSH_SECONDS_DEFAULT)}


def _compression(properties: Mapping[str, str]) -> Compression | None:
    value = given(properties, COMPRESSION)
    if not value:
        return None
    try:
        return Compression[value]
    except KeyError:
        names = ", ".join(each.name for each in Compression)
        raise ValueError(f"{COMPRESSION} must be one of {names}, got {value!r}") from None
