"""The native record of version 3: a snapshot stored as its difference from the messages in delay buckets.

Messages that are not yet due are holes, the same ones in every subscription of a topic, and the buckets of the delay
index store them durably. Such a snapshot names buckets and, for a message ledger, a run. The base is the run without
the messages in these buckets, and the ledger's block has the entries that are acked but not in the base, or in the base
but not acked. So it is exact for any contents of a bucket, and its size is that of the difference. Without the named
buckets it contains no acks: that is why it is not a `Record` until it is resolved.

`docs/wire-format.md` draws every byte. The caller locates the buckets, and keeps them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from pyroaring import BitMap

from ackstate.entry_bitmap import union_by_ledger
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX
from ackstate.range_store import Run
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
_FURTHER_BYTES = _COUNTS.size - 4  # additional bytes of this version before the blocks


class BucketReference(NamedTuple):
    """A part of a delay bucket that never changes.

    Attributes:
        bucket_id: The store's id of the bucket's ledger.
        first_segment: The first relevant segment; segments count from 1, as the entries that store them.
        checksum: CRC-32C of the ledger's entry 0, which describes the segments.
    """

    bucket_id: int
    first_segment: int
    checksum: int


class BucketHoles(NamedTuple):
    """The contents of a part of a bucket.

    Attributes:
        reference: The part.
        bitmaps: The messages in it, by message ledger. Must not be changed.
    """

    reference: BucketReference
    bitmaps: Mapping[int, BitMap]


class SharedSnapshot(NamedTuple):
    """A snapshot, decoded from its own bytes alone.

    Attributes:
        parts: Its fields; the bitmaps are acked entries only for a ledger without a run. Must not be changed.
        references: The parts of buckets excluded from its base, in order of buckets.
        runs: The runs of its base, which are acked except for these parts, at most one per ledger, in order.
        acked_count: Number of acked entries after it is resolved.
    """

    parts: RecordFields
    references: tuple[BucketReference, ...]
    runs: tuple[Run, ...]
    acked_count: int

    @property
    def bucket_ids(self) -> frozenset[int]:
        """The buckets required to resolve it."""
        return frozenset(reference.bucket_id for reference in self.references)


def is_shared(data: bytes) -> bool:
    """Return whether bytes start like a record of this version."""
    return data.startswith(native.MAGIC) and data[len(native.MAGIC) : len(native.MAGIC) + 1] == bytes((native.VERSION,))


def share(record: Record, buckets: Sequence[BucketHoles]) -> SharedSnapshot | None:
    """Express a snapshot as a difference from buckets; None if that takes no fewer bytes.

    Args:
        record: A snapshot, the first record of its journal. Its bitmaps are shared and must not change.
        buckets: With distinct ids, in any order.

    Raises:
        ValueError: The record is not such a snapshot.

    Complexity: O(size of the record, and of its ledgers in the buckets).
    """
    if (record.kind, record.sequence, record.chain) != (RecordKind.SNAPSHOT, 0, 0):
        raise ValueError(
            f"a record that refers to buckets must be the first snapshot of a journal, got {record.kind.name}"
        )
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
    """Return the fields of a snapshot, given the parts of buckets that it refers to; the caller owns the bitmaps.

    Raises:
        CorruptStateError: The number of acked entries does not match.
        ValueError: The buckets are not the parts that it refers to.

    Complexity: O(size of the record and of the buckets).
    """
    given = list(buckets)
    if sorted(bucket.reference for bucket in given) != list(snapshot.references):
        raise ValueError(f"the buckets must be {snapshot.references}, got {[each.reference for each in given]}")
    holes = joined(given)
    bitmaps = {ledger_id: bitmap.copy() for ledger_id, bitmap in snapshot.parts.bitmaps}
    for run in snapshot.runs:
        base = _base(run, holes)
        base ^= bitmaps.get(run.ledger_id, _NONE)
        bitmaps[run.ledger_id] = base
    acked_count = sum(map(len, bitmaps.values()))
    if acked_count != snapshot.acked_count:
        corrupt(_ACKED_COUNT_AT, f"{snapshot.acked_count} acked entries", f"{acked_count} with these buckets")
    return snapshot.parts._replace(bitmaps=[item for item in sorted(bitmaps.items()) if item[1]])


def encode_shared(snapshot: SharedSnapshot) -> bytes:
    """Encode a snapshot.

    Raises:
        ValueError: As `ackstate.wire.native.encode`.
    """
    blocks = [_REFERENCE.pack(*reference) for reference in snapshot.references]
    blocks += [_RUN.pack(ledger_id, first, end - 1) for ledger_id, first, end in snapshot.runs]
    counts = _COUNTS.pack(0, len(snapshot.references), len(snapshot.runs), snapshot.acked_count)
    return encode_parts(snapshot.parts, version=native.VERSION, counts=counts[-_FURTHER_BYTES:], tail=blocks)


def decode_shared(data: bytes) -> SharedSnapshot:
    """Decode a snapshot that `encode_shared` wrote.

    Args:
        data: One whole record; nothing may follow.

    Raises:
        UnsupportedVersionError: The record has another version.
        CorruptStateError: Anything else is wrong. No other exception can escape.

    Complexity: O(len(data)).
    """
    parts, (reference_count, run_count, acked_count), reader = read_parts(data, native.VERSION, _COUNTS)
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
    """Return the union of the buckets' contents, by message ledger; must not be changed."""
    return union_by_ledger(bucket.bitmaps for bucket in buckets)


def _serves(holes: Mapping[int, BitMap], run: Run) -> bool:
    """Return whether a run contains any of the holes."""
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
