"""Reads the `broker.conf` of a Pulsar broker: one table of the keys, and what each of them sets.

A missing or blank value is unset, as in Pulsar. Every error names the key.

Source: ``ServiceConfiguration`` of Apache Pulsar 4.2.4 and 5.0.1; ``java.util.Properties`` for the text of a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.checks import INT_MAX, LONG_MAX, LONG_MIN, closest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

RANGES = "managedLedgerMaxUnackedRangesToPersist"
BATCHES = "managedLedgerMaxBatchDeletedIndexToPersist"
METADATA_RANGES = "managedLedgerMaxUnackedRangesToPersistInMetadataStore"
METADATA_RANGES_ALIAS = "managedLedgerMaxUnackedRangesToPersistInZooKeeper"  # of old releases; above 0 it wins
LEDGER_ENTRIES = "managedLedgerCursorMaxEntriesPerLedger"
ROLLOVER_SECONDS = "managedLedgerCursorRolloverTimeInSeconds"
MARK_DELETE_RATE = "managedLedgerDefaultMarkDeleteRateLimit"
FLUSH_SECONDS = "managedLedgerCursorPositionFlushSeconds"
AS_WORDS = "managedLedgerPersistIndividualAckAsLongArray"
RANGES_CACHE = "managedLedgerUnackedRangesOpenCacheSetEnabled"
COMPRESSION = "managedCursorInfoCompressionType"
COMPRESSION_BYTES = "managedCursorInfoCompressionThresholdInBytes"
BATCH_INDEX_ACKS = "acknowledgmentAtBatchIndexLevelEnabled"
UNPERSISTED_BYTES = "maxUnPersistAckRecordsBytes"
SUBSCRIPTION_UNACKED = "maxUnackedMessagesPerSubscription"
CONSUMER_UNACKED = "maxUnackedMessagesPerConsumer"
BROKER_UNACKED = "maxUnackedMessagesPerBroker"
BLOCKED_SHARE = "maxUnackedMessagesPerSubscriptionOnBrokerBlocked"
PAUSE = "dispatcherPauseOnAckStatePersistentEnabled"
DELAY_ENABLED = "delayedDeliveryEnabled"
DELAY_TRACKER = "delayedDeliveryTrackerFactoryClassName"
DELAY_TICK_MS = "delayedDeliveryTickTimeMillis"
DELAY_MAX_MS = "delayedDeliveryMaxDelayInMillis"

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines splits at many more characters
_KEY_AND_VALUE = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

# Keys of Pulsar that are similar enough to one of ours to look like its misspelling.
_NEIGHBOURS = frozenset(
    {
        "managedLedgerMaxEntriesPerLedger",
        "managedLedgerInfoCompressionType",
        "managedLedgerInfoCompressionThresholdInBytes",
    }
)
_LIKENESS_MIN = 0.88  # between 0 and 1: allows one or two words or a few letters to differ
_BEGINNING_MIN = 0.7  # between 0 and 1: allows the last one or two words to be missing


class Setting(NamedTuple):
    """One field that one key sets."""

    key: str  # as in a ``broker.conf``
    kind: str  # the name of the class with the field
    field: str  # the field; empty for a key without effect
    read: Callable[[Mapping[str, str], str], Any]  # of the properties and the key; None sets nothing
    default: str = ""  # Pulsar's default in 4.2, in the first row of a key; "none" for a key that no release reads
    default_5: str = ""  # the default in 5.0, if it is another one; "none" if 5.0 does not read the key
    remark: str = ""  # a deviation or condition


def read_properties(source: Mapping[str, str] | str | Path) -> Mapping[str, str]:
    r"""Return the properties of a broker, given them or the path of a ``broker.conf``."""
    return source if isinstance(source, Mapping) else decode_properties(Path(source).read_bytes())


def read_settings(source: Mapping[str, str] | str | Path, kind: str, *siblings: str) -> dict[str, Any]:
    """Return what a broker's properties set of one class, by key; keys of its siblings may not be misspelt either."""
    properties = read_properties(source)
    check_spelling(properties, keys_of(kind, *siblings))
    return values_of(properties, kind)


def values_of(properties: Mapping[str, str], kind: str) -> dict[str, Any]:
    """Return the same without a check of the spelling."""
    read = ((each.key, each.read(properties, each.key)) for each in SETTINGS if each.kind == kind)
    return {key: value for key, value in read if value is not None}


