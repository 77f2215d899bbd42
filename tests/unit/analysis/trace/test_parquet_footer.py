"""The sizes of columns are those that Arrow reads; damage is an error and never the end of the process."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.manifest import footer
from ackstate.analysis.trace.parquet_footer import column_sizes

GOLDEN = Path(__file__).parents[3] / "golden" / "polled-trace-v4.parquet"


def sizes_of_arrow(file):
    found = pq.read_metadata(file)
    for number in range(found.num_row_groups):
        group = found.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema.split(".")[0]
            yield number, group.num_rows, name, column.num_values, column.total_uncompressed_size


def test_the_sizes_are_those_of_arrow(tmp_path):
    several = tmp_path / "several.parquet"
    rows = pa.table({"a": list(range(40)), "b": [[n, n] for n in range(40)], "c": [{"x": str(n)} for n in range(40)]})
    pq.write_table(rows, several, row_group_size=3, store_schema=True)
    for file in (GOLDEN, several):
        found = column_sizes(footer(file)[1])
        assert list(map(tuple, found)) == list(sizes_of_arrow(file))
        assert found


def test_damage_is_a_value_error():
    sound = footer(GOLDEN)[1]
    choose = random.Random(7)
    refused = 0
    for cut in range(len(sound)):
        with pytest.raises(ValueError, match=r"footer|Parquet"):
            column_sizes(sound[:cut])
    for _ in range(2_000):
        data = bytearray(sound)
        for _ in range(choose.randint(1, 3)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        try:
            column_sizes(bytes(data))
        except ValueError:
            refused += 1
    assert 100 < refused < 2_000
    with pytest.raises(ValueError, match="nested too deeply"):
        column_sizes(b"\x1c" * 99 + bytes(4) + b"PAR1")


def test_a_damaged_statistic_that_ends_the_process_in_arrow_is_refused(tmp_path):
    """`ColumnChunkMetaData` of Arrow 26 ends the process if a histogram of levels has another length."""
    file = tmp_path / "trace.parquet"
    file.write_bytes(GOLDEN.with_name("parquet-histogram.parquet").read_bytes())
    with pytest.raises(TraceError, match="not a readable Parquet file"):
        check_events(file)
