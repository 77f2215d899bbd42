"""Numbers and switches among the properties of a Pulsar broker, which are all text: the text is read elsewhere.

What is missing or blank says nothing, as in Pulsar, and is None here. Every error names the key.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

INT_MAX = 2**31 - 1  # Java's, as the next two
LONG_MAX = 2**63 - 1
LONG_MIN = -LONG_MAX - 1

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def given(properties: Mapping[str, str], key: str) -> str:
    """Return a value without the blanks around it; empty if there is none.

    Raises:
        TypeError: The value is not text.
    """
    value = properties.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key}: the value is text, found {value!r}")
    return value.strip()


def whole_number(properties: Mapping[str, str], key: str, *, least: int, most: int = INT_MAX) -> int | None:
    """Return a whole number within bounds, both included.

    Raises:
        ValueError: It is none, or out of bounds.
        TypeError: The value is not text.
    """
    value = given(properties, key)
    if not value:
        return None
    if not _WHOLE.fullmatch(value) or not least <= int(value) <= most:
        raise ValueError(f"{key} is a whole number from {least} to {most}, found {value!r}")
    return int(value)


def number(properties: Mapping[str, str], key: str) -> float | None:
    """Return a finite number.

    Raises:
        ValueError: It is none.
        TypeError: The value is not text.
    """
    value = given(properties, key)
    if not value:
        return None
    if not _NUMBER.fullmatch(value) or not math.isfinite(float(value)):
        raise ValueError(f"{key} is a number, found {value!r}")
    return float(value)


def flag(properties: Mapping[str, str], key: str) -> bool | None:
    """Return a switch, in letters of either case.

    Raises:
        ValueError: It is neither true nor false.
        TypeError: The value is not text.
    """
    value = given(properties, key).casefold()
    if value not in {"", "true", "false"}:
        raise ValueError(f"{key} is true or false, found {value!r}")
    return value == "true" if value else None