def fields_of(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return values by field instead of by key; of two keys for one field, the later one in the table wins."""
    rows = (each for each in SETTINGS if each.kind == kind and each.field)
    return {each.field: values[each.key] for each in rows if each.key in values}


def keys_of(*kinds: str) -> tuple[str, ...]:
    """Return the keys of some classes of settings, each once, in the order of the table."""
    return tuple(dict.fromkeys(each.key for each in SETTINGS if each.kind in kinds))


def decode_properties(content: bytes) -> dict[str, str]:
    r"""Return the keys and values of a file in UTF-8, or else in Latin-1, which accepts any bytes."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return parse_properties(text)


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values of a text like ``java.util.Properties.load``; the last value of a key wins."""
    properties = {}
    for line in _logical_lines(text):
        found = _KEY_AND_VALUE.fullmatch(line)
        assert found is not None
        properties[_unescape(found[1])] = _unescape(found[2])
    return properties


def given(properties: Mapping[str, str], key: str) -> str:
    """Return a value without the blanks around it; empty if there is none."""
    value = properties.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key} must be text, got {value!r}")
    return value.strip()


def whole_number(properties: Mapping[str, str], key: str, *, least: int, most: int = INT_MAX) -> int | None:
    """Return a whole number within inclusive bounds."""
    value = given(properties, key)
    if not value:
        return None
    if not _WHOLE.fullmatch(value) or not least <= int(value) <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}, got {value!r}")
    return int(value)


def number(properties: Mapping[str, str], key: str) -> float | None:
    """Return a finite number."""
    value = given(properties, key)
    if not value:
        return None
    if not _NUMBER.fullmatch(value) or not math.isfinite(float(value)):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def flag(properties: Mapping[str, str], key: str) -> bool | None:
    """Return a switch, in letters of either case."""
    value = given(properties, key).casefold()
    if value not in {"", "true", "false"}:
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value == "true" if value else None


def check_spelling(properties: Iterable[str], keys: Collection[str]) -> None:
    """Refuse an unknown key that looks like a misspelling or the beginning of a key that is read."""
    folded = {known.casefold(): known for known in (*keys, *_NEIGHBOURS)}
    for key in properties:
        if not isinstance(key, str):
            raise TypeError(f"the name of a setting must be text, got {key!r}")
        if key in keys or key in _NEIGHBOURS:
            continue
        meant = folded.get(_likest(key.casefold(), folded))
        if meant in keys:
            raise ValueError(f"unknown key of Pulsar {key!r}; did you mean {meant!r}?")


def _likest(key: str, known: Iterable[str]) -> str:
    for each in known:
        if each.startswith(key) and len(key) >= _BEGINNING_MIN * len(each):
            return each
    return closest(key, known, likeness_min=_LIKENESS_MIN)


def _logical_lines(text: str) -> Iterator[str]:
    """Join continued lines, and skip blank lines and comments, which do not exist after a continuation."""
    begun: str | None = None
    for natural in _LINE_END.split(text):
        line = natural.lstrip(_BLANKS)
        if not begun and (not line or line[0] in "#!"):
            begun = None
            continue
        begun = (begun or "") + line
        if (len(line) - len(line.rstrip("\\"))) % 2:  # it ends in an escape
            begun = begun[:-1]
            continue
        yield begun
        begun = None
    if begun:
        yield begun


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda escape: _unescaped(escape[1], text), text)


def _unescaped(escaped: str, text: str) -> str:
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    if escaped == "u":
        raise ValueError(f"malformed \\u escape in {text!r}")
    return _CONTROLS.get(escaped, escaped)


def _whole(least: int, most: int = INT_MAX) -> Callable[[Mapping[str, str], str], int | None]:
    return lambda properties, key: whole_number(properties, key, least=least, most=most)


def _milliseconds(least: int) -> Callable[[Mapping[str, str], str], int | None]:
    """Read seconds, as milliseconds."""

    def read(properties: Mapping[str, str], key: str) -> int | None:
        seconds = whole_number(properties, key, least=least)
        return None if seconds is None else 1_000 * seconds

    return read


def _zero_if_off(properties: Mapping[str, str], key: str) -> int | None:
    """Read a number of which 0 and below are off."""
    limit = whole_number(properties, key, least=LONG_MIN, most=LONG_MAX)
    return None if limit is None else max(limit, 0)


def _if_above_zero(properties: Mapping[str, str], key: str) -> int | None:
    limit = whole_number(properties, key, least=-1)
    return limit if limit is not None and limit > 0 else None


def _text(properties: Mapping[str, str], key: str) -> str | None:
    return given(properties, key) or None


def _one_of(*names: str) -> Callable[[Mapping[str, str], str], str | None]:
    def read(properties: Mapping[str, str], key: str) -> str | None:
        value = given(properties, key)
        if value and value not in names:
            raise ValueError(f"{key} must be one of {', '.join(names)}, got {value!r}")
        return value or None

    return read


_NO_RELEASE = "From Pulsar's issue 19966; no release of Pulsar reads it."
_UNNEEDED = "From PIP-448. Read and checked, without effect: the shared index holds nothing that must be pruned."
_JITTER = (
    "Pulsar 5.0.1 takes up to 5 % off the entries of a cursor ledger, and adds up to 5 % to its time; we do neither."
)
_CURSOR, _GATE, _BROKER = "CursorConfig", "GateLimits", "BrokerLimit"
_DELAY, _POLICY = "DelayConfig", "BrokerDelayedDelivery"
_ANY_LONG = _whole(LONG_MIN, LONG_MAX)

SETTINGS = (
    Setting(RANGES, _CURSOR, "range_count_max", _whole(0), "10,000", "200,000",
            f"A limit of the gate only if {PAUSE} is true."),
    Setting(RANGES, _GATE, "max_unacked_ranges", _ANY_LONG),
    Setting(BATCHES, _CURSOR, "batch_count_max", _whole(0), "10,000", "200,000"),
    Setting(METADATA_RANGES, _CURSOR, "metadata_range_count_max", _whole(0), "1,000", "200,000"),
    Setting(METADATA_RANGES_ALIAS, _CURSOR, "metadata_range_count_max", _if_above_zero, "-1",
            remark="The older name of the key above; above 0 it takes precedence."),
    Setting(LEDGER_ENTRIES, _CURSOR, "ledger_entry_count_max", _whole(1), "50,000", remark=_JITTER),
    Setting(ROLLOVER_SECONDS, _CURSOR, "ledger_rollover_ms", _milliseconds(0), "14,400", remark=_JITTER),
    Setting(MARK_DELETE_RATE, _CURSOR, "mark_delete_rate_limit", number, "1.0",
            remark="At 0 or below, each tick writes. If only one of this and the next key is given, the other one has "
                   "Pulsar's default."),
    Setting(FLUSH_SECONDS, _CURSOR, "flush_interval_ms", _milliseconds(1), "60"),
    Setting(AS_WORDS, _CURSOR, "range_form", flag, "true"),
    Setting(RANGES_CACHE, _CURSOR, "range_form", flag, "true", "none",
            "If false, a list of ranges is written. Pulsar 5.0 does not read it."),
    Setting(COMPRESSION, _CURSOR, "compression", _one_of("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"), "NONE", "LZ4"),
    Setting(COMPRESSION_BYTES, _CURSOR, "compression_bytes_min", _whole(0), "16,384"),
    Setting(BATCH_INDEX_ACKS, _CURSOR, "batch_index_acks", flag, "true"),
    Setting("becomeOldAckRecordSeconds", _CURSOR, "become_old_ack_record_seconds", _whole(0), "none", "", _NO_RELEASE),
    Setting(UNPERSISTED_BYTES, _GATE, "max_unpersisted_ack_record_bytes", _zero_if_off, "none", "", _NO_RELEASE),
    Setting(SUBSCRIPTION_UNACKED, _GATE, "max_unacked_messages", _zero_if_off, "200,000"),
    Setting(CONSUMER_UNACKED, _GATE, "max_unacked_messages_per_consumer", _zero_if_off, "50,000"),
    Setting(BROKER_UNACKED, _BROKER, "max_unacked_messages", _ANY_LONG, "0"),
    Setting(BLOCKED_SHARE, _BROKER, "blocked_share", number, "0.16"),
    Setting(PAUSE, _GATE, "max_unacked_ranges", flag, "false"),
    Setting(DELAY_ENABLED, _DELAY, "enabled", flag, "true"),
    Setting(DELAY_ENABLED, _POLICY, "active", flag),
    Setting(DELAY_TRACKER, _DELAY, "tracker", _text, "InMemoryDelayedDeliveryTrackerFactory",
            remark="One of three classes of the package org.apache.pulsar.broker.delayed."),
    Setting(DELAY_TICK_MS, _DELAY, "tick_time_ms", _whole(1, LONG_MAX), "1,000"),
    Setting(DELAY_TICK_MS, _POLICY, "tick_time_ms", _whole(1, LONG_MAX)),
    Setting("isDelayedDeliveryDeliverAtTimeStrict", _DELAY, "is_deliver_at_time_strict", flag, "false"),
    Setting("delayedDeliveryFixedDelayDetectionLookahead", _DELAY, "fixed_delay_detection_lookahead", _zero_if_off,
            "50,000"),
    Setting(DELAY_MAX_MS, _DELAY, "max_delivery_delay_ms", _zero_if_off, "0"),
    Setting(DELAY_MAX_MS, _POLICY, "max_delivery_delay_ms", _zero_if_off),
    Setting("delayedDeliveryMinIndexCountPerBucket", _DELAY, "min_index_count_per_bucket", _zero_if_off, "50,000"),
    Setting("delayedDeliveryMaxTimeStepPerBucketSnapshotSegmentSeconds", _DELAY, "max_time_step_per_segment_ms",
            _milliseconds(1), "300"),
    Setting("delayedDeliveryMaxIndexesPerBucketSnapshotSegment", _DELAY, "max_indexes_per_segment", _whole(-1),
            "5,000"),
    Setting("delayedDeliveryMaxNumBuckets", _DELAY, "max_bucket_count", _whole(-INT_MAX - 1), "-1"),
    Setting("delayedDeliveryLedgerStepPerBucket", _DELAY, "ledger_step_per_bucket", _whole(1), "none",
            remark="From the first text of PIP-195; no release of Pulsar reads it."),
    Setting("delayedDeliveryPruneMinIntervalMillis", _DELAY, "", _zero_if_off, "none", "", _UNNEEDED),
    Setting("delayedDeliveryPruneEligibleRatio", _DELAY, "", number, "none", "", _UNNEEDED),
    Setting("delayedDeliveryTopicManagerIdleMillis", _DELAY, "", _zero_if_off, "none", "", _UNNEEDED),
)  # fmt: skip
"""Every key that ackstate reads, with what it sets."""
