"""`make proof` lists what was tried, what failed and what could not run, and fails if anything failed."""

from __future__ import annotations

import json
import sys

import pytest

from proof import __main__ as proof
from proof.page import render
from proof.parts import PARTS, Part, Result, finished


def run(tmp_path, monkeypatch, **parts):
    for name, run_part in parts.items():
        monkeypatch.setitem(PARTS, name, Part(f"Part {name}", 0.5, run_part))
    page = tmp_path / "page.md"
    files = ["--out", str(tmp_path / "out"), "--status", str(tmp_path / "status.json"), "--page", str(page)]
    status = proof.main(["--budget", "10s", "--parts", *parts, *files])
    return status, page.read_text(encoding="utf-8")


def test_the_committed_page_is_that_of_the_committed_status():
    assert render(json.loads(proof.STATUS.read_text())) == proof.PAGE.read_text()


def test_the_shares_are_the_whole_time():
    assert sum(part.share for part in PARTS.values()) == pytest.approx(1)


def test_a_failure_a_bug_of_a_part_and_a_missing_part_are_on_the_page(tmp_path, monkeypatch, capsys):
    asked = []

    def good(seconds, out):
        asked.append(seconds)
        return Result({"things": 1_234})

    def bug(seconds, out):
        raise RuntimeError("no *such* thing")

    status, page = run(
        tmp_path, monkeypatch, models=good, crashes=bug, fuzzing=lambda *_: Result({}, not_run="no fuzzer"),
        calibration=lambda *_: Result({"kills": 2}, ("one | lost",)),
    )  # fmt: skip
    assert status == 1
    assert asked == [2.5]
    assert "| Part models | 0 s | 1,234 things | 0 |" in page
    assert "| Part fuzzing | 0 s | not run | 0 |" in page
    assert "**2 failures. 2 of 4 parts could not run.**" in page
    assert "- Part fuzzing: no fuzzer" in page
    assert "- Part crashes: RuntimeError: no \\*such\\* thing" in page
    assert "- Part calibration: one \\| lost" in page
    capsys.readouterr()


def test_a_proof_succeeds_if_something_ran_and_nothing_failed(tmp_path, monkeypatch, capsys):
    good, idle = lambda *_: Result({"things": 1}), lambda *_: Result({}, not_run="nothing")
    assert run(tmp_path, monkeypatch, models=good, fuzzing=idle)[0] == 0
    assert run(tmp_path, monkeypatch, models=idle, fuzzing=idle)[0] == 2
    capsys.readouterr()


def test_a_command_is_interrupted_with_its_children_when_its_time_is_over(tmp_path):
    program = "import subprocess, sys, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    ended = finished([sys.executable, "-c", program], 1, tmp_path / "log")
    assert ended.status == -1
    assert ended.output.startswith("begun\n")
