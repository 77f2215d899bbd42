"""The bytes per message of an index, measured and as the index reports them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ackstate.delay import TopicDelayIndex
from benchmarks.delay.footprint import Ruler, growth, in_new_process
from benchmarks.delayed_messages import TICK_MS, mixed_delays
from benchmarks.measurement import Against, BenchmarkReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ABOUT = (
    "Growth of a process of its own, by the number of waiting messages: due within an hour, any time as likely as "
    "another, tick 1 s, in ledgers of 50 thousand. One by one: `add`. In bulk: `learn`, a ledger a call. Resident: "
    "pages; with fewer than a million messages, those of as many indexes as make a million. Traced: `tracemalloc` and, "
    "since bitmaps lie outside of it, their containers and structures. Its own figure is `memory_bytes`. Pulsar: heap, "
    "measured with 100 thousand and with 1 million; its own figure is 7 to 25 times too low."
)
COUNTS = (10_000, 100_000, 1_000_000, 10_000_000)
ENOUGH = 1_000_000
LIMITS = {1_000_000: Against("limit", 16), 10_000_000: Against("limit", 12)}
PULSAR_BYTES = {100_000: Against("Pulsar", 74, 78)}  # and 45 to 49 with 1 million
UNIT = "bytes a message"
OWN = "its own figure"


def one_by_one(count: int) -> TopicDelayIndex:
    index = TopicDelayIndex(tick_time_ms=TICK_MS)
    for ledger in mixed_delays(count):
        for position, deliver_at_ms in ledger.one_by_one():
            index.add(position, deliver_at_ms=deliver_at_ms, now_ms=0)
    return index


def in_bulk(count: int) -> TopicDelayIndex:
    index = TopicDelayIndex(tick_time_ms=TICK_MS)
    for ledger in mixed_delays(count):
        index.learn(ledger.one_by_one())
    return index


WAYS: dict[str, Callable[[int], TopicDelayIndex]] = {"one by one": one_by_one, "in bulk": in_bulk}


def bytes_a_message(way: str, count: int, ruler: Ruler) -> tuple[float, float]:
    """Return the growth of this process per message, and the index's own figure."""
    fill = WAYS[way]
    fill(min(count, 100_000))  # A warm-up: the allocations of the first use do not belong to the messages.
    built: list[TopicDelayIndex] = []
    copies = max(1, ENOUGH // count) if ruler is Ruler.RESIDENT else 1

    def build() -> object:
        built.extend(fill(count) for _ in range(copies))
        return built

    grown = growth(build, ruler)
    return grown / copies / count, built[0].memory_bytes / count


def row(count: int, way: str, what: str) -> str:
    """Name a figure."""
    return f"{count:,} {way}: {what}"


def measure(report: BenchmarkReport, counts: Sequence[int] = COUNTS) -> None:
    """Report all sizes, filled one by one and in bulk; one by one it takes minutes to trace."""
    for count in counts:
        for way, ruler in (("one by one", Ruler.RESIDENT), ("in bulk", Ruler.RESIDENT), ("in bulk", Ruler.TRACED)):
            taken, own = in_new_process("benchmarks.delay.bench_index_memory", way, count, ruler.value)
            report.count(row(count, way, ruler.value), UNIT, taken, LIMITS.get(count) or PULSAR_BYTES.get(count))
            report.count(f"{row(count, way, OWN)}, beside {ruler.value}", UNIT, own, Against("measured", taken))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(*bytes_a_message(sys.argv[1], int(sys.argv[2]), Ruler(sys.argv[3])))
    else:
        report = BenchmarkReport("delay_index_memory", ABOUT)
        measure(report)
        report.publish()
