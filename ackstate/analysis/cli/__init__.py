"""The command `ackstate`: one module a command, or a group of commands that share options. Needs ``ackstate[cli]``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

try:
    from ackstate.analysis.cli.main import main
except ModuleNotFoundError as error:
    if error.name not in {"rich", "typer"}:
        raise
    _MISSING: Final = error.name

    def main(arguments: Sequence[str] | None = None) -> None:  # noqa: ARG001 - as the real one
        """Name the missing package, and exit with the status of a failure."""
        sys.stderr.write(f"ackstate: {_MISSING} is missing: install ackstate[cli]\n")
        sys.exit(2)
