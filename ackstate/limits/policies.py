"""The policies of namespaces and topics: on the delays of messages, and on ack records; and the store that keeps them.

Policies exist at three levels: topic, namespace and broker. Each field is resolved by itself, so a level that sets one
field leaves the others to the level above. In Pulsar a request with only ``tickTime`` stores 0 for the other fields,
and so disables the broker's maximum. Here an absent field is `None`, which sets nothing, and only an explicit 0 is 0.

Source: ``DelayedDeliveryPolicies`` and ``PersistentTopic.publishMessage`` of Apache Pulsar, PIP-315 and PIP-437.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, final
from urllib.parse import quote, unquote

from ackstate.checks import INT_MAX, LONG_MAX, LONG_MIN, check_within, did_you_mean
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError, corrupt
from ackstate.limits.rules import GateLimits
from ackstate.pulsar_conf import fields_of, read_settings
from ackstate.stores.base import ABSENT, DamagedValueError, VersionMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ackstate.stores.base import MetadataStore

# The largest time: Pulsar stores times as signed 64-bit numbers.
TIME_MS_MAX = LONG_MAX

JSON_NAMES = {
    "active": "active",
    "tick_time_ms": "tickTime",
    "max_delivery_delay_ms": "maxDeliveryDelayInMillis",
    "fixed_delivery_delay_ms": "fixedDeliveryDelayInMillis",
}
_FIELDS = {json_name: name for name, json_name in JSON_NAMES.items()}
_LEAST = {"tick_time_ms": 1, "max_delivery_delay_ms": 0, "fixed_delivery_delay_ms": 0}


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
    """The policies of a broker, in effect if neither topic nor namespace sets a field; the defaults are Pulsar's.

    The fields are those of `DelayedDeliveryPolicies`; None is refused. Pulsar has no key for a fixed delay.
    """

    active: bool = True
    tick_time_ms: int = 1000
    max_delivery_delay_ms: int = 0

    def __post_init__(self) -> None:
        _check_fields({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> BrokerDelayedDelivery:
        """Return the policies in a broker's properties, or in a ``broker.conf``; errors as `GateLimits` has them.

        Blank sets nothing, a negative maximum is none, as in Pulsar.
        """
        return cls(**fields_of(read_settings(source, "BrokerDelayedDelivery"), "BrokerDelayedDelivery"))


class Decision(NamedTuple):
    """The delivery time of a message that may be stored."""

    deliver_at_ms: int  # the time to store; negative for immediate delivery
    overrides_client: bool  # whether a fixed delay replaced the time that the producer requested


@dataclass(frozen=True, slots=True)
class FieldLevels:
    """The level that each field of an `EffectiveDelayedDelivery` was taken from."""

    active: Level = Level.BROKER
    tick_time_ms: Level = Level.BROKER
    max_delivery_delay_ms: Level = Level.BROKER
    fixed_delivery_delay_ms: Level = Level.BROKER


@dataclass(frozen=True, slots=True)
class EffectiveDelayedDelivery:
    """The policies in effect for one topic: `DelayedDeliveryPolicies` with every field set, created by `effective`."""

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

        A fixed delay is added to the publish time, so it follows the producer's clock; the sum is at most 2**63 - 1. If
        delayed delivery is inactive, both are ignored, and the message is always delivered at once. Pulsar stores the
        requested time, negative for none, and checks the switch at dispatch; here only the stored time decides.

        Raises:
            DeliveryDelayExceededError: The requested time is more than the maximum after the publish time.
            ValueError: A time is out of range.
            TypeError: A time is not an integer.
        """
        # Each message that is published comes through here, so a valid time costs no call.
        if type(publish_time_ms) is not int or not 0 <= publish_time_ms <= TIME_MS_MAX:
            check_within("publish_time_ms", publish_time_ms, least=0, most=TIME_MS_MAX, unit="milliseconds")
        if type(deliver_at_ms) is not int or not -TIME_MS_MAX <= deliver_at_ms <= TIME_MS_MAX:
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
    a setting of the broker. A topic or namespace without policies has `DelayedDeliveryPolicies()`.
    """
    counted = topic if topic_may_disable else _without_disabling(topic, namespace)
    values: dict[str, Any] = {}
    levels: dict[str, Level] = {}
    for name in JSON_NAMES:
        # Pulsar has no fixed delay of a broker.
        of_levels = (getattr(counted, name), getattr(namespace, name), getattr(broker, name, 0))
        values[name], levels[name] = next(
            (value, level) for value, level in zip(of_levels, Level, strict=True) if value is not None
        )
    return EffectiveDelayedDelivery(**values, levels=FieldLevels(**levels))


def _without_disabling(topic: DelayedDeliveryPolicies, namespace: DelayedDeliveryPolicies) -> DelayedDeliveryPolicies:
    """Remove the topic's fields that would disable policies enforced by the namespace."""
    active = topic.active
    limit_ms, fixed_ms = topic.max_delivery_delay_ms, topic.fixed_delivery_delay_ms
    if namespace.fixed_delivery_delay_ms:
        active, fixed_ms = active or None, fixed_ms or None
    if namespace.max_delivery_delay_ms:
        limit_ms = limit_ms or None
    return replace(topic, active=active, max_delivery_delay_ms=limit_ms, fixed_delivery_delay_ms=fixed_ms)


