"""The delivery-delay policies of a topic: when a message is delivered, and whether it may be published.

Policies exist at three levels: topic, namespace and broker. Each field is resolved by itself, so a level that sets one
field leaves the others to the level above. In Pulsar a request with only ``tickTime`` stores 0 for the other fields,
and so disables the broker's maximum. Here an absent field is `None`, which sets nothing, and only an explicit 0 is 0.

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

# The largest time: Pulsar stores times as signed 64-bit numbers.
TIME_MS_MAX = LONG_MAX

ENABLED_KEY = "delayedDeliveryEnabled"
TICK_KEY = "delayedDeliveryTickTimeMillis"
MAX_DELAY_KEY = "delayedDeliveryMaxDelayInMillis"
# The name of the maximum in the text of PIP-315; no broker ever read it.
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
    """The level that a field was taken from."""

    TOPIC = "topic"
    NAMESPACE = "namespace"
    BROKER = "broker"


class DelayPolicyRefusedError(AckStateError):
    """A policy that conflicts with those of the other levels; `field` is the JSON name of the conflicting field."""

    def __init__(self, reason: str, *, field: str) -> None:
        super().__init__(reason)
        self.field = field


class DeliveryDelayExceededError(AckStateError):
    """A message whose delay exceeds the maximum in effect, which `level` has set; the text is Pulsar's."""

    def __init__(self, max_delivery_delay_ms: int, *, level: Level) -> None:
        super().__init__(f"Exceeds max allowed delivery delay of {max_delivery_delay_ms} milliseconds")
        self.max_delivery_delay_ms = max_delivery_delay_ms
        self.level = level


