"""The routes about the open topics of the broker that the server is part of.

They read live objects in the event loop, without awaiting, so that no other task of the loop runs meanwhile. So the
loop must be the one whose thread publishes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, final

from fastapi import Depends, HTTPException, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse

from ackstate.analysis.admin.answers import refusals
from ackstate.analysis.admin.internal_stats import PersistentTopicInternalStats, internal_stats
from ackstate.analysis.admin.live_configuration import live_configuration, live_version
from ackstate.analysis.admin.live_stats import LiveTopicInternalStats, LiveTopicStats, live_internal_stats, live_stats
from ackstate.analysis.admin.live_topics import LiveTopic, named_topics
from ackstate.analysis.admin.policy_routes import NamedOwner, namespace_names, tenant_name, topic_names
from ackstate.analysis.live_explanation import ExplainedTopic, explain_subscription

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ackstate.analysis.admin.live_topics import LiveTopics
    from ackstate.stores.base import Store

_TOPICS = "/admin/v2/persistent/{tenant}/{namespace}"
_TOPIC = f"{_TOPICS}/{{topic}}"
_HOLES_MAX = 100

_Subscription = Annotated[str | None, Query(description="Only this one; all by default.")]
_Top = Annotated[int, Query(ge=1, le=_HOLES_MAX, description="How many holes of each subscription.")]
_NowMs = Annotated[
    int | None, Query(alias="nowMs", ge=0, lt=2**63, description="Count ages from this time; now by default.")
]


@final
class LiveRoutes:
    """Pulsar's ``stats`` and ``internalStats``, the lists that lead to them, and ``explain``, which Pulsar lacks.

    Args:
        topics: The open topics.
        store: Where topics are stored that are not open.
    """

    def __init__(self, topics: LiveTopics, store: Store) -> None:
        self._topics = topics
        self._store = store

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application, before those of the policies, which end in a parameter."""
        add = _Adder(app)
        add("/admin/v2/brokers/version", self.version, response_class=PlainTextResponse)
        add("/admin/v2/brokers/configuration/runtime", self.configuration)
        add("/admin/v2/tenants", self.tenants)
        add("/admin/v2/namespaces/{tenant}", self.namespaces, names=tenant_name)
        add(_TOPICS, self.names, names=namespace_names)
        add(f"{_TOPIC}/partitions", self.partitions, names=topic_names)
        add(f"{_TOPIC}/stats", self.stats, names=topic_names, response_model_exclude_none=True)
        add(f"{_TOPIC}/internalStats", self.internal_stats, names=topic_names)
        add(f"{_TOPIC}/explain", self.explain, names=topic_names)

    async def version(self) -> str:
        """Return the release of Pulsar whose limit on ranges applies, and that of ackstate."""
        return live_version(self._topics.settings.cursor)

    async def configuration(self) -> dict[str, str]:
        """Return the settings of cursors and limits under Pulsar's names."""
        settings = self._topics.settings
        return live_configuration(settings.cursor, settings.limits)

    async def tenants(self) -> list[str]:
        """List the tenants that have an open topic."""
        return sorted({each.tenant for each in named_topics(self._topics)})

    async def namespaces(self, owner: NamedOwner) -> list[str]:
        """List the namespaces of a tenant that have an open topic."""
        found = named_topics(self._topics)
        return sorted({f"{each.tenant}/{each.namespace}" for each in found if each.tenant == owner.tenant})

    async def names(self, owner: NamedOwner) -> list[str]:
        """List the open topics of a namespace."""
        wanted = owner.tenant, owner.namespace
        return [each.full_name for each in named_topics(self._topics) if (each.tenant, each.namespace) == wanted]

    async def partitions(self, owner: NamedOwner) -> dict[str, int]:  # noqa: ARG002 - checks the names
        """Report that a topic has no partitions."""
        return {"partitions": 0}

    async def stats(self, owner: NamedOwner) -> LiveTopicStats:
        """Return the numbers of an open topic, its subscriptions and their consumers."""
        return live_stats(self._open(owner))

    async def internal_stats(self, owner: NamedOwner) -> LiveTopicInternalStats | PersistentTopicInternalStats:
        """Return the ledgers and cursors of an open topic, or else those that a broker would recover now."""
        try:
            return live_internal_stats(self._topics[str(owner)])
        except KeyError:
            found = await run_in_threadpool(internal_stats, self._store, str(owner))
        if found is None:
            raise HTTPException(404, f"the store has neither messages nor cursors of {owner}")
        return found

    async def explain(
        self, owner: NamedOwner, subscription: _Subscription = None, top: _Top = 10, now_ms: _NowMs = None
    ) -> ExplainedTopic:
        """Explain the ack holes of open subscriptions, and the limits that keep new messages back."""
        opened = self._open(owner).subscriptions
        if subscription is not None and subscription not in opened:
            raise HTTPException(404, f"{owner} has no open subscription {subscription!r}")
        now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        chosen = sorted(opened) if subscription is None else [subscription]
        explained = [explain_subscription(opened[name], name=name, top=top, now_ms=now_ms) for name in chosen]
        return ExplainedTopic(topic=str(owner), now_ms=now_ms, subscriptions=explained)

    def _open(self, owner: NamedOwner) -> LiveTopic:
        try:
            return self._topics[str(owner)]
        except KeyError:
            raise HTTPException(404, f"{owner} is not open here") from None


@final
class _Adder:
    """Adds routes that only read."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def __call__(self, path: str, endpoint: Any, *, names: Any = None, **options: Any) -> None:
        """Add a route; `names` declares the parameters of its path."""
        dependencies = [] if names is None else [Depends(names)]
        statuses = () if names is None else (404, 412)
        self._app.add_api_route(
            path, endpoint, dependencies=dependencies, responses=refusals(*statuses), tags=["broker"],
            response_description="The requested resource", **options,
        )  # fmt: skip
