"""Durations as people write them: 500ms, 5s, 1m, 1h."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000, "y": 365 * 86_400_000,
}  # fmt: skip
_NAMES = {"ms": "milliseconds", "s": "seconds"}
_SHOWN_UNITS = ("d", "h", "m", "s", "ms")
_TEXT = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?([a-z]*)")
_MS_MAX = 2**63 - 1  # Java's long
EXAMPLES: Final = "500ms, 5s, 1m or 1h"


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """A whole number of milliseconds, from 0 to 2**63 - 1, whose text is a user's spelling."""

    ms: int

    @classmethod
    def parse(cls, text: str, *, plain_unit: str = "") -> Duration:
        """Read a number and a unit: ms, s, m, h, d, w of 7 days or y of 365 days, in letters of either case.

        >>> Duration.parse("1.5m").ms, Duration.parse("90", plain_unit="s").ms
        (90000, 90000)
        """
        found = _TEXT.fullmatch(text.strip().lower())
        unit_ms = _UNITS_MS.get(found[3] or plain_unit) if found else None
        if found is None or unit_ms is None:
            raise ValueError(f"must be a duration such as {EXAMPLES}, got {text!r}")
        duration_ms = Decimal(found[1] + (found[2] or "")) * unit_ms
        if duration_ms > _MS_MAX or duration_ms % 1:
            raise ValueError(f"must be a whole number of milliseconds up to {_MS_MAX}, got {text!r}")
        return cls(int(duration_ms))

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.ms / 1_000

    def in_whole(self, unit: str) -> int:
        """Return the duration in `ms` or `s`."""
        count, rest = divmod(self.ms, _UNITS_MS[unit])
        if rest:
            raise ValueError(f"must be a whole number of {_NAMES[unit]}, got {self}")
        return count

    def __str__(self) -> str:
        """Return the duration in the largest unit, up to days, that divides it."""
        unit = next(unit for unit in _SHOWN_UNITS if self.ms % _UNITS_MS[unit] == 0) if self.ms else "s"
        return f"{self.ms // _UNITS_MS[unit]}{unit}"
