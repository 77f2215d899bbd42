"""Counts comparisons with a real broker, and how many of them agreed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Section:
    """The comparisons of one subject.

    Attributes:
        title: Its heading.
        counts: Name of a comparison -> how often it agreed, and how often it was made.
        wrong: The comparisons that did not agree, in words.
        notes: Remarks, one a line.
    """

    title: str
    counts: dict[str, list[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(self, what, found, expected, *, where=""):
        """Count one comparison, and return whether it agreed."""
        counted = self.counts.setdefault(what, [0, 0])
        counted[1] += 1
        if found == expected:
            counted[0] += 1
            return True
        self.wrong.append(f"{where}: {what}: {_short(found)} instead of {_short(expected)}")
        print(f"WRONG {self.wrong[-1]}", flush=True)
        return False

    def refused(self, what, error_type, call, *, where=""):
        """Count one call that must raise an error of a type."""
        try:
            outcome = call()
        except error_type as error:
            self.compare(what, True, True)
            return str(error)
        self.compare(what, f"no error, but {outcome!r}", error_type.__name__, where=where)
        return ""


def _short(value):
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
