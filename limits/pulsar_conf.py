"""Numbers and switches among the properties of a Pulsar broker; pure, the text is read elsewhere."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONG_MAX = 2**63 - 1  # Java's
_LONG = re.compile(r"[+-]?[0-9]{1,19}")
_DOUBLE = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def whole_number(properties: Mapping[str, str], key: str, *, default: int) -> int:
    """Return a whole number, negative ones too; the default if it is missing or blank.

    Raises:
        ValueError: It is no whole number of 64 bits; names the key.
        TypeError: The value is not text.
    """
    value = _given(properties, key)
    if not value:
        return default
    if not _LONG.fullmatch(value) or abs(int(value)) > _LONG_MAX:
        raise ValueError(f"{key} is a whole number, found {value!r}")
    return int(value)


def number(properties: Mapping[str, str], key: str, *, default: float) -> float:
    """Return a number; the default if it is missing or blank.

    Raises:
        ValueError: It is no finite number; names the key.
        TypeError: The value is not text.
    """
    value = _given(properties, key)
    if not value:
        return default
    if not _DOUBLE.fullmatch(value) or not math.isfinite(float(value)):
        raise ValueError(f"{key} is a number, found {value!r}")
    return float(value)


def flag(properties: Mapping[str, str], key: str) -> bool:
    """Return a switch, off if it is missing or blank.

    Raises:
        ValueError: It is neither true nor false; names the key.
        TypeError: The value is not text.
    """
    value = _given(properties, key).casefold()
    if value not in {"", "true", "false"}:
        raise ValueError(f"{key} is true or false, found {value!r}")
    return value == "true"


def _given(properties: Mapping[str, str], key: str) -> str:
    value = properties.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key}: the value is text, found {value!r}")
    return value.strip()
