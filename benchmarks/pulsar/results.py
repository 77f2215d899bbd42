"""Reads ``results/pulsar.json``: a comparison for each row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import RESULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "pulsar"
OURS = "ours"


def figure_name(what: str, side: str) -> str:
    """Name a figure of a side."""
    return f"{what}; {side}"


@dataclass(frozen=True)
class Comparison:
    """One row: the figure of each side.

    Attributes:
        what: Its name.
        unit: The unit of the figures.
        grows: Whether Pulsar's cost grows with the state.
        spreads: The median, low and high of each side, ours first.
    """

    what: str
    unit: str
    grows: bool
    spreads: Mapping[str, Mapping[str, float]]

    @property
    def best_release(self) -> str:
        """The release of Pulsar with the lowest figure."""
        return min((side for side in self.spreads if side != OURS), key=self.median)

    @property
    def times(self) -> float:
        """The lowest figure of a release divided by ours: above 1 we are ahead."""
        return self.ratio(self.best_release)

    def median(self, side: str) -> float:
        """Return the figure of a side."""
        return self.spreads[side]["median"]

    def ratio(self, side: str) -> float:
        """Return the figure of a side divided by ours."""
        return self.median(side) / self.median(OURS)


@dataclass(frozen=True)
class Results:
    """The contents of the file.

    Attributes:
        rows: In order.
        java: The version of Java.
        environment: That of our side.
        records: The last record of a small workload by release and form, in base 64.
    """

    rows: list[Comparison]
    java: str
    environment: Mapping[str, Any]
    records: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls) -> Results:
        """Read the committed results."""
        written = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
        rows: dict[str, tuple[str, dict[str, Mapping[str, float]]]] = {}
        for figure in written["figures"]:
            what, side = figure["what"].split("; ")
            rows.setdefault(what, (figure["unit"], {}))[1][side] = figure["spread"]
        compared = [
            Comparison(what, unit, what in written["growing"], spreads) for what, (unit, spreads) in rows.items()
        ]
        return cls(compared, written["java"], written["environment"], written["records"])