def _check_fields(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        label = name if name == JSON_NAMES[name] else f"{name} ({JSON_NAMES[name]})"
        if name != "active":
            check_within(label, value, least=_LEAST[name], most=TIME_MS_MAX, unit="milliseconds")
        elif not isinstance(value, bool):
            raise TypeError(f"{label} must be true or false, got {value!r}")


# Updates that count and can be kept


def check_topic_settable(
    update: DelayedDeliveryPolicies,
    namespace: DelayedDeliveryPolicies,
    broker: BrokerDelayedDelivery,
    *,
    stored: DelayedDeliveryPolicies | None = None,
    topic_may_disable: bool = False,
) -> None:
    """Refuse an update of a topic's policies that would switch off one of its namespace, or could not be kept.

    A 0 among the topic's policies so far that no longer counts is no reason to refuse.

    Raises:
        DelayPolicyRefusedError: Likewise, or as `check_fixed_delay_kept`.
    """
    stored = stored or DelayedDeliveryPolicies()
    before = effective(stored, namespace, broker, topic_may_disable=topic_may_disable)
    applied = effective(stored.updated(update), namespace, broker, topic_may_disable=topic_may_disable)
    for name, value in update.named().items():
        if getattr(applied.levels, name) is not Level.TOPIC:
            enforced = "max_delivery_delay_ms" if name == "max_delivery_delay_ms" else "fixed_delivery_delay_ms"
            raise DelayPolicyRefusedError(
                f"{JSON_NAMES[name]} {str(value).lower()} of the topic would switch off a policy of its namespace: "
                f"{JSON_NAMES[enforced]} {getattr(namespace, enforced)}",
                field=JSON_NAMES[name],
            )
    check_fixed_delay_kept(before, applied)


def check_namespace_settable(
    namespace: DelayedDeliveryPolicies,
    broker: BrokerDelayedDelivery,
    *,
    stored: DelayedDeliveryPolicies | None = None,
    topics: Mapping[str, DelayedDeliveryPolicies] | None = None,
    topic_may_disable: bool = False,
) -> None:
    """Refuse policies of a namespace with which a fixed delay could not be kept, of itself or of one of its topics.

    The policies are those after the update, as a whole. A topic's 0 does not prevent the namespace from enforcing a
    value: it no longer counts. A fixed delay that the stored policies already break is no reason to refuse. O(topics).

    Raises:
        DelayPolicyRefusedError: As `check_fixed_delay_kept`; it names up to three topics, and their number.
    """

    def change_of(topic: DelayedDeliveryPolicies) -> tuple[EffectiveDelayedDelivery, EffectiveDelayedDelivery]:
        after = effective(topic, namespace, broker, topic_may_disable=topic_may_disable)
        before = stored and effective(topic, stored, broker, topic_may_disable=topic_may_disable)
        return before or EffectiveDelayedDelivery(), after

    check_fixed_delay_kept(*change_of(DelayedDeliveryPolicies()))
    broken = [name for name, topic in (topics or {}).items() if _breaks(*change_of(topic))]
    if topics and broken:
        raise _not_kept(change_of(topics[broken[0]])[1], topics=broken)


def check_fixed_delay_kept(before: EffectiveDelayedDelivery, after: EffectiveDelayedDelivery) -> None:
    """Refuse a change, by `DelayPolicyRefusedError`, with which a fixed delay is in force but would not be kept."""
    if _breaks(before, after):
        raise _not_kept(after)


def _breaks(before: EffectiveDelayedDelivery, after: EffectiveDelayedDelivery) -> bool:
    # One that was not kept before either, and is as long, is no reason: to refuse would keep out every repair.
    is_as_before = not before.keeps_fixed_delay and before.fixed_delivery_delay_ms == after.fixed_delivery_delay_ms
    return not after.keeps_fixed_delay and not is_as_before


def _not_kept(applied: EffectiveDelayedDelivery, *, topics: Sequence[str] = ()) -> DelayPolicyRefusedError:
    where = f" for topic {topics[0]}" if topics else ""
    others = f"; it would be so for {len(topics)} topics, such as {', '.join(topics[:3])}" if len(topics) > 1 else ""
    return DelayPolicyRefusedError(
        f"fixedDeliveryDelayInMillis {applied.fixed_delivery_delay_ms} (of the "
        f"{applied.levels.fixed_delivery_delay_ms.value}) would not be kept{where}: delayed delivery is not active "
        f"(says the {applied.levels.active.value}){others}",
        field="fixedDeliveryDelayInMillis",
    )


# The store: one value holds all policies of one namespace or topic, as a JSON document (`docs/wire-format.md`). It is
# changed by compare-and-set: if two writers read the same version, one is refused, so neither overwrites the other's
# change unseen.

NAMESPACES = "/policies/namespaces"
TOPICS = "/policies/topics"

VERSION = 1
DOCUMENT_BYTES_MAX = 4096
NAME_LENGTH_MAX = 255
TOPIC_BYTES_MAX = 1024

_NAME = re.compile(r"[-=:.\w]+", re.ASCII)
# Control characters, halves of surrogate pairs, and the remainder of bytes that were not UTF-8.
_REFUSED = re.compile("[/\0-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
# How the text of each error about an owner's stored policies begins.
POLICIES_OF = "policies of "


@dataclass(frozen=True, slots=True)
class PolicyOwner:
    """Whose policies: a namespace's or, with a topic, a topic's.

    >>> str(PolicyOwner("public", "default", "orders")), str(PolicyOwner("public", "default"))
    ('persistent://public/default/orders', 'public/default')

    The tenant and the namespace are 1 to 255 letters and digits of ASCII, and ``_-=:.``, and neither ``.`` nor ``..``;
    the local name of a topic is any text of 1 to 1,024 bytes in UTF-8, not of blanks alone, without slashes and control
    characters: with a slash it is, in Pulsar, one of the old form with a cluster. Anything else is a `ValueError`.

    Source: ``NamedEntity`` and ``TopicName`` of Apache Pulsar, which have no bounds on lengths.
    """

    tenant: str
    namespace: str
    topic: str | None = None

    def __post_init__(self) -> None:
        for kind, name in (("tenant", self.tenant), ("namespace", self.namespace)):
            if not _NAME.fullmatch(name) or len(name) > NAME_LENGTH_MAX or name in {".", ".."}:
                raise ValueError(f"{kind} {_shown(name)} is not 1 to {NAME_LENGTH_MAX} of a-z, A-Z, 0-9 and _-=:.")
        if self.topic is not None:
            _check_topic(self.topic)

    def __str__(self) -> str:
        namespace = f"{self.tenant}/{self.namespace}"
        return namespace if self.topic is None else f"persistent://{namespace}/{self.topic}"

    @property
    def path(self) -> str:
        """Where the policies are in the metadata store."""
        if self.topic is None:
            return f"{NAMESPACES}/{quote(self.tenant, safe='')}/{quote(self.namespace, safe='')}"
        return "/".join([TOPICS, *(quote(name, safe="") for name in (self.tenant, self.namespace, self.topic))])

    @property
    def of_namespace(self) -> PolicyOwner:
        """The namespace itself."""
        return PolicyOwner(self.tenant, self.namespace)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one namespace or topic; a value of None, also in a field of the delays, is not set.

    Raises:
        ValueError: A number is out of its bounds; the text has Pulsar's name of it.
        TypeError: A number is no integer.
    """

    delayed_delivery: DelayedDeliveryPolicies = field(default_factory=DelayedDeliveryPolicies)
    become_old_ack_record_seconds: int | None = None  # as in `CursorConfig`, and below 2**31
    max_unpersisted_ack_record_bytes: int | None = None  # as in `GateLimits`, and a signed number of 64 bits

    def __post_init__(self) -> None:
        if (seconds := self.become_old_ack_record_seconds) is not None:
            check_within("becomeOldAckRecordSeconds", seconds, least=0, most=INT_MAX)
        if (limit_bytes := self.max_unpersisted_ack_record_bytes) is not None:
            check_within("maxUnPersistAckRecordsBytes", limit_bytes, least=LONG_MIN, most=LONG_MAX)
            GateLimits(max_unpersisted_ack_record_bytes=limit_bytes)


class VersionedPolicies(NamedTuple):
    """Policies, and the version of the metadata value that holds them: `ABSENT` if there is none."""

    policies: Policies
    version: int


@final
class PolicyStore:
    """The policies in a metadata store; as thread-safe as that is."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata

    def read(self, owner: PolicyOwner) -> VersionedPolicies:
        """Return an owner's policies, with their version.

        Raises:
            StoreError: The storage failed.
            CorruptStateError: The value is damaged.
            UnsupportedVersionError: It has another version.
        """
        value = self._metadata.get(owner.path)
        if value is None:
            return VersionedPolicies(Policies(), ABSENT)
        return VersionedPolicies(decode_policies(value.data, what=f"{POLICIES_OF}{owner}"), value.version)

    def update(
        self, owner: PolicyOwner, change: Callable[[Policies], Policies], *, expected_version: int | None = None
    ) -> VersionedPolicies:
        """Read, change, write and return the policies of an owner, unless another writer has written in between.

        Nothing is tried again, because the value of a conflicting writer may be a reason to stop. A change without
        effect writes nothing. Policies without a value are deleted.

        Args:
            owner: The owner of the policies.
            change: Returns the new policies, or raises to leave all as it is.
            expected_version: Refuse at once unless the policies are at this version, `ABSENT` for none.

        Raises:
            VersionMismatchError: They are at another version, or were changed meanwhile; nothing was written.
            As `read`, and the exceptions of `change`.
        """
        old = self.read(owner)
        if expected_version not in {None, old.version}:
            raise VersionMismatchError(f"policies of {owner} are at version {old.version}, not {expected_version}")
        policies = change(old.policies)
        if policies == old.policies:
            return old
        if policies == Policies():
            self._metadata.delete(owner.path, expected_version=old.version)
            return VersionedPolicies(policies, ABSENT)
        version = self._metadata.put(owner.path, encode_policies(policies), expected_version=old.version)
        return VersionedPolicies(policies, version)

    def discard_unreadable(self, owner: PolicyOwner) -> bool:
        """Delete the policies of an owner, all of them, if they cannot be read, and return whether they were deleted.

        Raises:
            StoreError: The storage failed.
            VersionMismatchError: Another writer wrote in between; nothing was deleted.
        """
        try:
            value = self._metadata.get(owner.path)
        except DamagedValueError as error:
            self._metadata.delete(owner.path, expected_version=error.version)
            return True
        if value is None:
            return False
        try:
            decode_policies(value.data)
        except (CorruptStateError, UnsupportedVersionError):
            self._metadata.delete(owner.path, expected_version=value.version)
            return True
        return False

    def namespaces(self) -> list[PolicyOwner]:
        """Return the namespaces that have policies of their own, sorted by path; errors as `read`."""
        return self._owners(NAMESPACES, ())

    def topics(self, namespace: PolicyOwner | None = None) -> list[PolicyOwner]:
        """Return the topics that have policies of their own, of one namespace or of all, as `namespaces`."""
        return self._owners(TOPICS, (namespace.tenant, namespace.namespace) if namespace else ())

    def _owners(self, root: str, names: tuple[str, ...]) -> list[PolicyOwner]:
        path = "/".join([root, *(quote(name, safe="") for name in names)])
        below = [(*names, unquote(name)) for name in self._metadata.children(path)]
        if len(names) + 1 < _DEPTHS[root]:
            return [owner for each in below for owner in self._owners(root, each)]
        try:
            return [PolicyOwner(*each) for each in below]
        except ValueError as error:
            corrupt(f"metadata below {path}", 0, "names of tenants, namespaces and topics", error)


def encode_policies(policies: Policies) -> bytes:
    """Return policies as ASCII without blanks and without unset values: there is one text for each value."""
    document: dict[str, Any] = {"version": VERSION}
    if delayed := policies.delayed_delivery.to_json():
        document[_DELAYED] = delayed
    for key, name in _INTEGERS.items():
        if (number := getattr(policies, name)) is not None:
            document[key] = number
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def decode_policies(data: bytes, *, what: str = "policies") -> Policies:
    """Read exactly what `encode_policies` writes; else `CorruptStateError`, or `UnsupportedVersionError`."""
    if len(data) > DOCUMENT_BYTES_MAX:
        corrupt(what, DOCUMENT_BYTES_MAX, "no more", f"{len(data)} bytes")
    try:
        document = json.loads(str(data, "ascii"))
        _check_version(document, what)
        numbers = {name: document.get(key) for key, name in _INTEGERS.items()}
        policies = Policies(DelayedDeliveryPolicies.from_json(document.get(_DELAYED, {})), **numbers)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        offset = getattr(error, "pos", getattr(error, "start", 0))
        corrupt(what, offset, "a document of policies", str(error)[:200])
    canonical = encode_policies(policies)
    if data != canonical:
        pairs = zip(data, canonical, strict=False)
        offset = next((at for at, (found, due) in enumerate(pairs) if found != due), min(len(data), len(canonical)))
        corrupt(what, offset, canonical[offset:][:20], bytes(data[offset:][:20]))
    return policies


_DELAYED = "delayedDelivery"
_INTEGERS = {
    "becomeOldAckRecordSeconds": "become_old_ack_record_seconds",
    "maxUnPersistAckRecordsBytes": "max_unpersisted_ack_record_bytes",
}
_DEPTHS = {NAMESPACES: 2, TOPICS: 3}


def _check_version(document: object, what: str) -> None:
    if not isinstance(document, dict):
        raise TypeError("no object")
    version = document.get("version")
    if not isinstance(version, int) or version < VERSION:
        raise ValueError(f"version {version!r}")
    if version > VERSION:
        raise UnsupportedVersionError(f"{what}: version {str(version)[:20]}, this release reads up to {VERSION}")


def _check_topic(topic: str) -> None:
    size = len(topic.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= TOPIC_BYTES_MAX:
        raise ValueError(f"topic {_shown(topic)} is not 1 to {TOPIC_BYTES_MAX} bytes long")
    if topic in {".", ".."} or topic.isspace():
        raise ValueError(f"topic {_shown(topic)} is no name")
    if refused := _REFUSED.search(topic):
        raise ValueError(f"topic {_shown(topic)} has a character that no topic may have: {refused[0]!a}")


def _shown(name: str) -> str:
    """Return a name as text of ASCII, and not at length."""
    return ascii(name if len(name) <= 60 else f"{name[:60]}...")
