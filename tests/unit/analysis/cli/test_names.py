"""Version, completion, and suggestions for unknown names."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from command_line import run

COMMAND = Path(sys.executable).parent / "ackstate"


def test_the_version_is_that_of_the_distribution(capsys):
    assert run(capsys, "--version") == (0, f"ackstate {version('ackstate')}\n", "")


# --- completion


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("re", ["redelivery", "recover"]),
        ("trace c", ["convert", "check"]),
        ("pulsar s", ["snapshot"]),
        ("broker --se", ["--seconds", "--seed"]),
        ("sweep --cur", ["--current-policy"]),
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