@dataclass(frozen=True, slots=True)
class DelayedDeliveryPolicies:
    """The delayed-delivery policies of one topic or one namespace; a field that is None sets nothing.

    >>> stored = DelayedDeliveryPolicies.from_json({"active": True, "fixedDeliveryDelayInMillis": 5_000})
    >>> stored.updated(DelayedDeliveryPolicies(tick_time_ms=100)).to_json()
    {'active': True, 'tickTime': 100, 'fixedDeliveryDelayInMillis': 5000}

    Attributes:
        active: Whether messages are delayed at all.
        tick_time_ms: The precision of delivery, at least 1. 0 is refused: in Pulsar, a request without a tick stores
            0, where it means 1 ms, and a broker does not start with its own tick at 0.
        max_delivery_delay_ms: Longest delay that a producer may request; 0 for no maximum.
        fixed_delivery_delay_ms: Delay of every message, instead of the producer's; 0 for none.

    Raises:
        ValueError: A number is below its minimum or above 2**63 - 1.
        TypeError: A number is not an integer, or `active` not a boolean.
    """

    active: bool | None = None
    tick_time_ms: int | None = None
    max_delivery_delay_ms: int | None = None
    fixed_delivery_delay_ms: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self.named())

    @classmethod
    def from_json(cls, document: object) -> DelayedDeliveryPolicies:
        """Return the policies in a JSON object with Pulsar's field names; null is the same as absent.

        Raises:
            ValueError: A name is unknown, or a number is out of range; the text names the field.
            TypeError: The document is not an object, or a field has a value of the wrong type.
        """
        if not isinstance(document, Mapping):
            raise TypeError(f"delayed delivery policies must be an object, got {document!r}")
        for name in document:
            if name not in _FIELDS:
                hint = did_you_mean(str(name), _FIELDS) or f"; known are {', '.join(_FIELDS)}"
                raise ValueError(f"unknown field {name!r} of delayed delivery policies{hint}")
        return cls(**{_FIELDS[name]: value for name, value in document.items()})

    def to_json(self) -> dict[str, bool | int]:
        """Return the fields that are set, by Pulsar's names."""
        return {JSON_NAMES[name]: value for name, value in self.named().items()}

    def updated(self, update: DelayedDeliveryPolicies) -> DelayedDeliveryPolicies:
        """Return a copy with the fields that `update` sets; the others are unchanged."""
        return replace(self, **update.named())

    def named(self) -> dict[str, Any]:
        """Return the fields that are set, by name."""
        values = {name: getattr(self, name) for name in JSON_NAMES}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BrokerDelayedDelivery:
    """The policies of a broker, which apply if neither topic nor namespace sets a field; the defaults are Pulsar's.

    The fields are those of `DelayedDeliveryPolicies`; None is refused. Pulsar has no key for a fixed delay.
    """

    active: bool = True
    tick_time_ms: int = 1000
    max_delivery_delay_ms: int = 0

    def __post_init__(self) -> None:
        _check_fields({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> BrokerDelayedDelivery:
        """Return the policies in a broker's properties. Blank sets nothing, a negative maximum is none, as in Pulsar.

        Args:
            source: The keys and their values, or the path of a ``broker.conf``.

        Raises:
            ValueError: A value of ``delayedDeliveryEnabled``, ``delayedDeliveryTickTimeMillis`` or
                ``delayedDeliveryMaxDelayInMillis`` is malformed or out of range, or the last key has its name from
                PIP-315, or a key is misspelt; the text names the key.
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
    """The delivery time of a message that may be stored.

    Attributes:
        deliver_at_ms: The time to store; negative for immediate delivery.
        overrides_client: Whether a fixed delay replaced the time that the producer requested.
    """

    deliver_at_ms: int
    overrides_client: bool


@dataclass(frozen=True, slots=True)
class FieldLevels:
    """The level that each field of an `EffectiveDelayedDelivery` was taken from."""

    active: Level = Level.BROKER
    tick_time_ms: Level = Level.BROKER
    max_delivery_delay_ms: Level = Level.BROKER
    fixed_delivery_delay_ms: Level = Level.BROKER


@dataclass(frozen=True, slots=True)
class EffectiveDelayedDelivery:
    """The policies in effect for one topic: `DelayedDeliveryPolicies` with every field set, created by `effective`.

    Attributes:
        levels: The level that each field was taken from.
    """

    active: bool = True
    tick_time_ms: int = 1000
    max_delivery_delay_ms: int = 0
    fixed_delivery_delay_ms: int = 0
    levels: FieldLevels = field(default_factory=FieldLevels)

    def __post_init__(self) -> None:
        _check_fields({name: getattr(self, name) for name in JSON_NAMES})

    def to_json(self) -> dict[str, bool | int]:
        """Return every field by Pulsar's names: the response to ``?applied=true``."""
        return {json_name: getattr(self, name) for name, json_name in JSON_NAMES.items()}

    @property
    def keeps_fixed_delay(self) -> bool:
        """Whether there is no fixed delay, or delayed delivery is active."""
        return self.active or not self.fixed_delivery_delay_ms

    def deliver_at(self, publish_time_ms: int, deliver_at_ms: int) -> Decision:
        """Return the delivery time of a message: by the fixed delay, else by its producer within the maximum.

        If delayed delivery is inactive, both are ignored, and the message is always delivered at once. Pulsar stores
        the requested time and checks the switch at dispatch; here only the stored time decides.

        Args:
            publish_time_ms: The producer's timestamp, 0 or more. A fixed delay is added to it, so it follows the
                producer's clock.
            deliver_at_ms: The time that the producer requests, past times included; negative for none.

        Returns:
            The decision. With a fixed delay, the time is capped at 2**63 - 1.

        Raises:
            DeliveryDelayExceededError: The requested time is more than the maximum after the publish time.
            ValueError: A time is out of range.
            TypeError: A time is not an integer.
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
    """Resolve the policies of a topic field by field: the topic's value, else the namespace's, else the broker's.

    A namespace that sets a fixed delay or a maximum above 0 enforces it. Unless `topic_may_disable`, a 0 in the topic's
    field is then ignored, and so is an ``active`` of False beside an enforced fixed delay. Any other delay or maximum
    of the topic counts, even a fixed delay above an enforced maximum, as in PIP-437. A namespace or a topic may disable
    a setting of the broker.

    Args:
        topic: The policies of the topic; `DelayedDeliveryPolicies()` if it has none.
        namespace: The policies of its namespace, likewise.
        broker: The policies of its broker.
        topic_may_disable: Whether a topic may disable policies that its namespace enforces.
    """
    counted = topic if topic_may_disable else _without_disabling(topic, namespace)
    active, active_level = _first_set(counted.active, namespace.active, broker.active)
    tick, tick_level = _first_set(counted.tick_time_ms, namespace.tick_time_ms, broker.tick_time_ms)
    limit, limit_level = _first_set(
        counted.max_delivery_delay_ms, namespace.max_delivery_delay_ms, broker.max_delivery_delay_ms
    )
    fixed, fixed_level = _first_set(counted.fixed_delivery_delay_ms, namespace.fixed_delivery_delay_ms, 0)
    levels = FieldLevels(active_level, tick_level, limit_level, fixed_level)
    return EffectiveDelayedDelivery(active, tick, limit, fixed, levels)


def _without_disabling(topic: DelayedDeliveryPolicies, namespace: DelayedDeliveryPolicies) -> DelayedDeliveryPolicies:
    """Remove the topic's fields that would disable policies enforced by the namespace."""
    active = topic.active
    limit_ms, fixed_ms = topic.max_delivery_delay_ms, topic.fixed_delivery_delay_ms
    if namespace.fixed_delivery_delay_ms:
        active, fixed_ms = active or None, fixed_ms or None
    if namespace.max_delivery_delay_ms:
        limit_ms = limit_ms or None
    return replace(topic, active=active, max_delivery_delay_ms=limit_ms, fixed_delivery_delay_ms=fixed_ms)


def _first_set(topic: _T | None, namespace: _T | None, broker: _T) -> tuple[_T, Level]:
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
