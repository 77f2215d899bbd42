"""Encodes and decodes the records of a cursor, and decodes that of a topic.

Lists of ranges have a fast codec of their own, all else of a cursor's uses the protobuf runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import corrupt
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position
from ackstate.wire.pulsar.compression import Compression, compress, decompress, is_compressed
from ackstate.wire.pulsar.cursor_state_pb2 import (
    BatchedEntryDeletionIndexInfo,
    LongListMap,
    LongProperty,
    ManagedCursorInfo,
    MessageRange,
    NestedPositionInfo,
    StringProperty,
)
from ackstate.wire.pulsar.cursor_state_pb2 import PositionInfo as PositionInfoMessage
from ackstate.wire.pulsar.fields import fields_of
from ackstate.wire.pulsar.ranges import (
    UNLIMITED,
    WORD_COUNT_MAX,
    InvalidRecordError,
    Limits,
    RangeForm,
    RangeRows,
    apply_limits,
    bitmap_of_words,
    decode_range_list,
    encode_range_list,
    resolve,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.ledger_map import LedgerMap
    from ackstate.wire.pulsar.fields import Field

NO_LEDGER = -1  # the `cursors_ledger_id` of a cursor whose whole state is in its metadata record


@dataclass(frozen=True, slots=True)
class PositionInfo:
    """An entry of a cursor ledger: the whole state of the cursor at one moment."""

    position: Position  # the mark-delete position: every entry up to it, inclusive, is acked
    deleted: DeletedRanges = field(default_factory=DeletedRanges)  # Pulsar may write some at or below the position
    batch: BatchIndexes = field(default_factory=BatchIndexes)  # must not be changed, like the one before
    properties: Mapping[str, int] = field(default_factory=dict)  # of the latest mark-delete; signed 64-bit numbers
    unknown: bytes = b""  # unknown fields, unchanged; written back behind all others
    # Since when no consumer used the cursor; None if the entry lacks it. Pulsar 5.0.1 writes it, takes None and 0 as
    # now, when it reads the entry, and deletes a subscription that is idle for longer than its namespace allows.
    idle_since_ms: int | None = None

    def __post_init__(self) -> None:
        check_position(self.position)


@dataclass(frozen=True, slots=True)
class CursorInfo:
    """A cursor's record in the metadata store; the fields that are not described here are as in `PositionInfo`."""

    cursors_ledger_id: int  # the cursor ledger with the state; `NO_LEDGER` (-1) if the state is in this record
    mark_delete: Position | None = None  # when this was written, inclusive; None if the record lacks it
    deleted: DeletedRanges = field(default_factory=DeletedRanges)
    batch: BatchIndexes = field(default_factory=BatchIndexes)
    properties: Mapping[str, int] = field(default_factory=dict)
    last_active_ms: int | None = None  # when the cursor was last used, since 1970; None if the record lacks it
    cursor_properties: Mapping[str, str] = field(default_factory=dict)  # set by the application
    unknown: bytes = b""
    term: int | None = None  # of the cursor's owner, in a field of ours that Pulsar ignores; None if Pulsar wrote it
    idle_since_ms: int | None = None

    def __post_init__(self) -> None:
        if not NO_LEDGER <= self.cursors_ledger_id <= LEDGER_ID_MAX:
            raise ValueError(f"cursor ledger must be in {NO_LEDGER}..{LEDGER_ID_MAX}, got {self.cursors_ledger_id}")
        if self.mark_delete is not None:
            check_position(self.mark_delete)


_Message = TypeVar("_Message", PositionInfoMessage, ManagedCursorInfo)

COMPRESSION_THRESHOLD_BYTES = 16_384


# The list of ranges is behind the single numbers of a record, which are optional: their tags, and the tag of the list.
_RANGES_TAG, _CURSOR_RANGES_TAG = 0x1A, 0x22
_NUMBER_TAGS, _CURSOR_NUMBER_TAGS = b"\x08\x10", b"\x08\x10\x18"
_NO_RANGES = DeletedRanges()


