"""`make proof` lists what was tried, what failed and what could not run, and fails if anything failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proof import __main__ as proof
from proof import parts
from proof.page import render
from proof.parts import PARTS, Ended, PartEnd, ProofPart, finished


def run(tmp_path, monkeypatch, **chosen):
    for name, run_part in chosen.items():
        monkeypatch.setitem(PARTS, name, ProofPart(f"Part {name}", 0.5, run_part))
    page = tmp_path / "page.md"
    files = ["--out", str(tmp_path / "out"), "--status", str(tmp_path / "status.json"), "--page", str(page)]
    status = proof.main(["--budget", "10s", "--parts", *chosen, *files])
    return status, page.read_text(encoding="utf-8")


def test_the_committed_page_is_that_of_the_committed_status():
    assert render(json.loads(proof.STATUS.read_text())) == proof.PAGE.read_text()


def test_the_shares_are_the_whole_time():
    assert sum(part.share for part in PARTS.values()) == pytest.approx(1)


def test_a_failure_a_bug_of_a_part_and_a_missing_part_are_on_the_page(tmp_path, monkeypatch, capsys):
    asked = []

    def good(seconds, out):
        asked.append(seconds)
        return PartEnd({"things": 1_234})

    def bug(seconds, out):
        raise RuntimeError("no *such* thing")

    status, page = run(
        tmp_path, monkeypatch, models=good, crashes=bug, fuzzing=lambda *_: PartEnd({}, not_run="no fuzzer"),
        calibration=lambda *_: PartEnd({"kills": 2}, ("one | lost",)),
    )  # fmt: skip
    assert status == 1
    assert asked == [2.5]
    assert "| Part models | 0 s | 1,234 things | 0 | complete |" in page
    assert "| Part fuzzing | 0 s | nothing | 0 | not run |" in page
    assert "| Part crashes | 0 s | nothing | 1 | failed |" in page
    assert "**2 failures. 1 of 4 parts complete, 1 not run, 2 failed.**" in page
    assert "- Part fuzzing: no fuzzer" in page
    assert "- Part crashes: RuntimeError: no \\*such\\* thing" in page
    assert "- Part calibration: one \\| lost" in page
    capsys.readouterr()


def test_a_part_that_was_cut_off_and_one_that_was_not_begun_are_on_the_page(tmp_path, monkeypatch, capsys):
    def interrupted(seconds, out):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            tmp_path, monkeypatch, models=lambda *_: PartEnd({"things": 1}, not_run="stopped"),
            crashes=interrupted,
        )  # fmt: skip
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| Part models | 0 s | 1 things | 0 | run in part |" in page
    assert "| Part crashes | 0 s | nothing | 0 | not run |" in page
    assert "- Part crashes: the proof ended before" in page
    assert "**Nothing failed. 0 of 2 parts complete, 1 run in part, 1 not run.**" in page
    capsys.readouterr()


@pytest.mark.parametrize(
    ("second", "tried"),
    [
        (PartEnd({"tests": 9, "examples of each": 180}), {"tests": 9, "examples of each": 180}),
        (
            PartEnd({"tests": 4, "examples of each": 180}, not_run="stopped"),
            {"tests": 9, "examples of each": 25, "tests with 180 examples": 4},
        ),
    ],
)
def test_models_run_again_with_as_many_examples_as_the_time_allows(tmp_path, monkeypatch, second, tried):
    results = [PartEnd({"tests": 9, "examples of each": 25}), second]
    asked, clock = [], iter([0, 10])

    def run_tests(examples, seconds, out):
        asked.append((examples, seconds))
        return results.pop(0)

    monkeypatch.setattr(parts, "_models", run_tests)
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert parts.models(100, tmp_path) == PartEnd(tried)
    assert asked == [(25, 100), (180, 90)]


@pytest.mark.parametrize("part", ["crashes", "kill-matrix", "calibration"])
def test_a_part_that_is_cut_off_without_a_result_has_not_failed(tmp_path, monkeypatch, part):
    (tmp_path / "matrix.json").write_text("{}")  # of an earlier proof
    ends = iter([Ended(-1, "begun"), Ended(2, "no such thing")])
    monkeypatch.setattr(parts, "finished", lambda *_, **__: next(ends))
    assert PARTS[part].run(60, tmp_path) == PartEnd({}, (), "stopped when its time was over, without a result")
    assert PARTS[part].run(60, tmp_path) == PartEnd({}, ("exit status 2: no such thing",))


def test_a_comparison_with_a_broker_that_is_cut_off_keeps_what_it_has_found(tmp_path, monkeypatch):
    section = {"counts": {"x": [2, 3]}, "wrong": ["a: x: 1 instead of 2"]}

    def cut_off(command, seconds, log):
        Path(command[-1]).write_text(json.dumps({"parts": {"inspection": [section]}}))
        return Ended(-1, "")

    monkeypatch.setattr(parts, "finished", cut_off)
    found = parts._pulsar_broker(1, tmp_path)
    assert found.tried == {"comparisons with a Pulsar broker": 3}
    assert found.failures == ("Pulsar broker: a: x: 1 instead of 2",)
    assert found.not_run.startswith("Pulsar broker: its time was over before the end of: transfer, ")


def test_a_proof_succeeds_if_something_ran_and_nothing_failed(tmp_path, monkeypatch, capsys):
    good, idle = lambda *_: PartEnd({"things": 1}), lambda *_: PartEnd({}, not_run="nothing")
    assert run(tmp_path, monkeypatch, models=good, fuzzing=idle)[0] == 0
    assert run(tmp_path, monkeypatch, models=idle, fuzzing=idle)[0] == 2
    capsys.readouterr()


def test_a_command_is_interrupted_with_its_children_when_its_time_is_over(tmp_path):
    program = "import subprocess, sys, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    ended = finished([sys.executable, "-c", program], 1, tmp_path / "log")
    assert ended.status == -1
    assert ended.output.startswith("begun\n")
