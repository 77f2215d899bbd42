"""Answers of brokers from which a number is easily too low: joined ranges, skip-all, missing ledgers, batches."""

import json
from pathlib import Path

import pytest

from command_line import run
from pulsar_admin import RUNTIME, serving, topic_answers

VECTORS = Path(__file__).parents[3] / "vectors" / "hard-answers.jsonl"
CASES = [*map(json.loads, VECTORS.read_text().splitlines())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_snapshot_of_a_hard_answer_is_not_below_the_truth(capsys, case):
    """An answer that contradicts itself may be refused instead."""
    changes = topic_answers(internals=case["internalStats"], stats=case.get("stats", {"subscriptions": {}}))
    version = {"/admin/v2/brokers/version": (200, case["version"].encode(), {})}
    with serving(changes | version | {RUNTIME: case.get("configuration", {})}) as broker:
        outcome, right = run(capsys, "pulsar", "snapshot", broker.url, "--metadata", "none", "--json"), case["right"]
    if outcome.status == 2:
        assert "high_min" in right
        return
    (found,) = json.loads(outcome.out)["subscriptions"]
    assert found["at_least"] <= right.get("low_max", 2**63)
    assert found["comes_back"] >= right.get("high_min", 0)
    assert found["messages"] is None or found["messages"] >= right.get("messages_high_min", 0)
    for name in ("cut_if_written_now", "comes_back_if_unloaded"):
        assert found[name] == right.get(name, found[name])
