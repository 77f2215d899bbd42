"""The overhead of recording a cursor."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.analysis.trace.parquet import write_trace
from ackstate.analysis.trace.recorder import read_recording
from ackstate.analysis.trace.recording import Recording
from benchmarks.measurement import Against, BenchmarkReport, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT = (
    "A cursor on a store in memory, recorded into a file that is not synced, and the same calls unrecorded; an event "
    "is with the operating system when the call returns. An ack in order moves the mark-delete position, one out of "
    "order leaves a hole. In bulk, each run of entries is an event. Bytes are those of the recording, and of the trace "
    "that it becomes."
)
LEDGER = 3
ACKS = 20_000
BULK = 100_000
PERSISTS = 500
UNRECORDED = "not recorded"


def opened(recording: Recording | None = None) -> ManagedCursor:
    """Open a new cursor, recorded or not."""
    ledgers = LedgerMap.from_counts({LEDGER: 4 * BULK})
    cursor = ManagedCursor.open(MemoryStore(), topic="t", subscription="s", ledgers=ledgers, now_ms=0)
    if recording is not None:
        recording.follow(cursor, topic="t", subscription="s", now_ms=0)
    return cursor


def ack_in_order(cursor: ManagedCursor) -> None:
    """Ack one after the other."""
    for entry_id in range(ACKS):
        cursor.ack(Position(LEDGER, entry_id), now_ms=entry_id)


def ack_out_of_order(cursor: ManagedCursor) -> None:
    """Ack every other entry."""
    for entry_id in range(1, 2 * ACKS, 2):
        cursor.ack(Position(LEDGER, entry_id), now_ms=entry_id)


def ack_cumulatively(cursor: ManagedCursor) -> None:
    """Move the mark-delete position entry by entry."""
    for entry_id in range(ACKS):
        cursor.mark_delete(Position(LEDGER, entry_id), now_ms=entry_id)


def ack_run(cursor: ManagedCursor) -> None:
    """Ack many entries at once, neighbours all of them."""
    cursor.ack_entries(LEDGER, range(1, BULK), now_ms=1)


def ack_holes(cursor: ManagedCursor) -> None:
    """Ack many entries at once, no two of them neighbours."""
    cursor.ack_entries(LEDGER, np.arange(1, 2 * BULK, 2, dtype=np.uint32), now_ms=1)


def ack_and_persist(cursor: ManagedCursor) -> None:
    """Persist after each ack."""
    for entry_id in range(1, 2 * PERSISTS, 2):
        cursor.ack(Position(LEDGER, entry_id), now_ms=entry_id)
        cursor.persist(now_ms=entry_id)


WORK: dict[str, tuple[Callable[[ManagedCursor], None], int]] = {
    "an ack in order": (ack_in_order, ACKS),
    "an ack out of order": (ack_out_of_order, ACKS),
    "a cumulative ack": (ack_cumulatively, ACKS),
    "an ack and a persist: three events": (ack_and_persist, PERSISTS),
    f"{BULK:,} neighbours in a call, each": (ack_run, BULK),
    f"{BULK:,} holes in a call, each": (ack_holes, BULK),
}


def measure_calls(report: BenchmarkReport, directory: Path) -> None:
    """Each call recorded, beside the same unrecorded."""
    numbers = iter(range(1_000_000))
    timings = {}
    for name, (work, count) in WORK.items():
        timings[f"{name}: {UNRECORDED}"] = Timing(work, opened, 1e3 * count)
        timings[name] = Timing(work, lambda: opened(Recording(directory / str(next(numbers)))), 1e3 * count)
    spreads = timed_in_turn(timings)
    for name in WORK:
        bare = report.time(f"{name}: {UNRECORDED}", "us", spreads[f"{name}: {UNRECORDED}"])
        report.time(f"{name}: recorded", "us", spreads[name], Against("ours, bare", bare.median))


def measure_bytes(report: BenchmarkReport, directory: Path) -> None:
    """The size of an event."""
    with Recording(directory / "weighed") as recording:
        ack_out_of_order(opened(recording))
    events = write_trace(read_recording(directory / "weighed"), directory / "trace")
    for what, place in (("the recording", "weighed"), ("the trace", "trace")):
        size = sum(path.stat().st_size for path in (directory / place).iterdir())
        report.count(f"an ack out of order in {what}", "bytes", round(size / events, 2))


if __name__ == "__main__":
    report = BenchmarkReport("recorder", ABOUT)
    with TemporaryDirectory() as place:
        measure_calls(report, Path(place))
        measure_bytes(report, Path(place))
    report.publish()
