"""The position of an entry in a message log."""

from __future__ import annotations

import re
from functools import partial
from itertools import repeat
from operator import index
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        """Parse the output of `str`.

        >>> Position.parse("3:-1")
        Position(ledger_id=3, entry_id=-1)

        Raises:
            ValueError: The text is not ``ledger:entry``, or an id is out of range.
        """
        matched = _TEXT.fullmatch(text)
        if matched is None:
            raise ValueError(f"a position must be ledger:entry such as 3:7, got {text!r}")
        position = cls(int(matched[1]), int(matched[2]))
        check_position(position)
        return position


def check_position(position: Position, *, entry_id_min: int = -1) -> Position:
    """Return a position, converted unless it is a `Position` of plain integers; refuse one with invalid ids."""
    try:
        ledger_id, entry_id = position
    except (TypeError, ValueError):
        hint = "; Position.parse reads text" if isinstance(position, str) else ""
        raise TypeError(f"position must be a Position, got {position!r}{hint}") from None
    if type(position) is not Position or type(ledger_id) is not int or type(entry_id) is not int:
        try:
            ledger_id, entry_id = position = Position(index(ledger_id), index(entry_id))
        except TypeError:
            raise TypeError(f"ids of a position must be integers, got {ledger_id!r} and {entry_id!r}") from None
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise ValueError(f"ledger id must be in 0..{LEDGER_ID_MAX}, got {ledger_id}")
    if not entry_id_min <= entry_id <= ENTRY_ID_MAX:
        raise ValueError(f"entry id of ledger {ledger_id} must be in {entry_id_min}..{ENTRY_ID_MAX}, got {entry_id}")
    return position


_new_position = partial(tuple.__new__, Position)


def positions_of(ledger_id: int, entry_ids: Iterable[int]) -> Iterator[Position]:
    """Yield positions of plain integers, in half the time of the class itself."""
    return map(_new_position, zip(repeat(ledger_id), entry_ids))


def checked_positions(positions: Iterable[Position]) -> list[Position]:
    """Return positions of entries as a list of `Position`s of plain integers."""
    # Without a call for each position, if all are valid.
    if isinstance(positions, Position | str | bytes):
        raise TypeError(f"positions must be a list of Position, got {positions!r}")
    if hasattr(positions, "tolist"):  # an array, whose elements would be numbers of its own types
        positions = [Position(*row) for row in positions.tolist()]
    found = list(positions)
    if not found:
        return found
    try:
        ledger_ids, entry_ids = zip(*found, strict=True)
        is_valid = (
            {*map(type, found)} == {Position}
            and {*map(type, ledger_ids), *map(type, entry_ids)} == {int}
            and 0 <= min(ledger_ids) <= max(ledger_ids) <= LEDGER_ID_MAX
            and 0 <= min(entry_ids) <= max(entry_ids) <= ENTRY_ID_MAX
        )
    except (TypeError, ValueError):
        is_valid = False
    return found if is_valid else [check_position(position, entry_id_min=0) for position in found]
