"""A sealed bucket: the delayed messages of a range of message ledgers, stored by time in segments.

The snapshot of a bucket is one ledger: entry 0 says what each segment holds, entries 1 to N are the segments. Which
snapshot a bucket has stands in the registry, under Pulsar's key for it.

Source: ``ImmutableBucket`` of Apache Pulsar, PIP-195.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ackstate.position import LEDGER_ID_MAX
from ackstate.wire.pulsar.delay_snapshot import SegmentMetadata, decode_metadata, encode_metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes

BUCKET_KEY_PREFIX = "#pulsar.internal.delayed.bucket"
"""What the registry's keys of buckets begin with."""

_LEDGER_ID = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


class BucketKey(NamedTuple):
    """The message ledgers that a bucket covers, both ends included; what the registry knows it by.

    >>> str(BucketKey(3, 7)), BucketKey.parse("#pulsar.internal.delayed.bucket_3_7")
    ('#pulsar.internal.delayed.bucket_3_7', BucketKey(first_ledger_id=3, last_ledger_id=7))
    """

    first_ledger_id: int
    last_ledger_id: int

    def __str__(self) -> str:
        return f"{BUCKET_KEY_PREFIX}_{self.first_ledger_id}_{self.last_ledger_id}"

    @classmethod
    def parse(cls, text: str) -> BucketKey:
        """Read back what `str` wrote.

        Raises:
            ValueError: The text is no key of a bucket.
        """
        parts = text.split("_")
        if len(parts) != 3 or parts[0] != BUCKET_KEY_PREFIX:
            raise ValueError(f"not a bucket's key: {text!r}, expected {BUCKET_KEY_PREFIX}_FIRST_LAST")
        key = cls(parse_ledger_id(parts[1]), parse_ledger_id(parts[2]))
        if key.first_ledger_id > key.last_ledger_id:
            raise ValueError(f"not a bucket's key: {text!r} ends before it begins")
        return key

    def encloses(self, other: BucketKey) -> bool:
        """Tell whether every ledger of another range is in this one."""
        return self.first_ledger_id <= other.first_ledger_id and other.last_ledger_id <= self.last_ledger_id


def parse_ledger_id(text: str) -> int:
    """Read a ledger id in decimals.

    Raises:
        ValueError: It is none.
    """
    if not _LEDGER_ID.fullmatch(text) or int(text) > LEDGER_ID_MAX:
        raise ValueError(f"not a ledger id: {text!r}")
    return int(text)


class Boundary(NamedTuple):
    """The last message of a segment, in the order in which messages are due."""

    due_ms: int
    ledger_id: int
    entry_id: int

    @classmethod
    def of(cls, segment: DelayedIndexes) -> Boundary:
        """Return the boundary of a segment that is not empty."""
        return cls(*(int(column[-1]) for column in segment))

    def count_before(self, due: DelayedIndexes) -> int:
        """Return how many of some messages, which are in order and none due later than this one, come before it."""
        at = int(np.searchsorted(due.deliver_at_ms, self.due_ms))
        positions = zip(due.ledger_ids[at:].tolist(), due.entry_ids[at:].tolist(), strict=True)
        return at + sum(position < (self.ledger_id, self.entry_id) for position in positions)


class Segment(NamedTuple):
    """What memory keeps of a segment.

    Attributes:
        first_due_ms: When its first message is due.
        last_due_ms: When its last one is.
        message_count: Its messages.
        encoded: Its metadata as bytes, a tenth of what the bitmaps take.
    """

    first_due_ms: int
    last_due_ms: int
    message_count: int
    encoded: bytes

    @classmethod
    def of(cls, metadata: SegmentMetadata, encoded: bytes | None = None) -> Segment:
        """Return what is kept of a segment, given its metadata and, if at hand, that as bytes."""
        message_count = sum(map(len, metadata.bitmaps.values()))
        encoded = encode_metadata((metadata,)) if encoded is None else encoded
        return cls(metadata.min_deliver_at_ms, metadata.max_deliver_at_ms, message_count, encoded)

    @property
    def metadata(self) -> SegmentMetadata:
        """Which messages it has. Complexity: O(ledgers)."""
        return decode_metadata(self.encoded, what="segment metadata in memory")[0]


@final
class Bucket:
    """A bucket whose snapshot is stored and of whose segments one is in memory.

    Args:
        key: The message ledgers that it covers.
        bucket_id: The ledger of its snapshot.
        segments: All segments, in order of time; not empty.
        current: The number of the segment in memory, from 1.
        boundary: That segment's last message.
    """

    __slots__ = ("boundary", "bucket_id", "current", "is_live", "is_registered", "key", "message_count", "segments")

    def __init__(
        self, key: BucketKey, bucket_id: int, segments: Sequence[Segment], *, current: int, boundary: Boundary
    ) -> None:
        self.key = key
        self.bucket_id = bucket_id
        self.segments = tuple(segments)
        self.current = current
        self.boundary = boundary
        # As Pulsar counts: all that a recovery or sealing found to come, not less as they are delivered.
        self.message_count = sum(segment.message_count for segment in self.segments[current - 1 :])
        self.is_live = True
        self.is_registered = True

    @property
    def last(self) -> int:
        """The number of the last segment."""
        return len(self.segments)

    @property
    def has_unloaded_segment(self) -> bool:
        """Whether a segment is still to come."""
        return self.current < self.last

    @property
    def memory_bytes(self) -> int:
        """About how much memory its metadata takes; its messages are counted where they are."""
        return sum(_SEGMENT_BYTES + len(segment.encoded) for segment in self.segments)


# A tuple of four, two integers that are its own, and a bytes object.
_SEGMENT_BYTES = 220
