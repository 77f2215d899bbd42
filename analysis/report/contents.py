"""The contents of a report: the value from which the page is rendered."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ackstate.analysis.estimate.parts import CURVE_COUNT_MAX, badness
from ackstate.analysis.report.inputs import ReportInputs

if TYPE_CHECKING:
    from ackstate.analysis.estimate.results import Estimate, PolicyResult, SweepResult
    from ackstate.analysis.report.curves import CrashTimes, Curve

# The last millisecond in the calendars of both Python and the plots.
CALENDAR_END_MS = 253_402_300_799_999


@dataclass(frozen=True, slots=True)
class Contents:
    """A report.

    Attributes:
        result: The estimates. Its first policy is the one that the trace was recorded under, or the only one.
        curves: The total curve of the first and of the recommended policy, and the first one's worst subscriptions.
        crashes: When processes died.
        provenance: The sources and programs of the report: pairs of name and text.
        inputs: The other files shown.
    """

    result: SweepResult
    curves: tuple[Curve, ...]
    crashes: CrashTimes
    provenance: tuple[tuple[str, str], ...]
    inputs: ReportInputs = field(default_factory=ReportInputs)

    @property
    def shown(self) -> list[PolicyResult]:
        """The policies that are shown in full: the first, and the recommended."""
        return shown_policies(self.result)


def shown_policies(result: SweepResult) -> list[PolicyResult]:
    """Return the first policy, and the recommended if that is another."""
    first, recommended = result.policies[0], result.recommended
    return [first] if recommended is None or recommended is first else [first, recommended]


def worst_subscriptions(result: SweepResult) -> list[tuple[str, str]]:
    """Return (topic, subscription) of those with most redelivery under the first policy, the worst first."""
    found = [each for each in result.policies[0].estimates if each.scope == "subscription"]
    found.sort(key=lambda each: badness(asdict(each)))
    return [(each.topic, each.subscription) for each in found[:CURVE_COUNT_MAX]]


def headline(result: SweepResult) -> str:
    """Return one sentence about redelivery after a crash of the broker."""
    first = result.policies[0]
    under = "" if first.policy is None else f"Under {first.label}: "
    said = _said(first.total)
    return under + said if not under else under + said[0].lower() + said[1:]


def _said(total: Estimate) -> str:
    if not total.max:
        return "No acked message would be redelivered, at any time of death"
    worst = "" if total.max_ts_ms is None else f" at {time_text(total.max_ts_ms)}"
    if total.expected is None:
        return (
            f"The trace has no duration: had the broker died{worst}, {_messages(total.max)} would have been redelivered"
        )
    return (
        f"If the broker died at a random moment, {_messages(total.expected)} would be redelivered; "
        f"at the worst, {count_text(total.max)}{worst}"
    )


def _messages(number: float) -> str:
    return f"{count_text(number)} acked message{'' if number == 1 else 's'}"


def count_text(number: float) -> str:
    """Return a number for a sentence, without a fraction if it is large.

    >>> count_text(41_234.6), count_text(0.25), count_text(7)
    ('41,235', '0.25', '7')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:,.3g}"


def time_text(ts_ms: int) -> str:
    """Return an instant in words; as a number if it is outside the calendar.

    >>> time_text(1_700_000_030_000)
    '2023-11-14 22:13:50.000 UTC'
    """
    if not 0 <= ts_ms <= CALENDAR_END_MS:
        return f"{ts_ms} ms"
    at = datetime.fromtimestamp(ts_ms // 1_000, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{ts_ms % 1_000:03} UTC"
