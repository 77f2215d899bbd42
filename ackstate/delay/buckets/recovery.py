"""Recovery of stored buckets: the usable buckets, their messages, and the reasons why the others are dropped.

Only the metadata of each snapshot is read, and one segment of each bucket.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ackstate.delay.buckets.bucket import Boundary, Bucket, BucketKey, BucketSegment, parse_ledger_id
from ackstate.entry_bitmap import union_by_ledger
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.wire.pulsar.delay_snapshot import decode_metadata, split_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyroaring import BitMap

    from ackstate.delay.buckets.snapshots import BucketSnapshots
    from ackstate.wire.pulsar.delay_snapshot import DelayedIndexes, SegmentMetadata


class DropReason(Enum):
    """Why a registered bucket was not recovered. Unless `MALFORMED`, it was unregistered and its snapshot deleted."""

    MALFORMED = "its key or its id is malformed; it was left alone"
    MISSING = "its snapshot is not there"
    EMPTY = "its snapshot is empty"
    DAMAGED = "its snapshot is damaged"
    NEWER = "its snapshot was written by a newer release"
    REPLACED = "a bucket that encloses it has all of its messages: it was merged"
    DUE = "all of its messages are due"


@dataclass(frozen=True, slots=True)
class DroppedBucket:
    """A registered bucket that was not recovered.

    Its messages are not in the index, so the dispatcher offers them again as it reads the log.

    Attributes:
        name: Its key in the registry.
        text: The registered text, the decimal id of its snapshot.
        reason: The reason.
        detail: The details; empty if the reason is sufficient.
    """

    name: str
    text: str
    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BucketRecoveryReport:
    """The result of a recovery.

    Attributes:
        bucket_count: Number of recovered buckets.
        message_count: Number of their messages without the segments skipped, each counted once.
        segments_skipped: Number of their segments that were entirely due, which the dispatcher will read again.
        dropped: The registered buckets that were not recovered.
        orphan_count: Number of unregistered snapshots, all deleted.
        fell_back: Why nothing was recovered and all messages stay in memory; empty if the recovery succeeded.
    """

    bucket_count: int = 0
    message_count: int = 0
    segments_skipped: int = 0
    dropped: tuple[DroppedBucket, ...] = ()
    orphan_count: int = 0
    fell_back: str = ""


class FoundBucket(NamedTuple):
    """A recovered bucket.

    Attributes:
        bucket: The bucket, with its first segment that is not entirely due.
        loaded: That segment.
        metadata: The metadata of each of its segments, including the skipped ones.
    """

    bucket: Bucket
    loaded: DelayedIndexes
    metadata: tuple[SegmentMetadata, ...]

    def bitmaps(self) -> dict[int, BitMap]:
        """Return the messages of its segments, from the loaded one on."""
        return _union(self.metadata[self.bucket.current - 1 :])


class FoundBuckets(NamedTuple):
    """All recovered buckets."""

    buckets: tuple[FoundBucket, ...]
    dropped: tuple[DroppedBucket, ...]
    orphan_count: int

    def report(self, *, message_count: int) -> BucketRecoveryReport:
        """Return the report, given the number of messages in the buckets, each counted once."""
        skipped = sum(each.bucket.current - 1 for each in self.buckets)
        return BucketRecoveryReport(len(self.buckets), message_count, skipped, self.dropped, self.orphan_count)


class RecoveryTooLongError(AckStateError):
    """The recovery was abandoned because it took too long."""


class _Unusable(Exception):  # noqa: N818 - it never leaves this module
    def __init__(self, reason: DropReason, detail: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = str(detail)


def find_buckets(snapshots: BucketSnapshots, *, cutoff_ms: int, is_late: Callable[[], bool]) -> FoundBuckets:
    """Read the stored buckets, and delete the useless ones.

    Raises:
        RecoveryTooLongError: `is_late` returned True; nothing was changed.
        AckStateError: The storage failed; nothing was changed.
    """
    names = snapshots.registered()
    stored = snapshots.stored()
    found: dict[str, FoundBucket] = {}
    dropped: list[DroppedBucket] = []
    for name, text in sorted(names.items()):
        if is_late():
            raise RecoveryTooLongError(
                f"recovery was abandoned with {len(found) + len(dropped)} of {len(names)} buckets read"
            )
        try:
            found[name] = _read(snapshots, *_parse(name, text), stored=stored, cutoff_ms=cutoff_ms)
        except _Unusable as finding:
            dropped.append(DroppedBucket(name, text, finding.reason, finding.detail))
    for name in _replaced(found):
        dropped.append(DroppedBucket(name, names[name], DropReason.REPLACED))
        del found[name]
    in_use = {each.bucket.bucket_id for each in found.values()}
    orphan_count = _tidy(snapshots, in_use, stored, dropped)
    return FoundBuckets(tuple(found.values()), tuple(dropped), orphan_count)


def _parse(name: str, text: str) -> tuple[BucketKey, int]:
    try:
        return BucketKey.parse(name), parse_ledger_id(text)
    except ValueError as error:
        raise _Unusable(DropReason.MALFORMED, error) from None


def _read(
    snapshots: BucketSnapshots, key: BucketKey, bucket_id: int, *, stored: set[int], cutoff_ms: int
) -> FoundBucket:
    if bucket_id not in stored:
        raise _Unusable(DropReason.MISSING)
    try:
        entry = snapshots.read_metadata(bucket_id)
        if entry is None:
            raise _Unusable(DropReason.EMPTY)
        encoded, segment_count = entry
        metadata = decode_metadata(encoded, what=f"delay snapshot {bucket_id}, metadata")
        if segment_count != len(metadata):
            raise _Unusable(DropReason.DAMAGED, f"expected {len(metadata)} segments, found {segment_count}")
        _check_ledgers(metadata, key)
        due_count = _due_count(metadata, cutoff_ms)
        if due_count == len(metadata):
            raise _Unusable(DropReason.DUE if metadata else DropReason.EMPTY)
        loaded = snapshots.read_segment(bucket_id, due_count + 1, metadata[due_count])
    except UnsupportedVersionError as error:
        raise _Unusable(DropReason.NEWER, error) from None
    except CorruptStateError as error:
        raise _Unusable(DropReason.DAMAGED, error) from None
    split = split_metadata(encoded, what=f"delay snapshot {bucket_id}, metadata")
    segments = [BucketSegment.of(*pair) for pair in zip(metadata, split, strict=True)]
    return FoundBucket(
        Bucket(key, bucket_id, segments, current=due_count + 1, boundary=Boundary.of(loaded)), loaded, metadata
    )


def _check_ledgers(metadata: tuple[SegmentMetadata, ...], key: BucketKey) -> None:
    """Refuse a snapshot with ledgers outside the bucket's range: those messages would outlive the bucket."""
    ledger_ids = {ledger_id for segment in metadata for ledger_id in segment.bitmaps}
    if ledger_ids and not key.encloses(BucketKey(min(ledger_ids), max(ledger_ids))):
        found = f"{min(ledger_ids)} to {max(ledger_ids)}"
        raise _Unusable(
            DropReason.DAMAGED, f"expected ledgers {key.first_ledger_id} to {key.last_ledger_id}, found {found}"
        )


