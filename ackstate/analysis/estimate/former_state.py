"""Computes a daily state of an earlier version again, from its policies and days.

States up to version 6 have the attributes of classes that no longer exist. Their manifests name the policies and the
days, which are enough to replay the days into a state of the present version.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.estimate.checkpoint import MAGIC, body_digest, latest_manifest
from ackstate.analysis.estimate.daily import days_of, fingerprint
from ackstate.analysis.estimate.incremental import daily_estimates
from ackstate.analysis.estimate.trace_source import LocalEngine
from ackstate.analysis.replay.policy import Policy, PolicyError
from ackstate.analysis.replay.state_fields import VERSION, CheckpointError
from ackstate.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.analysis.location import Location

_LEAST = 5
"""The first released version."""


class FormerState(NamedTuple):
    """The policies and days of a state.

    Attributes:
        version: The version of the state, at most `VERSION`.
        policies: The grid; None is the recording.
        day_count: The number of days that it covers.
        days: The latest of these days: name -> fingerprint, in order.
    """

    version: int
    policies: tuple[Policy | None, ...]
    day_count: int
    days: Mapping[str, str]


def find_state(path: Location) -> FormerState | None:
    """Return the policies and days of a state directory; None if the path is no state.

    Raises:
        CheckpointError: The state is damaged, or older than release 0.1.0.
        UnsupportedVersionError: A newer release wrote it.
        OSError: It cannot be read.
    """
    if not path.is_dir():
        return None
    try:
        manifest = latest_manifest(path)
    except CheckpointError:
        return None  # It has other files.
    return None if manifest is None else _read(manifest)


def replay_again(former: FormerState, traces: Location, target: Location) -> tuple[str, ...]:
    """Replay all days into a new state, in this process; return the names of the days.

    Args:
        former: The state of an earlier version, which stays as it is.
        traces: The directory of the daily traces; days after those of the state are read, too.
        target: The directory of the new state; the state appears when it is complete.

    Raises:
        CheckpointError: A day of the state is missing from the traces, or has changed since it was read.
        TraceError: As `daily_estimates`.
        OSError: The disk is full or failed.
    """
    check_days(former, traces)
    with daily_estimates(LocalEngine(), traces, target, former.policies) as found:
        return found.days_read


def check_days(former: FormerState, traces: Location) -> None:
    """Check that a directory has all days of a state, unchanged.

    Raises:
        CheckpointError: A day is missing, or has changed.
        TraceError: The directory has no daily traces.
    """
    last = list(former.days)[-1]
    known = {day.name: day for day in days_of(traces) if day.name <= last}
    for name, expected in former.days.items():
        if name not in known:
            raise CheckpointError(f"{traces}: the state has read the day {name}, which is missing")
        if fingerprint(known[name]) != expected:
            raise CheckpointError(f"{known[name]}: it has changed since the state read it; restore the earlier files")
    if len(known) != former.day_count:
        raise CheckpointError(f"{traces}: the state has read {former.day_count} days up to {last}, got {len(known)}")


def _read(manifest: Location) -> FormerState:
    path = manifest.parent
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))
        body, digest = said["body"], said["sha256"]
        if body["magic"] != MAGIC or type(body["version"]) is not int:
            raise ValueError(f"its magic and version are {body['magic']!r} and {body['version']!r}")
        if body["version"] > VERSION:
            raise UnsupportedVersionError(
                f"{path}: the state has version {body['version']}; this release reads up to {VERSION}"
            )
        if digest != body_digest(body):
            raise ValueError("its checksum is wrong")
        if body["version"] < _LEAST:
            raise CheckpointError(f"{path}: the state has version {body['version']}, which no release has written")
        return FormerState(body["version"], _policies(body["policies"]), int(body["day_count"]), _days(body["days"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, PolicyError) as error:
        raise CheckpointError(f"{path}: the state is damaged, {error}") from None


def _policies(found: list[Mapping[str, Any] | None]) -> tuple[Policy | None, ...]:
    policies = tuple(None if each is None else Policy.from_mapping(dict(each)) for each in found)
    if not policies:
        raise ValueError("it has no policies")
    return policies


def _days(found: Mapping[str, str]) -> Mapping[str, str]:
    days = {name: print_ for name, print_ in found.items() if isinstance(name, str) and isinstance(print_, str)}
    if not days or len(days) < len(found):
        raise ValueError("its days must be texts")
    return days
