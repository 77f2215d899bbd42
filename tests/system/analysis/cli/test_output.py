"""A report that Spark's estimate is written into."""

from __future__ import annotations

import json
import re
from html import escape

import pytest

from command_line import status_of
from trace_files import write_acks


@pytest.fixture
def trace(tmp_path):
    return write_acks(tmp_path / "trace", ("persistent://a/b/c", "<i>"), range(0, 200, 2), begin_ms=1_000)


@pytest.mark.spark
@pytest.mark.slow
def test_a_sweep_writes_a_report_of_what_its_json_says(spark, trace, tmp_path, capsys):
    report, origin = tmp_path / "report.html", tmp_path / "made.json"
    origin.write_text(json.dumps({"plan": {"seed": 77}}))
    words = ("sweep", trace, "--set", "flush_interval_ms=20,5000", "--report", report, "--trace-json", origin)
    assert status_of(*words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    page = report.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    estimates, policies = data["grids"][:2]  # A calibration may follow.
    total = said["policies"][0]["estimates"][0]
    assert [row[1] for row in policies["views"][0]["rows"]] == [
        each["estimates"][0]["expected"] for each in said["policies"]
    ]
    assert estimates["views"][0]["rows"][0][:3] == ["<i>", "persistent://a/b/c", total["expected"]]
    drawn = data["figures"][0]["traces"][0]
    assert (max(drawn["y"]), drawn["x"][drawn["y"].index(max(drawn["y"]))]) == (total["max"], total["max_ts_ms"])
    assert "trace generated with seed" in page
    assert page.count("plotly.js v") == 1
    assert escape(said["recommendation"]) in page
