"""Runs `ackstate` as a user does, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

_ENDS_WITHIN_S = 240


def ackstate(*words):
    """Run a command, and return its exit status, its standard output and its standard error."""
    done = subprocess.run(
        _command(words), capture_output=True, text=True, timeout=_ENDS_WITHIN_S, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def started(*words):
    """Start a command, whose output is discarded; to be used as a context manager."""
    return subprocess.Popen(_command(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _command(words):
    return [str(Path(sys.prefix, "bin", "ackstate")), *map(str, words)]


def ackstate_json(*words):
    """Run a command that must succeed, and return its JSON."""
    status, output, errors = ackstate(*words, "--json")
    assert status == 0, (words, errors)
    return json.loads(output)
