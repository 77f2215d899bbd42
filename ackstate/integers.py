"""Checks that numbers from a caller are integers within bounds."""

from __future__ import annotations

from operator import index


def integer(name: str, number: int) -> int:
    """Return a number as a plain integer.

    Args:
        name: The caller's name for the number.
        number: Any integer type, such as numpy's.

    Raises:
        TypeError: It is not an integer; booleans are refused.
    """
    try:
        if not isinstance(number, bool):
            return index(number)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {number!r}")


def check_count(name: str, value: object, *, least: int) -> None:
    """Refuse a setting that is a boolean or not an integer (`TypeError`), or below the least (`ValueError`)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_within(name: str, value: object, *, least: int, most: int, unit: str = "") -> None:
    """Refuse a boolean or a non-integer (`TypeError`), or a number out of inclusive bounds (`ValueError`)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number{unit and f' of {unit}'}, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be in {least}..{most}, got {value}")
