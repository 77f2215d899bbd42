"""`python -m benchmarks.calibration`: its answer, its exit status, and that nothing is left of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ackstate.analysis.crash.scratch import fast_parent, scratch_prefix
from ackstate.analysis.replay.policy import Policy
from benchmarks.calibration.__main__ import main
from benchmarks.calibration.blocked import blocked
from benchmarks.calibration.prediction import TracePrediction, expected_by_spark
from command_line import CommandOutcome, assert_one_line
from waiting import wait_until

ROOT = Path(__file__).parents[4]
SMALL = ("--points", 1, "--kills", 1, "--power-cuts", 0)


def run(capsys, *arguments):
    """Run the command in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return CommandOutcome(ended.value.code, *capsys.readouterr())


@pytest.mark.slow
@pytest.mark.spark
def test_spark_keeps_apart_what_has_the_same_name(spark):
    """The traffic that a limit stops depends on the whole policy, and is named after the limit only."""
    rare = {"max_unpersisted_ack_record_bytes": 1_024, "flush_interval_ms": 1_500}
    policies = [Policy.from_mapping(each) for each in (rare, rare | {"flush_interval_ms": 300})]
    replayed = [(blocked(policy, 1), policy) for policy in policies]
    assert len({workload.topic for workload, _ in replayed}) == 1
    plain = [TracePrediction(*each, ()).expected for each in replayed]
    assert expected_by_spark(spark, replayed) == pytest.approx(plain)


def without_spark(monkeypatch):
    monkeypatch.setattr("benchmarks.calibration.__main__._session", lambda: None)
    monkeypatch.setattr("benchmarks.calibration.__main__._by_spark", lambda spark, plan: [None] * plan.points)


@pytest.mark.slow
@pytest.mark.spark
def test_the_answer_is_the_same_on_the_terminal_in_the_file_and_from_spark(capsys, tmp_path, spark):
    done = run(capsys, *SMALL, "--kills", 2, "--json", "--out", tmp_path / "calibration.json")
    found = json.loads(done.out)
    assert done.status == 0
    assert found == json.loads((tmp_path / "calibration.json").read_text())
    (point,) = found["grid"]
    assert point["expected_by_spark"] == pytest.approx(point["expected"])
    assert found["totals"]["kills_equal"] == found["totals"]["kills"] == 4
    assert found["power_cuts_skipped"] == "none were requested"


@pytest.mark.slow
def test_a_wrong_estimate_is_bad_news(capsys, monkeypatch):
    without_spark(monkeypatch)
    done = run(capsys, *SMALL, "--assume", "flush_interval_ms=3333")
    assert done.status == 1
    assert "(!)" in done.out
    assert "of 3 kills at 1 grid points redelivered exactly the predicted number" in done.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--points", "0"), "--points"),
        (("--kills", "0"), "--kills"),
        (("--power-cuts", "-1"), "--power-cuts"),
        (("--assume", "flush=3"), "'flush'"),
        (("--assume", "flush_interval_ms=soon"), "flush_interval_ms"),
        (("--assume", "flush_interval_ms"), "key=value"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(capsys, arguments, named):
    assert_one_line(run(capsys, *SMALL, *arguments), named)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(capsys, tmp_path, monkeypatch):
    without_spark(monkeypatch)
    assert_one_line(run(capsys, *SMALL, "--out", tmp_path / "missing" / "file"), tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_java_nobody_is_killed(capsys, monkeypatch):
    from ackstate.analysis.spark.java import SparkUnavailableError

    def refuse():
        raise SparkUnavailableError("planted: no Java")

    monkeypatch.setattr("benchmarks.calibration.__main__._session", refuse)
    monkeypatch.setattr("benchmarks.calibration.run.WorkerProcess", None)
    assert_one_line(run(capsys, *SMALL), "planted: no Java")


_WITHOUT_SPARK = """
from benchmarks.calibration import __main__ as command
command._session = lambda: None
command.main(["--power-cuts", "0"])
"""


@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_nothing_behind(request):
    process = subprocess.Popen([sys.executable, "-c", _WITHOUT_SPARK], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    request.addfinalizer(process.kill)
    names = f"{scratch_prefix('calibration', process.pid)}*/life-*"
    wait_until(lambda: list(fast_parent().glob(names)), timeout_s=60)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint == "ackstate: interrupted\n"
    assert not list(fast_parent().glob(f"{scratch_prefix('calibration', process.pid)}*"))
    assert not any(Path(f"/proc/{child}").exists() for child in children)
