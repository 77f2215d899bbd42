"""Run `ackstate` in this process or in one of its own, and check that a refusal is one line and does no harm."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import NamedTuple

import typer.main

from ackstate import SqliteStore
from ackstate.analysis.cli import main
from ackstate.analysis.demo.broker import BrokerDirectory, DemoBroker, DemoSettings
from ackstate.analysis.trace.recording import Recording

T0_MS = 1_700_000_000_000
ENTRY = [sys.executable, "-P", "-m", "ackstate.analysis.cli"]

# Typer builds every command again at each call, which takes longer than most of the calls.
typer.main.get_command = functools.cache(typer.main.get_command)


class CommandOutcome(NamedTuple):
    status: int
    out: str
    err: str


def status_of(*arguments):
    """Run a command in this process and return its exit status; the caller finds its output."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code


def run(capsys, *arguments):
    """Run a command in this process."""
    capsys.readouterr()
    return CommandOutcome(status_of(*arguments), *capsys.readouterr())


def run_apart(*arguments, **options):
    """Run a command in a process of its own."""
    command = [*ENTRY, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)
    return CommandOutcome(done.returncode, done.stdout, done.stderr)


_EACH = """
import contextlib, io, json, sys
from ackstate.analysis.cli import main
for words in json.loads(sys.argv[1]):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def run_each_apart(*commands, before="", prefix=(), **options):
    """Run commands one after another in one process of their own, after some code, perhaps by another program."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    code = [*prefix, sys.executable, "-P", "-c", before + _EACH, words]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=300, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return [CommandOutcome(*json.loads(line)) for line in done.stdout.splitlines()]


def assert_one_line(outcome, *naming, status=2):
    """One line on standard error that names the things, nothing on standard output."""
    assert outcome.status == status, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("ackstate: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    for name in naming:
        assert str(name) in outcome.err


def write_token(path, token):
    """Write a token file that only its owner can read: others are warned about."""
    path.touch(mode=0o600)
    path.write_text(f"{token}\n")
    return path


def tree(directory):
    """Everything below a directory: names, kinds and bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else path.is_symlink()
        for path in sorted(directory.rglob("*"))
    }


def killed_broker(path, *, begin_ms=T0_MS, steps=60):
    """Leave the remains of a broker that dies between two persists: a store, and a recording with acks not durable."""
    place = BrokerDirectory(path)
    store = SqliteStore(place.store)
    with Recording(place.recording) as recording:
        settings = DemoSettings(seed=3, flush_interval_ms=100)
        broker = DemoBroker(store, recording, settings, now_ms=begin_ms)
        for number in range(steps):
            broker.step(now_ms=begin_ms + 6 * number)
    store.close()
    return place
