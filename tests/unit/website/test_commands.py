"""The page of commands has the help text of each command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from ackstate.analysis.cli.main import app
from shown_consoles import BLOCK
from website import commands

ROOT = Path(__file__).parents[3]


def test_every_visible_command_is_on_the_page():
    root = typer.main.get_command(app)
    visible = set(root.commands)
    words = [each.words for each in commands.commands()]
    assert {each.split()[1] for each in words if " " in each} == visible
    assert {"ackstate", "ackstate trace convert", "ackstate topics set-delayed-delivery"} <= set(words)
    page = commands.page()
    assert [f"## {each}" for each in words] == re.findall(r"^## .*$", page, re.MULTILINE)


def test_a_help_text_has_every_visible_option():
    root = typer.main.get_command(app)
    found = {each.words: each.help_text for each in commands.commands()}
    options = 0
    for name, command in root.commands.items():
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                options += 1
                assert option.opts[-1] in found[f"ackstate {name}"], (name, option.opts)
    assert options > 50
    assert "--flush-interval-ms" in found["ackstate sweep"]
    assert found["ackstate sweep"].startswith("Usage: ackstate sweep ")


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
