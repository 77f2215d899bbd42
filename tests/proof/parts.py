"""The parts of a proof: each runs for its share of the time, and returns its attempts and failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.wording import counted
from fuzz.targets import TARGETS
from live.java_process import JARS
from museum.exhibits import EXHIBITS
from museum.matrix import PRODUCT, SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[2]
_OUTCOMES = re.compile(r"(\d+) (passed|failed|error)")
_GRACE_S = 600
"""A command may take this long more, to finish a run that it has begun."""
_LAYERS = 8
_EXAMPLES = 25
_LIVE_S_MIN = 300
_KILLS, _CUTS, _POINT_S = 20, 4, 45.0
"""Of a point of the calibration: deaths, and roughly how long they take."""


class PartEnd(NamedTuple):
    """The result of a part.

    Attributes:
        tried: The number of attempts by kind.
        failures: A line for each.
        not_run: Why nothing, or not everything, was run; empty if it was.
    """

    tried: Mapping[str, int]
    failures: tuple[str, ...] = ()
    not_run: str = ""


class ProofPart(NamedTuple):
    """A part of a proof.

    Attributes:
        title: Its name on the page.
        share: Its share of the time.
        run: Runs it for some seconds, with a directory for files.
    """

    title: str
    share: float
    run: Callable[[float, Path], PartEnd]


class Ended(NamedTuple):
    """A command that has ended; its status is -1 if it was stopped when its time was over."""

    status: int
    output: str


def finished(command: list[str], seconds: float, log: Path, **environment: str) -> Ended:
    """Run a command, and interrupt it when its time is over."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **environment}, stdout=output,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        except subprocess.TimeoutExpired:
            status = -1
            # The session is that of the command, so that its children are interrupted, too.
            for number in (signal.SIGINT, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    _wait(process, 60)
        output.seek(0)
        return Ended(status, output.read())


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def crashes(seconds: float, out: Path) -> PartEnd:
    """Crash our cursor in every layer, from seeds that the clock chooses."""
    command = [
        sys.executable, "-P", "-m", "crash", "--layer", "all", "--json",
        "--budget", f"{max(1, round(seconds / _LAYERS))}s", "--seed", str(int(time.time())),
    ]  # fmt: skip
    ended = finished(command, seconds + _GRACE_S, out / "crash.log")
    try:
        found = json.loads(ended.output[ended.output.index("{") :])["layers"]
    except (ValueError, KeyError):
        return _without_result(ended)
    tried = {f"crashes in {each['layer']}": each["cycles"] for each in found if each["cycles"]}
    failures = tuple(f"{each['layer']}: {failure}" for each in found for failure in each["failures"])
    if ended.status == 1 and not failures:
        failures = (f"exit status 1, see {out / 'crash.log'}",)
    idle = [f"{each['layer']}: {each['skipped'] or each['untested']}" for each in found]
    return PartEnd(tried, failures, "; ".join(each for each in idle if not each.endswith(": ")))


def models(seconds: float, out: Path) -> PartEnd:
    """Run the state machines and schedules with a few examples each, then with as many as the time allows."""
    begun_s = time.monotonic()
    first = _models(_EXAMPLES, seconds, out)
    took_s = time.monotonic() - begun_s
    examples = int(_EXAMPLES * 0.8 * (seconds - took_s) / took_s)
    if first.failures or first.not_run or examples < _EXAMPLES:
        return first
    second = _models(examples, seconds - took_s, out)
    if second.not_run:
        more = {f"tests with {examples:,} examples": second.tried.get("tests", 0)}
        return PartEnd({**first.tried, **more}, second.failures)
    return second


def _models(examples: int, seconds: float, out: Path) -> PartEnd:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header",
        "-m", "not spark and not soak", "tests/model",
    ]  # fmt: skip
    ended = finished(
        command, seconds, out / "models.log", HYPOTHESIS_PROFILE="nightly", NIGHTLY_EXAMPLES=str(examples)
    )  # fmt: skip
    outcomes = {what: int(count) for count, what in _OUTCOMES.findall(ended.output)}
    failures = tuple(re.findall(r"^(?:FAILED|ERROR) (.*)$", ended.output, re.MULTILINE))
    if ended.status < 0 and not outcomes:
        return _without_result(ended)
    if not outcomes or (ended.status > 0 and not failures):
        failures += (f"exit status {ended.status}: {_last_line(ended.output)}",)
    tried = {"tests": outcomes.get("passed", 0) + len(failures), "examples of each": examples}
    return PartEnd(tried, failures, "stopped when its time was over" * (ended.status < 0))


