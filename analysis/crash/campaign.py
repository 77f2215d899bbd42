"""How often was a layer run, and what did it find? A campaign asks for runs until its budget is over, and adds up.

Totals may be kept in a file. A campaign that finds one there goes on with the seed after the last and adds to it, so
hours of runs survive interruptions, and the evidence is one file.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ackstate.errors import AckStateError
from analysis.crash.layer import BrokenPromise, LayerSkippedError
from analysis.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from analysis.crash.layer import Layer, RunOutcome

FAILURES_MAX = 20
"""Of a layer's failed runs, this many are kept with their stories; all are counted."""

OURS = "ours"
"""The subject whose totals are kept, unless another is named."""

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0}
_VERSION = 1


class CampaignError(AckStateError):
    """A file of totals that is not one, or that does not fit what is asked; it was left as it is."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop asking for runs; one that has begun is always finished.

    Attributes:
        seconds: After this time.
        run_count_max: After this many runs; None for any number.
    """

    seconds: float
    run_count_max: int | None = None

    @classmethod
    def parse(cls, text: str, *, run_count_max: int | None = None) -> Budget:
        """Read a time such as ``60s``, ``1.5m``, ``500ms`` or ``2h``.

        Raises:
            ValueError: It is none, or no time at all.
        """
        match = _BUDGET.fullmatch(text.strip())
        seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
        if not 0 < seconds < float("inf"):
            raise ValueError(f"not a budget: {text!r}; expected a number and ms, s, m or h, such as 60s")
        return cls(seconds, run_count_max)


@dataclass(slots=True)
class Totals:
    """What a layer was run and found, over any number of campaigns.

    Attributes:
        next_seed: The first that was not run to its end: one that was interrupted is run again, from its beginning.
        runs: How many seeds were run to their end.
        cycles: Crashes that were survived and judged.
        lost_durable: As `RunOutcome`, summed; so are the next two.
        invented: See above.
        gauge_mismatch: See above.
        failed_runs: Seeds that saw any promise broken.
        last_failed_seed: The last of these; -1 without any.
        seconds: How long they took.
        counts: As `RunOutcome`, summed by name.
        failures: The first `FAILURES_MAX` broken promises: ``seed``, ``promise``, ``found`` and ``story``.
        skipped: Why the layer could not run when it was asked last; empty if it could.
    """

    next_seed: int
    runs: int = 0
    cycles: int = 0
    lost_durable: int = 0
    invented: int = 0
    gauge_mismatch: int = 0
    failed_runs: int = 0
    last_failed_seed: int = -1
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""

    @property
    def untested(self) -> str:
        """What could not be tested, because the subject did not do its part; empty if all could."""
        # Not a word of runs in which nothing was persisted: they were too short.
        if self.counts.get("accepted_persists") and not self.counts.get("durable_receipts"):
            return "it never said that anything is durable: I2 was not tested"
        return ""

    def add(self, outcome: RunOutcome) -> None:
        """Take one more run in."""
        if outcome.is_last:
            self.next_seed = outcome.seed + 1
            self.runs += 1
        self.cycles += outcome.cycles
        self.lost_durable += outcome.lost_durable
        self.invented += outcome.invented
        self.gauge_mismatch += outcome.gauge_mismatch
        if not is_clean(outcome) and outcome.seed != self.last_failed_seed:
            self.failed_runs += 1
            self.last_failed_seed = outcome.seed
        self.counts = dict(Counter(self.counts) + Counter(outcome.counts))
        for broken in _told(outcome)[: FAILURES_MAX - len(self.failures)]:
            self.failures.append({"seed": outcome.seed, **asdict(broken)})


def is_clean(outcome: RunOutcome) -> bool:
    """Return whether a run saw no promise broken."""
    return not (outcome.broken or outcome.lost_durable or outcome.invented or outcome.gauge_mismatch)


def run_layer(
    layer: Layer, totals: Totals, budget: Budget, *, watch: Callable[[Totals, float], None] = lambda *_: None
) -> None:
    """Ask a layer for runs until the budget is over, and add them up as they come.

    Args:
        layer: Begins with the seed `totals.next_seed`.
        totals: Goes on from what it holds.
        budget: At least one run is made, whatever it is.
        watch: Told, after each run, the totals and which share of the time is over. What it raises ends the campaign.
    """
    begun, earlier, runs = time.monotonic(), totals.seconds, 0
    try:
        with closing(layer(totals.next_seed)) as outcomes:  # type: ignore[type-var] # a generator; an iterator need not
            totals.skipped = ""
            for outcome in outcomes:
                totals.add(outcome)
                runs += outcome.is_last
                lasted = time.monotonic() - begun
                totals.seconds = round(earlier + lasted, 3)
                watch(totals, min(lasted / budget.seconds, 1.0))
                if lasted >= budget.seconds or runs == budget.run_count_max:
                    return
    except LayerSkippedError as error:
        totals.skipped = str(error)


def read_totals(path: Path, *, subject: str = OURS) -> dict[str, Totals]:
    """Read what earlier campaigns have written; nothing if there is no file.

    Raises:
        CampaignError: It is not such a file, or of a newer version, or of another subject.
        OSError: It cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise CampaignError(f"{path}: version {found['version']!r}; this release reads version {_VERSION}")
        if (crashed := found.get("subject", OURS)) != subject:
            raise CampaignError(f"{path}: totals of the subject {crashed!r}, not of {subject!r}: name another file")
        return {name: _totals(plain) for name, plain in found["layers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CampaignError(f"{path}: not the totals of a crash campaign ({error!r})") from error


def write_totals(path: Path, totals: dict[str, Totals], *, subject: str = OURS) -> None:
    """Write totals so that the file is there whole or as it was.

    Raises:
        OSError: The disk is full or failed.
    """
    layers = {name: asdict(each) for name, each in sorted(totals.items())}
    write_whole(path, json.dumps({"version": _VERSION, "subject": subject, "layers": layers}, indent=2) + "\n")


def _told(outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
    """Return the promises that a run names, and one for it if it only counts."""
    if outcome.broken or is_clean(outcome):
        return outcome.broken
    found = f"lost {outcome.lost_durable}, invented {outcome.invented}, gauge wrong {outcome.gauge_mismatch} times"
    return (BrokenPromise("I1, I2 or I3", found),)


def _totals(plain: dict[str, Any]) -> Totals:
    kinds: dict[str, type] = {"counts": dict, "failures": list, "skipped": str, "seconds": float}
    for each in fields(Totals):
        if not isinstance(plain[each.name], kinds.get(each.name, int)):
            raise TypeError(f"{each.name} is {plain[each.name]!r}")
    return Totals(**plain)
