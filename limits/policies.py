"""The delivery-delay policies of a topic: when a message may be delivered, and whether it may be published so.

Policies exist at three levels: topic, namespace and broker. Each field is resolved by itself, so a level that sets one
field leaves the others to the level above. In Pulsar a request that names only ``tickTime`` stores 0 for the other
fields, and so switches off the broker's maximum. Here a field that is not named is `None`, which sets nothing, and only
an explicit 0 is 0.

Source: ``DelayedDeliveryPolicies`` and ``PersistentTopic.publishMessage`` of Apache Pulsar, PIP-315 and PIP-437.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ackstate.errors import AckStateError
from ackstate.integers import check_within
from ackstate.limits.broker_conf import read_conf
from ackstate.properties import LONG_MAX, flag, whole_number
from ackstate.spelling import did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

# The longest time there is: what fits the signed 64 bits that Pulsar stores a time in.
TIME_MS_MAX = LONG_MAX

ENABLED_KEY = "delayedDeliveryEnabled"
TICK_KEY = "delayedDeliveryTickTimeMillis"
MAX_DELAY_KEY = "delayedDeliveryMaxDelayInMillis"
# What the text of PIP-315 calls the maximum: no broker ever read it.
_PIP_315_KEY = "delayedDeliveryMaxDeliveryDelayInMillis"

JSON_NAMES = {
    "active": "active",
    "tick_time_ms": "tickTime",
    "max_delivery_delay_ms": "maxDeliveryDelayInMillis",
    "fixed_delivery_delay_ms": "fixedDeliveryDelayInMillis",
}
_FIELDS = {json_name: name for name, json_name in JSON_NAMES.items()}
_LEAST = {"tick_time_ms": 1, "max_delivery_delay_ms": 0, "fixed_delivery_delay_ms": 0}

_T = TypeVar("_T")


class Level(Enum):
    """Whose policy a field was taken from."""

    TOPIC = "topic"
    NAMESPACE = "namespace"
    BROKER = "broker"


class DelayPolicyRefusedError(AckStateError):
    """A policy that cannot be set beside those of the other levels; `field` is the JSON name of what is at fault."""

    def __init__(self, reason: str, *, field: str) -> None:
        super().__init__(reason)
        self.field = field


class DeliveryDelayExceededError(AckStateError):
    """A message whose delay is above the maximum in force, which `level` has set; the text is Pulsar's."""

    def __init__(self, max_delivery_delay_ms: int, *, level: Level) -> None:
        super().__init__(f"Exceeds max allowed delivery delay of {max_delivery_delay_ms} milliseconds")
        self.max_delivery_delay_ms = max_delivery_delay_ms
        self.level = level


