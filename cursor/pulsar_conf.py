"""What of a Pulsar broker's ``broker.conf`` concerns a cursor?

The file is what ``java.util.Properties`` reads. `parse_properties` and `cursor_settings` are pure; only
`read_properties` opens a file.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from ackstate.properties import flag, given, number, whole_number
from ackstate.wire.pulsar import Compression, RangeForm

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

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
BATCH_INDEX_ACKS = "acknowledgmentAtBatchIndexLevelEnabled"
BECOME_OLD_SECONDS = "becomeOldAckRecordSeconds"

_OURS = (
    RANGES, BATCHES, METADATA_RANGES, METADATA_RANGES_ALIAS, LEDGER_ENTRIES, ROLLOVER_SECONDS, MARK_DELETE_RATE,
    FLUSH_SECONDS, AS_WORDS, COMPRESSION, COMPRESSION_BYTES, BATCH_INDEX_ACKS, BECOME_OLD_SECONDS,
)  # fmt: skip
# Keys of Pulsar that are so like one of ours that they would pass for a misspelling of it.
_NEIGHBOURS = frozenset(
    {
        "managedLedgerMaxEntriesPerLedger",
        "managedLedgerInfoCompressionType",
        "managedLedgerInfoCompressionThresholdInBytes",
    }
)
_LIKENESS_MIN = 0.9  # between 0 and 1: one or two words or a few letters differ
_BEGINNING_MIN = 0.7  # between 0 and 1: the last word or two are missing

# What Pulsar takes for one of the two when only the other is given.
_MARK_DELETE_RATE_DEFAULT = 1.0
_FLUSH_SECONDS_DEFAULT = 60

_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines knows many more
_KEY_AND_VALUE = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


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
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return parse_properties(text)


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values of a text as ``java.util.Properties.load`` finds them; the last of a key wins.

    >>> parse_properties("# a comment\nname = value\\\n  continued\nother:\\u0041")
    {'name': 'valuecontinued', 'other': 'A'}

    Raises:
        ValueError: A ``\u`` is not followed by four hexadecimal digits.
    """
    properties = {}
    for line in _logical_lines(text):
        found = _KEY_AND_VALUE.fullmatch(line)
        assert found is not None
        properties[_unescape(found[1])] = _unescape(found[2])
    return properties


def cursor_settings(properties: Mapping[str, str]) -> CursorSettings:
    """Return what a broker's properties say about its cursors; a blank value says nothing, as in Pulsar.

    Raises:
        ValueError: A value of a key that concerns a cursor is malformed or out of range, or a key that is not Pulsar's
            looks like a misspelling of such a key.
        TypeError: A value of such a key is not text.
    """
    check_spelling(properties)
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
    return cast("CursorSettings", {name: value for name, value in found.items() if value is not None})


def _metadata_ranges(properties: Mapping[str, str]) -> int | None:
    alias = whole_number(properties, METADATA_RANGES_ALIAS, least=-1)
    limit = whole_number(properties, METADATA_RANGES, least=0)
    return alias if alias is not None and alias > 0 else limit


def _pace(properties: Mapping[str, str]) -> dict[str, float]:
    """Return when to write; what is given of the two keys draws in Pulsar's default of the other."""
    rate, flush = number(properties, MARK_DELETE_RATE), whole_number(properties, FLUSH_SECONDS, least=1)
    if rate is None and flush is None:
        return {}
    rate = _MARK_DELETE_RATE_DEFAULT if rate is None else rate
    if rate <= 0:
        return {"mark_delete_rate_limit": 0, "flush_interval_ms": 0}
    return {"mark_delete_rate_limit": rate, "flush_interval_ms": 1000 * (flush or _FLUSH_SECONDS_DEFAULT)}


def _logical_lines(text: str) -> Iterator[str]:
    """Join what backslashes continue, and leave out blanks and comments; after what is continued there are none."""
    begun: str | None = None
    for natural in _LINE_END.split(text):
        line = natural.lstrip(_BLANKS)
        if not begun and (not line or line[0] in "#!"):
            begun = None
            continue
        begun = (begun or "") + line
        if _ends_in_escape(line):
            begun = begun[:-1]
            continue
        yield begun
        begun = None
    if begun:
        yield begun


def _ends_in_escape(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda escape: _unescaped(escape[1], text), text)


def _unescaped(escaped: str, text: str) -> str:
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    if escaped == "u":
        raise ValueError(f"malformed \\u escape in {text!r}")
    return _CONTROLS.get(escaped, escaped)


def check_spelling(properties: Iterable[str], keys: Collection[str] = _OURS) -> None:
    """Refuse a key that is not Pulsar's and looks like a misspelling of one that is read, or like its beginning.

    Args:
        properties: The keys that a file has.
        keys: Those that are read; those that concern a cursor if not given.

    Raises:
        ValueError: There is one; the text names both.
    """
    folded = {known.casefold(): known for known in (*keys, *_NEIGHBOURS)}
    for key in properties:
        if key in keys or key in _NEIGHBOURS:
            continue
        meant = folded.get(_likest(key.casefold(), folded))
        if meant in keys:
            raise ValueError(f"{key!r} is no key of Pulsar; {meant!r} was probably meant")


def _likest(key: str, known: Iterable[str]) -> str:
    for each in known:
        if each.startswith(key) and len(key) >= _BEGINNING_MIN * len(each):
            return each
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=_LIKENESS_MIN)), "")


def _compression(properties: Mapping[str, str]) -> Compression | None:
    value = given(properties, COMPRESSION)
    if not value:
        return None
    try:
        return Compression[value]
    except KeyError:
        names = ", ".join(each.name for each in Compression)
        raise ValueError(f"{COMPRESSION} is one of {names}, found {value!r}") from None
