"""Version, completion, suggestions for unknown names, and the names of before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest

from ackstate.analysis.cli.names import RENAMED_OPTIONS
from command_line import assert_one_line, run, run_apart

COMMAND = Path(sys.executable).parent / "ackstate"


def completed(**environment):
    """Run the installed command as a shell's completion does."""
    done = subprocess.run(
        [COMMAND], capture_output=True, text=True, check=True, env={**os.environ, **environment}, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


def test_the_version_is_that_of_the_distribution(capsys):
    assert run(capsys, "--version") == (0, f"ackstate {version('ackstate')}\n", "")


# --- completion


@pytest.mark.slow
def test_the_completion_scripts_call_the_command():
    bash, zsh = (completed(_ACKSTATE_COMPLETE=f"source_{shell}") for shell in ("bash", "zsh"))
    assert re.search(r"^complete .*-F \S+ ackstate$", bash, re.MULTILINE)
    assert "_ACKSTATE_COMPLETE=complete_bash" in bash
    assert zsh.strip().startswith("#compdef ackstate")
    assert "_ACKSTATE_COMPLETE=complete_zsh" in zsh


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("re", ["redelivery", "recover"]),
        ("pack", []),  # an old name
        ("trace c", ["convert", "check"]),
        ("pulsar s", ["snapshot"]),
        ("broker --delay", ["--delayed-share", "--delay-ms-max"]),
        ("sweep --trace", ["--trace-summary"]),
    ],
)
def test_names_are_completed(capsys, monkeypatch, words, names):
    def answer(shell, **environment):
        for name, value in {"_ACKSTATE_COMPLETE": f"complete_{shell}", **environment}.items():
            monkeypatch.setenv(name, value)
        return run(capsys).out

    bash = answer("bash", COMP_WORDS=f"ackstate {words}", COMP_CWORD=str(len(words.split())))
    assert sorted(bash.split()) == sorted(names)
    zsh = answer("zsh", _TYPER_COMPLETE_ARGS=f"ackstate {words}")
    assert all(name in zsh.replace("\\", "") for name in names)


# --- unknown names

SUGGESTED = {
    ("recovr",): "unknown command 'recovr'; did you mean 'recover'? (see ackstate --help)",
    ("packag",): "unknown command 'packag'; did you mean 'spark-package'?",
    ("frobnicate",): "unknown command 'frobnicate' (see",
    ("pulsar", "snap"): "unknown command 'snap'; did you mean 'snapshot'?",
    ("trace", "chek", "x"): "unknown command 'chek'; did you mean 'check'? (see ackstate trace --help)",
    ("demo", "--sed", "3"): "unknown option --sed; did you mean '--seed'? (see ackstate demo --help)",
    ("trace", "check", "x", "--xyzzy"): "unknown option --xyzzy (see",
    ("sweep", "x", "--trace-sumary", "y"): "unknown option --trace-sumary; did you mean '--trace-summary'?",
    ("sweep", "x", "--set", "flush_intervall_ms=1"): "'flush_intervall_ms'; did you mean 'flush_interval_ms'?",
    ("redelivery", "x", "--policy", "xyzzy=1"): "unknown key 'xyzzy'; known keys are format, ",
}  # fmt: skip


def test_an_unknown_name_is_answered_with_the_one_that_is_like_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    for words, said in SUGGESTED.items():
        assert_one_line(run(capsys, *words), said)
    misspelled = tmp_path / "broker.conf"
    misspelled.write_text("delayedDeliveryTickTimeMilis=100\n")
    told = run(capsys, "serve", "--store", "new", "--conf", misspelled)
    assert_one_line(told, "delayedDeliveryTickTimeMilis", "did you mean 'delayedDeliveryTickTimeMillis'?")


def test_a_recording_may_have_a_name_like_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chek").mkdir()
    assert_one_line(run(capsys, "trace", "chek", "trace"), "chek: ")


# --- names of before


def warned_of(old, new, *, is_old=True):
    """Expect a warning that names the replacement; none for a present name."""
    return pytest.warns(FutureWarning, match=f"^{old} is deprecated.* write {new}$") if is_old else nullcontext()


def test_an_old_name_is_answered_with_one_line(tmp_path):
    done = run_apart("package", tmp_path / "package")
    assert done.status == 0
    assert done.err == "ackstate: warning: package is deprecated, and release 0.3 removes it: write spark-package\n"


def test_old_options_work_and_are_in_no_help(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace").mkdir()
    for command, *rest in (("redelivery", "trace"), ("sweep", "trace", "--set", "tick_ms=1")):
        told = run(capsys, command, "--help").out
        for old, new in RENAMED_OPTIONS.items():
            if old == "--baseline":
                continue
            assert new in told
            assert old not in told
            for name in (old, new):
                with warned_of(old, new, is_old=name == old):
                    refused = run(capsys, command, *rest, name, "file")
                assert_one_line(refused, "--calibration, --recorded-runs and --trace-summary go with --report")
            with warned_of(old, new):
                assert_one_line(run(capsys, command, *rest, f"{old}="), f"'{new}'")


def test_the_current_policy_has_an_old_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace").mkdir()
    assert "--current-policy" in (told := run(capsys, "sweep", "--help").out)
    assert "--baseline" not in told
    for name in ("--baseline", "--current-policy"):
        with warned_of("--baseline", "--current-policy", is_old=name == "--baseline"):
            refused = run(capsys, "sweep", "trace", "--set", "tick_ms=1", name, "x")
        assert_one_line(refused, "current policy must be KEY=V KEY=V or default, got 'x'")


def test_a_word_after_the_end_of_the_options_is_no_old_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_one_line(run(capsys, "redelivery", "--", "--trace-json"), "--trace-json: no such trace")


def test_the_old_command_packs_the_same(tmp_path, capsys):
    assert "spark-package" in run(capsys).out
    assert "\n  package" not in run(capsys).out
    for name in ("package", "spark-package"):
        with warned_of("package", "spark-package", is_old=name == "package"):
            assert run(capsys, name, tmp_path / name).status == 0
    old, new = ({file.name for file in (tmp_path / name).iterdir()} for name in ("package", "spark-package"))
    assert old == new == {"ackstate.zip", "ackstate_job.py"}
    assert zipfile.ZipFile(tmp_path / "package" / "ackstate.zip").namelist()
