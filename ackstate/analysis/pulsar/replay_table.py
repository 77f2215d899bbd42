"""Compares predictions with measurements: a table for the terminal, and the page `docs/pulsar-replay.md`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from ackstate.analysis.atomic_write import write_atomically
from ackstate.analysis.pulsar.policy import PolicyName
from ackstate.analysis.pulsar.recorded_run import for_each_line, message_numbers, parse_object, parse_run
from ackstate.analysis.pulsar.replay import Prediction, predict
from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEASURED = "redelivered_acked"
"""The field with the redelivered acked messages; it may be missing."""

VERDICT_HEADS = ("run", "predicted", "sets", "measured", "inside", "exact")
SCORE_HEADS = ("policy", "inside", "exact set named", "named first")

_WRONG = tuple(name for name in PolicyName if name is not PolicyName.PULSAR_4)


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

    Args:
        line: The run.
        name: See `predict`.
        ledger_creation_ms: See `predict`.

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


def replay_page(verdicts: Mapping[PolicyName, Sequence[JudgedPrediction]]) -> str:
    """Return the page for the result of `judge_all` on files of measured runs."""
    rows = [
        (verdict.prediction.topic, *verdict_cells(verdict), *(_mark(verdicts[name][number]) for name in _WRONG))
        for number, verdict in enumerate(verdicts[PolicyName.PULSAR_4])
    ]
    heads = (*VERDICT_HEADS, *(name.value for name in _WRONG))
    scores = [(name.value, *score_cells(each)) for name, each in verdicts.items()]
    return _PAGE.format(scores=_markdown(SCORE_HEADS, scores), runs=_markdown(heads, rows))


def verdict_cells(verdict: JudgedPrediction) -> tuple[str, ...]:
    """Return a verdict's cells under `VERDICT_HEADS`, without the run's name."""
    predicted, sets = _interval(verdict), str(len(verdict.prediction.candidates))
    if verdict.measured is None:
        return predicted, sets, "-", "-", "-"
    return predicted, sets, f"{len(verdict.measured):,}", _yes(verdict.is_inside), _yes(verdict.is_named)


def _mark(verdict: JudgedPrediction) -> str:
    return _interval(verdict) if verdict.is_named else f"**{_interval(verdict)}**"


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


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_PAGE = """\
# Redelivery of a killed Pulsar broker

`ackstate pulsar replay FILE` reads the ACK commands that a real Apache Pulsar 4.2 broker received until it was killed.
It predicts which messages the broker redelivers after its restart although the client had acknowledged them.
`make pulsar-replay` writes this page from forty recorded runs of 4.2.4 brokers
(`tests/vectors/broker-redelivery*.jsonl.gz`), most of them ended by `kill -9`. The measured redelivery stands next to
the prediction and is no input of it. The [glossary](glossary.md) defines the terms.

## How often the prediction is right

Three of the policies are wrong on purpose: a limiter that stores no permits while it is idle, no limiter, and no limit
on ranges.

{scores}

## The model of a broker

A broker keeps an ack in memory until it writes the cursor's state. These rules determine when it writes, and how much:

- **The mark-delete limiter** (`managedLedgerDefaultMarkDeleteRateLimit`, 1 a second). Each ACK command requests a
  permit. The limiter stores the permits of one idle second and grants one on credit: after a pause, two commands in a
  row are written, then one a second. It starts when the cursor is opened.
- **The flush timer** (`managedLedgerCursorPositionFlushSeconds`, 60). It counts from the broker's start, and requests a
  permit of the same limiter for acks that were refused before.
- **The limit on ranges** (`managedLedgerMaxUnackedRangesToPersist`, 10,000). In the list form, 4.2 keeps one range
  more. In the words form it counts acked entries, by whole ledgers, and keeps the ledger that crosses the limit.
- **Partly acked batches.** If only messages inside batches were acked, nothing is written and no write is due.
- **The end.** SIGTERM closes the cursor. Up to 1,000 ranges go to the metadata store, from which 4.2 reads no partly
  acked batches back. More ranges go to the cursor ledger or, if that cannot be written any more, to the metadata store
  too.
- **Cumulative acks** request a write whenever they are not refused, even inside a batch. Then the mark-delete position
  is the one before the batch, and the messages acked in it are a partly acked batch.
- **The first write** waits for a new cursor ledger. It holds the mark-delete position of the last command that had been
  granted a write by then, and every range and every partly acked batch of that moment. It does not hold the moves of
  the mark-delete position by later commands. A first write of cumulative acks therefore holds that position alone.

The recording may contain the time at which the cursor ledger was ready (`cursor_ledger_ms`), which a broker logs:
`Updated cursor ... with ledger id`. Otherwise the prediction covers a creation of up to 400 ms, or of 12 times the
slowest handling of an ACK command if that is more, or of `--ledger-creation-ms`. Brokers took up to 200 ms on a busy
machine, and over 3 s on an overloaded one, which 12 times did not always cover. This time matters to cursors that wrote
once or twice before the end.

An ACK command of the recording may have its type, `Individual` or `Cumulative`. If a run has no types, the answer
reports it: its acks are treated as individual, and if all of them may be cumulative, the prediction covers that case
too.

No recording has the microsecond at which the limiter read its clock. It is only known to lie between the receipt of a
command and the end of its handling. At a boundary, it decides between two writes a second apart. The prediction is
therefore not one set of messages but **every** set that follows from some clocks in these windows. All courses of
events are followed, as intervals of time, and none is sampled. `low` and `high` are the lowest and the highest number
of messages of any set. The sets themselves are listed with the most plausible first, at most 64.

## Each run

`sets` is the number of possible sets. For the wrong policies the table shows their predictions, in bold if the measured
set is not among their sets.

{runs}

## The JSON

`ackstate pulsar replay FILE --json` prints one object per run, each on its own line, in the order of the file:

| field | meaning |
| --- | --- |
| topic | the run's topic |
| low, high | the lowest and the highest number of acked messages that may be redelivered, both included |
| candidates | at most 64 distinct lists of rising message numbers, the most plausible first |
| has_ack_types | false if the run does not have the type of each ACK command |

`analysis/pulsar/recorded_run.py` describes the lines of FILE. In Python: `ackstate.analysis.pulsar.replay.predict` for
one run, `ackstate.analysis.pulsar.replay_spark.predict_frame` for a DataFrame of lines.
"""


if __name__ == "__main__":
    *recorded, page = map(Path, sys.argv[1:])
    write_atomically(page, replay_page(judge_all(*recorded)))
