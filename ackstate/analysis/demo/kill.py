"""Starts a broker in a separate process, kills it at a random moment, and recovers it in another process."""

from __future__ import annotations

import json
import os
import random
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ackstate.analysis.crash import dying
from ackstate.analysis.demo.broker import SUBSCRIPTIONS, TOPIC
from ackstate.analysis.trace.entry_set import histories
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Recorder, read_recording
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.demo.broker import DemoSettings
    from ackstate.analysis.demo.directory import BrokerDirectory

READY = "ready"
_POLL_S = 0.05
# Limit for a child to be ready, and to end after wrong output; a busy machine needs seconds.
_PATIENCE_S = 60.0


class ChildFailedError(AckStateError):
    """A child process ended by itself; the message is its output."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A broker's death.

    Attributes:
        kill_ts_ms: Time by which it was dead: when it was reaped, or its last event if that is later.
        lived_ms: Time from its first step to the signal.
    """

    kill_ts_ms: int
    lived_ms: int


def run_and_kill(
    directory: BrokerDirectory,
    settings: DemoSettings,
    *,
    lives_ms: tuple[int, int],
    waiting: Callable[[float], None] = lambda _share: None,
) -> Kill:
    """Start a broker, kill it with SIGKILL at a moment drawn from its seed, and add the crash to its recording.

    Raises:
        ChildFailedError: The broker ended before it was killed; the message is its output.
    """
    moment_ms = random.Random(f"kill {settings.seed}").randint(*lives_ms)  # noqa: S311 - a moment, not a secret
    # If its parent dies first, and the kernel does not kill it, it ends by itself soon after.
    options = ["--seconds", str(lives_ms[1] / 1_000 + 30)]
    options += [f"--{field.name.replace('_', '-')}={getattr(settings, field.name)}" for field in fields(settings)]
    with _start("broker", *options, "--", str(directory.path)) as child:
        try:
            if _first_line(child) != READY:
                raise _failed(child, "broker")
            begun = time.monotonic()
            while (lived_ms := (time.monotonic() - begun) * 1_000) < moment_ms:
                waiting(lived_ms / moment_ms)
                if child.poll() is not None:
                    raise _failed(child, "broker")
                time.sleep(min(_POLL_S, (moment_ms - lived_ms) / 1_000))
        finally:
            child.kill()
            child.wait()
    waiting(1.0)
    return Kill(_note_crash(directory), int(lived_ms))


def recover_elsewhere(directory: BrokerDirectory) -> list[dict[str, Any]]:
    """Recover every cursor in a second process; return its reports, as `RecoveredCursor.to_json`.

    Raises:
        ChildFailedError: The recovery failed; the message is its output.
    """
    with _start("recover", "--json", "--", str(directory.path)) as child:
        try:
            told, complaint = child.communicate()
        finally:
            child.kill()
    # Status 1 also has a report, of lost or invented acks.
    if child.returncode not in {0, 1} or not told:
        raise ChildFailedError(f"the recovery failed: {_last_line(complaint) or child.returncode}")
    report: list[dict[str, Any]] = json.loads(told)["subscriptions"]
    return report


def _start(command: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - our own command
        # Without -P, a directory in the current one could shadow our packages.
        dying.command_of([sys.executable, "-P", "-m", "ackstate.analysis.cli", command, *arguments]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
    )


def _first_line(child: subprocess.Popen[str]) -> str:
    """Return the first line of a child's output, empty if it ends without one.

    Raises:
        ChildFailedError: It prints nothing within the limit.
    """
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        if not selector.select(_PATIENCE_S):
            raise ChildFailedError(f"process {child.pid} printed nothing for {_PATIENCE_S:.0f} s, and was killed")
    return child.stdout.readline().strip()


def _failed(child: subprocess.Popen[str], what: str) -> ChildFailedError:
    try:
        _, complaint = child.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return ChildFailedError(f"the {what} did not report {READY}, and was killed")
    return ChildFailedError(f"the {what} ended by itself: {_last_line(complaint) or child.returncode}")


def _last_line(complaint: str) -> str:
    """Return the last line of a command on standard error, without its name."""
    return next(iter(complaint.strip().splitlines()[-1:]), "").removeprefix("ackstate: ")


def _note_crash(directory: BrokerDirectory) -> int:
    """Write the crash of every subscription into the recording and return its time."""
    # Read the clock first: reading the recording takes a while, during which no broker lived.
    now_ms = time.time_ns() // 1_000_000
    recorded = histories(read_recording(directory.recording))
    ts_ms = max([now_ms, *(history.last_ts_ms for history in recorded.values())])
    with Recorder(directory.recording) as recorder:
        for subscription in SUBSCRIPTIONS:
            recorder.record(TOPIC, subscription, [Event(ts_ms, EventKind.CRASH)])
    return ts_ms
