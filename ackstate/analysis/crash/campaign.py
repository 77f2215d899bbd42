"""A campaign runs a layer until its budget is over, and adds up the results.

Totals may be stored in a file. A campaign that finds such a file continues with the seed after the last and adds to
it, so hours of runs survive interruptions, and the evidence is one file. An interrupted run is repeated from
its beginning: its pieces are not counted twice, and a promise that it broke stays recorded.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ackstate.analysis.atomic_write import write_atomically
from ackstate.analysis.crash.layer import BrokenPromise, LayerSkippedError
from ackstate.analysis.crash.promises import Promise
from ackstate.errors import AckStateError, UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ackstate.analysis.crash.layer import Layer, RunOutcome

FAILURES_MAX = 20
"""At most this many different failures of a layer are stored with a story; all failed runs are counted."""
RECEIPTS_MIN = 0.25
"""The share of acks that need a receipt, unless another is given: with fewer, durability was not tested."""

OURS = "ours"
"""The subject whose totals are kept, unless another is named."""

_VERSION = 2
_ENTRIES = re.compile(r"\d+:\[\d+, \d+\)(?: \d+:\[\d+, \d+\))*(?: \.\.\.)?")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class CampaignError(AckStateError):
    """A file of totals cannot be read, or does not fit the options; it was left as it is."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The time and number of runs after which a campaign ends. A run in pieces can end between two of them.

    Attributes:
        seconds: The campaign ends after this time; above 0.
        run_count_max: The campaign ends after this many runs, at least 1; None for any number.

    Raises:
        ValueError: A value is out of its range.
    """

    seconds: float
    run_count_max: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be above 0 and finite, got {self.seconds}")
        if self.run_count_max is not None and self.run_count_max < 1:
            raise ValueError(f"run_count_max must be at least 1, got {self.run_count_max}")


@dataclass(slots=True)
class Seen:
    """Counts of one campaign in one layer; these, not the totals, decide its exit status.

    Attributes:
        runs: Seeds that were run to their end.
        has_failed: Whether a promise was broken, be it in a run that an earlier campaign began and did not end.
        counts: As `RunOutcome`, summed by name.
        skipped: The reason why the layer could not run; empty if it could.
    """

    runs: int = 0
    has_failed: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    skipped: str = ""

    def untested(self, *, receipts_min: float = RECEIPTS_MIN) -> str:
        """Describe the untested promises; empty if the layer was skipped or failed, or everything was tested."""
        if self.has_failed:
            return ""
        if not self.runs:
            return "" if self.skipped else "nothing was tested: no run was completed, give a longer --budget"
        # The other layers have no subject.
        return self._without_receipts(receipts_min) if "accepted_persists" in self.counts else ""

    def _without_receipts(self, receipts_min: float) -> str:
        if not self.counts["accepted_persists"]:
            return "nothing was tested: the subject never accepted a persist"
        if not self.counts["durable_receipts"]:
            return "the subject never reported that an ack is durable: I2 was not tested"
        due, given = self.counts["receipts_due"], self.counts["receipts_given"]
        if given < receipts_min * due:
            return (
                f"the subject gave receipts for {given:,} of {due:,} requested acks that it should persist "
                f"({given / due:.1%}; --receipts-min requires {receipts_min:.1%}): I2 was not tested"
            )
        return ""


@dataclass(slots=True)
class Totals:
    """The runs and results of a layer, over any number of campaigns.

    Attributes:
        next_seed: The first that was not run to its end: one that was interrupted is run again, from its beginning.
        runs: How many seeds were run to their end.
        cycles: Crashes that were survived and judged.
        lost_durable: As `RunOutcome`, summed; as are the next two.
        invented: See above.
        gauge_mismatch: See above.
        failed_runs: Seeds that saw any promise broken.
        last_failed_seed: The last of these; -1 without any.
        seconds: How long they took.
        counts: As `RunOutcome`, summed by name.
        failures: At most `FAILURES_MAX` broken promises: ``seed``, ``promise``, ``found`` and ``story`` of the run with
            the shortest story, ``count`` of the runs that broke it equally, and the ``last_seed`` of these.
        skipped: The reason why the layer could not run at the last attempt; empty if it could.
        unfinished_pieces: How many outcomes of `next_seed` are in the sums already.
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
    unfinished_pieces: int = 0

    @property
    def has_failed_unfinished(self) -> bool:
        """Whether the run that comes next was begun before, and broke a promise."""
        return self.last_failed_seed == self.next_seed

    def add(self, outcome: RunOutcome, *, is_counted: bool = False) -> None:
        """Add an outcome of a run.

        Args:
            outcome: The outcome of the seed `next_seed`.
            is_counted: Whether it repeats a piece that is in the sums already; a broken promise is still recorded.
        """
        if not is_counted:
            self.unfinished_pieces += 1
            self.cycles += outcome.cycles
            self.lost_durable += outcome.lost_durable
            self.invented += outcome.invented
            self.gauge_mismatch += outcome.gauge_mismatch
            self.counts = dict(Counter(self.counts) + Counter(outcome.counts))
        if not is_clean(outcome) and outcome.seed != self.last_failed_seed:
            self.failed_runs += 1
            self.last_failed_seed = outcome.seed
        for broken in _told(outcome):
            self._note(outcome.seed, broken)
        if outcome.is_last:
            self.next_seed = outcome.seed + 1
            self.runs += 1
            self.unfinished_pieces = 0

    def _note(self, seed: int, broken: BrokenPromise) -> None:
        """Count a failure with its equals, or store it if it is new and there is room."""
        kind = failure_kind(broken.promise, broken.found)
        for known in self.failures:
            if failure_kind(known["promise"], known["found"]) == kind:
                known["count"] += known["last_seed"] != seed
                known["last_seed"] = seed
                if len(broken.story) < len(known["story"]):
                    known.update(seed=seed, found=broken.found, story=broken.story)
                return
        if len(self.failures) < FAILURES_MAX:
            self.failures.append({"seed": seed, **asdict(broken), "count": 1, "last_seed": seed})


