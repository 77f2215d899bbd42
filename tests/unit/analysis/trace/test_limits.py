"""Small files that unpack to gigabytes are refused, by a limit that the message names with its option."""

from __future__ import annotations

import gzip
import json

import pytest

from ackstate.analysis import cli
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.parquet import check_trace
from ackstate.analysis.trace.row_limit import OPTION
from trace_files import write_rows

EVENTS = 70_000


@pytest.fixture
def large_row(tmp_path):
    """A trace of a few KB with one row of many events."""
    file = tmp_path / "trace.parquet"
    numbers = {"ts_ms": 5, "kind": 2, "ledger_id": 3, "first_entry": 0, "last_entry": 0, "number": -1}
    row = {"topic": "t", "subscription": "s", "chunk": 0, "first_seq": 0, "first_ts_ms": 5, "last_ts_ms": 5}
    row |= {name: [value] * EVENTS for name, value in numbers.items()}
    write_rows([row], file)
    assert file.stat().st_size < 10_000
    return file


def test_a_row_with_too_many_events_is_refused_from_the_footer(large_row, monkeypatch):
    for read in (check_trace, check_events):
        with pytest.raises(
            TraceError, match=f"(row group 0 has {EVENTS} values|row 1 has {EVENTS} events).* 65536.*, or set {OPTION}"
        ):
            read(large_row)
    monkeypatch.setenv(OPTION, str(EVENTS))
    assert check_events(large_row).events == EVENTS


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "9" * 30])
def test_a_limit_that_is_none_is_refused(large_row, monkeypatch, text):
    monkeypatch.setenv(OPTION, text)
    with pytest.raises(TraceError, match=f"{OPTION} must be a number"):
        check_trace(large_row)


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
