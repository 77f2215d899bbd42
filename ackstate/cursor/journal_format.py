"""The former place of these names, for one release: import them from `ackstate.cursor`."""

from typing import TYPE_CHECKING

from ackstate.renamed import moved_names

__all__ = ["Format", "Repair"]

if TYPE_CHECKING:
    from ackstate.cursor.journal.format import Format, Repair
else:
    __getattr__ = moved_names(__name__, "ackstate.cursor", __all__)
