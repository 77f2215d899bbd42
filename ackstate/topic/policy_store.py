"""The policies of namespaces and topics, on delays and ack records, in the metadata store with versions.

One value holds all policies of one namespace or topic, as a JSON document (`docs/wire-format.md`). It is changed by
compare-and-set: if two writers read the same version, one is refused, so neither overwrites the other's change unseen.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final
from urllib.parse import quote, unquote

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.integers import check_within
from ackstate.limits import DelayedDeliveryPolicies, GateLimits
from ackstate.properties import INT_MAX, LONG_MAX, LONG_MIN
from ackstate.stores.base import ABSENT, DamagedValueError, VersionMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import MetadataStore

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

    Attributes:
        tenant: Letters and digits of ASCII, and ``_-=:.``; 1 to 255 of them, and neither ``.`` nor ``..``.
        namespace: Likewise.
        topic: The local name: any text of 1 to 1,024 bytes in UTF-8, not of blanks alone, without slashes and without
            control characters. A topic with a slash in it is, in Pulsar, one of the old form with a cluster.

    Raises:
        ValueError: A name is not so.

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

    Attributes:
        delayed_delivery: Policies of message delays.
        become_old_ack_record_seconds: As in `CursorConfig`, and below 2**31.
        max_unpersisted_ack_record_bytes: As in `GateLimits`, and a signed number of 64 bits.

    Raises:
        ValueError: A number is out of its bounds; the text has Pulsar's name of it.
        TypeError: A number is no integer.
    """

    delayed_delivery: DelayedDeliveryPolicies = field(default_factory=DelayedDeliveryPolicies)
    become_old_ack_record_seconds: int | None = None
    max_unpersisted_ack_record_bytes: int | None = None

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
        """Read, change and write the policies of an owner, unless another writer has written in between.

        Nothing is tried again, because the value of a conflicting writer may be a reason to stop. A change without
        effect writes nothing. Policies without a value are deleted.

        Args:
            owner: The owner of the policies.
            change: Returns the new policies, or raises to leave all as it is.
            expected_version: Refuse at once unless the policies are at this version, `ABSENT` for none.

        Returns:
            The new policies and their version.

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
        """Delete the policies of an owner, all of them, if they cannot be read; else do nothing.

        Returns:
            Whether they were deleted.

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
        """Return the namespaces that have policies of their own, sorted by their paths.

        Raises:
            StoreError: The storage failed.
            CorruptStateError: A name cannot be read.
        """
        return self._owners(NAMESPACES, ())

    def topics(self, namespace: PolicyOwner | None = None) -> list[PolicyOwner]:
        """Return the topics that have policies of their own, of one namespace or of all, sorted by their paths.

        Raises:
            As `namespaces`.
        """
        return self._owners(TOPICS, (namespace.tenant, namespace.namespace) if namespace else ())

    def _owners(self, root: str, names: tuple[str, ...]) -> list[PolicyOwner]:
        path = "/".join([root, *(quote(name, safe="") for name in names)])
        below = [(*names, unquote(name)) for name in self._metadata.children(path)]
        if len(names) + 1 < _DEPTHS[root]:
            return [owner for each in below for owner in self._owners(root, each)]
        try:
            return [PolicyOwner(*each) for each in below]
        except ValueError as error:
            raise _corrupt(
                f"metadata below {path}", expected="names of tenants, namespaces and topics", found=error
            ) from None


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
    """Read policies back: exactly what `encode_policies` writes, and nothing that only resembles it.

    Args:
        data: The value of the metadata store.
        what: Whose policies, for error messages.

    Raises:
        CorruptStateError: It is damaged, or something else.
        UnsupportedVersionError: It has another version.
    """
    if len(data) > DOCUMENT_BYTES_MAX:
        raise _corrupt(what, offset=DOCUMENT_BYTES_MAX, expected="no more", found=f"{len(data)} bytes")
    try:
        document = json.loads(str(data, "ascii"))
        _check_version(document, what)
        numbers = {name: document.get(key) for key, name in _INTEGERS.items()}
        policies = Policies(DelayedDeliveryPolicies.from_json(document.get(_DELAYED, {})), **numbers)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        offset = getattr(error, "pos", getattr(error, "start", 0))
        raise _corrupt(what, offset=offset, expected="a document of policies", found=str(error)[:200]) from None
    canonical = encode_policies(policies)
    if data != canonical:
        pairs = zip(data, canonical, strict=False)
        offset = next((at for at, (found, due) in enumerate(pairs) if found != due), min(len(data), len(canonical)))
        raise _corrupt(what, offset=offset, expected=canonical[offset:][:20], found=bytes(data[offset:][:20]))
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
    return ascii(name if len(name) <= _SHOWN_LENGTH else f"{name[:_SHOWN_LENGTH]}...")


_SHOWN_LENGTH = 60


def _corrupt(what: str, *, expected: object, found: object, offset: int = 0) -> CorruptStateError:
    return CorruptStateError(what, offset=offset, expected=expected, found=found)