def encode_position_info(info: PositionInfo, *, form: RangeForm = RangeForm.WORDS, limits: Limits = UNLIMITED) -> bytes:
    """Encode an entry of a cursor ledger, byte for byte as Pulsar 4.2 and 5.0; no acked entries are always a list.

    Raises:
        ValueError: A number does not fit 64 bits, text is not UTF-8, or `unknown` has a known field.
    """
    selection, form = apply_limits(info.deleted, form=form, limits=limits)
    as_list = form is RangeForm.LIST
    in_words = () if as_list else selection.kept.bitmaps()
    head = PositionInfoMessage(ledger_id=info.position.ledger_id, entry_id=info.position.entry_id)
    tail = PositionInfoMessage(
        properties=_properties(info.properties),
        batched_entry_deletion_index_info=_batch_infos(info.batch, limits),
        individual_deleted_message_ranges=(LongListMap(key=each, values=words_of(bitmap)) for each, bitmap in in_words),
        idle_since=info.idle_since_ms,
    )
    return _assembled(head, selection.kept if as_list else _NO_RANGES, _RANGES_TAG, tail, info.unknown)


def decode_position_info(data: bytes, ledgers: LedgerMap | None = None, *, what: str = "position info") -> PositionInfo:
    """Decode an entry of a cursor ledger, or raise `CorruptStateError`, which names `what`: no other can escape.

    Without the ledgers of the log, ranges across ledgers count only in their upper one: fewer acks, never more.
    """
    record = bytes(memoryview(data))
    try:
        message, rows = _parsed(record, PositionInfoMessage, _NUMBER_TAGS, _RANGES_TAG)
        position = _checked_position(message.ledger_id, message.entry_id)
        return PositionInfo(
            position,
            _deleted(message, rows, ledgers, len(record)),
            _batch(message),
            _decoded_properties(message),
            idle_since_ms=message.idle_since if message.HasField("idle_since") else None,
            unknown=_unknown(message),
        )
    except InvalidRecordError as refused:
        corrupt(what, 0, refused.expected, refused.found)


def encode_cursor_info(
    info: CursorInfo,
    *,
    limits: Limits = UNLIMITED,
    compression: Compression = Compression.NONE,
    threshold_bytes: int = COMPRESSION_THRESHOLD_BYTES,
) -> bytes:
    """Encode a cursor's record of the metadata store, byte for byte as Pulsar 4.2 and 5.0; ranges are a list.

    It is compressed above the threshold. Errors as `encode_position_info`; `MissingCodecError` without the package.
    """
    selection, _ = apply_limits(info.deleted, form=RangeForm.LIST, limits=limits)
    head = ManagedCursorInfo(cursors_ledger_id=info.cursors_ledger_id)
    if info.mark_delete is not None:
        head.mark_delete_ledger_id, head.mark_delete_entry_id = info.mark_delete
    tail = ManagedCursorInfo(
        properties=_properties(info.properties),
        last_active=info.last_active_ms,
        batched_entry_deletion_index_info=_batch_infos(info.batch, limits),
        cursor_properties=(StringProperty(name=name, value=text) for name, text in info.cursor_properties.items()),
        idle_since=info.idle_since_ms,
        ackstate_term=info.term,
    )
    record = _assembled(head, selection.kept, _CURSOR_RANGES_TAG, tail, info.unknown)
    if compression is Compression.NONE or len(record) <= threshold_bytes:
        return record
    # Pulsar cannot open a compressed record with properties again.
    return record if info.properties or info.cursor_properties else compress(record, compression)


def decode_cursor_info(data: bytes, ledgers: LedgerMap | None = None) -> CursorInfo:
    """Decode a cursor's record of the metadata store, compressed or not; at most 128 times as long as its bytes.

    Raises:
        CorruptStateError: It is not valid; the offset is that in the decompressed record, if it could be decompressed.
        UnsupportedVersionError: Its compression type is unknown.
        MissingCodecError: The package for its compression is not installed.
        No other exception can escape.
    """
    record = bytes(memoryview(data))
    if is_compressed(record):
        record = decompress(record)
    try:
        message, rows = _parsed(record, ManagedCursorInfo, _CURSOR_NUMBER_TAGS, _CURSOR_RANGES_TAG)
        if message.cursors_ledger_id < NO_LEDGER:
            raise InvalidRecordError(f"a ledger id, or {NO_LEDGER}", message.cursors_ledger_id)
        return CursorInfo(
            message.cursors_ledger_id,
            _mark_delete(message),
            _deleted(message, rows, ledgers, len(record)),
            _batch(message),
            _decoded_properties(message),
            message.last_active if message.HasField("last_active") else None,
            {_text(each.name): _text(each.value) for each in message.cursor_properties},
            term=message.ackstate_term if message.HasField("ackstate_term") else None,
            idle_since_ms=message.idle_since if message.HasField("idle_since") else None,
            unknown=_unknown(message),
        )
    except InvalidRecordError as refused:
        corrupt("cursor info", 0, refused.expected, refused.found)


