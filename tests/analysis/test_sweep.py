"""`ackstate sweep` and `ackstate redelivery` under a policy, from the outside."""

from __future__ import annotations

import csv
import json

import pytest

from analysis import cli
from analysis.redelivery.policy import Policy
from analysis.redelivery.results import Estimate, SweepResult
from analysis.trace import parquet
from analysis.trace.events import Event, EventKind
from analysis.trace.recorder import Frame


@pytest.fixture
def trace(tmp_path):
    events = [Event(ts_ms, EventKind.ACK, 3, ts_ms, ts_ms) for ts_ms in range(10_000)]
    parquet.write_trace([Frame("persistent://a/b/t", "s", events)], tmp_path / "trace")
    return tmp_path / "trace"


def run(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code


@pytest.mark.spark
@pytest.mark.slow
def test_a_sweep_says_what_a_setting_buys(spark, trace, tmp_path, capsys):
    assert run("sweep", trace, "--flush-interval-ms", "100,5000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["label"] for each in found["policies"]] == [
        "as recorded", "flush_interval_ms=100", "flush_interval_ms=5000",
    ]  # fmt: skip
    assert found["recommendation"].startswith("flush every 0.1 s instead of 5 s: expected duplicates 2,5")
    out = tmp_path / "found.csv"
    assert run("redelivery", trace, "--policy", "flush_interval_ms=100", "--format", "csv", "--out", out) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["scope"] for row in rows] == ["total", "namespace", "topic", "subscription"]
    # 0 at each multiple of 100 ms, 99 just before it; the first interval begins with the first ack.
    assert all(float(row["expected"]) == pytest.approx(50, abs=1) for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "{trace}"], "a grid comes from --grid or from --set, one of them"),
        (["sweep", "{trace}", "--set", "x=1"], "unknown key 'x'"),
        (["sweep", "{trace}", "--set", "tick_ms"], "a setting is key=value, found 'tick_ms'"),
        (["sweep", "{trace}", "--grid", "none.json"], "none.json: No such file"),
        (["sweep", "no-trace", "--set", "tick_ms=1"], "no-trace: no such trace"),
        (["redelivery", "{trace}", "--format", "csv"], "--format and --out go together"),
        (["redelivery", "{trace}", "--format", "xml", "--out", "x"], "--format is one of json, parquet, csv"),
        (["redelivery", "{trace}", "--policy", "keep=BEST"], "keep is one of LOWEST, WIDEST"),
    ],
)
def test_what_is_wrong_is_one_line(trace, tmp_path, monkeypatch, capsys, words, said):  # noqa: PLR0917 - fixtures
    monkeypatch.chdir(tmp_path)
    assert run(*(word.format(trace=trace) for word in words)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def estimate(expected, writes):
    numbers = dict.fromkeys(Estimate.__dataclass_fields__, 0) | {"expected": expected, "write_count": writes}
    names = {"scope": "total", "namespace": "", "topic": "", "subscription": ""}
    return numbers | names | {"duration_ms": 1_000, "bytes_written": writes}


def test_the_front_is_what_nothing_beats():
    policies = [None, *(Policy.from_mapping({"flush_interval_ms": each}) for each in (1, 2, 3, 4))]
    costs = [(9, 0), (1, 100), (5, 50), (6, 60), (50, 10)]
    rows = [estimate(*each) | {"policy": index} for index, each in enumerate(costs)]
    result = SweepResult.of_rows("t", policies, rows, crashes_per_day=1)
    assert [each.label for each in result.front] == [f"flush_interval_ms={each}" for each in (1, 2, 4)]
    # 5/50 + 50/100 is less than 1/50 + 100/100.
    assert result.recommendation.startswith("flush every 0.002 s instead of 0.004 s: expected duplicates 50 -> 5, +40")
