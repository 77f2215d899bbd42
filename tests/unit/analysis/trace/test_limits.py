"""Small files that unpack to gigabytes are refused."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis import cli
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import check_trace, write_trace
from ackstate.analysis.trace.recorder import Frame


@pytest.mark.parametrize("count", [0, -1, 65_537, 2**31 - 1])
def test_a_row_with_another_number_of_events_than_it_may_have_is_refused(tmp_path, count):
    """Columns of equal numbers take a few bytes, however many they say they are."""
    write_trace([Frame("t", "s", [Event(5, EventKind.ACK, 3, 0, 0)])], tmp_path / "trace")
    (file,) = (tmp_path / "trace").iterdir()
    table = pq.read_table(file)
    at = table.column_names.index("event_count")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array([count], table.schema.field(at).type)), file)
    for read in (check_trace, check_events):
        with pytest.raises(TraceError, match=f"row 1 has {count} events; a row must have 1 to 65536"):
            read(file)


@pytest.mark.parametrize("run", [
    {"topic": "t", "subscription": "s", "ts_ms": 5, "kind": "ack", "ledger_id": 3, "first_entry": 0},
    {"topic": "t", "subscription": "s", "entries": [[4, 0, 2]], "broker_acks_ms": [[0, 5, [0]]]},
])  # fmt: skip
def test_text_is_limited_by_what_it_decompresses_to(tmp_path, capsys, run):
    source = tmp_path / "text.gz"
    source.write_bytes(gzip.compress(json.dumps(run).encode() + b"\n" + b" \n" * 100_000))
    with pytest.raises(TraceError, match="more than 100000 bytes of text; --text-bytes-max allows more"):
        convert([source], tmp_path / "trace", text_bytes_max=100_000)
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", "convert", "--text-bytes-max=100000", str(source), str(tmp_path / "trace")])
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)
    assert not (tmp_path / "trace").exists()
    convert([source], tmp_path / "trace")
