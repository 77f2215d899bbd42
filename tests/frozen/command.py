"""Where the frozen files are, and how a command of this tree is run in this process."""

from __future__ import annotations

import importlib
import io
import sys
import tomllib
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRACES = HERE / "traces"

MODULE, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"][
    "ackstate"
].split(":")


def outcome_of(command, *words):
    """Run `ackstate COMMAND WORDS...` in this process; return its status and what it printed."""
    main = getattr(importlib.import_module(MODULE), FUNCTION)
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        try:
            main([*command.split(), *words])
        except SystemExit as ended:
            status = ended.code or 0
    return status, out.getvalue(), err.getvalue()


def answer_of(command, *words):
    """Return what a command prints that must succeed."""
    status, out, err = outcome_of(command, *words)
    if status:
        sys.exit(f"ackstate {command} {' '.join(words)}: status {status}: {err}")
    return out