def _due_count(metadata: tuple[SegmentMetadata, ...], cutoff_ms: int) -> int:
    """Return the number of segments at the beginning that are entirely due."""
    return next((at for at, each in enumerate(metadata) if each.max_deliver_at_ms > cutoff_ms), len(metadata))


def _replaced(found: Mapping[str, FoundBucket]) -> list[str]:
    """Return the buckets whose messages are all in a merged bucket: a crash prevented their deletion.

    Pulsar drops every bucket that another encloses. But a bucket sealed after a recovery may enclose a recovered
    bucket without having its messages, and then both stay.
    """
    replaced: list[str] = []
    for name, each in found.items():
        for other_name, other in found.items():
            encloses = name != other_name and other.bucket.key.encloses(each.bucket.key)
            if encloses and _has_all(_union(other.metadata), _union(each.metadata)):
                replaced.append(name)
                break
    return replaced


def _has_all(bitmaps: Mapping[int, BitMap], others: Mapping[int, BitMap]) -> bool:
    return all(ledger_id in bitmaps and others[ledger_id].issubset(bitmaps[ledger_id]) for ledger_id in others)


def _union(metadata: tuple[SegmentMetadata, ...]) -> dict[int, BitMap]:
    return union_by_ledger(segment.bitmaps for segment in metadata)


def _tidy(
    snapshots: BucketSnapshots,
    in_use: set[int],
    stored: set[int],
    dropped: list[DroppedBucket],
) -> int:
    """Unregister and delete dropped buckets, delete unregistered snapshots, and return the number of the latter."""
    orphans = stored - in_use
    for each in dropped:
        if each.reason is DropReason.MALFORMED:
            continue
        key, bucket_id = BucketKey.parse(each.name), parse_ledger_id(each.text)
        if bucket_id in in_use:
            with suppress(AckStateError):  # The next recovery finds the key again.
                snapshots.unregister(key)
        else:
            snapshots.drop(bucket_id, key)
            orphans.discard(bucket_id)
    for bucket_id in sorted(orphans):
        snapshots.drop(bucket_id)
    return len(orphans)
