"""A path that is given on the command line."""

from __future__ import annotations

from pathlib import Path

import typer


def path_argument(text: str) -> Path:
    """Return what a user named; an empty path would be the current directory, which is never meant.

    Raises:
        typer.BadParameter: It is empty.
    """
    if not str(text):
        raise typer.BadParameter("it is empty")
    return Path(text)
