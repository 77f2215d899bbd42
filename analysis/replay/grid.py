"""Builds a grid of policies: every combination of some settings, in a fixed order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ackstate.analysis.replay.policy import Policy, PolicyError

if TYPE_CHECKING:
    from pathlib import Path

POINT_COUNT_MAX = 10_000


def policies_of(settings: Mapping[str, Sequence[Any]]) -> list[Policy]:
    """Return a policy for each combination of the values: the last setting varies fastest.

    >>> [policy.label for policy in policies_of({"flush_interval_ms": [5000], "keep": ["WIDEST", "LOWEST"]})]
    ['flush_interval_ms=5000 keep=WIDEST', 'flush_interval_ms=5000']

    Args:
        settings: Key -> values, as in `Policy.from_mapping`; if empty, the default policy alone.

    Raises:
        PolicyError: A key or a value is wrong, a key has no values, two combinations give the same policy, or there are
            more than 10,000.
    """
    for key, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise PolicyError(f"grid: {key} must be a list of values, got {values!r}")
        if not values:
            raise PolicyError(f"grid: {key} must have at least one value")
    count = prod(len(values) for values in settings.values())
    if count > POINT_COUNT_MAX:
        raise PolicyError(
            f"grid: the number of policies must be at most {POINT_COUNT_MAX:,}, got {count:,}; give fewer values"
        )
    points = product(*settings.values())
    policies = [Policy.from_mapping(dict(zip(settings, point, strict=True))) for point in points]
    _refuse_twins(policies)
    return policies


def read_grid(path: Path) -> list[Policy]:
    """Read a grid from a JSON file: an object of settings, each with one value or a list of them.

    Raises:
        PolicyError: The file is invalid, or see `policies_of`.
        OSError: It cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: not a grid in JSON: {error}") from None
    if not isinstance(found, dict):
        raise PolicyError(f"{path}: a grid must be an object of settings, got {type(found).__name__}")
    settings = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    try:
        return policies_of(settings)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None


def policies_of_texts(texts: Mapping[str, str]) -> list[Policy]:
    """Return the grid of settings whose values are given as one text each, separated by commas.

    Raises:
        PolicyError: See `policies_of`.
    """
    return policies_of({key: [value for value in text.split(",") if value.strip()] for key, text in texts.items()})


def with_baseline(policies: Sequence[Policy], text: str) -> tuple[list[Policy], str]:
    """Add a policy to a grid, unless the grid has it; return the grid and the policy's label.

    Args:
        policies: The grid.
        text: The policy, in the form of `Policy.label`.

    Raises:
        PolicyError: The text is not a policy.
    """
    pairs = [] if text == Policy().label else [word.partition("=") for word in text.split()]
    if not all(separator and value for _, separator, value in pairs):
        raise PolicyError(f"baseline must be KEY=V KEY=V or default, got {text!r}")
    baseline = Policy.from_mapping({key: value for key, _, value in pairs})
    return [*policies] if baseline in policies else [baseline, *policies], baseline.label


def _refuse_twins(policies: Sequence[Policy]) -> None:
    labels: set[str] = set()
    for policy in policies:
        if policy.label in labels:
            raise PolicyError(f"grid: the policy {policy.label!r} occurs twice")
        labels.add(policy.label)
