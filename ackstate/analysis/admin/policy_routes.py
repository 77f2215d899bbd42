"""The routes that read, set and remove the policies of namespaces and topics."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, final

from fastapi import Body, Depends, Header, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ackstate.analysis.admin.answers import LOG, invalid, refusals
from ackstate.analysis.admin.resolve import NumberPolicy
from ackstate.limits import DelayedDeliveryPolicies
from ackstate.limits.policies import NAME_LENGTH_MAX, TOPIC_BYTES_MAX, PolicyOwner
from ackstate.stores.base import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from ackstate.analysis.admin.resolve import LevelledPolicies, PolicyChange

_AUDIT = logging.getLogger("ackstate.admin.audit")
_NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
_TOPIC = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"

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
            _TOPIC: [topic_names, no_global_write],
        }
        for path, names in levels.items():
            self._add(app, f"{path}/delayedDelivery", names, (self.delays, self.set_delays, self.remove_delays))
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
        expected_version = self._expected_version(owner, if_match)
        return _delays_changed(
            request, owner, self._policies.update_delays(owner, delays, expected_version=expected_version)
        )

    def remove_delays(self, request: Request, owner: NamedOwner, if_match: _IfMatch = None) -> Response:
        """Remove the delayed delivery policies of this level; with If-Match: *, also all unreadable policies."""
        if self._is_discarded(request, owner, if_match):
            return _written(ABSENT)
        expected_version = self._expected_version(owner, if_match)
        return _delays_changed(request, owner, self._policies.remove_delays(owner, expected_version=expected_version))

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
        expected_version = self._expected_version(owner, if_match)
        return self._put_number(request, owner, policy, number, expected_version)

    def remove_number(
        self, request: Request, owner: NamedOwner, policy: _Policy, if_match: _IfMatch = None
    ) -> Response:
        """Remove the number of this level; with If-Match: *, also all unreadable policies."""
        if self._is_discarded(request, owner, if_match):
            return _written(ABSENT)
        return self._put_number(request, owner, policy, None, self._expected_version(owner, if_match))

    def _put_number(
        self, request: Request, owner: PolicyOwner, policy: _Policy, number: int | None, expected_version: int | None
    ) -> Response:
        try:
            change = self._policies.put_number(owner, policy, number, expected_version=expected_version)
        except ValueError as error:
            raise invalid(error) from None
        _log_change(request, owner, policy, before=policy.of(change.before), after=policy.of(change.after))
        return _written(change.version)

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


def _delays_changed(request: Request, owner: PolicyOwner, change: PolicyChange) -> Response:
    before, after = (each.delayed_delivery.to_json() or None for each in (change.before, change.after))
    _log_change(request, owner, "delayedDelivery", before=before, after=after)
    return _written(change.version)


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
