"""Checks what a caller gave: numbers that are integers within bounds, and words that are known."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from operator import index
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from enum import Enum

    _E = TypeVar("_E", bound=Enum)

INT_MAX = 2**31 - 1  # Java's Integer.MAX_VALUE
LONG_MAX = 2**63 - 1
LONG_MIN = -LONG_MAX - 1


def integer(name: str, number: int) -> int:
    """Return a number of any integer type, such as numpy's, as a plain integer; booleans are refused."""
    try:
        if not isinstance(number, bool):
            return index(number)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {number!r}")


def present(now_ms: int | None, clock: Callable[[], int]) -> int:
    """Return the time that a call gave or, if it gave none, that of the clock."""
    if type(now_ms) is int:
        return now_ms
    return integer("the time of the clock", clock()) if now_ms is None else integer("now_ms", now_ms)


def member(name: str, value: object, kind: type[_E]) -> _E:
    """Return a member of an enumeration, given as one or by its name or value, in any case."""
    if isinstance(value, kind):
        return value
    names = [each.name.lower() for each in kind]
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a {kind.__name__}, or one of {', '.join(names)}; got {value!r}")
    for each in kind:
        if value.lower() in (each.name.lower(), str(each.value).lower()):
            return each
    raise ValueError(f"{name} must be one of {', '.join(names)}; got {value!r}{did_you_mean(value.lower(), names)}")


def check_within(name: str, value: object, *, least: int, most: int | None, unit: str = "") -> None:
    """Refuse a boolean or a non-integer (`TypeError`), or a number out of inclusive bounds (`ValueError`)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number{unit and f' of {unit}'}, got {value!r}")
    if not least <= value <= (value if most is None else most):
        # Not in decimals: Python refuses to write a very long number so.
        shown = value if LONG_MIN <= value <= -LONG_MIN else hex(value)
        bounds = f"at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be {bounds}, got {shown}")


check_count = partial(check_within, most=None)
"""Refuses a setting that is a boolean or not an integer (`TypeError`), or below the least (`ValueError`)."""


def closest(word: str, known: Iterable[str], *, likeness_min: float = 0.6) -> str:
    """Return the known word closest to another, with at least a likeness of 0 to 1; empty if there is none."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=likeness_min)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word, empty if no known word is close."""
    meant = closest(word, known)
    return f"; did you mean {meant!r}?" if meant else ""
