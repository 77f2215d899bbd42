"""Fuzzes every target for its share of the time: python -P -m fuzz --help.

The corpus, `corpus.zip`, holds inputs that reached code which no seed reaches; `--keep` adds those of this run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path

import atheris

_OURS = ["ackstate", "examples.broker.framing"]
# A line for each module is no news.
with redirect_stderr(StringIO()), atheris.instrument_imports(include=_OURS, enable_loader_override=False):
    from fuzz import corpus
    from fuzz.targets import TARGETS, run

_EXECUTED = re.compile(r"^stat::number_of_executed_units: (\d+)", re.MULTILINE)
_PULSE = re.compile(r"^#(\d+)\t", re.MULTILINE)
_COVERED = re.compile(r"\bcov: (\d+)")
_REASON = re.compile(
    r"^ *(?:===.*|[\w.]*(?:Error|Exception)\b.*|terminate called.*|==\d+== ERROR.*|ALARM.*)$", re.MULTILINE
)
_INPUT_BYTES_MAX = 65_536
_SEAL_SHARE = 0.9
_INPUT_S_MAX = 25
_GRACE_S = 300
"""A target may take this long more, to run its corpus once, on a machine that does other things."""


def main(arguments: list[str] | None = None) -> int:
    """Fuzz, write the report, and return the exit status: 1 if a target failed."""
    options = _options(arguments)
    found = {}
    for name in options.targets:
        seconds = max(1, round(options.seconds / len(options.targets)))
        found[name] = _fuzzed(name, seconds, failures=options.failures, keeps=options.keep)
        print(f"{name}: {found[name]}", flush=True)
        if options.report:
            options.report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, each in found.items() if each["failure"]]
    inputs = sum(each["inputs"] for each in found.values())
    print(f"{len(found)} targets, {inputs:,} inputs, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m fuzz", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300.0, help="of all targets together; 300 by default")
    parser.add_argument("--report", type=Path, help="write JSON there")
    parser.add_argument("--failures", type=Path, default=Path("out/fuzz"), help="put failing inputs there")
    parser.add_argument("--keep", action="store_true", help="add new inputs to the corpus in the repository")
    return parser.parse_args(arguments)


def _fuzzed(name: str, seconds: int, *, failures: Path, keeps: bool) -> dict[str, object]:
    """Fuzz one target in a child, which ends with the first failure."""
    with tempfile.TemporaryDirectory(prefix="ackstate-fuzz-") as scratch:
        directory = Path(scratch)
        corpus.unpack(name, directory / "corpus")
        begun_s = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_fuzzer(name, seconds, directory)
        status = _ended(child, begun_s + seconds + _GRACE_S)
        output = (directory / "output").read_text(encoding="utf-8", errors="replace")
        inputs, covered = _EXECUTED.findall(output) or _PULSE.findall(output), _COVERED.findall(output)
        reason = _REASON.search(output)
        failure = "" if status == 0 else (reason[0].strip()[:200] if reason else f"exit status {status}")
        if failure:
            failures.mkdir(parents=True, exist_ok=True)
            for file in directory.glob("*-*"):
                (failures / f"{name}-{file.name}").write_bytes(file.read_bytes())
            (failures / f"{name}.txt").write_text(output[-20_000:], encoding="utf-8")
        elif keeps:
            corpus.keep(name, directory / "corpus")
        return {
            "inputs": int(inputs[-1]) if inputs else 0, "branches": int(covered[-1]) if covered else 0,
            "seconds": round(time.monotonic() - begun_s, 1), "failure": failure,
        }  # fmt: skip


def _be_fuzzer(name: str, seconds: int, directory: Path) -> None:
    """Fuzz in this process, and end it."""
    status = 70
    try:
        output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        target = TARGETS[name]
        choose = random.Random(seconds)

        def one_input(data: bytes) -> None:
            """Decode; anything that escapes is a failure."""
            run(target, data)

        def mutated(data: bytes, size_max: int, _seed: int) -> bytes:
            """Mutate, and seal most of the results."""
            changed = atheris.Mutate(data, min(size_max, _INPUT_BYTES_MAX))
            assert target.seal is not None
            return target.seal(changed) if choose.random() < _SEAL_SHARE else changed

        options = [
            f"-max_total_time={seconds}", f"-timeout={_INPUT_S_MAX}", "-rss_limit_mb=2048", "-print_final_stats=1",
            f"-artifact_prefix={directory}/", f"-max_len={_INPUT_BYTES_MAX}", str(directory / "corpus"),
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *options], one_input, **({"custom_mutator": mutated} if target.seal else {}))
        atheris.Fuzz()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _ended(child: int, until_s: float) -> int:
    """Wait for a child, kill it if it takes too long, and return its exit status; -1 if it was killed."""
    while time.monotonic() < until_s:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


if __name__ == "__main__":
    sys.exit(main())