def kill_matrix(seconds: float, out: Path) -> PartEnd:
    """Plant every bug of the museum, and let every layer look for it."""
    whole_s = sum(SECONDS.values()) * (len(EXHIBITS) + 3)
    scale = min(1.0, seconds / whole_s)
    command = [sys.executable, "-P", "-m", "museum.matrix", "--scale", f"{scale:.4f}", "--out", str(out)]
    cells, ended = _reported(out / "matrix.json", command, seconds + _GRACE_S, out / "kill-matrix.log")
    if cells is None:
        return _without_result(ended)
    tried = {
        "bugs": len(cells.keys() - {PRODUCT}),
        "bugs caught": sum(
            any(cell["fate"] == "killed" for cell in row.values()) for name, row in cells.items() if name != PRODUCT
        ),
        "crashes": sum(cell["cycles"] for row in cells.values() for cell in row.values()),
    }
    failures = [
        f"{name} {layer}: {cell['fate']} {cell['found'][:160]}" for name, row in cells.items()
        for layer, cell in row.items()
        if cell["fate"] in {"hung", "died"} or (name == PRODUCT and cell["fate"] == "killed")
    ]  # fmt: skip
    if ended.status < 0:
        return PartEnd(tried, tuple(failures), "stopped when its time was over")
    missed = tried["bugs"] - tried["bugs caught"]
    if missed and scale >= 1:
        failures.append(f"no layer caught {counted(missed, 'bug')}")
    short = f"with {scale:.0%} of the usual time, which missed {counted(missed, 'bug')}" if scale < 1 else ""
    return PartEnd(tried, tuple(failures), short)


def calibration(seconds: float, out: Path) -> PartEnd:
    """Kill real cursors, and compare with the estimate."""
    points = max(1, round(seconds / _POINT_S))
    kills, cuts = (_KILLS, _CUTS) if seconds >= _POINT_S else (4, 1)
    command = [
        sys.executable, "-m", "benchmarks.calibration", "--points", str(points), "--kills", str(kills),
        "--power-cuts", str(cuts), "--seed", str(int(time.time())), "--out", str(out / "calibration.json"),
    ]  # fmt: skip
    found, ended = _reported(out / "calibration.json", command, seconds + _GRACE_S, out / "calibration.log")
    if found is None:
        return _without_result(ended)
    totals = found["totals"]
    tried = {
        "policies": totals["points"], "kills": totals["kills"], "kills as predicted": totals["kills_equal"],
        "power cuts": totals["power_cuts"], "power cuts within the prediction": totals["power_cuts_within"],
    }  # fmt: skip
    failures = () if found["holds"] else ("a kill or a power cut redelivered another number than predicted",)
    return PartEnd(tried, failures, found["power_cuts_skipped"])


def live_brokers(seconds: float, out: Path) -> PartEnd:
    """Kill the example broker under Pulsar's clients, and compare a real Pulsar broker with ackstate."""
    begun_s, failures, kills = time.monotonic(), [], 0
    reason = _live_reason(seconds)
    while kills < 1 or time.monotonic() - begun_s < seconds * (1.0 if reason else 0.2):
        kills += 1
        command = [
            sys.executable, "-m", "examples.kill_and_compare", str(out / "example-broker"), "--engine", "local",
            "--seed", str(int(time.time()) % 1_000_000),
        ]  # fmt: skip
        shutil.rmtree(out / "example-broker", ignore_errors=True)
        ended = finished(command, 300, out / "example-broker.log")
        if ended.status:
            failures.append(f"example broker: exit status {ended.status}: {_last_line(ended.output)}")
    tried = {"kills of the example broker": kills}
    if reason:
        return PartEnd(tried, tuple(failures), reason)
    compared = _pulsar_broker(seconds - (time.monotonic() - begun_s), out)
    return PartEnd({**tried, **compared.tried}, (*failures, *compared.failures), compared.not_run)