def _properties(properties: Mapping[str, int]) -> Iterator[LongProperty]:
    return (LongProperty(name=name, value=number) for name, number in properties.items())


def _batch_infos(batch: BatchIndexes, limits: Limits) -> Iterator[BatchedEntryDeletionIndexInfo]:
    for (ledger_id, entry_id), words in islice(batch.items(), limits.batch_index_count_max):
        position = NestedPositionInfo(ledger_id=ledger_id, entry_id=entry_id)
        yield BatchedEntryDeletionIndexInfo(position=position, delete_set=words)


def _assembled(head: _Message, listed: DeletedRanges, tag: int, tail: _Message, unknown: bytes) -> bytes:
    # Fields are written in the order of their numbers, as in Pulsar; unknown fields have the highest numbers.
    if unknown:
        try:
            known = type(tail).FromString(unknown).ListFields()
        except DecodeError as error:
            raise ValueError(f"unknown fields must be protobuf, got {unknown[:20]!r}: {error}") from None
        if known:
            raise ValueError(f"unknown fields must not contain {known[0][0].name}, got {unknown[:20]!r}")
    ranges: Sequence[bytes | bytearray] = encode_range_list(listed, tag=tag)
    return b"".join((head.SerializePartialToString(), *ranges, tail.SerializePartialToString(), unknown))


def _parsed(
    record: bytes, message_type: type[_Message], number_tags: bytes, ranges_tag: int
) -> tuple[_Message, RangeRows]:
    """Return the record, and the ranges that were removed from it for the fast codec."""
    begin = _end_of_numbers(record, number_tags)
    rows, end = decode_range_list(record, begin, tag=ranges_tag)
    message: _Message = message_type()
    try:
        message.ParseFromString(record[:begin] + record[end:])
    except DecodeError as error:
        raise InvalidRecordError("a record that protobuf can read", error) from None
    if not message.IsInitialized():
        raise InvalidRecordError("all required fields", "a part of them")
    left = np.array([*map(_ends, message.individual_deleted_messages)], np.int64).reshape(-1, 4).T
    if left.size:
        rows = RangeRows(*map(np.concatenate, zip(rows, left, strict=True)))
    return message, rows


def _end_of_numbers(record: bytes, tags: bytes) -> int:
    """Return the end of the well-formed single numbers at the start of a record."""
    at = 0
    while at < len(record) and record[at] in tags:
        end = at + 1
        while end < len(record) and record[end] >= 0x80:
            end += 1
        if end == len(record):
            break
        at = end + 1
    return at


def _ends(message: MessageRange) -> tuple[int, int, int, int]:
    lower, upper = message.lower_endpoint, message.upper_endpoint
    return lower.ledger_id, lower.entry_id, upper.ledger_id, upper.entry_id


def _deleted(
    message: PositionInfoMessage | ManagedCursorInfo, rows: RangeRows, ledgers: LedgerMap | None, record_bytes: int
) -> DeletedRanges:
    if len(rows.lower_ledger) or isinstance(message, ManagedCursorInfo):
        return resolve(rows, ledgers, record_bytes=record_bytes)
    deleted, ledger_ids = DeletedRanges(), set()
    for index, each in enumerate(message.individual_deleted_message_ranges):
        if each.key < 0 or each.key in ledger_ids:
            raise InvalidRecordError(f"a ledger id of 0 or more, each once, as key {index} of the words", each.key)
        ledger_ids.add(each.key)
        if len(each.values) > WORD_COUNT_MAX and any(each.values[WORD_COUNT_MAX:]):
            raise InvalidRecordError(f"entries up to {ENTRY_ID_MAX} of ledger {each.key}", "higher ones")
        deleted.add_entries(each.key, bitmap_of_words(each.values[:WORD_COUNT_MAX]))
    return deleted


