"""A campaign runs a layer until its budget is over, and adds up the results.

A verdict says how much was tested. Totals may be stored in a file. A campaign that finds such a file continues with the
seed after the last and adds to it, so hours of runs survive interruptions, and the evidence is one file. An interrupted
run is repeated.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from rich.table import Table

from ackstate.analysis.crash.oracle import BrokenPromise, Promise
from ackstate.analysis.crash.runs import UNSEEN, LayerSkippedError
from ackstate.analysis.location import write_atomically
from ackstate.errors import AckStateError, UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from ackstate.analysis.crash.oracle import RunOutcome
    from ackstate.analysis.crash.runs import Layer


FAILURES_MAX = 20
"""At most this many different failures of a layer are stored with a story; all failed runs are counted."""
RECEIPTS_MIN = 0.25
"""The share of acks that need a receipt, unless another is given: with fewer, durability was not tested."""

CRASHES_MIN = 10
"""The crashes after a receipt that a verdict needs: fewer miss a bug that every fourth of them shows too often."""

OURS = "ours"
"""The subject whose totals are kept, unless another is named."""

_VERSION = 2
_ENTRIES = re.compile(r"\d+:\[\d+, \d+\)(?: \d+:\[\d+, \d+\))*(?: \.\.\.)?")
_DIRECTORIES = re.compile(r"(?<![\w.])/(?:[^\s/'\":]+/)+")
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class CampaignError(AckStateError):
    """A file of totals or of a failure cannot be read, or does not fit the options; it was left as it is."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The time and number of runs after which a campaign ends; a run that has begun is finished."""

    seconds: float  # The campaign ends after this time; above 0
    run_count_max: int | None = None  # The campaign ends after this many runs, at least 1; None for any number


@dataclass(slots=True)
class Seen:
    """Counts of one campaign in one layer; these, not the totals, decide its exit status."""

    runs: int = 0  # Seeds that were run
    cycles: int = 0  # Crashes that were judged
    has_failed: bool = False  # Whether a promise was broken
    counts: Counter[str] = field(default_factory=Counter)  # As `RunOutcome`, summed by name
    skipped: str = ""  # The reason why the layer could not run; empty if it could

    def untested(self, *, receipts_min: float = RECEIPTS_MIN) -> str:
        """Return why nothing was measured; empty if the layer was skipped or failed, or everything was tested."""
        if self.has_failed:
            return ""
        if not self.runs:
            return "" if self.skipped else "nothing was tested: no run was completed"
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
        if unseen := [name.removeprefix(UNSEEN) for name in sorted(self.counts) if name.startswith(UNSEEN)]:
            return f"some writes are not seen: {'; '.join(unseen)}"
        if self.counts["crashes_after_receipt"] < CRASHES_MIN:
            return f"{self.tested}; a verdict needs {CRASHES_MIN}: give more --runs or --budget"
        return ""

    @property
    def tested(self) -> str:
        """How much was tested."""
        crashes = f"{self.cycles:,} crashes"
        if "accepted_persists" in self.counts:
            crashes = f"{self.counts['crashes_after_receipt']:,} of {crashes} came after a receipt that they could lose"
        return f"{self.runs:,} {'run' if self.runs == 1 else 'runs'}, {crashes}"

    def verdict(self, untested: str) -> str:
        """Return one of ``broken``, ``skipped``, ``not measured`` and ``held``."""
        if self.has_failed:
            return "broken"
        return "skipped" if self.skipped and not self.runs else "not measured" if untested else "held"


@dataclass(slots=True)
class Totals:
    """The runs and results of a layer, over any number of campaigns."""

    next_seed: int  # The first that was not run
    runs: int = 0  # How many seeds were run
    cycles: int = 0  # Crashes that were survived and judged
    lost_durable: int = 0  # As `RunOutcome`, summed; as are the next two
    invented: int = 0
    gauge_mismatch: int = 0
    failed_runs: int = 0  # Seeds that saw any promise broken
    seconds: float = 0.0  # How long they took
    counts: dict[str, int] = field(default_factory=dict)  # As `RunOutcome`, summed by name
    # At most `FAILURES_MAX` broken promises: ``seed``, ``promise``, ``found`` and ``story`` of the run with the
    # shortest story, ``count`` of the runs that broke it equally, and the ``last_seed`` of these.
    failures: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""  # The reason why the layer could not run at the last attempt; empty if it could

    def add(self, outcome: RunOutcome) -> None:
        """Add the outcome of a run."""
        self.next_seed = outcome.seed + 1
        self.runs += 1
        for name in ("cycles", "lost_durable", "invented", "gauge_mismatch"):
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.counts = dict(Counter(self.counts) + Counter(outcome.counts))
        found = broken_promises(outcome)
        self.failed_runs += bool(found)
        for broken in found:
            self._note(outcome.seed, broken)

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


