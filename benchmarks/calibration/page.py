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
            [("kill", "count", "as predicted", "messages"), ("---", "---:", "---:", "---:"), *_kinds(kills)]
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
    text = f"{len(some):,} happened before its reported end, and with different predictions before and after it"
    return f"{text}: {before:,} recovered the state before the persist, {after:,} the state after it"


def _cuts(cuts: Sequence[Death], skipped: str) -> str:
    if skipped:
        return f"Not run: {skipped}."
    fewer = [death.slack for death in cuts if death.slack > 0]
    text = f"{sum(death.is_within for death in cuts):,} of {len(cuts):,} redelivered at most the predicted number, "
    text += f"{len(cuts) - len(fewer):,} exactly it."
    return text + (f" Slack: {sum(fewer):,} messages in total, at most {max(fewer):,} for one cut." if fewer else "")


def _distribution(what: str, found: dict[int, int]) -> str:
    text = ", ".join(f"{error:+,}: {count:,}" if error else f"0: {count:,}" for error, count in found.items())
    return f"Observed minus predicted, for all {what}: {text or 'none'}."


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
# Calibration of the estimate

`ackstate sweep` and `ackstate redelivery --policy` predict the redelivery after a crash under settings that were never
in use. This page compares such predictions with real crashes. `make calibrate` generates it from
`benchmarks/calibration.json`.

**{sentence}.**

![Predicted and observed redelivery](../benchmarks/calibration.svg)

## Method

A grid point is a policy and a shape of traffic. For each kill, a separate process plays the traffic by the traffic's
clock with the real cursor, `ManagedCursor` on `SqliteStore`; if a limit on bytes blocks dispatch, with a
`Subscription` and its gate. At a moment determined by the seed, the process reports that it has
reached this moment and is killed with SIGKILL. A second process opens the cursor and counts the acked entries that are
not acked in the recovered state: **observed**. **Predicted** is the result of the estimate for the same instant. The
estimate uses only the trace and the policy, not the store.

- After a kill, the observed number must be equal to the predicted one. The kernel keeps all data that a killed process
  wrote, so the result does not depend on chance.
- A kill during a persist, a random time up to two milliseconds after its start, can find the state before or after the
  persist: both numbers are accepted, and no others. After the process has reported the end of the persist, only the
  second one is accepted.
- A power cut loses unsynced data, and never synced data: the observed number must be at most the predicted one, or the
  larger of the two numbers during a persist. ext4 on a loop device is shut down under the running process, mounted
  again and recovered.
- A recovered cursor must not contain acked messages that were never acked.
- The estimate's `expected` is a mean over time. The mean of the kills at random moments must be near it: the table has
  the 95 % interval of each point, and the deviation of all points together must be at most four standard errors. It is
  {deviation}. The Spark job gave the same number as the single-process replay at {by_spark} of {points} points.

If a limit on bytes blocks dispatch, the trace is the recording of a broker with that limit: it contains the messages
that were sent, with their times. The estimate replays the other settings of the policy on it.

## Kills

{kinds}

{distribution}

Kills during a persist: {undecided}.

## Power cuts

{cuts}

## Sensitivity of the check

`python -m benchmarks.calibration --assume flush_interval_ms=333` makes the estimate replay a policy other than that of
the run: the kills then differ from the predictions, and the exit status is 1. The tests do the same with wrong flush
intervals, rates, ages, limits on ranges, choices of ranges, formats and routes. The table compares the kills at random
moments with estimates for a wrong setting, at the points whose policy it changes:

{mistakes}

## Points

`observed` is the smallest and the largest number of redelivered messages after a kill; `slack` is the sum of the
predicted minus the observed numbers over the power cuts. Seed {seed}.

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
