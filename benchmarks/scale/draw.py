"""Draws ``results/scale.svg`` from ``results/scale.json``: ``python -m benchmarks.scale.draw``."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.delay.chart import Panel, PanelAxis, PanelLine, drawn
from benchmarks.measurement import RESULTS
from benchmarks.scale.bench_scale import SIZES, row_of

_EVENTS = PanelAxis(
    "events of the trace",
    [(1e6, "1 million"), (3e6, "3"), (1e7, "10 million"), (3e7, "30"), (1e8, "100 million")],
    is_log=True,
)
_SECONDS = PanelAxis("s", [(0.1, "0.1"), (1, "1"), (10, "10"), (100, "100")], is_log=True)
_MEGABYTES = PanelAxis("MB", [(at, f"{at}") for at in (0, 250, 500, 750, 1_000)])


def scale(written: dict[str, Any]) -> str:
    """Draw time and the largest worker by the size of the trace."""
    panels = [
        Panel("Time, as recorded, two cores", _EVENTS, _SECONDS, [_line(written, "time", "s"), _linear(written)]),
        Panel("The Python worker that took most", _EVENTS, _MEGABYTES, [_line(written, "largest worker", "MB")]),
    ]
    return drawn("Time and memory of an estimate, by the length of the trace", panels)


def _line(written: dict[str, Any], what: str, unit: str) -> PanelLine:
    rows = {row["what"]: row["spread"] for row in written["figures"]}
    found = [(events, rows[name]) for events in SIZES if (name := row_of(events, what)) in rows]
    last = found[-1][1]["median"]
    return PanelLine(
        f"{what}: {last:,.3g} {unit}",
        [(events, spread["median"]) for events, spread in found],
        [(spread["low"], spread["high"]) for _, spread in found],
    )


def _linear(written: dict[str, Any]) -> PanelLine:
    """As long an event as at the largest size."""
    (events, seconds) = _line(written, "time", "s").points[-1]
    return PanelLine("in proportion", [(size, seconds * size / events) for size in SIZES if size <= events])


if __name__ == "__main__":
    text = (RESULTS / "scale.json").read_text()
    (RESULTS / "scale.svg").write_text(scale(json.loads(text)))
