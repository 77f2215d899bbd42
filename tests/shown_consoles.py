"""Runs the console blocks of a documentation page as a reader would: files, commands, background processes, kills."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED_AS = re.compile(r"[Ss]ave (?:this|it) as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S = 300


class ConsoleStep(NamedTuple):
    """A command, and the lines that the page shows as its output."""

    command: str
    shown: tuple[str, ...]


def python_block(page, part):
    """Return the only block of Python on a page of the documentation that has some text."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    (found,) = [block for language, block in BLOCK.findall(text) if language == "python" and part in block]
    return found


def files(page):
    """Return the files that the page asks the reader to save: name -> content."""
    return dict(_SAVED_AS.findall(page))


def steps(page):
    """Return the commands of all console blocks in order."""
    found = []
    for language, text in BLOCK.findall(page):
        if language == "console":
            for line in text.splitlines():
                if line.startswith("$ "):
                    found.append(ConsoleStep(line[2:], ()))
                else:
                    found[-1] = ConsoleStep(found[-1].command, (*found[-1].shown, line))
    return found


class Shell:
    """Executes commands in a directory; `with` ends the processes that are left in the background."""

    def __init__(self, directory):
        self.directory = directory
        self.jobs = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            job.kill()
            job.communicate(timeout=_TIMEOUT_S)

    def run(self, step):
        """Execute a command and return the lines of its output: of a background process, as many as are shown."""
        words = shlex.split(step.command)
        if words[:2] == ["kill", "-9"]:
            job = self.jobs[int(words[2].removeprefix("%")) - 1]
            job.kill()
            job.wait(timeout=_TIMEOUT_S)
            return []
        if words[-1] == "&":
            self.jobs.append(subprocess.Popen(
                [*program(words[0]), *words[1:-1]], cwd=self.directory, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            ))  # fmt: skip
            return [self.jobs[-1].stdout.readline().rstrip("\n") for _ in step.shown]
        ended = subprocess.run(
            [*program(words[0]), *words[1:]], cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, (step.command, ended.stdout)
        return [line.rstrip() for line in ended.stdout.splitlines()]


def program(name):
    """Return the words that start a program of the page."""
    return {"python": [sys.executable], "ackstate": [sys.executable, "-m", "ackstate.analysis.cli"]}.get(name, [name])
