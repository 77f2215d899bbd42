"""Rows of a trace that cannot be right: why, how many, which, and when they are too many."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, final

from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable

SAMPLES_MAX = 5
_THRESHOLD = re.compile(r"(\d+(?:\.\d+)?)%|(\d{1,18})", re.ASCII)


class Wrong(Enum):
    """What is wrong with a row; the value says it."""

    NOT_JSON = "not a JSON object"
    NOT_UTF8 = "not UTF-8"
    MISSING = "something is missing"
    WRONG_TYPE = "a value of another type"
    UNKNOWN_KIND = "an unknown kind"
    NEGATIVE = "a negative number"
    BEYOND = "a number too large"
    BACKWARDS = "last_entry below first_entry"
    SEQ_AGAIN = "a seq that was there before"
    SEQ_LATE = "a seq out of order"
    SEQ_GAP = "a gap in seq before it"
    TIME_OUTSIDE = "a time outside 2000 to 2100"
    TIME_BACK = "a time before that of the event before"
    NEVER_PUBLISHED = "entries that were never published"
    TWO_CURSORS = "two cursors under one name"
    WRONG_BOUNDS = "times that are not those the chunk states"
    NOT_IN_THE_LOG = "an entry index that the run's log does not have"


@dataclass(frozen=True, slots=True)
class BadRowsMax:
    """How many rows may be bad.

    Attributes:
        count: So many; None for a share.
        share: So large a part of all rows, 0 to 1.
    """

    count: int | None = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a number, ``12``, or a share, ``0.1%``.

        Raises:
            ValueError: It is neither.
        """
        match = _THRESHOLD.fullmatch(text)
        if match is None or (match[1] and float(match[1]) > 100):
            raise ValueError(f"{text!r} is neither a number such as 12 nor a share such as 0.1%")
        return cls(None, float(match[1]) / 100) if match[1] else cls(int(match[2]))

    def allows(self, bad: int, rows: int) -> bool:
        """Tell whether so many bad ones of so many rows may be."""
        return bad <= (self.share * rows if self.count is None else self.count)

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.count is None else str(self.count)


@final
@dataclass(slots=True)
class BadRows:
    """Counts bad rows by what is wrong, and keeps the first few of each.

    Attributes:
        rows: How many rows there were, good and bad.
        counts: How many bad ones, by what is wrong.
        samples: The first of each: where they stand, and what is there.
    """

    rows: int = 0
    counts: dict[Wrong, int] = field(default_factory=dict)
    samples: dict[Wrong, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many rows are bad."""
        return sum(self.counts.values())

    def add(self, wrong: Wrong, count: int, samples: Iterable[str]) -> None:
        """Count bad rows; of the samples, as many are kept as there is room for, and no more are asked for."""
        self.counts[wrong] = self.counts.get(wrong, 0) + count
        kept = self.samples.setdefault(wrong, [])
        for sample in samples if len(kept) < SAMPLES_MAX else ():
            kept.append(sample)
            if len(kept) == SAMPLES_MAX:
                return

    def check(self, most: BadRowsMax, *, what: str, hint: str, finished: bool = True) -> None:
        """Refuse to go on if too many are bad; a share is judged when all rows are known.

        Args:
            most: How many may be.
            what: What they are in.
            hint: What the user may do.
            finished: Whether all rows are known.

        Raises:
            TraceError: Too many are bad; it says where the first of each kind are.
        """
        if (finished or most.count is not None) and not most.allows(self.count, self.rows):
            so_far = "" if finished else " so far"
            said = "; ".join((*self.lines(), hint))
            raise TraceError(f"{what}: {self.count} bad of {self.rows} rows{so_far}, more than {most}: {said}")

    def lines(self) -> list[str]:
        """Say for each thing that is wrong how often it is, and where first."""
        return [
            f"{wrong.value}: {count}, {'first' if count > len(self.samples[wrong]) else 'at'} "
            + ", ".join(self.samples[wrong])
            for wrong, count in self.counts.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "rows": self.rows,
            "bad_rows": self.count,
            "bad": [
                {"what": wrong.value, "count": count, "first": self.samples[wrong]}
                for wrong, count in self.counts.items()
            ],
        }
