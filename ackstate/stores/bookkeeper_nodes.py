"""The nodes that a `BookKeeperStore` has in ZooKeeper for its ledgers and its writers of groups.

A ledger's node lists its segments: the ledgers of BookKeeper that contain its entries, in order. BookKeeper gives a
ledger one writer for ever, so each opening of the store that appends to a ledger begins a new segment.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ackstate.errors import CorruptStateError
from ackstate.stores import zookeeper as nodes
from ackstate.stores.zookeeper import FRAME_BYTES, WRITERS, LedgerStatus, NodeKind

_LEDGER = struct.Struct("<BI")  # status, size of the owner in bytes; then the owner in UTF-8, then segments
_SEGMENT = struct.Struct("<QIB")  # BookKeeper's ledger id, entry count, status
_WRITER = struct.Struct("<QB")  # the last committed group, 1 if it may commit no more


class SegmentStatus(IntEnum):
    """The status of a segment; all but the last of a ledger are sealed."""

    CREATING = 0
    """It has no entries, and BookKeeper's ledger need not exist yet."""
    OPEN = 1
    """Its writer may append; the number of entries is unknown to others."""
    SEALED = 2
    """Its number of entries is final."""


class Segment(NamedTuple):
    """A ledger of BookKeeper with a part of a ledger's entries.

    Attributes:
        bookkeeper_id: Its id in BookKeeper.
        entry_count: How many of its entries count, from the first; 0 until it is sealed.
        status: Whether it is sealed.
    """

    bookkeeper_id: int
    entry_count: int
    status: SegmentStatus


class SegmentedLedger(NamedTuple):
    """The contents of a ledger's node."""

    status: LedgerStatus
    owner: str
    segments: tuple[Segment, ...]

    @property
    def sealed_count(self) -> int:
        """The number of entries in sealed segments."""
        return sum(segment.entry_count for segment in self.segments)

    @property
    def unsealed(self) -> Segment | None:
        """The last segment, if it is not sealed."""
        last = self.segments[-1] if self.segments else None
        return last if last is not None and last.status is not SegmentStatus.SEALED else None

    def with_last(self, segment: Segment) -> SegmentedLedger:
        """Return this with another last segment."""
        return self._replace(segments=(*self.segments[:-1], segment))


class WriterState(NamedTuple):
    """The contents of a writer's node.

    Attributes:
        committed: The number of its last committed group, 0 if there is none.
        is_closed: It may commit no more.
    """

    committed: int
    is_closed: bool


def encode_ledger(ledger_id: int, state: SegmentedLedger) -> bytes:
    """Return the bytes of a ledger's node."""
    owner = state.owner.encode()
    segments = b"".join(_SEGMENT.pack(*segment) for segment in state.segments)
    body = _LEDGER.pack(state.status, len(owner)) + owner + segments
    return nodes.encode(NodeKind.BOOKKEEPER_LEDGER, nodes.ledger_path(ledger_id), body)


def decode_ledger(ledger_id: int, data: bytes) -> SegmentedLedger:
    """Return the state in a ledger's node.

    Raises:
        CorruptStateError: The node is of another kind, its bytes are damaged, or they were written to another path.
        UnsupportedVersionError: A newer release wrote them.
    """
    path = nodes.ledger_path(ledger_id)
    body = nodes.decode(NodeKind.BOOKKEEPER_LEDGER, path, data)
    try:
        status, owner_size = _LEDGER.unpack_from(body)
        end = _LEDGER.size + owner_size
        owner = body[_LEDGER.size : end].decode()
        segments = tuple(
            Segment(bookkeeper_id, entry_count, SegmentStatus(segment_status))
            for bookkeeper_id, entry_count, segment_status in _SEGMENT.iter_unpack(body[end:])
        )
        state = SegmentedLedger(LedgerStatus(status), owner, segments)
    except (struct.error, ValueError) as error:
        raise _damage(path, "the segments of a ledger", error) from error
    if len(body) < end or any(segment.status is not SegmentStatus.SEALED for segment in segments[:-1]):
        raise _damage(path, "sealed segments before the last", segments)
    return state


def writer_path(writer_id: int) -> str:
    """Return the node of a writer of groups."""
    return f"{WRITERS}/{writer_id:016x}"


def encode_writer(writer_id: int, state: WriterState) -> bytes:
    """Return the bytes of a writer's node."""
    return nodes.encode(NodeKind.BOOKKEEPER_WRITER, writer_path(writer_id), _WRITER.pack(*state))


def decode_writer(writer_id: int, data: bytes) -> WriterState:
    """Return the state in a writer's node; errors as `decode_ledger`."""
    path = writer_path(writer_id)
    body = nodes.decode(NodeKind.BOOKKEEPER_WRITER, path, data)
    if len(body) != _WRITER.size or body[-1] > 1:
        raise _damage(path, "a group number and 0 or 1", body)
    committed, is_closed = _WRITER.unpack(body)
    return WriterState(committed, bool(is_closed))


def _damage(path: str, expected: str, found: object) -> CorruptStateError:
    return CorruptStateError(f"node {path}", offset=FRAME_BYTES, expected=expected, found=found)
