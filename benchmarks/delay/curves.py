"""The curves of a picture in addition to the figures of a benchmark, stored next to them in ``results/<name>.json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.measurement import RESULTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Curve = Sequence[tuple[float, float]]


def keep_curves(name: str, curves: Mapping[str, Curve]) -> None:
    """Put curves, each a list of points, into the results that have just been published."""
    path = RESULTS / f"{name}.json"
    written = json.loads(path.read_text()) | {"curves": curves}
    path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
