"""Where an entry stands in a message log."""

from __future__ import annotations

import re
from operator import index
from typing import NamedTuple

LEDGER_ID_MAX = 2**63 - 1
ENTRY_ID_MAX = 2**32 - 1

_TEXT = re.compile(r"(\d{1,19}):(-1|\d{1,10})", re.ASCII)


class Position(NamedTuple):
    """An entry's address, ordered by ledger, then by entry.

    >>> Position(3, 7) < Position(4, 0)
    True
    >>> str(Position(3, 7))
    '3:7'

    Attributes:
        ledger_id: Message ledger, 0 to 2**63 - 1.
        entry_id: Entry in that ledger, 0 to 2**32 - 1; -1 is "before the first entry".
    """

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read back what `str` wrote.

        >>> Position.parse("3:-1")
        Position(ledger_id=3, entry_id=-1)

        Raises:
            ValueError: The text is not ``ledger:entry``, or an id is out of range.
        """
        matched = _TEXT.fullmatch(text)
        if matched is None:
            raise ValueError(f"not a position: {text!r}, expected ledger:entry such as 3:7")
        position = cls(int(matched[1]), int(matched[2]))
        check_position(position)
        return position


def check_position(position: Position, *, entry_id_min: int = -1) -> Position:
    """Refuse a position whose ids no message log can have.

    Args:
        position: The position to look at.
        entry_id_min: The lowest entry id allowed: -1 where "before the first" makes sense, else 0.

    Returns:
        The position itself if it is a `Position` of plain integers, else one that is.

    Raises:
        TypeError: It is no position, or an id is not an integer.
        ValueError: An id is out of range.
    """
    try:
        ledger_id, entry_id = position
    except (TypeError, ValueError):
        hint = "; Position.parse reads text" if isinstance(position, str) else ""
        raise TypeError(f"position must be a Position, got {position!r}{hint}") from None
    if type(position) is not Position or type(ledger_id) is not int or type(entry_id) is not int:
        try:
            ledger_id, entry_id = position = Position(index(ledger_id), index(entry_id))
        except TypeError:
            raise TypeError(f"ids of a position are integers, found {ledger_id!r} and {entry_id!r}") from None
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"ledger id {ledger_id} is outside 0..{LEDGER_ID_MAX}")
    if not entry_id_min <= entry_id <= ENTRY_ID_MAX:
        raise ValueError(f"entry id {entry_id} of ledger {ledger_id} is outside {entry_id_min}..{ENTRY_ID_MAX}")
    return position
