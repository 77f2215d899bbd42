"""The entries of a `BookKeeperStore` in BookKeeper: a header, and the caller's bytes.

Entries of one append to one ledger form a batch. Only its last entry ends it, so a recovery can cut off a batch whose
end was never written. If an append has entries for several ledgers, the batches are one group: the last entry of each
names the writer and the number of the group, and the group counts only if it is committed in the writer's node.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ackstate.errors import CorruptStateError, UnsupportedVersionError

_VERSION = 1
_HEADER = struct.Struct("<BBI")  # version, kind, index in the batch
_GROUP = struct.Struct("<QQ")  # writer, number of the group
ENTRY_ROOM_BYTES = _HEADER.size + _GROUP.size
"""The most that a header adds to an entry."""


class EntryKind(IntEnum):
    """The place of an entry in its batch."""

    CONTINUED = 1
    """Another entry of the same batch."""
    END = 2
    """Nothing: it ends its batch."""
    GROUP_END = 3
    """Nothing: it ends its batch, which counts if the group is committed."""


class Group(NamedTuple):
    """An append to several ledgers."""

    writer_id: int
    number: int


class Entry(NamedTuple):
    """An entry as read.

    Attributes:
        kind: Whether it ends its batch.
        batch_index: Its place in its batch, from 0.
        group: The group that its batch belongs to; None if there is none, or more entries of the batch follow.
        payload: The caller's bytes.
    """

    kind: EntryKind
    batch_index: int
    group: Group | None
    payload: bytes


def encode_batch(payloads: list[bytes], group: Group | None) -> list[bytes]:
    """Return the entries of a batch."""
    last = len(payloads) - 1
    end = EntryKind.END if group is None else EntryKind.GROUP_END
    names = b"" if group is None else _GROUP.pack(*group)
    return [
        _HEADER.pack(_VERSION, EntryKind.CONTINUED, index) + payload
        if index < last
        else _HEADER.pack(_VERSION, end, index) + names + payload
        for index, payload in enumerate(payloads)
    ]


def decode_entry(data: bytes, what: str) -> Entry:
    """Return an entry.

    Args:
        data: Its bytes in BookKeeper.
        what: Its name in errors.

    Raises:
        CorruptStateError: It is not an entry of ours.
        UnsupportedVersionError: A newer release wrote it.
    """
    if len(data) < _HEADER.size:
        raise CorruptStateError(
            what, offset=len(data), expected=f"at least {_HEADER.size} bytes", found=f"{len(data)} bytes"
        )
    version, kind, index = _HEADER.unpack_from(data)
    if version > _VERSION:
        raise UnsupportedVersionError(f"{what} has format version {version}; this release reads up to {_VERSION}")
    if version != _VERSION or kind not in set(EntryKind):
        raise CorruptStateError(what, offset=0, expected=f"version {_VERSION}, a known kind", found=(version, kind))
    if kind != EntryKind.GROUP_END:
        return Entry(EntryKind(kind), index, None, data[_HEADER.size :])
    if len(data) < ENTRY_ROOM_BYTES:
        raise CorruptStateError(what, offset=len(data), expected="a group", found=f"{len(data)} bytes")
    group = Group(*_GROUP.unpack_from(data, _HEADER.size))
    return Entry(EntryKind.GROUP_END, index, group, data[ENTRY_ROOM_BYTES:])