@dataclass(frozen=True, slots=True)
class DelayedDeliveryPolicies:
    """What one topic or one namespace says of delayed delivery; a field that is None says nothing.

    >>> stored = DelayedDeliveryPolicies.from_json({"active": True, "fixedDeliveryDelayInMillis": 5_000})
    >>> stored.updated(DelayedDeliveryPolicies(tick_time_ms=100)).to_json()
    {'active': True, 'tickTime': 100, 'fixedDeliveryDelayInMillis': 5000}

    Attributes:
        active: Whether messages are delayed at all.
        tick_time_ms: How exactly, at least 1. 0 is refused: in Pulsar it is what a request stores that does not
            mention the tick, it means 1 ms there, and a broker whose own is 0 does not start.
        max_delivery_delay_ms: Longest delay that a producer may ask for; 0 for any.
        fixed_delivery_delay_ms: Delay of every message, whatever its producer asks for; 0 for none.

    Raises:
        ValueError: A number is below its least value or above 2**63 - 1.
        TypeError: A number is no integer, or `active` no boolean.
    """

    active: bool | None = None
    tick_time_ms: int | None = None
    max_delivery_delay_ms: int | None = None
    fixed_delivery_delay_ms: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self.named())

    @classmethod
    def from_json(cls, document: object) -> DelayedDeliveryPolicies:
        """Return what a JSON object of Pulsar's field names says; null is as good as absent.

        Raises:
            ValueError: A name is unknown, or a number out of range; the text names the field.
            TypeError: It is no object, or the value of a field not of its type.
        """
        if not isinstance(document, Mapping):
            raise TypeError(f"delayed delivery policies must be an object, got {document!r}")
        for name in document:
            if name not in _FIELDS:
                hint = did_you_mean(str(name), _FIELDS) or f"; known are {', '.join(_FIELDS)}"
                raise ValueError(f"unknown field {name!r} of delayed delivery policies{hint}")
        return cls(**{_FIELDS[name]: value for name, value in document.items()})

    def to_json(self) -> dict[str, bool | int]:
        """Return the fields that say something, by Pulsar's names."""
        return {JSON_NAMES[name]: value for name, value in self.named().items()}

    def updated(self, update: DelayedDeliveryPolicies) -> DelayedDeliveryPolicies:
        """Return a copy in which the fields that `update` names replace; what it does not name is kept."""
        return replace(self, **update.named())

    def named(self) -> dict[str, Any]:
        """Return the fields that are set, by name."""
        values = {name: getattr(self, name) for name in JSON_NAMES}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BrokerDelayedDelivery:
    """What a broker says where neither topic nor namespace does; the defaults are Pulsar's.

    The fields are those of `DelayedDeliveryPolicies` and none may be None. Pulsar has no key for a fixed delay.
    """

    active: bool = True
    tick_time_ms: int = 1000
    max_delivery_delay_ms: int = 0

    def __post_init__(self) -> None:
        _check_fields({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> BrokerDelayedDelivery:
        """Return what a broker's properties say; blank says nothing, a negative maximum is none, as in Pulsar.

        Args:
            source: The keys and their values, or the path of a ``broker.conf``.

        Raises:
            ValueError: A value of ``delayedDeliveryEnabled``, ``delayedDeliveryTickTimeMillis`` or
                ``delayedDeliveryMaxDelayInMillis`` is malformed or out of range, or the last one is given by the name
                that PIP-315 uses, or a key is misspelt; the text names the key.
            TypeError: A key, or a value of such a key, is not text.
            OSError: The file cannot be read.
        """
        properties = read_conf(source, keys=(ENABLED_KEY, TICK_KEY, MAX_DELAY_KEY))
        if _PIP_315_KEY in properties:
            raise ValueError(f"unknown key of Pulsar {_PIP_315_KEY!r}; did you mean {MAX_DELAY_KEY!r}?")
        said: dict[str, Any] = {
            "active": flag(properties, ENABLED_KEY),
            "tick_time_ms": whole_number(properties, TICK_KEY, least=1, most=TIME_MS_MAX),
            "max_delivery_delay_ms": whole_number(properties, MAX_DELAY_KEY, least=-TIME_MS_MAX - 1, most=TIME_MS_MAX),
        }
        limit_ms = said["max_delivery_delay_ms"]
        said["max_delivery_delay_ms"] = limit_ms and max(limit_ms, 0)
        return cls(**{name: value for name, value in said.items() if value is not None})


class Decision(NamedTuple):
    """When a message that may be stored is to be delivered.

    Attributes:
        deliver_at_ms: What to store; negative for at once.
        overrides_client: Whether its producer had asked for a time and a fixed delay took its place.
    """

    deliver_at_ms: int
    overrides_client: bool


@dataclass(frozen=True, slots=True)
class FieldLevels:
    """Whose word each field of an `EffectiveDelayedDelivery` is."""

    active: Level = Level.BROKER
    tick_time_ms: Level = Level.BROKER
    max_delivery_delay_ms: Level = Level.BROKER
    fixed_delivery_delay_ms: Level = Level.BROKER


@dataclass(frozen=True, slots=True)
class EffectiveDelayedDelivery:
    """What is in force for one topic: `DelayedDeliveryPolicies` with nothing left open, made by `effective`.

    Attributes:
        levels: Whose word each of the fields is.
    """

    active: bool = True
    tick_time_ms: int = 1000
    max_delivery_delay_ms: int = 0
    fixed_delivery_delay_ms: int = 0
    levels: FieldLevels = field(default_factory=FieldLevels)

    def __post_init__(self) -> None:
        _check_fields({name: getattr(self, name) for name in JSON_NAMES})

    def to_json(self) -> dict[str, bool | int]:
        """Return every field by Pulsar's names: the answer to ``?applied=true``."""
        return {json_name: getattr(self, name) for name, json_name in JSON_NAMES.items()}

    @property
    def keeps_fixed_delay(self) -> bool:
        """Is there no fixed delay, or delayed delivery active?"""
        return self.active or not self.fixed_delivery_delay_ms

    def deliver_at(self, publish_time_ms: int, deliver_at_ms: int) -> Decision:
        """Decide when a message is delivered: by the fixed delay, else by its producer within the maximum.

        Where delayed delivery is not active neither counts, and the message is delivered at once, for good. Pulsar
        stores what was asked and looks at the switch at dispatch; here what is stored is all that says when.

        Args:
            publish_time_ms: Its producer's stamp, 0 or more. A fixed delay counts from it, so by its producer's clock.
            deliver_at_ms: What its producer asks for, past times included; negative for no such wish.

        Returns:
            With a fixed delay, a time that is capped at 2**63 - 1.

        Raises:
            DeliveryDelayExceededError: It asks for more than the maximum after its publish time.
            ValueError: A time is out of range.
            TypeError: A time is no integer.
        """
        check_within("publish_time_ms", publish_time_ms, least=0, most=TIME_MS_MAX, unit="milliseconds")
        check_within("deliver_at_ms", deliver_at_ms, least=-TIME_MS_MAX - 1, most=TIME_MS_MAX, unit="milliseconds")
        if not self.active:
            return Decision(-1, overrides_client=False)
        if self.fixed_delivery_delay_ms:
            due_ms = min(publish_time_ms + self.fixed_delivery_delay_ms, TIME_MS_MAX)
            return Decision(due_ms, overrides_client=deliver_at_ms >= 0)
        limit_ms = self.max_delivery_delay_ms
        if limit_ms and deliver_at_ms - publish_time_ms > limit_ms:
            raise DeliveryDelayExceededError(limit_ms, level=self.levels.max_delivery_delay_ms)
        return Decision(deliver_at_ms, overrides_client=False)


def effective(
    topic: DelayedDeliveryPolicies,
    namespace: DelayedDeliveryPolicies,
    broker: BrokerDelayedDelivery,
    *,
    topic_may_disable: bool = False,
) -> EffectiveDelayedDelivery:
    """Resolve the policies of a topic field by field: the topic's word, else the namespace's, else the broker's.

    A namespace that sets a fixed delay or a maximum above 0 enforces it. Unless `topic_may_disable`, a 0 of the topic
    in its place says nothing then, and neither does an ``active`` that is False beside an enforced fixed delay. Any
    other delay or maximum of the topic counts; so does a fixed delay above an enforced maximum, as PIP-437 has it.
    What only the broker sets, a namespace or a topic may switch off.

    Args:
        topic: What the topic says; `DelayedDeliveryPolicies()` if nothing.
        namespace: What its namespace says, likewise.
        broker: What its broker says.
        topic_may_disable: Whether a topic may switch off what its namespace enforces.
    """
    heard = topic if topic_may_disable else _without_disabling(topic, namespace)
    active, active_level = _first_said(heard.active, namespace.active, broker.active)
    tick, tick_level = _first_said(heard.tick_time_ms, namespace.tick_time_ms, broker.tick_time_ms)
    limit, limit_level = _first_said(
        heard.max_delivery_delay_ms, namespace.max_delivery_delay_ms, broker.max_delivery_delay_ms
    )
    fixed, fixed_level = _first_said(heard.fixed_delivery_delay_ms, namespace.fixed_delivery_delay_ms, 0)
    levels = FieldLevels(active_level, tick_level, limit_level, fixed_level)
    return EffectiveDelayedDelivery(active, tick, limit, fixed, levels)


def _without_disabling(topic: DelayedDeliveryPolicies, namespace: DelayedDeliveryPolicies) -> DelayedDeliveryPolicies:
    """Leave out what would switch off what the namespace enforces."""
    active = topic.active
    limit_ms, fixed_ms = topic.max_delivery_delay_ms, topic.fixed_delivery_delay_ms
    if namespace.fixed_delivery_delay_ms:
        active, fixed_ms = active or None, fixed_ms or None
    if namespace.max_delivery_delay_ms:
        limit_ms = limit_ms or None
    return replace(topic, active=active, max_delivery_delay_ms=limit_ms, fixed_delivery_delay_ms=fixed_ms)


def _first_said(topic: _T | None, namespace: _T | None, broker: _T) -> tuple[_T, Level]:
    if topic is not None:
        return topic, Level.TOPIC
    if namespace is not None:
        return namespace, Level.NAMESPACE
    return broker, Level.BROKER


def _check_fields(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        label = name if name == JSON_NAMES[name] else f"{name} ({JSON_NAMES[name]})"
        if name != "active":
            check_within(label, value, least=_LEAST[name], most=TIME_MS_MAX, unit="milliseconds")
        elif not isinstance(value, bool):
            raise TypeError(f"{label} must be true or false, got {value!r}")
