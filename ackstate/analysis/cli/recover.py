"""`ackstate recover` recovers the cursors of a dead broker."""

from __future__ import annotations

import time

import typer

from ackstate.analysis.cli import console, tables
from ackstate.analysis.cli.options import BrokerDirectoryArgument, JsonOption


def recover(directory: BrokerDirectoryArgument, json: JsonOption = False) -> None:
    """Recover every cursor of a dead broker, and report which acked messages are redelivered.

    Opening a cursor takes it over from its earlier owner, as a restarted broker
    does; no ack is changed. Redeliveries are added to the recording, so that
    a second recovery reports no more of them.
    """
    from ackstate.analysis.demo.directory import BrokerDirectory
    from ackstate.analysis.demo.recovery import recover as recover_all
    from ackstate.analysis.trace.recorder import Recorder

    place = BrokerDirectory(directory)
    with place.begun() as (store, frames), Recorder(place.recording) as recorder:
        results = recover_all(store, frames, recorder=recorder, now_ms=time.time_ns() // 1_000_000)
    if json:
        console.write_json({"subscriptions": [result.to_json() for result in results]})
    else:
        console.show(tables.recovery_table(results), tables.redelivered_table(results))
    if any(result.lost or result.invented for result in results):
        raise typer.Exit(1)
