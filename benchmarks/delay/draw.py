"""Draws ``results/delay_*.svg`` from ``results/delay_*.json``: ``python -m benchmarks.delay.draw``."""

from __future__ import annotations

import json

from benchmarks.delay.pictures import PICTURES
from benchmarks.measurement import RESULTS

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        written = json.loads((RESULTS / f"{name}.json").read_text())
        (RESULTS / f"{name}.svg").write_text(picture(written))