def _pulsar_broker(seconds: float, out: Path) -> PartEnd:
    """Run the parts of `make live`, those that take longest last, until the time is over."""
    from live import proof  # needs Pulsar's client

    file = out / "live.json"
    command = [sys.executable, "-P", "-m", "live.proof", str(file)]
    found, ended = _reported(file, command, seconds, out / "live.log")
    parts = {} if found is None else found["parts"]
    sections = [section for part in parts.values() for section in part]
    compared = sum(total for section in sections for _, total in section["counts"].values())
    tried = {"comparisons with a Pulsar broker": compared} if compared else {}
    failures = [f"Pulsar broker: {wrong}" for section in sections for wrong in section["wrong"]]
    if ended.status > 0 and not failures:
        failures.append(f"Pulsar broker: exit status {ended.status}: {_last_line(ended.output)}")
    missing = [name for name in proof.PARTS if name not in parts]
    cut_off = f"Pulsar broker: its time was over before the end of: {', '.join(missing)}" if ended.status < 0 else ""
    return PartEnd(tried, tuple(failures), cut_off)


def _live_reason(seconds: float) -> str:
    """Return why no Pulsar broker is started; empty if one is."""
    if not (JARS / ".stamp").exists():
        return "no Pulsar broker: its jars are missing (bash .ci/setup live, which needs Maven)"
    return "" if seconds >= _LIVE_S_MIN else f"no Pulsar broker: it takes {_LIVE_S_MIN} s"


def fuzzing(seconds: float, out: Path) -> PartEnd:
    """Fuzz every decoder of foreign bytes, guided by coverage."""
    report = out / "fuzz.json"
    command = [
        sys.executable, "-P", "-m", "fuzz", "--seconds", f"{seconds:.0f}", "--report", str(report),
        "--failures", str(out / "fuzz"),
    ]  # fmt: skip
    try:
        import atheris  # noqa: F401 - a prerequisite
    except ImportError:
        return PartEnd({}, not_run="atheris is missing: make setup installs it for Python 3.11 to 3.13")
    found, ended = _reported(report, command, seconds + len(TARGETS) * 10 + _GRACE_S, out / "fuzz.log")
    if found is None:
        return _without_result(ended)
    failures = tuple(f"{name}: {each['failure']}" for name, each in found.items() if each["failure"])
    tried = {"decoders": len(found), "inputs": sum(each["inputs"] for each in found.values())}
    return PartEnd(tried, failures, "stopped when its time was over" * (ended.status < 0))


def _reported(report: Path, command: list[str], seconds: float, log: Path) -> tuple[Any, Ended]:
    """Run a command that writes a report, and return its JSON, None without a whole one, and the command's end."""
    report.unlink(missing_ok=True)
    ended = finished(command, seconds, log)
    try:
        return json.loads(report.read_text(encoding="utf-8")), ended
    except (OSError, ValueError):
        return None, ended


def _without_result(ended: Ended) -> PartEnd:
    """Return the result of a command that has written none: it failed, unless it was stopped."""
    if ended.status < 0:
        return PartEnd({}, not_run="stopped when its time was over, without a result")
    return PartEnd({}, (f"exit status {ended.status}: {_last_line(ended.output)}",))


def _last_line(output: str) -> str:
    return next((line.strip()[:200] for line in reversed(output.splitlines()) if line.strip()), "no output")


PARTS = {
    "crashes": ProofPart("Crashes of a cursor in every layer", 0.25, crashes),
    "models": ProofPart("State machines and schedules", 0.15, models),
    "kill-matrix": ProofPart("Historical bugs, planted", 0.20, kill_matrix),
    "calibration": ProofPart("Kills against the estimate", 0.10, calibration),
    "live-brokers": ProofPart("Live brokers", 0.15, live_brokers),
    "fuzzing": ProofPart("Fuzzing of every decoder", 0.15, fuzzing),
}
"""The parts, by the name on the command line, in the order in which they run."""
