"""The main job: real processes, a real SIGKILL, a real Spark, and every prediction true."""

import json

import pytest

from command_line import run

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KEYS = {
    "name", "acked", "durable", "predicted_at_kill", "observed", "lost", "invented", "expected", "p50", "p99", "max",
}  # fmt: skip


@pytest.mark.parametrize("flush_interval_ms", [pytest.param(1, marks=pytest.mark.soak), 250])
def test_every_prediction_comes_true(spark, tmp_path_factory, capsys, flush_interval_ms):
    out = tmp_path_factory.getbasetemp() / "demo"
    options = (f"--flush-interval-ms={flush_interval_ms}", "--seconds=2", "--seed=12")
    outcome = run(capsys, "demo", "--json", "--out", out, *options)
    assert outcome.status == 0, outcome.err
    summary = json.loads(outcome.out)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["settings"]["flush_interval_ms"] == flush_interval_ms
    assert summary["seed"] == 12
    assert [outcome["name"] for outcome in summary["subscriptions"]] == [
        "eight-consumers",
        "in-order",
        "one-percent-stuck",
    ]
    for outcome in summary["subscriptions"]:
        assert outcome.keys() >= KEYS
        assert outcome["acked"] == outcome["durable"] + outcome["observed"] > 300
        assert outcome["predicted_at_kill"] == outcome["observed"]
        assert outcome["max"] >= outcome["p99"] >= outcome["p50"]
        assert flush_interval_ms == 1 or 0 < outcome["expected"] < outcome["max"]
    assert 10_000 < (out / "report.html").stat().st_size < 600_000
    assert (out / "trace.parquet").is_dir()
