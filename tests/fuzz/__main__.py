"""Fuzzes every target for its share of the time: python -P -m fuzz --help.

`.ci/fuzz-requirements.txt` has the fuzzer, Atheris, which set-up does not install.

The corpus, `corpus.zip`, holds inputs that reached code which no seed reaches; `--keep` adds those of this run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import atheris

_OURS = ["ackstate", "examples.broker.framing"]
# A line for each module is no news.
with redirect_stderr(StringIO()), atheris.instrument_imports(include=_OURS, enable_loader_override=False):
    from fuzz import corpus
    from fuzz.targets import TARGETS, run

_EXECUTED = re.compile(r"^stat::number_of_executed_units: (\d+)", re.MULTILINE)
_INPUT_BYTES_MAX = 65_536
_SEAL_SHARE = 0.9


def main() -> int:
    """Fuzz, and return the exit status: 1 if a target failed."""
    parser = argparse.ArgumentParser(prog="python -P -m fuzz", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300.0, help="of all targets together; 300 by default")
    parser.add_argument("--failures", type=Path, default=Path("out/fuzz"), help="put failing inputs there")
    parser.add_argument("--keep", action="store_true", help="add new inputs to the corpus in the repository")
    options = parser.parse_args()
    options.failures.mkdir(parents=True, exist_ok=True)
    failed, inputs = [], 0
    for name in options.targets:
        with tempfile.TemporaryDirectory(prefix="ackstate-fuzz-") as scratch:
            directory = Path(scratch)
            corpus.unpack(name, directory / "corpus")
            child = os.fork()
            if child == 0:
                _be_fuzzer(name, max(1, round(options.seconds / len(options.targets))), directory, options.failures)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output = (directory / "output").read_text(encoding="utf-8", errors="replace")
            inputs += sum(map(int, _EXECUTED.findall(output)))
            if status:
                failed.append(name)
                (options.failures / f"{name}.txt").write_text(output[-20_000:], encoding="utf-8")
            elif options.keep:
                corpus.keep(name, directory / "corpus")
        print(f"{name}: {'failed' if status else 'ok'}", flush=True)
    print(f"{len(options.targets)} targets, {inputs:,} inputs, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _be_fuzzer(name: str, seconds: int, directory: Path, failures: Path) -> None:
    """Fuzz one target in this process, and end it, at the latest with the first failure."""
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    target, choose = TARGETS[name], random.Random(seconds)

    def mutated(data: bytes, size_max: int, _seed: int) -> bytes:
        """Mutate, and seal most of the results."""
        changed = atheris.Mutate(data, min(size_max, _INPUT_BYTES_MAX))
        return target.seal(changed) if target.seal and choose.random() < _SEAL_SHARE else changed

    def one_input(data: bytes) -> None:
        """Decode; anything that escapes is a failure."""
        run(target, data)

    options = [
        f"-max_total_time={seconds}", "-timeout=25", "-rss_limit_mb=2048", "-print_final_stats=1",
        f"-artifact_prefix={failures}/{name}-", f"-max_len={_INPUT_BYTES_MAX}", str(directory / "corpus"),
    ]  # fmt: skip
    try:
        # It ends the process, with a status other than 0 after a failure.
        atheris.Setup([sys.argv[0], *options], one_input, custom_mutator=mutated)
        atheris.Fuzz()
    finally:
        os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
