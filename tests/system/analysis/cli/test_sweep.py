"""`ackstate sweep` with Spark, from the outside."""

from __future__ import annotations

import csv
import json

import pytest

from command_line import status_of
from trace_files import write_acks


@pytest.fixture
def trace(tmp_path):
    return write_acks(tmp_path / "trace", ("persistent://a/b/t", "s"), range(10_000))


@pytest.mark.spark
@pytest.mark.slow
def test_a_sweep_says_what_a_setting_buys(spark, trace, tmp_path, capsys):
    assert status_of("sweep", trace, "--flush-interval-ms", "5000,100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["label"] for each in found["policies"]] == [
        "recorded", "flush_interval_ms=5000", "flush_interval_ms=100",
    ]  # fmt: skip
    assert found["recommendation"].startswith("flush every 0.1 s instead of 5 s: 2,5")
    out = tmp_path / "found.csv"
    assert status_of("redelivery", trace, "--policy", "flush_interval_ms=100", "--format", "csv", "--out", out) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["scope"] for row in rows] == ["total", "namespace", "topic", "subscription"]
    # 0 at each multiple of 100 ms, 99 just before it; the first interval begins with the first ack.
    assert all(float(row["expected"]) == pytest.approx(50, abs=1) for row in rows)
