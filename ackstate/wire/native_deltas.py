"""Decodes many deltas of one journal at once: their common fields are checked as columns, not record by record.

Damaged or unexpected records are not handled here: `ackstate.wire.native` decodes those one by one.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np
from pyroaring import BitMap

from ackstate.deleted_ranges import DeletedRanges
from ackstate.entry_bitmap import bitmap_of
from ackstate.errors import CorruptStateError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.wire.native import (
    LEDGER_BLOCK,
    SEALED,
    Record,
    RecordFields,
    RecordKind,
    decode_bitmap,
    decode_parts,
    encode,
)
from ackstate.wire.native_reader import CHECKSUM, corrupt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

_HEADER = np.dtype(
    {
        "names": ["length", "epoch", "sequence", "chain", "mark_delete", "ledgers", "properties", "batches"],
        "formats": ["<u4", "<u8", "<u8", "<u4", ("<i8", 2), "<u4", "<u4", "<u4"],
        "offsets": [8, 12, 20, 28, 32, 48, 52, 56],
        "itemsize": 60,
    }
)
_BITMAP_AT = _HEADER.itemsize + LEDGER_BLOCK.size
_LENGTH_MIN = _HEADER.itemsize + CHECKSUM.size
# The layout of a delta with one acked entry, as most are: the bitmap has one container with one value.
_SINGLE = np.dtype(
    {
        "names": ["ledger_id", "size_and_cookie", "containers", "high", "others", "values_at", "low"],
        "formats": ["<i8", "<u8", "<u4", "<u2", "<u2", "<u4", "<u2"],
        "offsets": [60, 68, 76, 80, 82, 84, 88],
        "itemsize": 94,
    }
)
_FIXED = ("size_and_cookie", "containers", "others", "values_at")
_SAMPLE = encode(Record(RecordKind.DELTA, 0, 0, 0, Position(0, -1), DeletedRanges.from_bitmaps([(0, BitMap([0]))])))


class JournalOffset(NamedTuple):
    """The values that a record at this place of a journal must have.

    Attributes:
        epoch: The record's.
        sequence: The record's.
        chain: The record's.
        mark_delete: That of the previous record: within an epoch it never goes back.
    """

    epoch: int
    sequence: int
    chain: int
    mark_delete: Position


class Deltas(NamedTuple):
    """The contents of many deltas.

    Attributes:
        mark_delete: That of the last delta.
        properties: Those of the last delta.
        bitmaps: Acked entries by ledger, of all deltas that have nothing else.
        others: The other deltas.
    """

    mark_delete: Position
    properties: Mapping[str, int]
    bitmaps: dict[int, BitMap]
    others: list[RecordFields]


def decode_deltas(entries: Sequence[bytes], place: JournalOffset) -> Deltas | None:
    """Read consecutive deltas of a journal.

    Args:
        entries: At least one.
        place: The place of the first delta.

    Returns:
        None if a delta is damaged, does not belong there, or has another version: `decode_parts` returns the reason.

    Complexity: O(size); ten times as fast as `decode_parts` for one acked entry.
    """
    lengths = np.fromiter(map(len, entries), np.uint32, len(entries))
    if lengths.min() < _LENGTH_MIN or {*map(google_crc32c.value, entries)} != {SEALED}:
        return None
    joined = b"".join([encoded[: _HEADER.itemsize] for encoded in entries])
    headers = np.frombuffer(joined, _HEADER)
    checksums = np.frombuffer(b"".join([encoded[-CHECKSUM.size :] for encoded in entries]), "<u4")
    if joined != _expected(headers, lengths, checksums, place) or not _is_rising(headers, place):
        return None
    is_plain = (headers["ledgers"] == 1) & (headers["properties"] == 0) & (headers["batches"] == 0)
    is_plain &= lengths > _BITMAP_AT
    others = list(compress(entries, (~is_plain).tolist()))
    try:
        bitmaps = _decode_plain(list(compress(entries, is_plain.tolist())), lengths[is_plain])
        parts = list(map(decode_parts, others))
    except CorruptStateError:
        return None
    properties = {} if is_plain[-1] else parts[-1].properties
    return Deltas(Position(*headers["mark_delete"][-1].tolist()), properties, bitmaps, parts)


def join(bitmaps: dict[int, BitMap], ledger_id: int, acked: BitMap) -> None:
    """OR the acked entries of a ledger into those of all ledgers; ownership of the bitmap passes to `bitmaps`."""
    held = bitmaps.get(ledger_id)
    if held is None:
        bitmaps[ledger_id] = acked
    else:
        held |= acked


def _expected(
    headers: npt.NDArray[np.void],
    lengths: npt.NDArray[np.uint32],
    checksums: npt.NDArray[np.uint32],
    place: JournalOffset,
) -> bytes:
    """Return the required headers, byte for byte, with their free fields filled in."""
    encoded = np.tile(np.frombuffer(_SAMPLE, np.uint8, _HEADER.itemsize), len(headers))
    expected = encoded.view(_HEADER)
    expected["length"] = lengths
    expected["epoch"] = place.epoch
    expected["sequence"] = np.arange(place.sequence, place.sequence + len(headers))
    expected["chain"] = np.concatenate((np.array([place.chain], np.uint32), checksums[:-1]))
    for free in ("mark_delete", "ledgers", "properties", "batches"):
        expected[free] = headers[free]
    return encoded.tobytes()


def _is_rising(headers: npt.NDArray[np.void], place: JournalOffset) -> bool:
    """Return whether all mark-deletes are positions, each at or above the previous one."""
    ledger_ids, entry_ids = np.concatenate((np.array([place.mark_delete], np.int64), headers["mark_delete"])).T
    is_same_ledger = ledger_ids[1:] == ledger_ids[:-1]
    is_rising = (ledger_ids[1:] > ledger_ids[:-1]) | is_same_ledger & (entry_ids[1:] >= entry_ids[:-1])
    return bool(is_rising.all() and entry_ids.min() >= -1 and entry_ids.max() <= ENTRY_ID_MAX)


def _decode_plain(entries: list[bytes], lengths: npt.NDArray[np.uint32]) -> dict[int, BitMap]:
    """Return the acks of deltas with one ledger block each, by ledger."""
    is_single = lengths == _SINGLE.itemsize
    rows = np.frombuffer(b"".join(compress(entries, is_single.tolist())), _SINGLE)
    fixed = np.frombuffer(_SAMPLE, _SINGLE)
    is_as_sample = np.logical_and.reduce([rows[name] == fixed[name] for name in _FIXED]) & (rows["ledger_id"] >= 0)
    is_single[is_single] = is_as_sample
    bitmaps = _acked(rows[is_as_sample])
    for encoded in compress(entries, (~is_single).tolist()):
        join(bitmaps, *_decode_block(encoded))
    return bitmaps


def _acked(singles: npt.NDArray[np.void]) -> dict[int, BitMap]:
    if not len(singles):
        return {}
    entry_ids = singles["high"].astype(np.uint32) << 16 | singles["low"]
    order = np.argsort(singles["ledger_id"], kind="stable")
    ledger_ids, begins = np.unique(singles["ledger_id"][order], return_index=True)
    of_ledgers = np.split(entry_ids[order], begins[1:])
    return dict(zip(ledger_ids.tolist(), map(bitmap_of, of_ledgers), strict=True))


def _decode_block(encoded: bytes) -> tuple[int, BitMap]:
    """Read the only ledger block of a record."""
    ledger_id, size = LEDGER_BLOCK.unpack_from(encoded, _HEADER.itemsize)
    portable = encoded[_BITMAP_AT : -CHECKSUM.size]
    if ledger_id > LEDGER_ID_MAX or size != len(portable):
        corrupt(_HEADER.itemsize, "a single ledger block", f"ledger {ledger_id}, {size} bytes")
    return ledger_id, decode_bitmap(portable, _BITMAP_AT)
