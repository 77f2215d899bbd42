"""A report that Spark's estimate is written into."""

import json
import re
from html import escape

import pytest

from ackstate.analysis.report.contents import count_text
from command_line import status_of
from trace_files import write_acks


@pytest.fixture
def trace(tmp_path):
    return write_acks(tmp_path / "trace", ("persistent://a/b/c", "<i>"), range(0, 200, 2), begin_ms=1_000)


@pytest.mark.spark
@pytest.mark.slow
def test_a_sweep_writes_a_report_of_what_its_json_says(spark, trace, tmp_path, capsys):
    report = tmp_path / "report.html"
    words = ("sweep", trace, "--set", "flush_interval_ms=20,5000", "--report", report)
    assert status_of(*words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    page = report.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    estimates, policies = data["grids"]
    assert [row[2] for row in policies["views"][0]["rows"]] == [
        each["estimates"][0]["expected"] for each in said["policies"]
    ]
    # The trace has no persist: the first policy of the grid is taken for the current one.
    total = said["policies"][1]["estimates"][0]
    assert said["baseline"] == said["policies"][1]["label"]
    assert estimates["views"][0]["rows"][0][:3] == ["<i>", "persistent://a/b/c", round(total["expected"], 3)]
    assert f'<p class="big">{count_text(total["expected"])}</p>' in page
    assert f"at worst {count_text(total['max'])}" in page
    assert escape(said["warnings"][0]) in page
    assert escape(said["recommendation"])[1:] in page
    assert len(page) < 600_000
