"""The former place of these names, for one release: import them from `ackstate.cursor`."""

from ackstate.cursor.journal.format import Format, Repair

__all__ = ["Format", "Repair"]
