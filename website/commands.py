"""The page with the help texts of all commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ackstate.analysis.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTRODUCTION = """# Commands

The command `ackstate` needs the extra `[cli]`, and some commands another one, which they name when it is missing. Times
are written as `500ms`, `5s`, `1m` or `1h`. This page has the output of `--help` of each command.
"""
_COLUMNS = 100


class Command(NamedTuple):
    """A command or a group of commands: its words, beginning with `ackstate`, and its help text."""

    words: str
    help_text: str


def commands() -> list[Command]:
    """Return all commands that the help lists, each group before its commands."""
    return list(_below(typer.main.get_command(app), words="ackstate"))


def page() -> str:
    """Return the page in Markdown."""
    sections = [f"## {each.words}\n\n```text\n{each.help_text}\n```\n" for each in commands()]
    return "\n".join([_INTRODUCTION, *sections])


def _below(command: Any, *, words: str, parent: Any = None) -> Iterator[Command]:
    name = words.rpartition(" ")[2]
    context = typer.Context(command, info_name=name, parent=parent, terminal_width=_COLUMNS, max_content_width=_COLUMNS)
    yield Command(words, "\n".join(line.rstrip() for line in command.get_help(context).splitlines()).strip())
    for name, each in getattr(command, "commands", {}).items():
        yield from _below(each, words=f"{words} {name}", parent=context)
