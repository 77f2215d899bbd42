"""Defines the interface of the two sides: commands, each of which runs one round and returns numbers."""

from __future__ import annotations

from typing import Protocol

Answer = dict[str, int]
"""Times in ns, sizes in bytes, and results of the work that must be equal on all sides."""


class Side(Protocol):
    """Runs commands: our classes in this process, or a release of Pulsar in a process of its own."""

    name: str

    def run(self, command: str, **options: object) -> Answer:
        """Run one round of a command.

        Raises:
            SideError: The command failed.
        """


class SideError(Exception):
    """A side cannot be built, cannot be started or failed; the message is one line."""
