"""The speed of the replay of a policy whose gate stops dispatch, compared with one whose gate stays open."""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING

import numpy as np

from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import CHUNK_EVENTS
from ackstate.analysis.trace.generate import TracePlan
from benchmarks.measurement import Against, BenchmarkReport, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

EVENTS = 16 * CHUNK_EVENTS
RUNS = 3
LIMITS = (10_000_000, 100_000, 20_000, 5_000)
VECTORISED = {
    ("key_shared", 20_000): 0.296, ("key_shared", 5_000): 0.327,
    ("one_stuck_consumer", 100_000): 1.534, ("one_stuck_consumer", 20_000): 1.670, ("one_stuck_consumer", 5_000): 1.445,
    ("many_consumers", 100_000): 0.541, ("many_consumers", 20_000): 0.798, ("many_consumers", 5_000): 0.924,
    ("heavy_traffic", 100_000): 0.775, ("heavy_traffic", 20_000): 1.095, ("heavy_traffic", 5_000): 0.850,
}  # fmt: skip
"""Million events a CPU second of a replay with 600 lines more, which computed a gate's counts after each message as
arrays while it stayed closed or open. Measured in turn with this one, whose gate took 1.9 to 7 times as long."""
ABOUT = (
    f"One generated subscription of {EVENTS:,} events at 5,000 messages a second, a persist each second, one core, "
    "events in memory, under `max_unpersisted_ack_record_bytes`. Blocked: the share of the time in which dispatch "
    "waited. Vectorised: a replay that took deliveries and acks at a closed gate many at once, which 600 lines and 350 "
    "of tests were not worth. `sweep --engine local` of 10 million `key_shared` events under five such limits, one "
    "of which blocks, took 142 CPU seconds and with that replay 64; with limits that do not block both take as long."
)


def chunks_of(workload: str) -> tuple[list[EventChunk], dict[int, int]]:
    """Return the chunks of one subscription, and its message log."""
    plan = TracePlan(workload, EVENTS, subscriptions=1, topics=1)
    chunks = [
        EventChunk(*(np.asarray(column, np.int64) for column in each[:5]))
        for each in plan.series_of(0, []).chunks(EVENTS)
    ]
    log: dict[int, int] = {}
    for chunk in chunks:
        for ledger_id in np.unique(chunk.ledger_id[chunk.ledger_id >= 0]).tolist():
            highest = int(chunk.last_entry[chunk.ledger_id == ledger_id].max())
            log[ledger_id] = max(log.get(ledger_id, 0), highest + 1)
    return chunks, log


def replayed(chunks: Sequence[EventChunk], log: dict[int, int], limit: int) -> float:
    """Replay the chunks, and return for which share of the time dispatch was blocked."""
    replay = SubscriptionReplay([Policy.from_mapping({"max_unpersisted_ack_record_bytes": limit})], log)
    for chunk in chunks:
        replay.take(chunk)
    begin_ms, end_ms = int(chunks[0].ts_ms[0]), int(chunks[-1].ts_ms[-1])
    replay.end(end_ms)
    return replay.curves[0].costs.blocked_ms / (end_ms - begin_ms)


def measure(report: BenchmarkReport, workload: str) -> None:
    """Time all limits in turn."""
    chunks, log = chunks_of(workload)
    blocked = {limit: replayed(chunks, log, limit) for limit in LIMITS}
    taken: dict[int, list[float]] = {limit: [] for limit in LIMITS}
    for _ in range(RUNS):
        for limit in LIMITS:
            begun = process_time()
            replayed(chunks, log, limit)
            taken[limit].append(EVENTS / (process_time() - begun) / 1e6)
    for limit, rates in taken.items():
        vectorised = VECTORISED.get((workload, limit))
        against = None if vectorised is None else Against("vectorised", vectorised)
        spread = Spread.of(rates)
        report.time(
            f"{workload}, limit {limit:,}, blocked {blocked[limit]:.0%}", "million events/CPU s", spread, against
        )


if __name__ == "__main__":
    report = BenchmarkReport("gated_replay", ABOUT)
    for workload in ("in_order", "key_shared", "one_stuck_consumer", "many_consumers", "heavy_traffic"):
        measure(report, workload)
    report.publish()