def broken_promises(outcome: RunOutcome) -> tuple[BrokenPromise, ...]:
    """Return the promises that a run names, else those that its counts show broken; none for a clean run."""
    counted = (
        (Promise.I1, outcome.invented, "entries are invented"),
        (Promise.I2, outcome.lost_durable, "durable entries are lost"),
        (Promise.I3, outcome.gauge_mismatch, "times the gauge was wrong"),
    )
    return outcome.broken or tuple(
        BrokenPromise(promise, f"{number} {what}") for promise, number, what in counted if number
    )


def run_layer(
    layer: Layer,
    totals: Totals,
    budget: Budget,
    *,
    seen: Seen | None = None,
    watch: Callable[[Totals, float], None] = lambda *_: None,
) -> Seen:
    """Execute runs of a layer until the budget is over, and add them up."""
    seen = Seen() if seen is None else seen
    begun, earlier = time.monotonic(), totals.seconds
    try:
        with closing(layer(totals.next_seed)) as outcomes:
            totals.skipped = ""
            for outcome in outcomes:
                totals.add(outcome)
                seen.runs += 1
                seen.cycles += outcome.cycles
                seen.has_failed = seen.has_failed or bool(broken_promises(outcome))
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
    """Read the totals of earlier campaigns; empty if there is no file."""
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
    """Replace the file of totals atomically."""
    layers = {name: asdict(each) for name, each in sorted(totals.items())}
    write_atomically(path, json.dumps({"version": _VERSION, "subject": subject, "layers": layers}, indent=2) + "\n")


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
            case _:
                is_valid = _is_count(value)
        if not is_valid:
            raise TypeError(f"{each.name} is {value!r}")
    return Totals(**{each.name: plain[each.name] for each in fields(Totals)})


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_failure(value: Any) -> bool:
    match value:
        case {"seed": seed, "promise": str(), "found": str(), "story": list(story), "count": count, "last_seed": last}:
            return all(map(_is_count, (seed, count, last))) and all(isinstance(line, str) for line in story)
    return False


_STORY_LINES_MAX = 18
"""With the lines printed around it, a story fits on a screen of 24 lines."""
_STORY_FIRST_LINES = 2
_LINE_LENGTH_MAX = 150


def table(found: Mapping[str, Totals], titles: Mapping[str, str]) -> Table:
    """Return the sums as a table, a row for each layer; `titles` describe the layers by name."""
    table = Table("layer", "", box=None, header_style="bold")
    for title in ("runs", "cycles", "a second", "lost\ndurable", "invented", "gauge\nwrong", "failed\nruns"):
        table.add_column(title, justify="right")
    for name, totals in found.items():
        numbers = (totals.runs, totals.cycles, _rate(totals), totals.lost_durable, totals.invented)
        more = (totals.gauge_mismatch, totals.failed_runs)
        table.add_row(name, titles[name], *(f"{number:,}" for number in (*numbers, *more)))
    return table


def remarks(found: Mapping[str, Totals], seen: Mapping[str, Seen], untested: Mapping[str, str], file: str) -> list[str]:
    """Return the lines below the table: the failures with their stories, and the verdicts; `file` has the stories."""
    lines = []
    for name, totals in found.items():
        # A run that breaks two promises has one story.
        for (seed, story), failures in groupby(totals.failures, lambda each: (each["seed"], tuple(each["story"]))):
            lines += _failure_lines(name, seed, story, list(failures), file)
    for name, totals in found.items():
        match verdict := seen[name].verdict(untested[name]):
            case "skipped":
                lines.append(f"{name} was skipped: {totals.skipped}")
            case "not measured":
                lines.append(f"{name}: not measured: {untested[name]}")
            case _:
                promises = "every promise held" if verdict == "held" else "a promise was broken"
                lines.append(f"{name}: {promises}: {seen[name].tested}")
    return lines


def as_json(
    found: Mapping[str, Totals], seen: Mapping[str, Seen], untested: Mapping[str, str], file: str
) -> dict[str, Any]:
    """Return sums over all layers, and each layer with its failures; arguments as of `remarks`."""
    sums = ("runs", "cycles", "lost_durable", "invented", "gauge_mismatch", "failed_runs", "seconds")
    layers: list[dict[str, Any]] = [
        {"layer": name, "verdict": seen[name].verdict(untested[name]), "cycles_per_second": _rate(each)}
        | asdict(each)
        | {"untested": untested[name]}
        for name, each in found.items()
    ]
    return {name: sum(layer[name] for layer in layers) for name in sums} | {"failure_file": file, "layers": layers}


def junit(found: Mapping[str, Totals], seen: Mapping[str, Seen], untested: Mapping[str, str]) -> str:
    """Return the verdicts in the format of JUnit, a test case for each layer; what was not measured is an error."""
    suite = ElementTree.Element("testsuite", name="ackstate crash", tests=str(len(found)))
    for name, totals in found.items():
        case = ElementTree.SubElement(
            suite, "testcase", classname="ackstate.crash", name=name, time=f"{totals.seconds}"
        )
        match verdict := seen[name].verdict(untested[name]):
            case "broken":
                for each in totals.failures:
                    title = f"seed {each['seed']}: {each['promise']}: {each['found']}"
                    failure = ElementTree.SubElement(case, "failure", message=_xml_text(title))
                    failure.text = _xml_text("\n".join(each["story"]))
            case "not measured" | "skipped":
                kind = "error" if verdict == "not measured" else "skipped"
                ElementTree.SubElement(case, kind, message=_xml_text(untested[name] or totals.skipped))
    for kind in ("failure", "error", "skipped"):
        suite.set(f"{kind}s".replace("skippeds", "skipped"), str(len(suite.findall(f"testcase/{kind}"))))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _xml_text(text: str) -> str:
    return _NO_XML.sub("?", text)


