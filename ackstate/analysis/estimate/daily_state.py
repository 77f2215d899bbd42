"""Encodes the states at the end of a day, of one subscription and of all together, as JSON records.

`docs/wire-format.md` specifies every field. The names of fields are given where a class writes them and do not follow
its attributes, so an attribute may be renamed. Another field, or another meaning, needs another `VERSION`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ackstate.analysis.estimate.compact_curve import OWN_SLICES_MAX, SLICES_MAX, ThinnedCurve
from ackstate.analysis.estimate.parts import CRASHES_MAX
from ackstate.analysis.replay.curve_sum import SERIES
from ackstate.analysis.replay.state_fields import VERSION, CheckpointError, Fields, check_version
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.analysis.replay.policy import Policy

_State = TypeVar("_State")

_DIGEST = "(?:[0-9a-f]{64})?"


@dataclass(slots=True)
class DailyState:
    """A subscription at the end of a day.

    Attributes:
        replay: The replay under all policies.
        curves: The curve under each policy, from the start of the first day.
    """

    replay: SubscriptionReplay
    curves: list[ThinnedCurve]


@dataclass(slots=True)
class BrokerState:
    """All subscriptions at the end of a day.

    Attributes:
        curves: The curve of all subscriptions under each policy, from the start of the first day.
        died_ms: The first times at which processes died, rising.
        death_count: The number of times at which processes died.
        days_digest: SHA-256 over the fingerprints of all days, in their order.
    """

    curves: list[ThinnedCurve]
    died_ms: list[int]
    death_count: int
    days_digest: str


def encoded(state: DailyState) -> str:
    """Return a subscription's state as text, which `decoded` reads under the same policies."""
    curves = [each.to_record() for each in state.curves]
    return _text({"kind": "subscription", "replay": state.replay.to_record(), "plotted": curves})


def decoded(text: str, policies: Sequence[Policy | None]) -> DailyState:
    """Return the state of a subscription.

    Raises:
        CheckpointError: The text is damaged, of another version, or has other policies; the message names the field.
    """

    def read(fields: Fields) -> DailyState:
        replay = fields.one("replay", lambda each: SubscriptionReplay.of(each, policies))
        return DailyState(replay, _curves(fields, len(policies), OWN_SLICES_MAX))

    return _read(text, "subscription", read)


def encoded_broker(state: BrokerState) -> str:
    """Return the state of all subscriptions together as text, which `decoded_broker` reads."""
    fields = {"died_ms": state.died_ms, "death_count": state.death_count, "days_digest": state.days_digest}
    return _text({"kind": "broker", "plotted": [each.to_record() for each in state.curves], **fields})


def decoded_broker(text: str, policy_count: int) -> BrokerState:
    """Return the state of all subscriptions together.

    Raises:
        CheckpointError: The text is damaged or of another version; the message names the field.
    """

    def read(fields: Fields) -> BrokerState:
        """Return the state that the fields hold."""
        curves = _curves(fields, policy_count, SLICES_MAX)
        died_ms, death_count = fields.integers("died_ms"), fields.integer("death_count")
        if len(died_ms) > min(death_count, CRASHES_MAX):
            fields.refuse("died_ms", f"a list of at most {min(death_count, CRASHES_MAX)} times", len(died_ms))
        return BrokerState(curves, died_ms, death_count, fields.text("days_digest", _DIGEST))

    return _read(text, "broker", read)


def _curves(fields: Fields, count: int, slices_max: int) -> list[ThinnedCurve]:
    curves = fields.each("plotted", lambda each: ThinnedCurve.of(each, slices_max=slices_max, series_count=SERIES))
    if len(curves) != count:
        fields.refuse("plotted", f"a list of {count} curves, one for each policy", len(curves))
    return curves


def _text(fields: dict[str, object]) -> str:
    return json.dumps({"version": VERSION, **fields}, separators=(",", ":"))


def _read(text: str, kind: str, read: Callable[[Fields], _State]) -> _State:
    try:
        value = json.loads(text)
        if type(value) is dict:
            # Texts up to version 5 lack the version.
            check_version(value.get("version", 5 if "object" in value else VERSION), "the state")
        fields = Fields(value)
        fields.integer("version", least=VERSION, most=VERSION)
        fields.word("kind", kind)
        state = read(fields)
        fields.end()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the state is damaged: {error}") from error
    return state
