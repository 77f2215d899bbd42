"""The state of a replay as text: what is acked as portable roaring bitmaps, everything else as JSON.

Whatever is read is of a class that `ackstate.analysis.redelivery.kept_classes` names, built without running anything of
the file's. What two fields share, they share again: what may change is counted in the order in which it is written, and
told by its number where it comes again.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections import deque
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.redelivery.kept_classes import (
    ENUMS,
    ERRORS,
    LOCKS,
    OBJECTS,
    TUPLES,
    BrokerState,
    DailyState,
    complete,
    fields_of,
)
from ackstate.analysis.redelivery.policy import Policy
from ackstate.cursor.config import CursorConfig
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class CheckpointError(AckStateError):
    """A state that cannot be gone on with; the message names it and says what to do."""


def encoded(state: DailyState | BrokerState, policies: Sequence[Policy | None]) -> str:
    """Return a state as text, from which `decoded` makes the same under the same policies.

    Raises:
        TypeError: It holds what this release cannot write.
    """
    return json.dumps(_Writer(policies).value(state), separators=(",", ":"))


def decoded(text: str, policies: Sequence[Policy | None]) -> DailyState:
    """Return the state that a text says.

    Raises:
        CheckpointError: It says none.
    """
    state = _read(text, policies)
    if not isinstance(state, DailyState):
        raise CheckpointError(f"the state of a subscription is damaged: it is of {type(state).__name__}")
    return state


def decoded_broker(text: str) -> BrokerState:
    """Return the state of all subscriptions together that a text says.

    Raises:
        CheckpointError: It says none.
    """
    state = _read(text, ())
    if not isinstance(state, BrokerState):
        raise CheckpointError(f"the state of the broker is damaged: it is of {type(state).__name__}")
    return state


def _read(text: str, policies: Sequence[Policy | None]) -> Any:
    try:
        return _Reader(policies).value(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the state is damaged: {error}") from error


class _Writer:
    def __init__(self, policies: Sequence[Policy | None]) -> None:
        self._policies = policies
        self._configs = [None if policy is None else policy.cursor for policy in policies]
        # Number of what was written, by its id; it is held, or another might come to have the same.
        self._numbers: dict[int, tuple[int, object]] = {}

    def value(self, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return a value as JSON has it: what JSON does not know, as an object that says what it is."""
        match value:
            case Enum():
                return {"enum": _known(value, ENUMS), "name": value.name}
            case None | bool() | int() | float() | str():
                return value
            case np.integer():
                return int(value)
            case bytes():
                return {"bytes": _text(value)}
            case Fraction():
                return {"fraction": str(value)}
            case Policy():
                return {"policy": self._policies.index(value)}
            case CursorConfig():
                return {"config": self._configs.index(value)}
            case tuple() if type(value) is tuple:
                return {"tuple": "", "values": self._values(value)}
            case tuple():
                return {"tuple": _known(value, TUPLES), "values": self._values(value)}
        if id(value) in self._numbers:
            return {"again": self._numbers[id(value)][0]}
        self._numbers[id(value)] = len(self._numbers), value
        return self._changing(value)

    def _changing(self, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return what may change, and may be there more than once."""
        match value:
            case BitMap():
                compact = value.copy()
                compact.run_optimize()
                return {"bitmap": _text(compact.serialize())}
            case np.ndarray():
                kind = "bools" if value.dtype == np.bool_ else "ints"
                return {kind: value.astype(np.int64).tolist(), "shape": value.shape}
            case array():
                return {"array": value.typecode, "values": value.tolist()}
            case dict():
                return {"dict": [self._values(pair) for pair in value.items()]}
            case list():
                return self._values(value)
            case set():
                return {"set": self._values(sorted(value))}
            case deque():
                return {"deque": self._values(value)}
            case Exception():
                return {"error": _known(value, ERRORS), "text": str(value)}
        name = type(value).__name__
        if name in LOCKS:
            return {"lock": name}
        return {"object": _known(value, OBJECTS), "fields": {key: self.value(each) for key, each in fields_of(value)}}

    def _values(self, values: Any) -> list[Any]:
        return [self.value(each) for each in values]


class _Reader:
    def __init__(self, policies: Sequence[Policy | None]) -> None:
        self._policies = policies
        self._made: list[Any] = []

    def value(self, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return what `_Writer.value` wrote."""
        match value:
            case {"enum": kind, "name": name}:
                return ENUMS[kind][name]
            case {"bytes": text}:
                return _bytes(text)
            case {"fraction": text}:
                return Fraction(text)
            case {"policy": index}:
                return self._policies[index]
            case {"config": index}:
                policy = self._policies[index]
                return None if policy is None else policy.cursor
            case {"tuple": name, "values": values}:
                return TUPLES[name](*self._values(values)) if name else tuple(self._values(values))
            case {"again": number}:
                return self._made[number]
            case list() | dict():
                return self._changing(value)
        return value

    def _changing(self, value: Any) -> Any:  # noqa: PLR0911 - one for each kind
        match value:
            case list():
                return self._filled([], lambda made: made.extend(self._values(value)))
            case {"dict": pairs}:
                return self._filled({}, lambda made: made.update(self._values(pair) for pair in pairs))
            case {"set": values}:
                return self._filled(set(), lambda made: made.update(self._values(values)))
            case {"deque": values}:
                return self._filled(deque(), lambda made: made.extend(self._values(values)))
            case {"object": name, "fields": fields}:
                return self._filled(object.__new__(OBJECTS[name]), lambda made: self._fill(made, fields))
            case {"bitmap": text}:
                return self._filled(BitMap.deserialize(_bytes(text)))
            case {"ints": numbers, "shape": shape}:
                return self._filled(np.array(numbers, np.int64).reshape(shape))
            case {"bools": numbers, "shape": shape}:
                return self._filled(np.array(numbers, np.bool_).reshape(shape))
            case {"array": code, "values": numbers}:
                return self._filled(array(code, numbers))
            case {"lock": name}:
                return self._filled(LOCKS[name]())
            case {"error": name, "text": text}:
                return self._filled(ERRORS[name](text))
        raise TypeError(f"{sorted(value)} are no value")

    def _filled(self, made: Any, fill: Callable[[Any], object] = lambda _: None) -> Any:
        # It may hold itself.
        self._made.append(made)
        fill(made)
        return made

    def _fill(self, made: object, fields: dict[str, Any]) -> None:
        for key, each in fields.items():
            if key.startswith("__"):
                raise ValueError(f"{key} is no field")
            # Some are frozen.
            object.__setattr__(made, key, self.value(each))
        complete(made)

    def _values(self, values: list[Any]) -> list[Any]:
        return [self.value(each) for each in values]


def _known(value: object, classes: Any) -> str:
    """Return the name of a value's class."""
    name = type(value).__name__
    if classes.get(name) is not type(value):
        raise TypeError(f"{name} cannot be kept")
    return name


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
