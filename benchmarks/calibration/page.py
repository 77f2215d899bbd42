"""Renders a calibration as a table for the terminal and as the page `docs/calibration.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ackstate.analysis.atomic_write import write_atomically
from ackstate.analysis.replay.policy import Policy
from benchmarks.calibration.picture import drawn
from benchmarks.calibration.results import EVENT, MOMENT, PERSIST, Calibration, errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.calibration.results import Death, PointResult

_HEADS = ("traffic", "store", "policy", "kills", "equal", "observed", "expected", "mean observed", "cuts", "slack")
_WORDS = 3


def result_table(calibration: Calibration) -> Table:
    """Return a table with one row per point."""
    table = Table(box=None, header_style="bold")
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if number < _WORDS else "right", overflow="fold")
    for point in calibration.points:
        table.add_row(*_cells(point), style=None if _holds(point) else "red")
    return table


def page(calibration: Calibration) -> str:
    """Return the text of the page."""
    kills, cuts = calibration.kills, calibration.power_cuts
    heads = [_HEADS, ["---"] * _WORDS + ["---:"] * (len(_HEADS) - _WORDS)]
    rows = [_cells(point, code="`") for point in calibration.points]
    return _PAGE.format(
        sentence=calibration.sentence,
        deviation=f"{calibration.deviation:+.2f}",
        kinds=_markdown(
            [("died", "times", "as predicted", "messages"), ("---", "---:", "---:", "---:"), *_kinds(kills)]
        ),
        distribution=_distribution("kills", errors(kills)),
        undecided=_undecided(kills),
        cuts=_cuts(cuts, calibration.skipped),
        by_spark=sum(point.expected_by_spark is not None for point in calibration.points),
        points=len(calibration.points),
        mistakes=_markdown(_mistakes(calibration)),
        seed=calibration.seed,
        table=_markdown([*heads, *rows]),
    )


def _mistakes(calibration: Calibration) -> Iterable[Sequence[str]]:
    yield "wrong setting", "kills", "as predicted", "mean error in messages"
    yield "---", "---:", "---:", "---:"
    for each in calibration.mistakes:
        yield f"`{each.setting}`", f"{each.kills:,}", f"{each.equal:,}", f"{each.error:,.1f}"


def _kinds(kills: Sequence[Death]) -> Iterable[Sequence[str]]:
    names = {
        MOMENT: "at the end of a random millisecond",
        EVENT: "right after a random event",
        PERSIST: "during a persist",
    }
    for kind, name in names.items():
        some = [death for death in kills if death.when == kind]
        equal, messages = sum(death.is_equal for death in some), sum(death.observed for death in some)
        yield name, f"{len(some):,}", f"{equal:,}", f"{messages:,}"


def _undecided(kills: Sequence[Death]) -> str:
    some = [death for death in kills if death.when == PERSIST and len(set(death.predicted)) > 1]
    before = sum(death.observed == death.predicted[0] for death in some)
    after = sum(death.is_equal for death in some) - before
    said = f"{len(some):,} came before the process reported its end, and have two different right answers"
    return f"{said}: {before:,} recovered the state before the persist, {after:,} the state after it"


def _cuts(cuts: Sequence[Death], skipped: str) -> str:
    if skipped:
        return f"There were no power cuts: {skipped}."
    fewer = [death.slack for death in cuts if death.slack > 0]
    said = f"{sum(death.is_within for death in cuts):,} of {len(cuts):,} redelivered at most the predicted number, "
    said += f"{len(cuts) - len(fewer):,} exactly that number."
    return said + (f" Slack: {sum(fewer):,} messages in all, {max(fewer):,} at most." if fewer else "")


def _distribution(what: str, found: dict[int, int]) -> str:
    said = ", ".join(f"{error:+,}: {count:,}" if error else f"0: {count:,}" for error, count in found.items())
    return f"Observed minus predicted, over all {what}: {said or 'none'}."


def _cells(point: PointResult, code: str = "") -> list[str]:
    policy = Policy.from_mapping(point.policy).label
    equal = len(point.kills) - point.unequal
    mean, cuts = point.mean, point.power_cuts
    observed = [death.observed for death in point.kills]
    return [
        point.shape,
        point.store,
        f"{code}{policy}{code}",
        str(len(point.kills)),
        str(equal) if equal == len(point.kills) else f"{equal} (!)",
        f"{min(observed):,} to {max(observed):,}",
        f"{point.expected:,.1f}",
        f"{mean.observed:,.1f} ± {mean.half_width:,.1f}" if mean else "-",
        f"{len(cuts) - point.beyond} of {len(cuts)}" if cuts else "-",
        f"{sum(death.slack for death in cuts):,}" if cuts else "-",
    ]


def _holds(point: PointResult) -> bool:
    return not point.unequal and not point.beyond and point.spark_agrees


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


_PAGE = """\
# Calibration: is the estimate true?

