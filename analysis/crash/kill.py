"""Start a broker in a process of its own, kill it at a random moment, and have another process recover it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ackstate.errors import AckStateError
from analysis.crash.broker import SUBSCRIPTIONS, TOPIC
from analysis.trace.entry_set import histories
from analysis.trace.events import Event, EventKind
from analysis.trace.recorder import Recorder, read_recording, segments
from cursor.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.crash.broker import BrokerSettings

READY = "ready"
_POLL_S = 0.05


class ChildFailedError(AckStateError):
    """A process that we started ended by itself; the message is what it said."""


class DirectoryInUseError(AckStateError):
    """A directory holds something that is not ours to replace; nothing in it was changed."""


@dataclass(frozen=True, slots=True)
class BrokerDirectory:
    """Where a broker lives: its store and its recording.

    Attributes:
        path: The directory.
    """

    path: Path

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self.path / "store"

    @property
    def recording(self) -> Path:
        """The recording's directory."""
        return self.path / "recording"

    def clear(self) -> None:
        """Remove what an earlier broker left here, after making sure that it is a broker's and that it is over.

        Raises:
            DirectoryInUseError: There is something else here.
            StoreLockedError: A broker is running here.
            UnsupportedVersionError: A newer release wrote the store.
            StoreError: What stands in the store's place is no store of ours.
        """
        if not self.path.exists():
            return
        known = {self.store.name, self.recording.name}
        strangers = sorted(entry.name for entry in self.path.iterdir() if entry.name not in known)
        if self.recording.exists():
            ours = {segment.name for segment in segments(self.recording)}
            strangers += sorted(entry.name for entry in self.recording.iterdir() if entry.name not in ours)
        if strangers:
            raise DirectoryInUseError(f"{self.path}: not a broker's directory, it holds {strangers[0]!r}")
        if self.store.exists():
            SqliteStore(self.store).close()
        shutil.rmtree(self.path)


@dataclass(frozen=True, slots=True)
class Kill:
    """A broker's death.

    Attributes:
        kill_ts_ms: By then it was dead: when it had been reaped, or its last event if that is later.
        lived_ms: From its first step to the signal.
    """

    kill_ts_ms: int
    lived_ms: int


def run_and_kill(
    directory: BrokerDirectory,
    settings: BrokerSettings,
    *,
    lives_ms: tuple[int, int],
    waiting: Callable[[float], None] = lambda _share: None,
) -> Kill:
    """Start a broker, kill it with SIGKILL at a moment drawn from its seed, and note the crash in its recording.

    Args:
        directory: An empty or missing directory.
        settings: What the broker does.
        lives_ms: The kill falls between these two, ms after the broker's first step.
        waiting: Told, every now and then, which share of the wait is over.

    Raises:
        ChildFailedError: The broker ended before it was killed; the message is what it said.
    """
    moment_ms = random.Random(f"kill {settings.seed}").randint(*lives_ms)  # noqa: S311 - a moment, not a secret
    # It ends by itself soon after, should its parent die first.
    options = ["--seconds", str(lives_ms[1] / 1_000 + 30)]
    options += [f"--{field.name.replace('_', '-')}={getattr(settings, field.name)}" for field in fields(settings)]
    with _start("broker", str(directory.path), *options) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline().strip() != READY:
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
    """Have a second process recover every cursor; return what it reports, as `Recovered.to_json`.

    Raises:
        ChildFailedError: It could not; the message is what it said.
    """
    with _start("recover", str(directory.path), "--json") as child:
        assert child.stdout is not None
        told = child.stdout.read()
        if child.wait() != 0:
            raise _failed(child, "recovery")
    report: list[dict[str, Any]] = json.loads(told)["subscriptions"]
    return report


def _start(command: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "analysis.cli", command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
    )


def _failed(child: subprocess.Popen[str], what: str) -> ChildFailedError:
    _, said = child.communicate()
    lines = said.strip().splitlines()
    return ChildFailedError(f"the {what} ended by itself: {lines[-1] if lines else child.returncode}")


def _note_crash(directory: BrokerDirectory) -> int:
    """Write the crash of every subscription into the recording and return its time."""
    recorded = histories(read_recording(directory.recording))
    now_ms = time.time_ns() // 1_000_000
    ts_ms = max([now_ms, *(history.last_ts_ms for history in recorded.values())])
    with Recorder(directory.recording) as recorder:
        for subscription in SUBSCRIPTIONS:
            recorder.record(TOPIC, subscription, [Event(ts_ms, EventKind.CRASH)])
    return ts_ms
