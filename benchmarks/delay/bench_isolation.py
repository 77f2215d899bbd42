"""The effect of four slow or faulty subscriptions on the delay of a thousand others, and on the memory of the topic."""

from __future__ import annotations

import gc
from typing import NamedTuple

import numpy as np

from benchmarks.delay.footprint import owned_bytes
from benchmarks.delay.isolation import BURDENS, DelayedTraffic, IsolatedTopic, Subscriber
from benchmarks.delay.isolation_peers import PeerTopic, ProposedTopic, TrackersTopic
from benchmarks.measurement import Against, BenchmarkReport, Spread

ABOUT = (
    "A topic with a shared index and 1,000 subscriptions, of which one never polls (stuck), one polls at every 20th "
    "tick for 100 messages (slow), one acks all but its lowest message (hole) and one is closed and opened every 10 "
    "ticks and seeks to the beginning every 30 (churn); without these four, 996. 1,000 messages are published at each "
    "of 100 ticks of 1 s, delayed by up to 50 s, any time as likely as another. At each tick all poll in turn, on one "
    "thread: a lag is the time from the begin of that round until a healthy subscription has its messages. In each run "
    "both topics take turns tick by tick. None of the healthy was handed a message in a later tick than it was due: "
    "that is asserted. Memory is that of Python and CRoaring for the index and its views, without the ack state; over "
    "300 ticks also with 10 subscriptions, the four among them, for a tracker a subscription and PIP-448's design."
)
HEALTHY = 996
PEERS_HEALTHY = 6
PEERS_TICKS = 300
RUNS = 5
Curve = list[tuple[float, float]]
SAMPLE_TICKS = 5
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
WITH, WITHOUT = "with the four", "without"
TRACKERS, PROPOSED = f"tracker a subscription, {WITH}", f"PIP-448, {WITH}"


class IsolationResult(NamedTuple):
    """The measurements of both topics in one run.

    Attributes:
        lags_ms: By topic and name of a quantile.
        memory: By topic, bytes by tick.
    """

    lags_ms: dict[str, dict[str, float]]
    memory: dict[str, Curve]


def run(traffic: DelayedTraffic, *, healthy: int) -> IsolationResult:
    """Run a topic with the four and one without, in turns."""
    topics = {
        WITH: IsolatedTopic(traffic, healthy=healthy, burdens=BURDENS),
        WITHOUT: IsolatedTopic(traffic, healthy=healthy, burdens=()),
    }
    lags: dict[str, list[int]] = {name: [] for name in topics}
    memory: dict[str, list[tuple[float, float]]] = {name: [] for name in topics}
    # Not within a round: a garbage collection would look like a delay by another subscription.
    gc.collect()
    gc.disable()
    for tick in range(traffic.ticks):
        for name in sorted(topics, reverse=bool(tick % 2)):
            topic = topics[name]
            topic.publish(tick)
            lags[name] += topic.lags_ns(tick)
            if tick % SAMPLE_TICKS == 0:
                memory[name].append((tick, owned_bytes(topic.owned(), outside=(Subscriber,))))
    gc.enable()
    return IsolationResult({name: quantiles_ms(lags[name]) for name in topics}, dict(memory))


def quantiles_ms(lags_ns: list[int]) -> dict[str, float]:
    return {name: float(np.quantile(lags_ns, quantile)) / 1e6 for name, quantile in QUANTILES.items()}


def memory_over_time(topic: PeerTopic, traffic: DelayedTraffic) -> Curve:
    """Return bytes by tick."""
    curve = []
    for tick in range(traffic.ticks):
        topic.step(tick)
        if tick % SAMPLE_TICKS == 0:
            curve.append((tick, owned_bytes(topic.owned(), outside=(Subscriber,))))
    return curve


def measure_lags(report: BenchmarkReport, traffic: DelayedTraffic, *, healthy: int, runs: int) -> None:
    """Report the lags of the healthy ones, and the memory that the topic takes meanwhile."""
    outcomes = [run(traffic, healthy=healthy) for _ in range(runs)]
    for quantile in QUANTILES:
        spreads = {name: _spread([each.lags_ms[name][quantile] for each in outcomes]) for name in (WITHOUT, WITH)}
        report.time(lag_row(quantile, WITHOUT), "ms", spreads[WITHOUT])
        report.time(lag_row(quantile, WITH), "ms", spreads[WITH], Against(WITHOUT, spreads[WITHOUT].median))
        ratios = [each.lags_ms[WITH][quantile] / each.lags_ms[WITHOUT][quantile] for each in outcomes]
        report.time(f"{lag_row(quantile, WITH)} by that {WITHOUT}, run by run", "times", _spread(ratios))
    _report_memory(report, {f"{healthy} others, {name}": curve for name, curve in outcomes[0].memory.items()})


def measure_memory(report: BenchmarkReport, traffic: DelayedTraffic, *, healthy: int) -> None:
    """Report the memory that several designs take."""
    topics: dict[str, PeerTopic] = {
        TRACKERS: TrackersTopic(traffic, healthy=healthy),
        PROPOSED: ProposedTopic(traffic, healthy=healthy),
        f"shared index, {WITH}": IsolatedTopic(traffic, healthy=healthy, burdens=BURDENS),
        f"shared index, {WITHOUT}": IsolatedTopic(traffic, healthy=healthy, burdens=()),
    }
    curves = {name: memory_over_time(topic, traffic) for name, topic in topics.items()}
    _report_memory(report, {f"{healthy} others, {name}": curve for name, curve in curves.items()})


def _report_memory(report: BenchmarkReport, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        report.count(f"{name}: memory at most", "kB", max(size for _, size in curve) / 1e3)
        report.count(f"{name}: memory at the end", "kB", curve[-1][1] / 1e3)


def lag_row(quantile: str, name: str) -> str:
    """Name a figure."""
    return f"lag of the others, {quantile}, {name}"


def _spread(figures: list[float]) -> Spread:
    return Spread.of(figures)


if __name__ == "__main__":
    report = BenchmarkReport("delay_isolation", ABOUT)
    measure_lags(report, DelayedTraffic(), healthy=HEALTHY, runs=RUNS)
    measure_memory(report, DelayedTraffic(publish_ticks=PEERS_TICKS), healthy=PEERS_HEALTHY)
    report.publish()