`ackstate sweep` and `ackstate redelivery --policy` predict the redelivery of a crash under settings that were never
used. This page compares the predictions with real crashes under these settings. `make calibrate` measures them, and
writes this page from `benchmarks/calibration.json`.

**{sentence}.**

![Predicted against observed](../benchmarks/calibration.svg)

## Method

A grid point is a policy, a shape of traffic and a store. For each death, a separate process plays the traffic, by the
clock of the traffic, with the real cursor, `ManagedCursor` on `SqliteStore` or on `FileStore`. If a limit on bytes
stops dispatch, it uses a `Subscription` with its gate. At a moment drawn from the seed, the process reports the moment
over a pipe and is killed with SIGKILL. A second process opens the cursor and counts the acked messages that the cursor
does not know: the **observed** redelivery. The **predicted** redelivery is the estimate for that instant from the trace
alone. The estimate gets the events and the policy, and never the store.

- A kill must redeliver exactly the predicted number. The kernel keeps the writes of a killed process, so no luck is
  involved.
- A kill during a persist, a random fraction of a millisecond to two milliseconds after its begin, may leave the persist
  written or not. Then either number is right, and no other. Once the process has reported the end of the persist, only
  one number is right.
- A power cut loses unsynced writes and never synced ones. It may redeliver at most the predicted number, or the higher
  of the two numbers during a persist. The ext4 file system, on a loop device, is shut down under the living process,
  mounted again and recovered.
- No recovery may treat a message as acked that was never acked.
- The estimate's `expected` is a mean over time. The mean of the kills at random moments must be near it: the table of
  points shows its 95 % interval, and all points together must deviate by at most four standard errors. They deviate by
  {deviation}. The Spark job gave the same number as the single-process replay at {by_spark} of {points} points.

If a limit on bytes stops dispatch, the trace is that of a broker with this limit: it contains the deliveries and their
times. The estimate replays all other settings of the policy on it.

## Kills

{kinds}

{distribution}

Of the kills during a persist, {undecided}.

## Power cuts

{cuts}

## Can the check fail?

`python -m benchmarks.calibration --assume flush_interval_ms=333` makes the estimate replay another policy than the one
that was run. Then kills differ from the prediction, and the exit status is 1. Tests do the same with wrong flush
intervals, rates, ages, limits on ranges, choices of ranges, formats and routes. This table compares the kills at random
moments above with estimates under a wrong setting, at the points whose policy it changes:

{mistakes}

## Each point

`observed` is the lowest and the highest redelivery of a kill. `slack` is the sum of messages by which the power cuts
stayed below the prediction. Seed {seed}.

{table}
"""


def main(arguments: Sequence[str]) -> None:
    """Draw and write: ``python -m benchmarks.calibration.page JSON SVG PAGE``."""
    source, picture, text = map(Path, arguments)
    calibration = Calibration.from_json(json.loads(source.read_text(encoding="utf-8")))
    write_atomically(picture, drawn(calibration))
    write_atomically(text, page(calibration))


if __name__ == "__main__":
    main(sys.argv[1:])
