"""The routes that read, set and remove the policies of namespaces and topics.

Those in effect are resolved from topic, namespace and broker, which also decide what may be set.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, final

from fastapi import Body, Depends, Header, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ackstate.analysis.admin.answers import LOG, invalid, refusals
from ackstate.cursor.config import CursorConfig
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.limits import BrokerDelayedDelivery, DelayedDeliveryPolicies, GateLimits
from ackstate.limits.policies import (
    NAME_LENGTH_MAX,
    TOPIC_BYTES_MAX,
    Policies,
    PolicyOwner,
    check_fixed_delay_kept,
    check_namespace_settable,
    check_topic_settable,
    effective,
)
from ackstate.pulsar_conf import check_spelling, keys_of
from ackstate.stores.base import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastapi import FastAPI

    from ackstate.limits import EffectiveDelayedDelivery
    from ackstate.limits.policies import PolicyStore


_NOTHING = DelayedDeliveryPolicies()
# The broker's properties that `BrokerDelayedDelivery`, `GateLimits` and `BrokerLimit` read.
_KEYS = keys_of("GateLimits", "BrokerLimit", "BrokerDelayedDelivery")


class NumberPolicy(StrEnum):
    """A policy that is one whole number, by Pulsar's name."""

    BECOME_OLD_ACK_RECORD_SECONDS = "becomeOldAckRecordSeconds"
    MAX_UNPERSIST_ACK_RECORDS_BYTES = "maxUnPersistAckRecordsBytes"

    def of(self, policies: Policies | BrokerPolicies) -> int | None:
        """Return the number of this policy."""
        number: int | None = getattr(policies, _FIELDS[self])
        return number

    def put(self, number: int | None, policies: Policies) -> Policies:
        """Return policies with a number of this policy, without one if it is None."""
        changed: dict[str, Any] = {_FIELDS[self]: number}
        try:
            return replace(policies, **changed)
        except ValueError as error:
            raise invalid(error) from None


_FIELDS = {
    NumberPolicy.BECOME_OLD_ACK_RECORD_SECONDS: "become_old_ack_record_seconds",
    NumberPolicy.MAX_UNPERSIST_ACK_RECORDS_BYTES: "max_unpersisted_ack_record_bytes",
}


@dataclass(frozen=True, slots=True)
class BrokerPolicies:
    """Policies of the broker, used if neither a topic nor its namespace sets them; the defaults are Pulsar's."""

    delayed_delivery: BrokerDelayedDelivery = field(default_factory=BrokerDelayedDelivery)  # Policies of message delays
    become_old_ack_record_seconds: int = 0  # As in `CursorConfig`
    # As in `GateLimits`.
    max_unpersisted_ack_record_bytes: int = field(default_factory=lambda: GateLimits().max_unpersisted_ack_record_bytes)
    topic_may_disable: bool = False  # Whether a topic may switch off a delay or a maximum that its namespace enforces

    @classmethod
    def from_pulsar_conf(cls, properties: Mapping[str, str], *, topic_may_disable: bool = False) -> BrokerPolicies:
        """Return the policies of the properties of a ``broker.conf``."""
        check_spelling(properties, _KEYS)
        seconds = CursorConfig.from_pulsar_conf(properties).become_old_ack_record_seconds
        return cls(
            BrokerDelayedDelivery.from_pulsar_conf(properties),
            seconds,
            GateLimits.from_pulsar_conf(properties).max_unpersisted_ack_record_bytes,
            topic_may_disable,
        )


