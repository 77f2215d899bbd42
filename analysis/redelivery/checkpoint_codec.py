"""The state of a replay as text: what is acked as portable roaring bitmaps, everything else as JSON.

Whatever is read is one of the classes named here, built without running anything of the file's.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap

from ackstate.errors import AckStateError
from analysis.redelivery.acked import AckedFold
from analysis.redelivery.curve_sum import CurveSum, Histogram, Points
from analysis.redelivery.fold import LeftOut, RedeliveryFold
from analysis.redelivery.journal_size import JournalSize
from analysis.redelivery.mark_delete import MarkDeleteFold
from analysis.redelivery.plain_replay import PlainReplay
from analysis.redelivery.policy import Policy
from analysis.redelivery.schedule import Schedule
from analysis.redelivery.subscription_replay import Costs, PolicyCurve, RecordedCurve, SubscriptionReplay, _Life
from cursor.config import CursorConfig
from cursor.rate_limiter import MarkDeleteRateLimiter

if TYPE_CHECKING:
    from collections.abc import Sequence

_OBJECTS = {
    each.__name__: each
    for each in (
        AckedFold, CurveSum, Histogram, JournalSize, LeftOut, MarkDeleteFold, MarkDeleteRateLimiter, PlainReplay,
        PolicyCurve, RecordedCurve, RedeliveryFold, Schedule, SubscriptionReplay, _Life,
    )
}  # fmt: skip
_TUPLES = {each.__name__: each for each in (Costs, Points)}
# What is acked, which the replay shares with the object that holds it.
_SHARED = {"PlainReplay": "_acked"}


class CheckpointError(AckStateError):
    """A state that cannot be gone on with; the message names it and says what to do."""


def encoded(replay: SubscriptionReplay, policies: Sequence[Policy | None]) -> str:
    """Return a replay's state as text, from which `decoded` makes the same under the same policies.

    Raises:
        TypeError: It holds what this release cannot write, as under a policy that is not plain.
    """
    return json.dumps(_Writer(policies).value(replay), separators=(",", ":"))


def decoded(text: str, policies: Sequence[Policy | None]) -> SubscriptionReplay:
    """Return the replay of a state.

    Raises:
        CheckpointError: It is none.
    """
    try:
        replay = _Reader(policies).value(json.loads(text))
        if not isinstance(replay, SubscriptionReplay):
            raise TypeError(f"it is of {type(replay).__name__}")
        replay.follow()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"the state of a subscription is damaged: {error}") from error
    return replay


class _Writer:
    def __init__(self, policies: Sequence[Policy | None]) -> None:
        self._policies = policies
        self._configs = [None if policy is None else policy.cursor for policy in policies]

    def value(self, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return a value as JSON has it: what JSON does not know, as an object of one key that says what it is."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.integer():
                return int(value)
            case BitMap():
                compact = value.copy()
                compact.run_optimize()
                return {"bitmap": base64.b64encode(compact.serialize()).decode()}
            case np.ndarray():
                kind = "bools" if value.dtype == np.bool_ else "ints"
                return {kind: value.astype(np.int64).tolist(), "shape": value.shape}
            case dict():
                return {"dict": [[self.value(key), self.value(each)] for key, each in value.items()]}
            case Policy():
                return {"policy": self._policies.index(value)}
            case CursorConfig():
                return {"config": self._configs.index(value)}
            case tuple() if type(value).__name__ in _TUPLES:
                return {"tuple": type(value).__name__, "values": [self.value(each) for each in value]}
            case list() | tuple():
                return [self.value(each) for each in value]
        name = type(value).__name__
        if name not in _OBJECTS:
            raise TypeError(f"{name} cannot be kept")
        fields = {key: self.value(each) for key, each in vars(value).items() if _SHARED.get(name) != key}
        return {"object": name, "fields": fields}


class _Reader:
    def __init__(self, policies: Sequence[Policy | None]) -> None:
        self._policies = policies

    def value(self, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return what `_Writer.value` wrote."""
        match value:
            case list():
                return [self.value(each) for each in value]
            case {"bitmap": text}:
                return BitMap.deserialize(base64.b64decode(text, validate=True))
            case {"ints": numbers, "shape": shape}:
                return np.array(numbers, np.int64).reshape(shape)
            case {"bools": numbers, "shape": shape}:
                return np.array(numbers, np.bool_).reshape(shape)
            case {"dict": pairs}:
                return {self.value(key): self.value(each) for key, each in pairs}
            case {"policy": index}:
                return self._policies[index]
            case {"config": index}:
                policy = self._policies[index]
                return None if policy is None else policy.cursor
            case {"tuple": name, "values": values}:
                return _TUPLES[name](*(self.value(each) for each in values))
            case {"object": name, "fields": fields}:
                found = _OBJECTS[name].__new__(_OBJECTS[name])
                vars(found).update({key: self.value(each) for key, each in fields.items()})
                return found
            case dict():
                raise TypeError(f"{sorted(value)} are no value")
        return value
