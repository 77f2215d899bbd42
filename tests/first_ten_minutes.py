"""Takes the first steps of a new user, and prints the time of each: make first-ten-minutes.

Clone the repository, `make demo`, `make test`, install the wheel into an empty environment, and follow the tutorial
with it: write the broker, talk to it, kill it, and open its report in a browser. It runs with the system's Python, in
a new directory. `--quick` runs `make check` instead of `make test`; `--skip STEP` leaves a step out. A visit with all
steps is written to benchmarks/first_ten_minutes.json, and its table to docs/results.md; `--write` writes any visit.

Exit status: 0 every step succeeded, 1 a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "first_ten_minutes.json"
PAGE = ROOT / "docs" / "results.md"
STEPS = {
    "clone": "clone the repository",
    "demo": "`make demo`, which first sets up the environment",
    "test": "`make test`",
    "wheel": "build the wheel, and install it into an empty environment",
    "tutorial": "the tutorial's broker: write it, talk to it with its client, kill it, start it again",
    "report": "the report of the killed broker, in a browser",
}
_BEGIN, _END = "<!-- tables: written by make first-ten-minutes -->", "<!-- end of tables -->"


class StepError(Exception):
    """A step failed."""


class Visit:
    """The state of a visit: directories, and the Python that has the wheel."""

    def __init__(self, directory: Path, *, is_quick: bool) -> None:
        self.directory = directory
        self.is_quick = is_quick
        self.clone_ = directory / "ackstate"
        self.python = directory / "empty" / "bin" / "python"
        self.shop = directory / "tutorial"

    def clone(self) -> str:
        """Clone the commit of this checkout."""
        run(["git", "clone", "--quiet", ROOT, self.clone_], cwd=self.directory)
        return run(["git", "log", "-1", "--format=%h"], cwd=self.clone_).strip()

    def demo(self) -> str:
        """Run `make demo`, which sets up the environment first."""
        return " ".join(last_line(run(["make", "demo"], cwd=self.clone_)).split())

    def test(self) -> str:
        """Run the tests."""
        output = run(["make", "check" if self.is_quick else "test"], cwd=self.clone_)
        return next((line for line in reversed(output.splitlines()) if " passed" in line), "no test ran").strip("= ")

    def wheel(self) -> str:
        """Build the wheel, and install it into an empty environment."""
        run(["make", "dist"], cwd=self.clone_)
        (wheel,) = (self.clone_ / "dist").glob("*.whl")
        run([self.clone_ / ".venv" / "bin" / "python", "-m", "venv", self.directory / "empty"])
        run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[spark]"])
        return run([self.python.with_name("ackstate"), "--version"], cwd=self.directory).strip()

    def tutorial(self) -> str:
        """Write the broker of the tutorial, talk to it, kill it, and start it again, as the page shows."""
        page = (self.clone_ / "docs" / "tutorial.md").read_text(encoding="utf-8")
        self.shop.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:  # Another broker may have the port of the page.
            port = str(server.getsockname()[1])
        for name, code in zip(
            ("broker.py", "ask.py"), re.findall(r"```python\n(.*?)```", page, re.DOTALL), strict=True
        ):
            (self.shop / name).write_text(code.replace("6650", port), encoding="utf-8")
        brokers: list[subprocess.Popen[str]] = []
        commands = 0
        try:
            for console in re.findall(r"```console\n(.*?)```", page.partition("## Read its report")[0], re.DOTALL):
                for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE):
                    commands += 1
                    self._obey(command, shown.strip(), brokers)
        finally:
            for broker in brokers:
                broker.kill()
                broker.wait()
        return f"{commands} commands answered as the page shows"

    def _obey(self, command: str, shown: str, brokers: list[subprocess.Popen[str]]) -> None:
        """Run a command of the page, and compare its output."""
        if command.endswith("&"):
            words = command.split()[1:-1]
            process = subprocess.Popen([self.python, *words], cwd=self.shop, stdout=subprocess.PIPE, text=True)
            brokers.append(process)
            assert process.stdout is not None
            found = process.stdout.readline().strip()
        elif command.startswith("kill"):
            os.kill(brokers[-1].pid, signal.SIGKILL)
            brokers[-1].wait()
            return
        else:
            found = run([self.python, *command.split()[1:]], cwd=self.shop).strip()
        if found != shown:
            raise StepError(f"{command!r} printed {found!r}, and the page shows {shown!r}")

    def report(self) -> str:
        """Compute the report of the killed broker, and open it in a browser."""
        ackstate = self.python.with_name("ackstate")
        run([ackstate, "trace", "convert", "shop/recording", "trace"], cwd=self.shop)
        run([ackstate, "redelivery", "trace", "--engine", "local", "--report", "report.html"], cwd=self.shop)
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            return "written; there is no Chromium to open it with"
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.shop / 'profile'}"]
        shown = run([browser, *options, "--dump-dom", (self.shop / "report.html").as_uri()], cwd=self.shop)
        if "billing" not in shown or "<svg" not in shown:
            raise StepError("the browser shows no curve of billing")
        return f"{(self.shop / 'report.html').stat().st_size:,} bytes, shown with its curve"


def run(command: list[object], *, cwd: Path | None = None) -> str:
    """Run a command, and return its output."""
    # A make that started this one would pass its ARGS on, and print the directories of those below.
    env = {name: value for name, value in os.environ.items() if name not in {"ARGS", "MAKEFLAGS", "MAKELEVEL"}}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise StepError(f"{' '.join(map(str, command))} exited with {done.returncode}:\n{tail}")
    return done.stdout


def last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def table(result: dict[str, Any]) -> str:
    """Return the steps of a result as a table, with those that were left out."""
    steps = result["steps"]
    lines = ["| step | time | outcome |", "|---|--:|---|"]
    for step, what in STEPS.items():
        seconds, outcome = (
            (f"{steps[step]['seconds']:,.1f} s", steps[step]["outcome"]) if step in steps else ("", "not run")
        )
        lines.append(f"| {what} | {seconds} | {outcome} |")
    if steps:
        lines += ["", f"Taken on {result['date']}, on {result['machine']}."]
    return "\n".join(lines)


def filled(page: str, result: dict[str, Any]) -> str:
    """Return a page with the table of a result between its marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the page must have {_BEGIN} and {_END}")
    return f"{before}{begin}\n\n{table(result)}\n\n{end}{after}"


