"""`--report` and `--format`: the same values in every format, and nothing written where something is wrong."""

import csv
import errno
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyarrow import csv as arrow_csv

from ackstate.analysis.cli.estimates import Output
from report_contents import sweep_result


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_a_full_disk_is_told_with_the_file_of_which_nothing_is_left(tmp_path, monkeypatch, form):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((Path, "write_text"), (pq, "write_table"), (arrow_csv, "write_csv")):
        monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left") as raised:
        Output(form, tmp_path / "found", None).deliver(sweep_result(), answer=None)
    assert raised.value.filename == str(tmp_path / "found")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_every_format_has_the_same_values(tmp_path, form):
    result, out = sweep_result(), tmp_path / "found"
    Output(form, out, None).deliver(result, answer=None)
    expected = [
        {"policy": each["label"]} | estimate for each in result.to_json()["policies"] for estimate in each["estimates"]
    ]
    if form == "json":
        assert json.loads(out.read_text()) == result.to_json()
    elif form == "parquet":
        assert pq.read_table(out).to_pylist() == expected
    else:
        found = list(csv.DictReader(out.read_text().splitlines()))
        assert [list(map(csv_value, cells.values())) for cells in found] == [
            [None if value == "" else value for value in each.values()] for each in expected
        ]


def csv_value(text):
    """A number for a text that reads as one; None for nothing."""
    try:
        return float(text)
    except ValueError:
        return text or None
