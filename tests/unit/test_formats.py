"""The golden files of stores, recordings and traces are read, and every format refuses other versions by name."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import google_crc32c
import pyarrow.parquet as pq
import pytest

from ackstate import DeletedRanges, SqliteStore, UnsupportedVersionError
from ackstate.analysis.crash.campaign import Totals, read_totals, write_totals
from ackstate.analysis.pulsar.ack_state_file import decode_ack_states
from ackstate.analysis.trace.events import VERSION_KEY, Event, EventKind
from ackstate.analysis.trace.parquet import check_trace
from ackstate.analysis.trace.recording import Frame, Recorder, read_recording
from ackstate.limits.policies import decode_policies
from ackstate.topic.log import decode_log_record
from ackstate.wire.native import decode, decode_pointer
from trace_files import read_back

GOLDEN = Path(__file__).parents[1] / "golden"
TOPIC, T0 = "persistent://public/default/orders", 1_700_000_000_000
EVENTS = [
    Event(T0, EventKind.PUBLISH, 3, 0, 9),
    Event(T0 + 5, EventKind.DELIVER, 3, 0, 9, 1),
    Event(T0 + 10, EventKind.ACK, 3, 2, 4, 1),
    Event(T0 + 20, EventKind.MARK_DELETE, 3, 0, 0, 1),
    Event(T0 + 1_000, EventKind.PERSIST_BEGUN, number=1),
    Event(T0 + 1_000, EventKind.HELD_BACK, 3, 4, 4),
    Event(T0 + 1_010, EventKind.PERSIST_ENDED, number=1),
    Event(T0 + 3_000, EventKind.CRASH),
    Event(T0 + 3_500, EventKind.RECOVER),
    Event(T0 + 3_500, EventKind.REDELIVER, 3, 4, 4),
]


def test_the_golden_store_in_sqlite_is_read_and_continued(tmp_path):
    shutil.copy(GOLDEN / "sqlite-store-v3.sqlite3", tmp_path / "ackstate.sqlite3")
    for entries in ([], [b"more"]):
        with closing(SqliteStore(tmp_path)) as store:
            assert store.ledgers.owned_by("billing")[:1] == [1]
            assert store.ledgers.owned_by("shipping") == []
            assert store.ledgers.read(1, 0, 3) == [b"one", b"", b"three"]
            assert store.metadata.get("/orders") == (b"pointer", 1)
            assert store.metadata.get("/gone") is None
            if entries:
                assert store.ledgers.read(3, 0, 1) == entries
            else:
                assert store.ledgers.append(store.ledgers.create("billing"), [b"more"]) == 0


def test_the_golden_recording_is_what_is_written_and_read(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.record(TOPIC, "billing", EVENTS)
    golden = (GOLDEN / "recording-v2.events").read_bytes()
    assert (tmp_path / "000001.events").read_bytes() == golden
    assert list(read_recording(tmp_path)) == [Frame(TOPIC, "billing", EVENTS)]


def test_the_golden_trace_is_read():
    assert check_trace(GOLDEN / "trace-v3.parquet")[:3] == (T0, T0 + 3_500, 1)
    assert read_back(GOLDEN / "trace-v3.parquet") == {(TOPIC, "billing"): EVENTS}


def with_byte(name, at):
    """Return a function that puts a version into a byte of a golden file, with a checksum that fits."""

    def changed(version, _):
        data = bytearray((GOLDEN / name).read_bytes())
        data[at] = version
        return bytes(data[:-4]) + google_crc32c.value(bytes(data[:-4])).to_bytes(4, "little")

    return changed


def sqlite_store(version, directory):
    data = bytearray((GOLDEN / "sqlite-store-v3.sqlite3").read_bytes())
    data[60:64] = version.to_bytes(4, "big")
    (directory / "ackstate.sqlite3").write_bytes(data)
    return directory


def recording(version, directory):
    (directory / "000001.events").write_bytes(b"ACKTRACE" + version.to_bytes(4, "little"))
    return directory


def trace(version, directory):
    table = pq.read_table(GOLDEN / "trace-v3.parquet")
    metadata = {**table.schema.metadata, VERSION_KEY: str(version).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), directory / "part-00000.parquet")
    return directory


def totals(version, directory):
    write_totals(directory / "totals.json", {"L0": Totals(1)})
    plain = json.loads((directory / "totals.json").read_text()) | {"version": version}
    (directory / "totals.json").write_text(json.dumps(plain))
    return directory / "totals.json"


FORMATS = {
    "ranges": (with_byte("ranges-v1.bin", 4), DeletedRanges.from_bytes, (2, 255), "version 1"),
    "native record": (with_byte("native-record-v2.bin", 4), decode, (1, 3, 255), "version 2"),
    "cursor pointer": (with_byte("cursor-pointer-v2.bin", 4), decode_pointer, (1, 3, 255), "version 2"),
    "message log record": (with_byte("log-record-v2-times.bin", 4), decode_log_record, (1, 3, 255), "version 2"),
    "policies": (lambda version, _: b'{"version":%d}' % version, decode_policies, (2, 99), "up to 1"),
    "export": (lambda version, _: b'{"ackstate_export":%d}\n{}\n' % version, decode_ack_states, (2, 99), "up to 1"),
    "ackstate.sqlite3": (sqlite_store, SqliteStore, (1, 2, 4, 2**31), "version 3"),
    "000001.events": (recording, lambda path: list(read_recording(path)), (1, 3, 2**31), "version 2"),
    "part-00000.parquet": (trace, check_trace, (1, 2, 4, 99), "version 3"),
    "totals.json": (totals, read_totals, (1, 3), "reads 2"),
}


@pytest.mark.parametrize("where", FORMATS)
def test_another_version_is_refused_with_the_version_the_supported_one_and_the_place(where, tmp_path):
    make, read, versions, supported = FORMATS[where]
    for version in versions:
        with pytest.raises(UnsupportedVersionError, match=rf"{where}.*version {version}[;,].*{supported}"):
            read(make(version, tmp_path))
