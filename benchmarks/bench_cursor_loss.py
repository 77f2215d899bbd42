"""The acked messages that a crash right after a persist loses, by pattern and range limit."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore
from ackstate.selection import Keep
from benchmarks.acked_entries import alternating, clustered, ninety_nine_percent, random_half
from benchmarks.measurement import Against, BenchmarkReport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ABOUT = (
    "Acks in one call, one persist, a crash: the acks that a reopened cursor does not have, by the pattern of the "
    "acks. Pulsar's figures are its own losses of 20 thousand ranges under its limit of 10 thousand, in list form, of "
    "which it keeps the lowest; in words form it loses 0, 37.6, 97.5 and 98.8 % in the order of the patterns."
)
LEDGER = 7
RANGES = 20_000
LIMIT = 10_000
PATTERNS = {
    "alternating": alternating(RANGES) + 1,
    "random half": random_half(4 * RANGES) + 1,
    "99 % acked": ninety_nine_percent(101 * RANGES) + 1,
    "clustered": clustered(RANGES) + 1,
}
PULSAR = Against("Pulsar, list", 50)
CONFIGURATIONS = {
    "no limit": CursorConfig(),
    "lowest 10 k": CursorConfig(range_count_max=LIMIT, keep=Keep.LOWEST),
    "widest 10 k": CursorConfig(range_count_max=LIMIT, keep=Keep.WIDEST),
    "Pulsar's format, lowest 10 k": CursorConfig(format=Format.PULSAR, range_count_max=LIMIT, keep=Keep.LOWEST),
    "Pulsar's format, widest 10 k": CursorConfig(format=Format.PULSAR, range_count_max=LIMIT, keep=Keep.WIDEST),
}


def loss(acked: npt.NDArray[np.uint32], config: CursorConfig) -> float:
    """Return the share of acked messages, in percent, that a crash right after a persist loses."""
    log = LedgerMap.from_counts({LEDGER: int(acked[-1]) + 2})
    with closing(MemoryStore()) as store:
        cursor = opened(store, log, config)
        cursor.ack_entries(LEDGER, acked, now_ms=0)
        cursor.persist(now_ms=0)
        after = opened(store, log, config)
        lost = after.backlog - cursor.backlog
        assert lost == cursor.redelivery_if_crashed
    return 100 * lost / len(acked)


def opened(store: MemoryStore, log: LedgerMap, config: CursorConfig) -> ManagedCursor:
    """Open the only cursor."""
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)


def measure_loss(report: BenchmarkReport) -> None:
    """Measure the lost acks of each configuration for each pattern."""
    for pattern, acked in PATTERNS.items():
        for name, config in CONFIGURATIONS.items():
            lost = loss(acked, config)
            assert lost == 0 or name != "no limit"
            report.count(f"lost, {pattern}, {name}", "% of the acked", lost, PULSAR)


if __name__ == "__main__":
    report = BenchmarkReport("cursor_loss", ABOUT)
    measure_loss(report)
    report.publish()