@final
class LevelledPolicies:
    """The stored policies of namespaces and topics, together with those of the broker.

    Delay policies of one level restrict the others, which are separate values of the store. So changes of delays are
    checked and written one at a time, and never contradict each other. Topics whose policies cannot be read are ignored
    in these checks.

    All methods raise as `PolicyStore`. Thread-safe.
    """

    def __init__(self, store: PolicyStore, broker: BrokerPolicies) -> None:
        self.store = store
        self._broker = broker
        # Held from reading the other levels until the write of a change is done.
        self._changes = threading.Lock()

    def applied_delays(self, owner: PolicyOwner) -> dict[str, bool | int]:
        """Return the delays in effect, by Pulsar's JSON names; every field is present."""
        return self._effective(owner).to_json()

    def log_not_kept(self) -> None:
        """Warn of each owner whose fixed delay has no effect because delayed delivery is not active.

        A change that would lead there is refused, but a broker that is started with other properties can.

        Complexity: O(owners of policies).
        """
        try:
            owners = [*self.store.namespaces(), *self.store.topics()]
        except AckStateError as error:
            LOG.error("the policies cannot be listed: %s", error)
            return
        for owner in owners:
            try:
                applied = self._effective(owner)
            except AckStateError as error:
                LOG.error("%s", error)
                continue
            if not applied.keeps_fixed_delay:
                LOG.warning(
                    "the fixed delay of %s, %d ms, has no effect: delayed delivery is not active (set by the %s)",
                    owner, applied.fixed_delivery_delay_ms, applied.levels.active.value,
                )  # fmt: skip

    def applied_number(self, owner: PolicyOwner, policy: NumberPolicy) -> int | None:
        """Return the number in effect: the owner's, else that of its namespace, else the broker's."""
        for each in (owner, owner.of_namespace):
            number = policy.of(self.store.read(each).policies)
            if number is not None:
                return number
        return policy.of(self._broker)

    def put(
        self, owner: PolicyOwner, change: Callable[[Policies], Policies], *, expected_version: int | None
    ) -> tuple[Policies, Policies, int]:
        """Change the policies of an owner; return those before and after, and their version now."""
        before = Policies()

        def noted(policies: Policies) -> Policies:
            nonlocal before
            before = policies
            return change(policies)

        with self._changes:
            after, version = self.store.update(owner, noted, expected_version=expected_version)
        return before, after, version

    def with_delays(self, owner: PolicyOwner, update: DelayedDeliveryPolicies | None, policies: Policies) -> Policies:
        """Return policies with the fields of an update set and the others kept, without delays if it is None.

        This is a change for `put`, which keeps the other levels meanwhile; it is refused if they forbid it.
        """
        stored, broker = policies.delayed_delivery, self._broker.delayed_delivery
        may_disable = self._broker.topic_may_disable
        delays = _NOTHING if update is None else stored.updated(update)
        if owner.topic is None:
            known = ((str(topic), self._known_delays(topic)) for topic in self.store.topics(owner))
            topics = {name: topic for name, topic in known if topic is not None}
            check_namespace_settable(delays, broker, stored=stored, topics=topics, topic_may_disable=may_disable)
        elif update is not None:
            namespace = self._own_delays(owner.of_namespace)
            check_topic_settable(update, namespace, broker, stored=stored, topic_may_disable=may_disable)
        elif (found := self._known_delays(owner.of_namespace)) is not None:
            before = self._resolve(stored, found)
            if before.keeps_fixed_delay:
                check_fixed_delay_kept(before, self._resolve(_NOTHING, found))
        return replace(policies, delayed_delivery=delays)

    def _effective(self, owner: PolicyOwner) -> EffectiveDelayedDelivery:
        topic = self._own_delays(owner) if owner.topic is not None else _NOTHING
        return self._resolve(topic, self._own_delays(owner.of_namespace))

    def _resolve(self, topic: DelayedDeliveryPolicies, namespace: DelayedDeliveryPolicies) -> EffectiveDelayedDelivery:
        broker = self._broker
        return effective(topic, namespace, broker.delayed_delivery, topic_may_disable=broker.topic_may_disable)

    def _known_delays(self, owner: PolicyOwner) -> DelayedDeliveryPolicies | None:
        """Return the delay policies of an owner, None if they cannot be read."""
        try:
            return self._own_delays(owner)
        except (CorruptStateError, UnsupportedVersionError) as error:
            LOG.error("excluded from the check: %s", error)
            return None

    def _own_delays(self, owner: PolicyOwner) -> DelayedDeliveryPolicies:
        return self.store.read(owner).policies.delayed_delivery


_AUDIT = logging.getLogger("ackstate.admin.audit")
_DELAYS = "delayedDelivery"
_NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"

# Only for the OpenAPI document; `DelayedDeliveryPolicies` does the checks.
_Milliseconds = Annotated[int, Field(json_schema_extra={"minimum": 0, "format": "int64"})]
_TickMilliseconds = Annotated[int, Field(json_schema_extra={"minimum": 1, "format": "int64"})]


class DelayedDelivery(BaseModel):
    """Pulsar's delayed delivery policies; a null or absent field is not set, and keeps its value in an update."""

    model_config = ConfigDict(extra="forbid", strict=True, title="DelayedDeliveryPolicies")

    active: bool | None = Field(None, description="Whether messages are delayed at all.")
    tick_time: _TickMilliseconds | None = Field(
        None, alias="tickTime", description="Precision of the delivery time, in ms."
    )
    max_delivery_delay_in_millis: _Milliseconds | None = Field(
        None, alias="maxDeliveryDelayInMillis", description="Longest delay that a producer may request; 0 for any."
    )
    fixed_delivery_delay_in_millis: _Milliseconds | None = Field(
        None, alias="fixedDeliveryDelayInMillis", description="Delay of every message; 0 for none."
    )


