"""Builds a grid of policies, every combination of some settings, and refuses what no broker could run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ackstate.analysis.replay.cursor_replay import CursorReplay
from ackstate.analysis.replay.policy import AS_RECORDED, Policy, PolicyError
from ackstate.cursor.formats import Format
from ackstate.stores.base import StoreError

if TYPE_CHECKING:
    from pathlib import Path


POINT_COUNT_MAX = 10_000
# The default of Pulsar 4.2.
_PULSAR_RANGES = 10_000
# In a trace recorded by polls, a flush interval has at least so many.
_POLLS_PER_FLUSH = 5
# What `candidates` proposes to a Pulsar broker.
_RATE, _FLUSH_MS, _RANGES = 5, 10_000, 100_000
# What it proposes to find a policy at a target.
_FLUSHES_MS = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
_RATES = (0.1, 0.5, 1, 2, 5, 10, 50)


def policies_of(settings: Mapping[str, Sequence[Any]], base: Mapping[str, str] | None = None) -> list[Policy]:
    """Return a policy for each combination of the values: the last setting varies fastest.

    >>> [policy.label for policy in policies_of({"flush_interval_ms": [5000], "keep": ["WIDEST", "LOWEST"]})]
    ['flush_interval_ms=5000 keep=WIDEST', 'flush_interval_ms=5000']
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
    keys = [key.strip().replace("-", "_") for key in settings]
    policies = [Policy.from_mapping({**(base or {}), **dict(zip(keys, point, strict=True))}) for point in points]
    _refuse_twins(policies)
    return policies


def read_grid(path: Path, base: Mapping[str, str] | None = None) -> list[Policy]:
    """Read a grid from a JSON file: an object of settings, each with one value or a list of them."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: not a grid in JSON: {error}") from None
    if not isinstance(found, dict):
        raise PolicyError(f"{path}: a grid must be an object of settings, got {type(found).__name__}")
    settings = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    try:
        return policies_of(settings, base)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None


def policies_of_texts(texts: Mapping[str, str], base: Mapping[str, str] | None = None) -> list[Policy]:
    """Return the grid of settings whose values are given as one text each, separated by commas."""
    return policies_of(
        {key: [value for value in text.split(",") if value.strip()] for key, text in texts.items()}, base
    )


def policy_of_text(text: str) -> Policy:
    """Return the policy that a text in the form of `Policy.label` names."""
    pairs = [] if text == Policy().label else [word.partition("=") for word in text.split()]
    if not all(separator and value for _, separator, value in pairs):
        raise PolicyError(f"current policy must be KEY=V KEY=V or default, got {text!r}")
    return Policy.from_mapping({key: value for key, _, value in pairs})


def candidates(current: Policy, *, many: bool = False) -> list[Policy]:
    """Return policies worth comparing with the current one, which is the first; or many, to find one at a target.

    On a Pulsar broker: more frequent writes, each of them also with a shorter flush interval or more ranges; and a
    native journal that flushes as often as the current policy writes. Otherwise shorter flush intervals.
    """
    config, texts = current.cursor, current.to_mapping()
    interval_ms, rate = config.flush_interval_ms, config.mark_delete_rate_limit
    if many:
        if config.format is Format.NATIVE:
            chosen: dict[str, list[Any]] = {"flush_interval_ms": [interval_ms, *_FLUSHES_MS]}
        else:
            chosen = {"mark_delete_rate_limit": [rate, *_RATES], "flush_interval_ms": [interval_ms, *_FLUSHES_MS[4:]]}
        return policies_of({key: list(dict.fromkeys(values)) for key, values in chosen.items()}, texts)
    if config.format is Format.NATIVE:
        shorter = [each for each in (20_000, 5_000, 1_000) if each < interval_ms] or [interval_ms // 4]
        return policies_of(
            {"flush_interval_ms": [interval_ms, *(each for each in shorter if each < interval_ms)]}, texts
        )
    ranges = _PULSAR_RANGES if config.range_count_max is None else config.range_count_max
    often = {"mark_delete_rate_limit": [rate, *(each for each in (_RATE,) if 0 < rate < each)]}
    soon = {"flush_interval_ms": [interval_ms, *(each for each in (_FLUSH_MS,) if each < interval_ms)]}
    more = {"range_count_max": [config.range_count_max, *(each for each in (_RANGES,) if ranges < each)]}
    native = Policy.from_mapping({"flush_interval_ms": min(interval_ms, round(1_000 / rate) if rate else 0)})
    found = [*policies_of({**often, **soon}, texts), *policies_of({**often, **more}, texts), native]
    return [each for number, each in enumerate(found) if each not in found[:number]]


def _refuse_twins(policies: Sequence[Policy]) -> None:
    labels: set[str] = set()
    for policy in policies:
        if policy.label in labels:
            raise PolicyError(f"grid: the policy {policy.label!r} occurs twice")
        labels.add(policy.label)


def replayable(
    policies: Sequence[Policy | None], *, poll_ms: int = 0
) -> tuple[list[Policy | None], list[tuple[str, str]]]:
    """Return the policies that can be replayed, and the others by label with the reason.

    No cursor can be opened under some. In a trace that was recorded by polls every `poll_ms`, others would write at
    times that it does not know.
    """
    found: list[Policy | None] = []
    refused: list[tuple[str, str]] = []
    for policy in policies:
        reason = "" if policy is AS_RECORDED else _unknown_times(policy, poll_ms) or _refusal(policy)
        if policy is not AS_RECORDED and reason:
            refused.append((policy.label, reason))
        else:
            found.append(policy)
    if refused and all(policy is AS_RECORDED for policy in found):
        raise PolicyError(f"policy: {refused[0][0]}: {refused[0][1]}")
    return found, refused


def _unknown_times(policy: Policy, poll_ms: int) -> str:
    if not poll_ms:
        return ""
    if policy.blocks:
        return "a limit on dispatch cannot be replayed on a trace recorded by polls, which has no deliveries"
    if policy.cursor.flush_interval_ms < _POLLS_PER_FLUSH * poll_ms:
        least_s = _POLLS_PER_FLUSH * poll_ms / 1_000
        return (
            f"times are known to one poll of {poll_ms / 1_000:g} s, so the flush interval must be at least {least_s:g} "
            f"s, that of {_POLLS_PER_FLUSH} polls"
        )
    return ""


def _refusal(policy: Policy) -> str:
    try:
        CursorReplay(policy, {0: 1}, opened_ms=0)
    except StoreError as error:
        return f"not even an empty cursor can be written: {'; '.join([str(error), *getattr(error, '__notes__', ())])}"
    return ""
