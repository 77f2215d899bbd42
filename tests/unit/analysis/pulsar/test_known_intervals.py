"""Intervals of redelivery that are wrong as long as durable acks are inferred from answers that do not show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ackstate.analysis.admin_client import AdminServer, PulsarAdmin
from ackstate.analysis.pulsar.recorder import ClusterRecorder
from ackstate.analysis.pulsar.sources import LiveBroker
from ackstate.analysis.pulsar.trace_directory import TraceDirectory
from command_line import run
from pulsar_admin import PATH, serving, topic_answers

VECTORS = Path(__file__).parents[3] / "vectors" / "intervals.jsonl"


def cases(kind):
    found = [case for case in map(json.loads, VECTORS.read_text().splitlines()) if case["kind"] == kind]
    assert found
    wrong = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=case["why"]) for case in found]
    return [pytest.param(case, id=case["id"], marks=mark) for case, mark in zip(found, wrong, strict=True)]


@pytest.mark.parametrize("case", cases("snapshot"))
def test_the_interval_of_a_look(capsys, tmp_path, case):
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
    assert found["comes_back"]["low"]["entries"] <= right.get("low_max", 2**63)
    assert found["comes_back"]["high"]["entries"] >= right.get("high_min", 0)
    most = found["messages_estimate"]["high"]
    assert most is None or most >= right.get("messages_high_min", 0)
    for name in ("cut_if_written_now", "comes_back_if_unloaded"):
        assert found[name] == right.get(name, found[name])


@pytest.mark.parametrize("case", cases("record"))
def test_the_interval_of_a_recording(capsys, tmp_path, case):
    """After the last poll every ack may still come back, so most of the recording has that high end."""
    first, then = case["internalStats"]
    answers = topic_answers(PATH, [first, *[then] * 3], case["stats"])

    class DoneError(Exception):
        """Ends the recording."""

    def show(state):
        if state.polls >= 40:
            raise DoneError

    with (
        serving(answers) as broker,
        PulsarAdmin(AdminServer(broker.url, timeout_s=5)) as admin,
        TraceDirectory(tmp_path / "trace") as trace,
        pytest.raises(DoneError),
    ):
        ClusterRecorder(LiveBroker(admin), trace, every_s=0.02).run(None, show)
    outcome = run(capsys, "redelivery", tmp_path / "trace", "--engine", "local", "--json")
    assert outcome.status == 0, outcome.err
    (policy,) = json.loads(outcome.out)["policies"]
    (found,) = [each for each in policy["estimates"] if each["subscription"]]
    assert found["p50"] >= case["right"]["high_min"]
