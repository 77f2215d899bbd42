"""The command `ackstate`: one module a command, or a group of commands that share options."""

from ackstate.analysis.cli.main import main

__all__ = ["main"]