# Only for the OpenAPI document; `PolicyOwner` does the checks.
_NAME_BOUNDS = {"minLength": 1, "maxLength": NAME_LENGTH_MAX, "pattern": "^[-=:._a-zA-Z0-9]+$"}
_TOPIC_BOUNDS = {"minLength": 1, "maxLength": TOPIC_BYTES_MAX, "pattern": r"^[^/\x00-\x1f\x7f-\x9f]+$"}
Tenant = Annotated[str, Path(json_schema_extra=_NAME_BOUNDS)]
Namespace = Annotated[str, Path(json_schema_extra=_NAME_BOUNDS)]
Topic = Annotated[str, Path(json_schema_extra=_TOPIC_BOUNDS, description="The local name, percent-encoded.")]

_Applied = Annotated[bool, Query(description="The policies in effect, from this level or a higher one.")]
_Ignored = Annotated[bool, Query(description="Accepted from Pulsar's clients and ignored.")]
_IsGlobal = Annotated[
    bool, Query(alias="isGlobal", description="Policies of all clusters: ignored by a read, refused by a write.")
]
_Policy = Annotated[NumberPolicy, Path()]
_IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag that the policies must still have; * for any, and to DELETE unreadable policies.",
    ),
]


def tenant_name(tenant: Tenant, authoritative: _Ignored = False) -> None:
    """Declare the parameters in the path of a tenant."""


def namespace_names(tenant: Tenant, namespace: Namespace, authoritative: _Ignored = False) -> None:
    """Declare the parameters in the path of a namespace."""


def topic_names(tenant: Tenant, namespace: Namespace, topic: Topic, authoritative: _Ignored = False) -> None:
    """Declare the parameters in the path of a topic."""


def no_global_write(request: Request, is_global: _IsGlobal = False) -> None:
    """Refuse to write for other clusters."""
    if is_global and request.method in {"POST", "DELETE"}:
        raise HTTPException(412, "isGlobal: global policies are not supported; nothing was changed")


def named(request: Request) -> PolicyOwner:
    """Return the namespace or topic that a path names; for a tenant, its namespace ``-``."""
    names = request.path_params
    try:
        return PolicyOwner(names["tenant"], names.get("namespace", "-"), names.get("topic"))
    except ValueError as error:
        raise invalid(error) from None


NamedOwner = Annotated[PolicyOwner, Depends(named)]


