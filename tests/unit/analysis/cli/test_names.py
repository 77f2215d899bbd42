"""Version, completion, and suggestions for unknown names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from command_line import assert_one_line, run

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
