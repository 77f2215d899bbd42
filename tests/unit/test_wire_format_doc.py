"""`docs/wire-format.md` is true: written bytes, cut at the offsets it gives, are as described."""

import struct
from itertools import pairwise
from pathlib import Path

import google_crc32c
import pytest
from pyroaring import BitMap

from ackstate import DeletedRanges
from ackstate.analysis.trace.chunks import TRACE_SCHEMA
from ackstate.analysis.trace.events import CHUNK_EVENTS, EVENT_COLUMNS, SCALAR_COLUMNS, Event, EventKind
from ackstate.analysis.trace.recording import Recorder

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TEXT = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
TYPES = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "i64": "<q"}


def table_after(words):
    """The rows of the first table after some words, as lists of cells without the header."""
    begin = TEXT.index("\n|", TEXT.index(words)) + 1
    lines = TEXT[begin:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def field_at(data, row, base=0):
    """The bytes at a row of a field table."""
    offset, size, kind = int(row[0]) + base, int(row[1]), row[2]
    found = data[offset : offset + size]
    return struct.unpack(TYPES[kind], found)[0] if kind in TYPES else found


def fields(data, words, base=0):
    """The fields of fixed size that a table names, as the bytes have them."""
    return {row[3]: field_at(data, row, base) for row in table_after(words) if row[1].isdecimal()}


def ledger_blocks(data, offset, count):
    for _ in range(count):
        found = fields(data, "A **ledger block**", offset)
        end = offset + 12 + found["size"]
        yield found["ledger id"], list(BitMap.deserialize(data[offset + 12 : end])), end
        offset = end


def property_blocks(data, offset, count):
    for _ in range(count):
        found = fields(data, "A **property block**", offset)
        end = offset + 10 + found["name size"]
        yield data[offset + 10 : end].decode(), found["number"], end
        offset = end


def batch_blocks(data, offset, count):
    for _ in range(count):
        found = fields(data, "A **batch block**", offset)
        end = offset + 14 + 8 * found["word count"]
        yield (
            found["ledger id"],
            found["entry id"],
            struct.unpack(f"<{found['word count']}Q", data[offset + 14 : end]),
            end,
        )
        offset = end


def test_the_golden_record_reads_as_drawn():
    data = (GOLDEN / "native-record-v2.bin").read_bytes()
    found = fields(data, "## Native record, version 2")
    batch_count = found.pop("batch count")
    assert found == {
        "magic": b"ACKR",
        "version": 2,
        "kind": 2,
        "counts": 0,
        "length": len(data),
        "epoch": 2,
        "sequence": 7,
        "chain": 0xDEADBEEF,
        "mark-delete ledger id": 3,
        "mark-delete entry id": 41,
        "ledger count": 2,
        "property count": 2,
    }
    ledgers = list(ledger_blocks(data, 60, 2))
    assert [block[:2] for block in ledgers] == [(3, [43, 44]), (5, [0, 70_000])]
    properties = list(property_blocks(data, ledgers[-1][2], 2))
    assert [block[:2] for block in properties] == [("dedup", -1), ("sequence", 12)]
    batches = list(batch_blocks(data, properties[-1][2], batch_count))
    assert [block[:3] for block in batches] == [(3, 50, (0b1010, 2**64 - 1)), (5, 1, (4,))]
    assert batches[-1][-1] == len(data) - 4
    assert struct.unpack("<I", data[-4:])[0] == google_crc32c.value(data[:-4])


def test_the_golden_ranges_read_as_drawn():
    data = (GOLDEN / "ranges-v1.bin").read_bytes()
    assert fields(data, "## Ranges, version 1") == {"magic": b"ACKD", "version": 1, "ledger count": 2}
    ledgers = list(ledger_blocks(data, 12, 2))
    assert [block[:2] for block in ledgers] == [(3, [43, 44]), (5, [0, 70_000])]
    assert data[ledgers[-1][2] :] == struct.pack("<I", google_crc32c.value(data[:-4]))
    assert DeletedRanges.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        (
            "delay-registry-v1", "## Delay registry, version 1",
            {"magic": b"ACKD", "version": 1, "reserved": bytes(3), "owner": 7, "names": 2},
        ),
        (
            "cursor-pointer-v2", "## Cursor pointer, version 2",
            {
                "magic": b"ACKP", "version": 2, "reserved": bytes(3), "cursor ledger id": 17, "epoch": 2, "term": 9,
                "mark-delete ledger id": 3, "mark-delete entry id": 41, "cursor property count": 1, "snapshot size": 0,
            },
        ),
        (
            "log-record-v2", "## Message log record, version 2",
            {
                "magic": b"ACKL", "version": 2, "reserved": bytes(3), "term": 9, "open ledger id": 17,
                "first ledger id": 12, "sizes": 2,
            },
        ),
    ],
)  # fmt: skip
def test_the_head_of_a_golden_file_reads_as_drawn_and_a_checksum_ends_it(name, words, expected):
    data = (GOLDEN / f"{name}.bin").read_bytes()
    assert fields(data, words) == expected
    assert data[-4:] == struct.pack("<I", google_crc32c.value(data[:-4]))


