"""Is a number that a caller gave a whole one, and large enough?"""

from __future__ import annotations

from operator import index


def integer(name: str, number: int) -> int:
    """Return a number as a plain integer.

    Args:
        name: What the caller calls it.
        number: Anything that stands for an integer, such as one of numpy's.

    Raises:
        TypeError: It is no integer; True and False are none.
    """
    try:
        if not isinstance(number, bool):
            return index(number)
    except TypeError:
        pass
    raise TypeError(f"{name} is an integer, found {number!r}")


def check_count(name: str, value: object, *, least: int) -> None:
    """Refuse a setting that is no integer (`TypeError`), booleans too, or below the least (`ValueError`)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")


def check_within(name: str, value: object, *, least: int, most: int, unit: str = "") -> None:
    """Refuse what is no whole number (`TypeError`), booleans too, or out of bounds (`ValueError`), both included.

    Args:
        name: What the caller calls it.
        value: What was given.
        least: The lowest that is allowed.
        most: The highest.
        unit: What it counts, for the text of the error; empty for nothing in particular.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number{unit and f' of {unit}'}, found {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be in {least}..{most}, found {value}")
