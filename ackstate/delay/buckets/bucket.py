"""A sealed bucket: the delayed messages of a range of message ledgers, stored by time in segments.

The snapshot of a bucket is one ledger: entry 0 is the metadata of the segments, entries 1 to N are the segments. The
registry holds the ledger id of each bucket's snapshot, under Pulsar's key for the bucket.

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
"""The prefix of the registry's keys of buckets."""

_LEDGER_ID = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


class BucketKey(NamedTuple):
    """The message ledgers that a bucket covers, both ends included, and its key in the registry.

    >>> str(BucketKey(3, 7)), BucketKey.parse("#pulsar.internal.delayed.bucket_3_7")
    ('#pulsar.internal.delayed.bucket_3_7', BucketKey(first_ledger_id=3, last_ledger_id=7))
    """

    first_ledger_id: int
    last_ledger_id: int

    def __str__(self) -> str:
        return f"{BUCKET_KEY_PREFIX}_{self.first_ledger_id}_{self.last_ledger_id}"

    @classmethod
    def parse(cls, text: str) -> BucketKey:
        """Parse the text that `str` returns.

        Raises:
            ValueError: The text is not the key of a bucket.
        """
        parts = text.split("_")
        if len(parts) != 3 or parts[0] != BUCKET_KEY_PREFIX:
            raise ValueError(f"bucket key must be {BUCKET_KEY_PREFIX}_FIRST_LAST, got {text!r}")
        key = cls(parse_ledger_id(parts[1]), parse_ledger_id(parts[2]))
        if key.first_ledger_id > key.last_ledger_id:
            raise ValueError(f"bucket key must end at or after its first ledger, got {text!r}")
        return key

    def encloses(self, other: BucketKey) -> bool:
        """Return whether every ledger of another range is in this one."""
        return self.first_ledger_id <= other.first_ledger_id and other.last_ledger_id <= self.last_ledger_id


def parse_ledger_id(text: str) -> int:
    """Parse a decimal ledger id.

    Raises:
        ValueError: The text is not a ledger id.
    """
    if not _LEDGER_ID.fullmatch(text) or int(text) > LEDGER_ID_MAX:
        raise ValueError(f"ledger id must be a decimal number, got {text!r}")
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
        """Count the messages before this one, given sorted messages of which none is due later than this one."""
        at = int(np.searchsorted(due.deliver_at_ms, self.due_ms))
        positions = zip(due.ledger_ids[at:].tolist(), due.entry_ids[at:].tolist(), strict=True)
        return at + sum(position < (self.ledger_id, self.entry_id) for position in positions)


class BucketSegment(NamedTuple):
    """The part of a segment that stays in memory.

    Attributes:
        first_due_ms: The due time of its first message.
        last_due_ms: The due time of its last message.
        message_count: Number of its messages.
        encoded: Its metadata as bytes, a tenth of the size of the bitmaps.
    """

    first_due_ms: int
    last_due_ms: int
    message_count: int
    encoded: bytes

    @classmethod
    def of(cls, metadata: SegmentMetadata, encoded: bytes | None = None) -> BucketSegment:
        """Return the in-memory part of a segment, given its metadata and, optionally, the encoded metadata."""
        message_count = sum(map(len, metadata.bitmaps.values()))
        encoded = encode_metadata((metadata,)) if encoded is None else encoded
        return cls(metadata.min_deliver_at_ms, metadata.max_deliver_at_ms, message_count, encoded)

    @property
    def metadata(self) -> SegmentMetadata:
        """The messages of the segment. Complexity: O(ledgers)."""
        return decode_metadata(self.encoded, what="segment metadata in memory")[0]


@final
class Bucket:
    """A bucket with a stored snapshot and one segment in memory.

    Args:
        key: The message ledgers that it covers.
        bucket_id: The ledger of its snapshot.
        segments: All segments, ordered by time; not empty.
        current: The number of the segment in memory, from 1.
        boundary: The last message of that segment.
    """

    __slots__ = ("boundary", "bucket_id", "current", "is_live", "is_registered", "key", "message_count", "segments")

    def __init__(
        self, key: BucketKey, bucket_id: int, segments: Sequence[BucketSegment], *, current: int, boundary: Boundary
    ) -> None:
        self.key = key
        self.bucket_id = bucket_id
        self.segments = tuple(segments)
        self.current = current
        self.boundary = boundary
        # As in Pulsar: the messages to come when the bucket was sealed or recovered; it does not fall with deliveries.
        self.message_count = sum(segment.message_count for segment in self.segments[current - 1 :])
        self.is_live = True
        self.is_registered = True

    @property
    def last(self) -> int:
        """The number of the last segment."""
        return len(self.segments)

    @property
    def has_unloaded_segment(self) -> bool:
        """Whether a segment is still to be loaded."""
        return self.current < self.last

    @property
    def memory_bytes(self) -> int:
        """About how much memory its metadata takes; the messages in memory are counted elsewhere."""
        return sum(_SEGMENT_BYTES + len(segment.encoded) for segment in self.segments)


# A tuple of four, with two integers and a bytes object that nothing else references.
_SEGMENT_BYTES = 220
