"""`ackstate broker` runs a small broker until it is killed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import (
    LONGEST,
    NUMBER_MAX,
    BrokerDirectoryArgument,
    FlushIntervalOption,
    between,
    duration_option,
)
from ackstate.analysis.durations import Duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ackstate.analysis.demo.broker import DemoSettings


def _record_bytes_limit(number: int) -> int:
    from ackstate.limits import GateLimits

    try:
        return GateLimits(max_unpersisted_ack_record_bytes=number).max_unpersisted_ack_record_bytes
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def broker(
    directory: BrokerDirectoryArgument,
    seconds: Annotated[
        Duration, duration_option(plain_unit="s", most=LONGEST, help="Stop after this time.")
    ] = Duration(60_000),
    seed: Annotated[int, typer.Option(metavar="N", help="Decides the workload.")] = 1,
    messages_per_second: Annotated[
        int, typer.Option(metavar="N", callback=between(1, NUMBER_MAX), help="Publish rate.")
    ] = 3_000,
    entries_per_ledger_max: Annotated[
        int,
        typer.Option(
            metavar="N", callback=between(1, NUMBER_MAX), help="Entries of a ledger before the log rolls over."
        ),
    ] = 2_500,
    delayed_share: Annotated[
        float, typer.Option(metavar="X", callback=between(0, 1), help="Share of delayed messages, 0 to 1.")
    ] = 0.1,
    delay_max: Annotated[
        Duration,
        duration_option("--delay-ms-max", plain_unit="ms", least="1ms", most=LONGEST, help="Longest delay."),
    ] = Duration(400),
    flush_interval: FlushIntervalOption = Duration(250),
    max_unpersisted_ack_record_bytes: Annotated[
        int,
        typer.Option(metavar="N", callback=_record_bytes_limit, help="Stop sending at this many bytes; 0 is off."),
    ] = 16 * 1024,
    max_unacked_messages: Annotated[
        int, typer.Option(metavar="N", callback=between(0, NUMBER_MAX), help="Stop sending at this many; 0 is off.")
    ] = 1_000,
) -> None:
    """Run a small broker until it is killed: one topic, three subscriptions, all recorded.

    It prints "ready" when it has started. In a directory that a killed broker
    left, it recovers first and continues.
    """
    from ackstate.analysis.demo.broker import DemoSettings

    settings = DemoSettings(
        seed, messages_per_second, entries_per_ledger_max, delayed_share, delay_max.ms, flush_interval.ms,
        max_unpersisted_ack_record_bytes, max_unacked_messages,
    )  # fmt: skip
    _run_broker(directory, settings, lives_ms=seconds.ms)


def _run_broker(directory: Path, settings: DemoSettings, *, lives_ms: int) -> None:
    from ackstate.analysis.demo.broker import DemoBroker, run
    from ackstate.analysis.demo.directory import BrokerDirectory
    from ackstate.analysis.demo.kill import READY
    from ackstate.analysis.demo.recovery import recover as recover_all
    from ackstate.analysis.trace.recorder import Recorder

    place = BrokerDirectory(directory)
    now_ms = _clock()
    with place.begun_or_new() as (store, frames), Recorder(place.recording) as recorder:
        if frames:
            recover_all(store, frames, recorder=recorder, now_ms=now_ms())
        live = DemoBroker(store, recorder, settings, now_ms=now_ms())
        console.write(f"{READY}\n")
        run(live, now_ms=now_ms, until_ms=now_ms() + lives_ms)


def _clock() -> Callable[[], int]:
    """Return a clock in ms since the epoch that never goes backwards."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1_000_000