def _batch(message: PositionInfoMessage | ManagedCursorInfo) -> BatchIndexes:
    batch = BatchIndexes()
    for each in message.batched_entry_deletion_index_info:
        position = _checked_position(each.position.ledger_id, each.position.entry_id, "a batch", entry_id_min=0)
        if not any(each.delete_set):
            raise InvalidRecordError("an index that is not acked", f"none of batch {position}")
        batch.discard(position)  # If a position is repeated, the last one counts.
        batch.ack(position, each.delete_set)
    return batch


def _decoded_properties(message: PositionInfoMessage | ManagedCursorInfo) -> dict[str, int]:
    return {_text(each.name): each.value for each in message.properties}


def _text(text: str) -> str:
    # The runtime returns text that is not UTF-8 as bytes.
    if not isinstance(text, str):
        raise InvalidRecordError("text in UTF-8", text)
    return text


def _mark_delete(message: ManagedCursorInfo) -> Position | None:
    ledger, entry = message.HasField("mark_delete_ledger_id"), message.HasField("mark_delete_entry_id")
    if ledger != entry:
        raise InvalidRecordError("both ids of the mark-delete position", "one of them")
    return _checked_position(message.mark_delete_ledger_id, message.mark_delete_entry_id) if ledger else None


def _checked_position(
    ledger_id: int, entry_id: int, what: str = "the mark-delete position", entry_id_min: int = -1
) -> Position:
    if not (0 <= ledger_id <= LEDGER_ID_MAX and entry_id_min <= entry_id <= ENTRY_ID_MAX):
        expected = f"a ledger id of 0 or more and an entry id of {entry_id_min} to {ENTRY_ID_MAX} of {what}"
        raise InvalidRecordError(expected, f"{ledger_id}:{entry_id}")
    return Position(ledger_id, entry_id)


def _unknown(message: PositionInfoMessage | ManagedCursorInfo) -> bytes:
    """Return the unknown fields unchanged; the message is consumed."""
    for each in message.DESCRIPTOR.fields:
        message.ClearField(each.name)
    return message.SerializePartialToString()


# The ledgers of a topic: only the fields that a reader needs are decoded.
_LEDGERS = "managed ledger info"


@dataclass(frozen=True, slots=True)
class MessageLedger:
    """One ledger of a message log."""

    ledger_id: int
    entry_count: int  # when it was closed; 0 while it is open, or if it was not closed properly
    is_offloaded: bool = False  # whether its entries are elsewhere and BookKeeper no longer has them


def decode_ledger_info(data: bytes) -> tuple[MessageLedger, ...]:
    """Decode a topic's record of the metadata store: the ledgers of its log, rising; errors as `decode_cursor_info`.

    Source: ``MLDataFormats.proto`` (``ManagedLedgerInfo``), ``ManagedLedgerImpl`` of Apache Pulsar.
    """
    record = decompress(data) if is_compressed(data) else bytes(data)
    found = tuple(
        _ledger(record, each) for each in fields_of(record, 0, len(record), what=_LEDGERS) if each.number == 1
    )
    for before, after in pairwise(found):
        if before.ledger_id >= after.ledger_id:
            corrupt(_LEDGERS, 0, f"a ledger above {before.ledger_id}", after.ledger_id)
    return found


def _ledger(record: bytes, within: Field) -> MessageLedger:
    ledger_id, entry_count, is_offloaded = -1, 0, False
    for each in fields_of(record, within.begin, within.end, what=_LEDGERS):
        if each.number == 1:
            ledger_id = each.signed
        elif each.number == 2:
            entry_count = each.signed
        elif each.number == 5:
            inner = fields_of(record, each.begin, each.end, what=_LEDGERS)
            is_offloaded = any(deep.number == 4 and deep.value == 1 for deep in inner)
    if not (0 <= ledger_id <= LEDGER_ID_MAX and 0 <= entry_count <= ENTRY_ID_MAX + 1):
        expected = f"a ledger id of 0 or more, and at most {ENTRY_ID_MAX + 1} entries"
        corrupt(_LEDGERS, within.begin, expected, f"{ledger_id} and {entry_count}")
    return MessageLedger(ledger_id, entry_count, is_offloaded)