def write(steps: dict[str, dict[str, object]]) -> None:
    """Write the result of a visit, and its table."""
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}", "steps": steps,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


def main() -> int:
    """Run the steps, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make first-ten-minutes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="make check instead of make test")
    parser.add_argument("--skip", action="append", choices=STEPS, default=[], help="leave a step out")
    parser.add_argument("--keep", action="store_true", help="leave the directory")
    parser.add_argument("--write", action="store_true", help="write the result of a visit that left steps out")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ackstate-first-"))
    visit = Visit(directory, is_quick=options.quick)
    begun_s, failed = time.monotonic(), False
    found: dict[str, dict[str, object]] = {}
    for step in [each for each in STEPS if each not in options.skip]:
        step_s = time.monotonic()
        try:
            outcome = getattr(visit, step)()
        except (StepError, OSError, ValueError) as error:
            outcome, failed = f"FAILED: {error}", True
        found[step] = {"seconds": round(time.monotonic() - step_s, 1), "outcome": outcome}
        print(f"{step:<10}{found[step]['seconds']:>8.1f} s  {outcome}", flush=True)
        if failed:
            break
    print(f"{'all':<10}{time.monotonic() - begun_s:>8.1f} s", flush=True)
    if not failed and (options.write or (found.keys() == STEPS.keys() and not options.quick)):
        write(found)
    if options.keep:
        print(directory)
    else:
        with suppress(OSError):
            shutil.rmtree(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
