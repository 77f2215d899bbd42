"""Predicts the redelivery of recorded brokers after their ends, from the files of the broker interceptor."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from ackstate.analysis.pulsar.broker_runs import SubscriptionRun, broker_runs
from ackstate.analysis.pulsar.policy import PolicyName
from ackstate.analysis.pulsar.recorded_run import End
from ackstate.analysis.pulsar.replay import Prediction, predict
from ackstate.analysis.wording import counted, dropped_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_SECOND_MS = 1_000


class BrokerPrediction(NamedTuple):
    """The prediction for a subscription at the end of a process."""

    recorded: SubscriptionRun
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; messages are named ``ledger:entry``, in a batch ``ledger:entry:index``."""
        run = self.recorded.run
        return {
            "topic": run.topic,
            "subscription": self.recorded.subscription,
            "process": self.recorded.life.name,
            "end": run.end.value,
            "ended_ms": run.ended_ms,
            "low": self.prediction.low,
            "high": self.prediction.high,
            "candidates": [[self._name(message) for message in each] for each in self.prediction.candidates],
            "dropped_events": self.recorded.dropped,
            "is_reset": self.recorded.is_reset,
        }

    def _name(self, message: int) -> str:
        first_messages = self.recorded.run.first_messages
        entry = bisect_right(first_messages, message) - 1
        is_batch = first_messages[entry + 1] - first_messages[entry] > 1
        index = f":{message - first_messages[entry]}" if is_batch else ""
        return f"{self.recorded.run.positions[entry]}{index}"


def predict_broker_runs(
    files: Sequence[Path], name: PolicyName = PolicyName.PULSAR_4, *, ledger_creation_ms: float | None = None
) -> Iterator[BrokerPrediction]:
    """Yield the prediction for each subscription and process; raises as `broker_runs` and `predict`."""
    for recorded in broker_runs(files):
        yield BrokerPrediction(recorded, predict(recorded.run, name, ledger_creation_ms=ledger_creation_ms))


def broker_table(found: Sequence[BrokerPrediction]) -> Table:
    """Return a table, a row a subscription and process."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("process ended", "topic", "subscription"):
        table.add_column(column, overflow="fold")
    for column in ("acked", "redelivered", "sets"):
        table.add_column(column, justify="right")
    for (subscription, run, *_), prediction in found:
        ended = datetime.fromtimestamp(run.ended_ms / _SECOND_MS, UTC).isoformat(sep=" ", timespec="seconds")
        numbers = (prediction.low, prediction.high)
        shown = f"{numbers[0]:,}" if numbers[0] == numbers[1] else f"{numbers[0]:,} to {numbers[1]:,}"
        how = "closed" if run.end is End.TERM else "last seen"
        cells = (f"{ended} {how}", run.topic, subscription, f"{len(run.acked_messages):,}")
        table.add_row(*cells, shown, f"{len(prediction.candidates)}")
    return table


def remarks(found: Sequence[BrokerPrediction]) -> list[str]:
    """Return the limits of the predictions, a line each."""
    dropped = {each.recorded.life.name: each.recorded.dropped for each in found}
    lines = [dropped_line(sum(dropped.values()))] if any(dropped.values()) else []
    resets = sum(each.recorded.is_reset for each in found)
    if resets:
        lines.append(f"{counted(resets, 'run')} with a seek or transactions, which the prediction does not follow")
    return lines