def failure_kind(promise: str, found: str) -> tuple[str, str]:
    """Return the common part of equal failures: the text without numbers and entries."""
    return promise, _NUMBER.sub("N", _ENTRIES.sub("ENTRIES", found))


def is_clean(outcome: RunOutcome) -> bool:
    """Return whether a run saw no promise broken."""
    return not (outcome.broken or outcome.lost_durable or outcome.invented or outcome.gauge_mismatch)


def run_layer(
    layer: Layer,
    totals: Totals,
    budget: Budget,
    *,
    seen: Seen | None = None,
    watch: Callable[[Totals, float], None] = lambda *_: None,
) -> Seen:
    """Execute runs of a layer until the budget is over, and add them up.

    Args:
        layer: Begins with the seed `totals.next_seed`.
        totals: The totals so far; the campaign continues them.
        budget: At least one run is started, even with the smallest budget.
        seen: Receives the results of this campaign, also if it ends with an exception; a new one by default.
        watch: Called after each outcome with the totals and the share of the time that is over. Its exceptions end the
            campaign.

    Returns:
        The counts of this campaign.
    """
    seen = Seen() if seen is None else seen
    seen.has_failed = totals.has_failed_unfinished
    begun, earlier, counted = time.monotonic(), totals.seconds, totals.unfinished_pieces
    try:
        with closing(layer(totals.next_seed)) as outcomes:  # type: ignore[type-var] # a generator; an iterator need not
            totals.skipped = ""
            for outcome in outcomes:
                totals.add(outcome, is_counted=counted > 0)
                counted = 0 if outcome.is_last else max(counted - 1, 0)
                seen.runs += outcome.is_last
                seen.has_failed = seen.has_failed or not is_clean(outcome)
                seen.counts.update(outcome.counts)
                lasted = time.monotonic() - begun
                totals.seconds = round(earlier + lasted, 3)
                watch(totals, min(lasted / budget.seconds, 1.0))
                if lasted >= budget.seconds or seen.runs == budget.run_count_max:
                    break
    except LayerSkippedError as error:
        totals.skipped = seen.skipped = str(error)
    return seen


def read_totals(path: Path, *, subject: str = OURS) -> dict[str, Totals]:
    """Read the totals of earlier campaigns; empty if there is no file.

    Raises:
        CampaignError: The file holds no totals, or those of another subject.
        UnsupportedVersionError: It has another version.
        OSError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(data)
        if type(version := found["version"]) is not int:
            raise TypeError(f"version is {version!r}")
        if version != _VERSION:
            raise UnsupportedVersionError(f"{path}: totals have version {version}; this release reads {_VERSION}")
        if (crashed := found["subject"]) != subject:
            raise CampaignError(f"{path}: totals of the subject {crashed!r}, not of {subject!r}: name another file")
        return {name: _totals(plain) for name, plain in found["layers"].items()}
    # Deep nesting raises RecursionError.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CampaignError(f"{path}: not the totals of a crash campaign ({error!r})") from error


def write_totals(path: Path, totals: dict[str, Totals], *, subject: str = OURS) -> None:
    """Replace the file of totals atomically.

    Raises:
        OSError: The disk is full or failed.
    """
    layers = {name: asdict(each) for name, each in sorted(totals.items())}
    write_atomically(path, json.dumps({"version": _VERSION, "subject": subject, "layers": layers}, indent=2) + "\n")


def _told(outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
    """Return the promises that a run names, or those that its counts show broken."""
    if outcome.broken or is_clean(outcome):
        return outcome.broken
    counted = {
        Promise.I1: (outcome.invented, "entries are invented"),
        Promise.I2: (outcome.lost_durable, "durable entries are lost"),
        Promise.I3: (outcome.gauge_mismatch, "times the gauge was wrong"),
    }
    return tuple(BrokenPromise(promise, f"{number} {what}") for promise, (number, what) in counted.items() if number)


def _totals(plain: dict[str, Any]) -> Totals:
    for each in fields(Totals):
        value = plain[each.name]
        match each.name:
            case "skipped":
                is_valid = isinstance(value, str)
            case "seconds":
                is_valid = isinstance(value, float) and 0 <= value < float("inf")
            case "counts":
                is_valid = isinstance(value, dict) and all(map(_is_count, value.values()))
            case "failures":
                is_valid = isinstance(value, list) and all(map(_is_failure, value))
            case name:
                is_valid = _is_count(value) or (name, value) == ("last_failed_seed", -1)
        if not is_valid:
            raise TypeError(f"{each.name} is {value!r}")
    return Totals(**plain)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_failure(value: Any) -> bool:
    match value:
        case {"seed": seed, "promise": str(), "found": str(), "story": list(story), "count": count, "last_seed": last}:
            return all(map(_is_count, (seed, count, last))) and all(isinstance(line, str) for line in story)
    return False
