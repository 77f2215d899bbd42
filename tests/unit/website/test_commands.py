"""The page of commands has the help text of each command."""

from __future__ import annotations

import re

import typer

from ackstate.analysis.cli.main import app
from website import commands


def test_every_visible_command_is_on_the_page():
    root = typer.main.get_command(app)
    visible = {name for name, each in root.commands.items() if not each.hidden}
    words = [each.words for each in commands.commands()]
    assert {each.split()[1] for each in words if " " in each} == visible
    assert "package" not in visible  # the old name of spark-package is hidden
    assert {"ackstate", "ackstate trace convert", "ackstate topics set-delayed-delivery"} <= set(words)
    page = commands.page()
    assert [f"## {each}" for each in words] == re.findall(r"^## .*$", page, re.MULTILINE)


def test_a_help_text_has_every_visible_option():
    root = typer.main.get_command(app)
    found = {each.words: each.help_text for each in commands.commands()}
    options = 0
    for name, command in root.commands.items():
        for option in command.params:
            if not command.hidden and option.param_type_name == "option" and not option.hidden:
                options += 1
                assert option.opts[-1] in found[f"ackstate {name}"], (name, option.opts)
    assert options > 50
    assert "--flush-interval-ms" in found["ackstate sweep"]
    assert found["ackstate sweep"].startswith("Usage: ackstate sweep ")