@final
class PolicyRoutes:
    """GET, POST and DELETE of each policy, for namespaces and for topics.

    POST and DELETE answer 204. Their answers and that of GET have an ``ETag`` of all policies of the owner; with it in
    ``If-Match``, a write is refused if another write happened since.
    """

    def __init__(self, policies: LevelledPolicies) -> None:
        self._policies = policies

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        levels: dict[str, list[Callable[..., None]]] = {
            _NAMESPACE: [namespace_names],
            TOPIC: [topic_names, no_global_write],
        }
        for path, names in levels.items():
            self._add(app, f"{path}/{_DELAYS}", names, (self.delays, self.set_delays, self.remove_delays))
            self._add(app, f"{path}/{{policy}}", names, (self.number, self.set_number, self.remove_number))

    @staticmethod
    def _add(
        app: FastAPI, path: str, names: list[Callable[..., None]], endpoints: tuple[Callable[..., Any], ...]
    ) -> None:
        get, post, delete = endpoints
        shared: dict[str, Any] = {"dependencies": [Depends(each) for each in names], "tags": ["policies"]}
        # Unset fields are omitted, as Pulsar's clients expect.
        shared |= {"response_model_exclude_none": True, "response_description": "The requested policies"}
        app.add_api_route(path, get, methods=["GET"], responses=refusals(404, 412), **shared)
        shared |= {"status_code": 204, "response_class": Response, "response_description": "The policies are changed"}
        app.add_api_route(path, post, methods=["POST"], responses=refusals(404, 409, 412, 413, 415), **shared)
        app.add_api_route(path, delete, methods=["DELETE"], responses=refusals(404, 409, 412, 413), **shared)

    def delays(self, owner: NamedOwner, response: Response, applied: _Applied = False) -> DelayedDelivery | None:
        """Return the delayed delivery policies of this level, null if it has none; with applied, those in effect."""
        if applied:
            return DelayedDelivery.model_validate(self._policies.applied_delays(owner))
        policies, version = self._policies.store.read(owner)
        response.headers["ETag"] = _etag(version)
        delays = policies.delayed_delivery.to_json()
        return DelayedDelivery.model_validate(delays) if delays else None

    def set_delays(
        self, request: Request, owner: NamedOwner, update: DelayedDelivery, if_match: _IfMatch = None
    ) -> Response:
        """Set the given fields and keep the others; an explicit 0 or false disables."""
        try:
            delays = DelayedDeliveryPolicies.from_json(update.model_dump(by_alias=True))
        except (ValueError, TypeError) as error:
            raise invalid(error) from None
        return self._put(request, owner, if_match, _DELAYS, partial(self._policies.with_delays, owner, delays))

    def remove_delays(self, request: Request, owner: NamedOwner, if_match: _IfMatch = None) -> Response:
        """Remove the delayed delivery policies of this level; with If-Match: *, also all unreadable policies."""
        return self._put(request, owner, if_match, _DELAYS, partial(self._policies.with_delays, owner, None))

    def number(self, owner: NamedOwner, policy: _Policy, response: Response, applied: _Applied = False) -> int | None:
        """Return the number of this level, null if it has none; with applied, the one in effect."""
        if applied:
            return self._policies.applied_number(owner, policy)
        policies, version = self._policies.store.read(owner)
        response.headers["ETag"] = _etag(version)
        return policy.of(policies)

    def set_number(
        self,
        request: Request,
        owner: NamedOwner,
        policy: _Policy,
        number: Annotated[int, Body(strict=True)],
        if_match: _IfMatch = None,
    ) -> Response:
        """Set the number: seconds, 0 for none; or bytes, at least 1024, below 1 for no limit."""
        return self._put(request, owner, if_match, policy, partial(policy.put, number))

    def remove_number(
        self, request: Request, owner: NamedOwner, policy: _Policy, if_match: _IfMatch = None
    ) -> Response:
        """Remove the number of this level; with If-Match: *, also all unreadable policies."""
        return self._put(request, owner, if_match, policy, partial(policy.put, None))

    def _put(
        self, request: Request, owner: PolicyOwner, if_match: str | None, policy: str,
        change: Callable[[Policies], Policies],
    ) -> Response:  # fmt: skip
        """Change the policies of an owner, and log the values of one before and after."""
        if request.method == "DELETE" and self._is_discarded(request, owner, if_match):
            return _written(ABSENT)
        expected_version = self._expected_version(owner, if_match)
        *policies, version = self._policies.put(owner, change, expected_version=expected_version)
        before, after = (_value(policy, each) for each in policies)
        _log_change(request, owner, policy, before=before, after=after)
        return _written(version)

    def _is_discarded(self, request: Request, owner: PolicyOwner, if_match: str | None) -> bool:
        """Remove unreadable policies, only on request: other clients might rely on them."""
        is_discarded = (
            if_match is not None and "*" in _tags(if_match) and self._policies.store.discard_unreadable(owner)
        )
        if is_discarded:
            LOG.warning("removed the policies of %s, which could not be read", owner)
            _log_change(request, owner, "all", before="unreadable", after=None)
        return is_discarded

    def _expected_version(self, owner: PolicyOwner, if_match: str | None) -> int | None:
        """Return the version that the policies must have, None for any."""
        if if_match is None or "*" in (tags := _tags(if_match)):
            return None
        version = self._policies.store.read(owner).version
        if _etag(version) not in tags:
            raise HTTPException(
                412, f"If-Match must be {_etag(version)} for the policies of {owner}; nothing was changed"
            )
        return version


def _tags(if_match: str) -> list[str]:
    return [tag.strip() for tag in if_match.split(",")]


def _etag(version: int) -> str:
    return '"none"' if version == ABSENT else f'"{version}"'


def _value(policy: str, policies: Policies) -> object:
    return (policies.delayed_delivery.to_json() or None) if policy == _DELAYS else NumberPolicy(policy).of(policies)


def _written(version: int) -> Response:
    return Response(status_code=204, headers={"ETag": _etag(version)})


def _log_change(request: Request, owner: PolicyOwner, policy: str, *, before: object, after: object) -> None:
    """Log a durable change of a policy as a JSON object in ASCII, with the address and the values before and after."""
    entry = {
        "client": request.client.host if request.client else None,
        "action": request.method,
        "owner": str(owner),
        "policy": policy,
        "before": before,
        "after": after,
    }
    _AUDIT.info("%s", json.dumps(entry))
