"""Every command that a page shows exists, with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from ackstate.analysis.cli.main import app
from shown_consoles import BLOCK

ROOT = Path(__file__).parents[3]


def shown_commands():
    """Yield the words of each command line of ours in a block of a page, up to a pipe or a redirection."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                found = re.match(r"(?:\$ )?(ackstate (?!.*\.\.\.).*)", line)
                if found:
                    command = re.split(r" [&|#>]|;", found[1])[0]
                    yield page.name, shlex.split(command)


def test_every_command_that_a_page_shows_exists_with_its_options():
    checked = 0
    for page, words in shown_commands():
        command = typer.main.get_command(app)
        for word in words[1:]:
            if word not in getattr(command, "commands", {}):
                break
            command = command.commands[word]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in {"--help", "--version", "--install-completion"}:
                checked += 1
                assert name in options, (page, words)
    assert checked > 30
