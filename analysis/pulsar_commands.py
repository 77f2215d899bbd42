"""`ackstate pulsar`: what real Pulsar brokers redelivered, and what they would redeliver now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ackstate.analysis.pulsar.replay_command import ReplayCommand
from ackstate.analysis.pulsar.snapshot.command import SnapshotCommand

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress


def add_pulsar_commands(
    app: typer.Typer, show: Callable[..., None], write: Callable[[str], None], progress: Callable[[], Progress]
) -> None:
    """Add the group `pulsar`.

    Args:
        app: The command `ackstate`.
        show: Writes tables and lines to standard output.
        write: Writes text there.
        progress: Returns what shows progress.
    """
    group = typer.Typer(help="What real Pulsar brokers redelivered, and what they would redeliver now.")
    group.command("replay", short_help="Predict what killed brokers redelivered from their ACK commands.")(
        ReplayCommand(show, write, progress).replay
    )
    group.command("snapshot", short_help="What comes back of live subscriptions if their broker dies now.")(
        SnapshotCommand(show, write, progress).snapshot
    )
    app.add_typer(group, name="pulsar", short_help="What Pulsar brokers redelivered, or would now.")
