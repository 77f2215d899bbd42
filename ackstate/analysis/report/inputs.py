"""Reads the files that a report shows beside its trace: output of other commands, read before the long work begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {"kill": "SIGKILL", "power_cut": "power cut"}
"""How a process of a calibration ended: in the file -> in words."""


class ReportInputError(AckStateError):
    """An invalid file for the report; the message names it."""


class CalibrationPoint(NamedTuple):
    """The predicted and the observed redelivery under a policy."""

    policy: str
    predicted: float
    observed: float
    kind: str  # A key of `KINDS`
    runs: int

    @property
    def holds(self) -> bool:
        """Whether the prediction came true: after a power cut, unsynced acks may survive."""
        return self.observed == self.predicted if self.kind == "kill" else self.observed <= self.predicted


class TraceOrigin(NamedTuple):
    """The origin of the trace: JSON output of ``ackstate trace convert`` or ``generate``."""

    rows: int | None  # Number of rows that were read; None if the trace was not converted
    bad_rows: int  # Number of rows that were skipped
    # For each kind of error: its text, the number of rows, and the places of the first ones.
    bad: tuple[tuple[str, int, tuple[str, ...]], ...]
    plan: tuple[tuple[str, str], ...]  # The options of a generated trace, including its seed


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """The inputs of a report; each is None if it was not given."""

    calibration: tuple[CalibrationPoint, ...] | None = None  # The points of a calibration
    origin: TraceOrigin | None = None  # The origin of the trace

    @classmethod
    def read(cls, *, calibration: Path | None, origin: Path | None) -> Self:
        """Read the files."""
        return cls(
            None if calibration is None else read_calibration(calibration),
            None if origin is None else read_origin(origin),
        )


def read_calibration(path: Path) -> tuple[CalibrationPoint, ...]:
    """Read the points of a calibration: a JSON list of objects with the fields of `CalibrationPoint`.

    They may also be under ``points`` of an object; a policy may be an object of its settings.
    """
    found = _parsed(path)
    points = found.get("points") if isinstance(found, dict) else found
    if not isinstance(points, list):
        raise ReportInputError(f"{path}: a calibration must be a list of points; create one with make calibrate")
    return tuple(_point(path, number, point) for number, point in enumerate(points))


def read_origin(path: Path) -> TraceOrigin:
    """Read the origin of a trace."""
    found = _parsed(path)
    try:
        bad = (
            tuple((str(each["what"]), int(each["count"]), tuple(map(str, each["first"]))) for each in found["bad"])
            if "bad" in found
            else ()
        )
        plan = tuple((str(key), str(value)) for key, value in found.get("plan", {}).items())
        rows = None if "rows" not in found else int(found["rows"])
        if rows is None and not plan:
            raise KeyError("rows")
        return TraceOrigin(rows, int(found.get("bad_rows", 0)), bad, plan)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ReportInputError(f"{path}: not output of ackstate trace with --json") from None


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReportInputError(f"{path}: not JSON: {error}") from None


def _point(path: Path, number: int, point: Any) -> CalibrationPoint:
    try:
        policy, kind = point["policy"], point["kind"]
        counts = [point[name] for name in ("predicted", "observed", "runs")]
    except (KeyError, TypeError):
        raise ReportInputError(f"{path}: point {number} lacks one of {', '.join(CalibrationPoint._fields)}") from None
    if kind not in KINDS or any(isinstance(each, bool) or not isinstance(each, int | float) for each in counts):
        raise ReportInputError(f"{path}: point {number} is not a prediction with its observation")
    if isinstance(policy, dict):
        policy = " ".join(f"{key}={value}" for key, value in policy.items()) or "default"
    predicted, observed, runs = counts
    return CalibrationPoint(str(policy), predicted, observed, kind, int(runs))
