"""The page of the API has every public name, and the commands that pages show exist."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

from ackstate.analysis.cli.main import app
from shown_consoles import BLOCK
from website.reference import PACKAGES, api_page

ROOT = Path(__file__).parents[2]
DOCUMENTED = re.findall(r"^::: (\S+)", api_page(), re.M)


def test_every_public_name_is_documented_once():
    public = {name for each in PACKAGES for name in import_module(each).__all__}
    assert len(public) <= 70
    names = [each.rpartition(".")[2] for each in DOCUMENTED]
    assert public <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_name_exists(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(import_module(module), attribute)


def shown_commands():
    """Yield the words of each command line of ours in a block of a page, up to a pipe or a redirection."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for found in re.findall(r"^(?:\$ )?(ackstate (?!.*\.\.\.).*)", block, re.M):
                yield page.name, shlex.split(re.split(r" [&|#>]|;", found)[0])


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
