"""Counts the invalid rows of a trace, with reasons and samples, and refuses a trace with too many."""

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
    """The reason why a row is bad; the value is its text."""

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
    """A limit on the number of bad rows.

    Attributes:
        count: Most bad rows; None for a share.
        share: Largest share of bad rows among all rows, 0 to 1.
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
            raise ValueError(f"must be a number such as 12 or a share such as 0.1%, got {text!r}")
        return cls(None, float(match[1]) / 100) if match[1] else cls(int(match[2]))

    def allows(self, bad: int, rows: int) -> bool:
        """Return whether `bad` of `rows` rows may be bad."""
        return bad <= (self.share * rows if self.count is None else self.count)

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.count is None else str(self.count)


@final
@dataclass(slots=True)
class BadRows:
    """Counts bad rows by reason, and stores samples of each.

    Attributes:
        rows: Number of rows, good and bad.
        counts: Number of bad rows by reason.
        samples: The first rows of each reason: place and content.
    """

    rows: int = 0
    counts: dict[Wrong, int] = field(default_factory=dict)
    samples: dict[Wrong, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of bad rows."""
        return sum(self.counts.values())

    def add(self, wrong: Wrong, count: int, samples: Iterable[str]) -> None:
        """Count bad rows; take samples only up to a fixed number per reason."""
        self.counts[wrong] = self.counts.get(wrong, 0) + count
        kept = self.samples.setdefault(wrong, [])
        for sample in samples if len(kept) < SAMPLES_MAX else ():
            kept.append(sample)
            if len(kept) == SAMPLES_MAX:
                return

    def check(self, most: BadRowsMax, *, what: str, hint: str, finished: bool = True) -> None:
        """Raise an error if too many rows are bad; a share is judged only when all rows are known.

        Args:
            most: The limit.
            what: The name of the source.
            hint: Advice for the user.
            finished: Whether all rows are known.

        Raises:
            TraceError: Too many are bad; the message has the places of the first of each reason.
        """
        if (finished or most.count is not None) and not most.allows(self.count, self.rows):
            so_far = "" if finished else " so far"
            said = "; ".join((*self.lines(), hint))
            raise TraceError(f"{what}: {self.count} bad of {self.rows} rows{so_far}, more than {most}: {said}")

    def lines(self) -> list[str]:
        """Return a line for each reason: its count, and its first places."""
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
