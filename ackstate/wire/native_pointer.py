"""The native pointer: a cursor's value in the metadata store.

It names the ledger of the cursor's journal or, if there is none, contains the whole state. It also has the cursor's
mark-delete position at the time of writing, in case the ledger is lost. `docs/wire-format.md` draws every byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import google_crc32c

from ackstate.errors import CorruptStateError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.wire import native
from ackstate.wire.native import RecordKind
from ackstate.wire.native_reader import CHECKSUM, Reader, check_version, corrupt
from ackstate.wire.text_properties import check_properties_fit, decode_text_properties, encode_text_properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.wire.native import Record

MAGIC = b"ACKP"
VERSION = 2

_HEADER = struct.Struct("<4sB3xQQQ")  # magic, version, reserved, cursor ledger, epoch, term
_TAIL = struct.Struct("<qqII")  # mark-delete ledger and entry, cursor properties, snapshot bytes
_NO_LEDGER = 2**64 - 1
_NO_POSITION = (-1, -1)
_WHAT = "cursor pointer"


@dataclass(frozen=True, slots=True)
class Pointer:
    """The location of a cursor's state.

    Attributes:
        cursor_ledger_id: The ledger that holds the journal; None if the state is in `snapshot`.
        epoch: The epoch of the journal's records, or of the snapshot.
        term: Rises whenever the cursor is opened: a pointer with another term belongs to another owner.
        mark_delete: The mark-delete position at the time of writing; None if it was unknown.
        cursor_properties: Properties set by the application, name -> text.
        snapshot: Without a ledger, the whole state; else None.
    """

    cursor_ledger_id: int | None
    epoch: int
    term: int
    mark_delete: Position | None = None
    cursor_properties: Mapping[str, str] = field(default_factory=dict)
    snapshot: Record | None = None

    def __post_init__(self) -> None:
        if (self.cursor_ledger_id is None) != (self.snapshot is not None):
            raise ValueError("a pointer must have either a ledger or a snapshot")


def check_cursor_properties(properties: Mapping[str, str]) -> None:
    """Raise `ValueError` or `TypeError` for a name or a text that no pointer can hold."""
    check_properties_fit(properties, called="cursor property")


def encode_pointer(pointer: Pointer) -> bytes:
    """Encode a pointer.

    Raises:
        ValueError: A cursor property, or the snapshot, is too large.
    """
    check_cursor_properties(pointer.cursor_properties)
    ledger_id = _NO_LEDGER if pointer.cursor_ledger_id is None else pointer.cursor_ledger_id
    snapshot = b"" if pointer.snapshot is None else native.encode(pointer.snapshot)
    covered = b"".join(
        (
            _HEADER.pack(MAGIC, VERSION, ledger_id, pointer.epoch, pointer.term),
            _TAIL.pack(*(pointer.mark_delete or _NO_POSITION), len(pointer.cursor_properties), len(snapshot)),
            *encode_text_properties(pointer.cursor_properties),
            snapshot,
        )
    )
    return covered + CHECKSUM.pack(google_crc32c.value(covered))


def decode_pointer(data: bytes) -> Pointer:
    """Decode a pointer that `encode_pointer` wrote.

    Raises:
        UnsupportedVersionError: The pointer has another version.
        CorruptStateError: Anything else is wrong. No other exception can escape.
    """
    size_min = _HEADER.size + CHECKSUM.size
    if len(data) < size_min:
        corrupt(0, f"at least {size_min} bytes", f"{len(data)} bytes", what=_WHAT)
    magic, version, cursor_ledger_id, epoch, term = _HEADER.unpack_from(data)
    if magic != MAGIC:
        corrupt(0, MAGIC, magic, what=_WHAT)
    check_version(version, VERSION, what=_WHAT)
    computed, stored = google_crc32c.value(data[: -CHECKSUM.size]), native.checksum(data)
    if stored != computed:
        corrupt(len(data) - CHECKSUM.size, f"checksum {computed:#010x}", f"{stored:#010x}", what=_WHAT)
    if not version or any(data[5:8]):
        corrupt(4, f"version {VERSION}, then three zero bytes", data[4:8].hex(), what=_WHAT)
    reader = Reader(data, _HEADER.size, len(data) - CHECKSUM.size, what=_WHAT)
    return _decode_tail(reader, None if cursor_ledger_id == _NO_LEDGER else cursor_ledger_id, epoch, term)


def _decode_tail(reader: Reader, cursor_ledger_id: int | None, epoch: int, term: int) -> Pointer:
    at = reader.offset
    *ids, property_count, snapshot_bytes = _TAIL.unpack(reader.take(_TAIL.size, "mark-delete and counts"))
    mark_delete = None if tuple(ids) == _NO_POSITION else Position(*ids)
    if mark_delete is not None and not (0 <= ids[0] <= LEDGER_ID_MAX and -1 <= ids[1] <= ENTRY_ID_MAX):
        corrupt(at, "a mark-delete position", mark_delete, what=_WHAT)
    properties = dict(decode_text_properties(reader, property_count))
    at = reader.offset
    if (cursor_ledger_id is None) != (snapshot_bytes > 0):
        corrupt(at, "a cursor ledger or a snapshot", f"ledger {cursor_ledger_id}, {snapshot_bytes} bytes", what=_WHAT)
    snapshot = _decode_snapshot(reader.take(snapshot_bytes, "snapshot"), at, epoch) if snapshot_bytes else None
    reader.finish("the checksum")
    return Pointer(cursor_ledger_id, epoch, term, mark_delete, properties, snapshot)


def _decode_snapshot(data: bytes, offset: int, epoch: int) -> Record:
    try:
        snapshot = native.decode(data)
    except CorruptStateError as error:
        corrupt(offset + error.offset, error.expected, error.found, what=_WHAT)
    if (snapshot.kind, snapshot.epoch) != (RecordKind.SNAPSHOT, epoch):
        found = f"kind {snapshot.kind}, epoch {snapshot.epoch}"
        corrupt(offset, f"a snapshot of epoch {epoch}", found, what=_WHAT)
    return snapshot