def write_failures(found: Mapping[str, Totals], subject: str) -> str:
    """Write the failures into a file that repeats them here or elsewhere; return its path, or why there is none.

    It is in the current directory, otherwise among the temporary files. No path in it is absolute.
    """
    failures = [
        {"layer": name, "seed": each["seed"], "promise": each["promise"]}
        | {"found": _relative(each["found"]), "story": [_relative(line) for line in each["story"]]}
        for name, totals in found.items()
        for each in totals.failures
    ]
    text = json.dumps({"version": 1, "subject": portable(subject), "failures": failures}, indent=2) + "\n"
    name = f"ackstate-crash-{failures[0]['layer']}-seed-{failures[0]['seed']}.json"
    try:
        write_atomically(Path(name), text)
    except OSError:
        name = str(Path(tempfile.gettempdir()) / name)
        write_atomically(Path(name), text)
    return name


def read_failures(path: Path) -> tuple[str, dict[str, int]]:
    """Read such a file; return the subject, and the seed of the first failure of each layer."""
    try:
        stored = json.loads(path.read_bytes())
        if type(version := stored["version"]) is not int:
            raise TypeError(f"version is {version!r}")
        if version != 1:
            raise UnsupportedVersionError(f"{path}: failures have version {version}; this release reads 1")
        if not isinstance(subject := stored["subject"], str):
            raise TypeError(f"subject is {subject!r}")
        seeds: dict[str, int] = {}
        for each in stored["failures"]:
            if not isinstance(each["layer"], str) or not _is_count(each["seed"]):
                raise TypeError(f"layer is {each['layer']!r}, seed is {each['seed']!r}")
            seeds.setdefault(each["layer"], each["seed"])
        if not seeds:
            raise ValueError("there is no failure")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CampaignError(f"{path}: not the failures of a crash campaign ({error!r})") from error
    return subject, seeds


def repeated(layer: Layer, seed: int) -> Layer:
    """Return a layer that repeats the run of one seed until it breaks a promise: a crash may need several attempts."""

    def again(first_seed: int) -> Generator[RunOutcome]:  # noqa: ARG001 - of a layer
        is_broken = False
        while not is_broken:
            with closing(layer(seed)) as outcomes:
                outcome = next(outcomes)
            is_broken = bool(broken_promises(outcome))
            yield outcome

    return again


def portable(subject: str) -> str:
    """Return a subject without absolute paths: a program of the search path, or files relative to this directory."""
    try:
        words = shlex.split(subject)
    except ValueError:
        return subject
    if not any(word.startswith("/") for word in words):
        return subject
    return shlex.join(_portable(word) for word in words)


def _portable(word: str) -> str:
    if not word.startswith("/"):
        return word
    name = os.path.basename(word)  # noqa: PTH119 - of text
    return name if shutil.which(name) == word else os.path.relpath(word)


def _relative(text: str) -> str:
    """Return text without the directories of absolute paths."""
    return _DIRECTORIES.sub(".../", text)


def _failure_lines(
    name: str, seed: int, story: Sequence[str], failures: Iterable[dict[str, Any]], file: str
) -> list[str]:
    lines, notes = [""], []
    for failure in failures:
        lines.append(f"{name}, seed {seed}: {failure['promise']}: {failure['found']}")
        if failure["count"] > 1:
            notes.append(f"  {failure['count']:,} runs failed equally, the last with seed {failure['last_seed']}")
    return [*lines, *_shortened(story, file), *dict.fromkeys(notes)]


def _shortened(story: Sequence[str], file: str) -> list[str]:
    """Return a story with an indent; if it is too long, its first and last lines, and the file that holds all."""
    shown = [line if len(line) <= _LINE_LENGTH_MAX else f"{line[:_LINE_LENGTH_MAX]}..." for line in story]
    if len(shown) > _STORY_LINES_MAX:
        last_count = _STORY_LINES_MAX - _STORY_FIRST_LINES - 1
        left_out = f"... {len(shown) - _STORY_FIRST_LINES - last_count:,} lines are left out ..."
        shown = [*shown[:_STORY_FIRST_LINES], left_out, *shown[-last_count:]]
    if shown != list(story):
        shown = [*shown, f"the whole story: {file}"] if file else list(story)
    return [f"  {line}" for line in shown]


def _rate(totals: Totals) -> int:
    return round(totals.cycles / totals.seconds) if totals.seconds else 0
