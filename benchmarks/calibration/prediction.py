"""The prediction of the estimate under a policy, from a trace alone: at an instant, and as a mean over time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

import numpy as np

from ackstate.analysis.crash.layer import scratch_directory
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.spark.session import readable_failures
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace.parquet import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import SparkSession

    from ackstate.analysis.replay.policy import Policy
    from benchmarks.calibration.workload import CalibrationWorkload, Instant


def estimated(policy: Policy) -> Policy:
    """Return the policy without the limit that stops dispatch: the trace was recorded under it and shows it already."""
    return replace(policy, max_unpersisted_ack_record_bytes=0)


@final
class TracePrediction:
    """One replay of one trace.

    Args:
        workload: The workload; only its trace is used.
        policy: Under which it is replayed.
        instants: The instants of the predictions.
    """

    def __init__(self, workload: CalibrationWorkload, policy: Policy, instants: Iterable[Instant]) -> None:
        self._workload = workload
        events = np.array([event[:5] for event in workload.own], np.int64)
        whole = EventChunk(*events.T)
        self._ts_ms = whole.ts_ms
        replay = SubscriptionReplay([estimated(policy)], workload.log)
        # The state right after an event is the end of a chunk that ends there.
        counts = sorted({workload.own_count(instant) for instant in instants} - {0} | {len(events)})
        self._after: dict[int, int] = {0: 0}
        times, values, begin = [], [], 0
        for count in counts:
            (points,) = replay.take(whole.part(begin, count))
            self._after[count] = int(points.value[-1])
            times.append(points.ts_ms)
            values.append(points.value)
            begin = count
        (points,) = replay.end(workload.end_ms)
        self._times = np.concatenate((*times, points.ts_ms))
        self._values = np.concatenate((*values, points.value))
        held, durations = replay.curves[0].sum.histogram.columns()
        self.expected = float(held @ durations) / (workload.end_ms - workload.begin_ms)

    def at(self, instant: Instant) -> int:
        """Return how many acked messages are redelivered if the process dies then: at one of the given instants."""
        count = self._workload.own_count(instant)
        if not count or self._ts_ms[count - 1] >= instant.until_ms:
            return self._after[count]
        # The last of the points until then holds.
        at = int(np.searchsorted(self._times, instant.until_ms, "left")) - 1
        return int(self._values[at]) if at >= 0 else 0


def expected_by_spark(spark: SparkSession, replayed: Sequence[tuple[CalibrationWorkload, Policy]]) -> list[float]:
    """Return the mean over time of each trace under each policy, as the Spark job has it.

    Raises:
        TraceError: Spark failed.
    """
    found: list[float] = [0.0] * len(replayed)
    by_workload: dict[CalibrationWorkload, list[int]] = {}
    for number, (workload, _) in enumerate(replayed):
        by_workload.setdefault(workload, []).append(number)
    with scratch_directory("calibration-trace") as directory:
        for at, (workload, numbers) in enumerate(by_workload.items()):
            path = directory / f"{at}"
            write_trace(workload.frames(), path)
            policies = [estimated(replayed[number][1]) for number in numbers]
            with readable_failures(path):
                rows = estimates(SparkSource.of(spark, path), policies, scopes=("subscription",)).collect()
            for row in rows:
                found[numbers[row["policy"]]] = row["expected"]
    return found
