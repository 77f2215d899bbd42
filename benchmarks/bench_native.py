"""The native record: time to encode and decode a snapshot of a million holes, and its length."""

from __future__ import annotations

import zlib

from ackstate import DeletedRanges, Position
from ackstate.wire import native
from benchmarks.acked_entries import EntryIds, alternating, clustered, ninety_nine_percent, random_half
from benchmarks.measurement import Against, BenchmarkReport, timed

ABOUT = (
    "`ackstate.wire.native`, a SNAPSHOT of one ledger with about 1 million holes. An entry of span is every entry from "
    "0 to the last acked one. The compressed size, by zlib at its default level, is for comparison: the format does "
    "not compress."
)
LEDGER = 7
ENCODE_LIMIT = Against("limit", 3.0)
SPAN_LIMIT = Against("limit", 0.13)
MILLION = 1_000_000


def snapshot(entry_ids: EntryIds) -> native.Record:
    """Return a record that holds these entries."""
    deleted = DeletedRanges()
    deleted.add_entries(LEDGER, entry_ids)
    return native.Record(native.RecordKind.SNAPSHOT, 1, 0, 0, Position(LEDGER, -1), deleted)


def measure(report: BenchmarkReport, shape: str, entry_ids: EntryIds) -> None:
    """Measure one shape; only the alternating one has a limit for its length."""
    record = snapshot(entry_ids)
    encoded = native.encode(record)
    assert native.decode(encoded) == record
    what = f"{shape}, {record.deleted.range_count:,} ranges"
    encoding = timed(native.encode, lambda: record, runs=15, each=1e6)
    report.time(f"{what}: encode", "ms", encoding, ENCODE_LIMIT)
    decoding = timed(native.decode, lambda: encoded, runs=15, each=1e6)
    report.time(f"{what}: decode", "ms", decoding, Against("encode", encoding.median))
    span = int(entry_ids[-1]) + 1
    limit = SPAN_LIMIT if shape == "alternating" else None
    report.count(f"{what}: length", "bytes an entry of span", len(encoded) / span, limit)
    report.count(f"{what}: length", "bytes", len(encoded), Against("as MessageRange list", record.deleted.record_bytes))
    report.count(f"{what}: zlib", "bytes", len(zlib.compress(encoded)), Against("raw", len(encoded)))


if __name__ == "__main__":
    report = BenchmarkReport("native", ABOUT)
    measure(report, "alternating", alternating(MILLION))
    measure(report, "random half", random_half(4 * MILLION))
    measure(report, "clustered", clustered(MILLION))
    measure(report, "99 % acked", ninety_nine_percent(101 * MILLION))
    report.publish()
