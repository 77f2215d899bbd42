"""Compares predictions with measurements."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from ackstate.analysis.pulsar.policy import PolicyName
from ackstate.analysis.pulsar.recorded_run import for_each_line, message_numbers, parse_object, parse_run
from ackstate.analysis.pulsar.replay import Prediction, predict
from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MEASURED = "redelivered_acked"
"""The field with the redelivered acked messages; it may be missing."""

VERDICT_HEADS = ("run", "predicted", "sets", "measured", "inside", "exact")
SCORE_HEADS = ("policy", "inside", "exact set named", "named first")


class JudgedPrediction(NamedTuple):
    """A prediction, and the measured redelivery if known."""

    prediction: Prediction
    measured: tuple[int, ...] | None

    @property
    def is_inside(self) -> bool:
        """Whether the measured number is inside the predicted interval."""
        return self.measured is not None and self.prediction.low <= len(self.measured) <= self.prediction.high

    @property
    def is_named(self) -> bool:
        """Whether the measured set is one of the predicted sets."""
        return self.measured in self.prediction.candidates


def judge(
    line: str, name: PolicyName = PolicyName.PULSAR_4, *, ledger_creation_ms: float | None = None
) -> JudgedPrediction:
    """Predict a recorded run, and only then read its measurement.

    Raises:
        TraceError: The line is not a run, or its measurement is not a list of its messages.
    """
    run = parse_run(line)
    prediction = predict(run, name, ledger_creation_ms=ledger_creation_ms)
    fields = parse_object(line)
    if fields.get(MEASURED) is None:
        return JudgedPrediction(prediction, None)
    return JudgedPrediction(prediction, tuple(sorted(message_numbers(fields, MEASURED, run.first_messages[-1]))))


def verdict_table(verdicts: Sequence[JudgedPrediction]) -> Table:
    """Return a table, a row a run."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold")
    for column in VERDICT_HEADS[1:]:
        table.add_column(column, justify="right", overflow="fold")
    for verdict in verdicts:
        table.add_row(verdict.prediction.topic, *verdict_cells(verdict))
    return table


def summary_line(verdicts: Sequence[JudgedPrediction]) -> str:
    """Return how many of the measured predictions came true, in a line."""
    known = [verdict for verdict in verdicts if verdict.measured is not None]
    if not known:
        return f"{counted(len(verdicts), 'run')}, none of them measured"
    inside, named = sum(each.is_inside for each in known), sum(each.is_named for each in known)
    return f"Of {len(known)} measured: {inside} inside the interval, {named} with the exact set among the predicted"


def ack_type_remark(predictions: Sequence[Prediction]) -> str:
    """Return a remark about missing ack types, empty if none is missing."""
    missing = sum(not prediction.has_ack_types for prediction in predictions)
    if not missing:
        return ""
    return (
        f"{counted(missing, 'run')} of {len(predictions)} without ack types: the acks are read as individual, "
        "and where all of them may be cumulative, as cumulative too"
    )


def judge_all(*paths: Path) -> dict[PolicyName, list[JudgedPrediction]]:
    """Compare each policy with each run of some files; raises as `for_each_line`."""
    return {
        name: [verdict for path in paths for verdict in for_each_line(path, partial(judge, name=name))]
        for name in PolicyName
    }


def verdict_cells(verdict: JudgedPrediction) -> tuple[str, ...]:
    """Return a verdict's cells under `VERDICT_HEADS`, without the run's name."""
    predicted, sets = _interval(verdict), str(len(verdict.prediction.candidates))
    if verdict.measured is None:
        return predicted, sets, "-", "-", "-"
    return predicted, sets, f"{len(verdict.measured):,}", _yes(verdict.is_inside), _yes(verdict.is_named)


def _interval(verdict: JudgedPrediction) -> str:
    low, high = verdict.prediction.low, verdict.prediction.high
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def score_cells(verdicts: Sequence[JudgedPrediction]) -> tuple[str, ...]:
    """Return a policy's cells under `SCORE_HEADS`, without its name; all of its runs must be measured."""
    first = sum(verdict.measured == verdict.prediction.candidates[0] for verdict in verdicts)
    numbers = (sum(each.is_inside for each in verdicts), sum(each.is_named for each in verdicts), first)
    return tuple(f"{number} of {len(verdicts)}" for number in numbers)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"