def test_what_follows_the_head_of_a_golden_file_reads_as_drawn():
    data = (GOLDEN / "delay-registry-v1.bin").read_bytes()
    assert fields(data, "A **cursor property block**", 20) == {"name size": 35, "text size": 2}
    assert data[26:63] == b"#pulsar.internal.delayed.bucket_3_717"
    data = (GOLDEN / "cursor-pointer-v2.bin").read_bytes()
    assert fields(data, "A **cursor property block**", 56) == {"name size": 5, "text size": 7}
    assert data[62:-4] == b"ownerbilling"
    data = (GOLDEN / "cursor-pointer-v2-state.bin").read_bytes()
    found = fields(data, "## Cursor pointer, version 2")
    assert found["cursor ledger id"] == 2**64 - 1
    record = data[56 : 56 + found["snapshot size"]]
    assert fields(record, "## Native record, version 2")["kind"] == 1
    assert len(data) == 56 + len(record) + 4
    data = (GOLDEN / "log-record-v2.bin").read_bytes()
    assert struct.unpack("<4Q", data[36:-4]) == (12, 5_000, 15, 70_000)
    with_times = (GOLDEN / "log-record-v2-times.bin").read_bytes()
    assert with_times[36 : len(data) - 4] == data[36:-4]
    assert struct.unpack("<4Q", with_times[len(data) - 4 : -4]) == (12, 1_790_000_000_000, 15, 1_790_000_000_500)


def test_a_recording_reads_as_drawn(tmp_path):
    events = [Event(1_000, EventKind.ACK, 3, 7, 9, 2), Event(1_001, EventKind.CRASH)]
    with Recorder(tmp_path) as recorder:
        recorder.record("orders", "é", events)
    data = (tmp_path / "000001.events").read_bytes()
    assert fields(data, "Header, 12 bytes") == {"magic": b"ACKTRACE", "version": 2}
    frame = data[12:]
    assert fields(frame, "\nFrame:") == {
        "length": len(frame) - 12,
        "length checksum": google_crc32c.value(frame[:4]),
        "checksum": google_crc32c.value(frame[12:]),
        "topic size": 6,
        "subscription size": 2,
    }
    assert frame[16:24] == "ordersé".encode()
    assert len(frame) == 24 + 2 * 41
    for number, event in enumerate(events):
        assert tuple(fields(frame, "Event, 41 bytes", 24 + 41 * number).values()) == event


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("## Native record, version 2", 60),
        ("## Cursor pointer, version 2", 56),
        ("Header, 12 bytes", 12),
        ("\nFrame:", 16),
        ("Event, 41 bytes", 41),
    ],
)
def test_the_fields_of_a_table_leave_no_gap(words, end):
    spans = [(int(row[0]), int(row[1])) for row in table_after(words) if row[1].isdecimal()]
    assert all(offset + size == following for (offset, size), (following, _) in pairwise(spans))
    assert spans[0][0] == 0
    assert sum(spans[-1]) == end


def test_the_columns_and_kinds_of_a_trace_are_all_there():
    names = [(row[0].strip("`"), row[1]) for row in table_after("## Parquet trace, version 3")]
    assert names == [
        *SCALAR_COLUMNS.items(), ("event_count", "int32"),
        *((name, f"packed {kind}") for name, kind in EVENT_COLUMNS.items()), ("ledgers", "list of structs"),
    ]  # fmt: skip
    assert [name for name, _ in names] == TRACE_SCHEMA.names
    kinds = {int(row[0]): row[1] for row in table_after("The kinds of events")}
    assert kinds == {kind.value: kind.name for kind in EventKind}
    assert f"{CHUNK_EVENTS:,} consecutive events" in TEXT
