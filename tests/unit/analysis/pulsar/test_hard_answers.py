"""Answers of brokers from which a number is easily too low: joined ranges, skip-all, missing ledgers, batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run

VECTORS = Path(__file__).parents[3] / "vectors" / "hard-answers.jsonl"
CASES = [*map(json.loads, VECTORS.read_text().splitlines())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_snapshot_of_a_hard_answer_is_not_below_the_truth(capsys, tmp_path, case):
    """An answer that contradicts itself may be refused instead."""
    files = {
        "internalStats-t.json": json.dumps(case["internalStats"]),
        "configuration.json": json.dumps(case.get("configuration", {})),
        "version.txt": case["version"],
    }
    if "stats" in case:
        files["stats-t.json"] = json.dumps(case["stats"])
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    outcome, right = run(capsys, "pulsar", "snapshot", "--from", tmp_path, "--json"), case["right"]
    if outcome.status == 2:
        assert "high_min" in right
        return
    (found,) = json.loads(outcome.out)["subscriptions"]
    assert found["at_least"] <= right.get("low_max", 2**63)
    assert found["comes_back"] >= right.get("high_min", 0)
    assert found["messages"] is None or found["messages"] >= right.get("messages_high_min", 0)
    for name in ("cut_if_written_now", "comes_back_if_unloaded"):
        assert found[name] == right.get(name, found[name])
