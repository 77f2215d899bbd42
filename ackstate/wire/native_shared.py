"""The native record of version 3: a snapshot that says how it differs from what the delay buckets hold.

Messages that are not yet due are holes, the same ones in every subscription of a topic, and the buckets of the delay
index hold them durably. Such a snapshot names buckets and, for a message ledger, a run: all of the run but what these
buckets hold is the base, and the ledger's block has the entries that are acked and not in the base, or in it and not
acked. So it is exact whatever a bucket holds, and takes no more than what differs. Without the very buckets that it
names it says nothing about acks: that is why it is no `Record` until it is resolved.

`docs/wire-format.md` draws every byte. Where a bucket is, and that it stays there, is the business of whoever stores.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from pyroaring import BitMap

from ackstate.deleted_ranges import Run
from ackstate.entry_bitmap import union_by_ledger
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX
from ackstate.wire import native
from ackstate.wire.native import Record, RecordFields, RecordKind, encode_ledger, encode_parts, read_parts
from ackstate.wire.native_reader import corrupt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.position import Position
    from ackstate.wire.native_reader import Reader

_COUNTS = struct.Struct("<IIIQ")  # batches, references, runs, acked entries
_REFERENCE = struct.Struct("<QII")
_RUN = struct.Struct("<QII")
_FURTHER_BYTES = _COUNTS.size - 4  # what a record of this version has beside that of the last one, before its blocks


class BucketReference(NamedTuple):
    """A part of a delay bucket that is never to change.

    Attributes:
        bucket_id: The store's id of the ledger that is the bucket.
        first_segment: The first of its segments that counts; segments count from 1, as the entries that hold them.
        checksum: CRC-32C of the ledger's entry 0, which says what the segments hold.
    """

    bucket_id: int
    first_segment: int
    checksum: int


class BucketHoles(NamedTuple):
    """What the part of a bucket holds.

    Attributes:
        reference: Which part.
        bitmaps: The messages in it, by message ledger. Not to be changed.
    """

    reference: BucketReference
    bitmaps: Mapping[int, BitMap]


class SharedSnapshot(NamedTuple):
    """A snapshot as far as its own bytes say it.

    Attributes:
        parts: What it says; the bitmaps are acked entries only for a ledger without a run. Not to be changed.
        references: The parts of buckets that its base leaves out, in order of buckets.
        runs: What its base takes as acked but for those, at most one for each ledger, in order.
        acked_count: How many entries are acked once it is resolved.
    """

    parts: RecordFields
    references: tuple[BucketReference, ...]
    runs: tuple[Run, ...]
    acked_count: int

    @property
    def bucket_ids(self) -> frozenset[int]:
        """The buckets without which it cannot be read."""
        return frozenset(reference.bucket_id for reference in self.references)


def is_shared(data: bytes) -> bool:
    """Tell whether bytes begin as those of a record of this version."""
    return data.startswith(native.MAGIC) and data[len(native.MAGIC) : len(native.MAGIC) + 1] == bytes((native.VERSION,))


def share(record: Record, buckets: Sequence[BucketHoles]) -> SharedSnapshot | None:
    """Say a snapshot by what buckets hold; None where that takes no fewer bytes.

    Args:
        record: A snapshot, the first record of its journal. Its bitmaps are kept and must not change.
        buckets: Of different ids, in any order.

    Raises:
        ValueError: The record is no such snapshot.

    Complexity: O(size of the record) and of what the buckets hold of its ledgers.
    """
    if (record.kind, record.sequence, record.chain) != (RecordKind.SNAPSHOT, 0, 0):
        raise ValueError(f"only the first snapshot of a journal refers to buckets, found {record.kind.name}")
    holes = joined(buckets)
    runs, blocks, saved = [], [], -_FURTHER_BYTES
    for ledger_id, acked in record.deleted.bitmaps():
        block, run = acked, Run(ledger_id, acked.min(), acked.max() + 1)
        if _serves(holes, run):
            difference = acked ^ _base(run, holes)
            gain = _block_bytes(ledger_id, acked) - _block_bytes(ledger_id, difference) - _RUN.size
            if gain > 0:
                runs.append(run)
                saved += gain
                block = difference
        if block:
            blocks.append((ledger_id, block))
    used = sorted(bucket.reference for bucket in buckets if any(_serves(bucket.bitmaps, run) for run in runs))
    if saved <= _REFERENCE.size * len(used):
        return None
    parts = RecordFields(*_head(record), blocks, record.properties, list(record.batch.items()))
    return SharedSnapshot(parts, tuple(used), tuple(runs), len(record.deleted))


def resolve(snapshot: SharedSnapshot, buckets: Iterable[BucketHoles]) -> RecordFields:
    """Return what a snapshot says, given the parts of buckets that it refers to; the bitmaps are the caller's.

    Raises:
        CorruptStateError: It does not come to as many acked entries as there were.
        ValueError: These are not the parts that it refers to.

    Complexity: O(size of the record and of the buckets).
    """
    given = list(buckets)
    if sorted(bucket.reference for bucket in given) != list(snapshot.references):
        raise ValueError(f"the snapshot refers to {snapshot.references}, not to {[each.reference for each in given]}")
    holes = joined(given)
    bitmaps = {ledger_id: bitmap.copy() for ledger_id, bitmap in snapshot.parts.bitmaps}
    for run in snapshot.runs:
        base = _base(run, holes)
        base ^= bitmaps.get(run.ledger_id, _NONE)
        bitmaps[run.ledger_id] = base
    acked_count = sum(map(len, bitmaps.values()))
    if acked_count != snapshot.acked_count:
        corrupt(_ACKED_COUNT_AT, f"{snapshot.acked_count} acked entries", f"{acked_count} by what the buckets hold")
    return snapshot.parts._replace(bitmaps=[item for item in sorted(bitmaps.items()) if item[1]])


def encode_shared(snapshot: SharedSnapshot) -> bytes:
    """Write a snapshot.

    Raises:
        ValueError: As `ackstate.wire.native.encode`.
    """
    blocks = [_REFERENCE.pack(*reference) for reference in snapshot.references]
    blocks += [_RUN.pack(ledger_id, first, end - 1) for ledger_id, first, end in snapshot.runs]
    counts = _COUNTS.pack(0, len(snapshot.references), len(snapshot.runs), snapshot.acked_count)
    return encode_parts(snapshot.parts, version=native.VERSION, counts=counts[-_FURTHER_BYTES:], tail=blocks)


def decode_shared(data: bytes) -> SharedSnapshot:
    """Read back what `encode_shared` wrote.

    Args:
        data: One whole record; nothing may follow.

    Raises:
        UnsupportedVersionError: The record was written by a newer release.
        CorruptStateError: Anything else is wrong. No other exception can escape.

    Complexity: O(len(data)).
    """
    parts, (reference_count, run_count, acked_count), reader = read_parts(data, {native.VERSION: _COUNTS})
    if (parts.kind, parts.sequence, parts.chain) != (RecordKind.SNAPSHOT, 0, 0):
        corrupt(5, "a snapshot, sequence 0, chain 0", f"({int(parts.kind)}, {parts.sequence}, {parts.chain})")
    references = tuple(_decode_references(reader, reference_count))
    runs = tuple(_decode_runs(reader, run_count))
    reader.finish("the checksum")
    return SharedSnapshot(parts, references, runs, acked_count)


_NONE = BitMap()
_ACKED_COUNT_AT = 68


def _head(record: Record) -> tuple[RecordKind, int, int, int, Position]:
    return record.kind, record.epoch, record.sequence, record.chain, record.mark_delete


def joined(buckets: Iterable[BucketHoles]) -> dict[int, BitMap]:
    """Return what any of the buckets holds, by message ledger: not to be changed."""
    return union_by_ledger(bucket.bitmaps for bucket in buckets)


def _serves(holes: Mapping[int, BitMap], run: Run) -> bool:
    """Tell whether some of the holes are in a run."""
    return run.ledger_id in holes and holes[run.ledger_id].range_cardinality(run.first, run.end) > 0


def _base(run: Run, holes: Mapping[int, BitMap]) -> BitMap:
    base = BitMap()
    base.add_range(run.first, run.end)
    base -= holes.get(run.ledger_id, _NONE)
    return base


def _block_bytes(ledger_id: int, bitmap: BitMap) -> int:
    return len(encode_ledger(ledger_id, bitmap)) if bitmap else 0


def _decode_references(reader: Reader, count: int) -> Iterator[BucketReference]:
    previous = -1
    for _ in range(count):
        at = reader.offset
        reference = BucketReference(*_REFERENCE.unpack(reader.take(_REFERENCE.size, "bucket reference")))
        if not previous < reference.bucket_id <= LEDGER_ID_MAX or not reference.first_segment:
            corrupt(at, f"a bucket id above {previous}, a segment from 1 on", reference[:2])
        previous = reference.bucket_id
        yield reference


def _decode_runs(reader: Reader, count: int) -> Iterator[Run]:
    previous = -1
    for _ in range(count):
        at = reader.offset
        ledger_id, first, last = _RUN.unpack(reader.take(_RUN.size, "run"))
        if not previous < ledger_id <= LEDGER_ID_MAX or not first <= last <= ENTRY_ID_MAX:
            corrupt(at, f"a ledger id above {previous}, then entries that do not fall", (ledger_id, first, last))
        previous = ledger_id
        yield Run(ledger_id, first, last + 1)
