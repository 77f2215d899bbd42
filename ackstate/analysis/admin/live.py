"""The open topics of the broker that the server is part of: their routes, in the shape of Pulsar's answers.

Numbers that are not counted here, such as rates, are left out of ``stats``. In ``internalStats`` they have Pulsar's
empty value, as in the report about a store; a ledger whose size is not known has 0 bytes. ``redeliveryIfCrashed`` and
``explain`` are not Pulsar's, and its clients ignore them.

Source: ``TopicStats``, ``SubscriptionStats``, ``ConsumerStats`` and ``ManagedLedgerInternalStats`` of Apache Pulsar.

They read live objects in the event loop, without awaiting, so that no other task of the loop runs meanwhile. So the
loop must be the one whose thread publishes.
"""

from __future__ import annotations

import time
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, final

from fastapi import Body, Depends, HTTPException, Path, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from ackstate import pulsar_conf
from ackstate.aio import AsyncTopics
from ackstate.analysis.admin.answers import refusals
from ackstate.analysis.admin.internal_stats import (
    ExplainedTopic,
    InternalCursorStats,
    LedgerInfo,
    PersistentTopicInternalStats,
    PulsarResponse,
    explain_subscription,
    internal_stats,
)
from ackstate.analysis.admin.policy_routes import TOPIC, NamedOwner, namespace_names, tenant_name, topic_names
from ackstate.cursor.config import RangeForm
from ackstate.cursor.formats import INTERNAL_PREFIX, Format
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.errors import CursorClosedError
from ackstate.limits.rules import Rule
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.topic_name import parse_topic, persistence_name
from ackstate.wire.pulsar import LimitRule

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from fastapi import FastAPI

    from ackstate.aio import AsyncTopic
    from ackstate.cursor.config import CursorConfig
    from ackstate.dispatch.subscription import Subscription
    from ackstate.ledger_map import LedgerMap
    from ackstate.limits.gate import GateLimits
    from ackstate.limits.policies import PolicyOwner
    from ackstate.stores.base import Store
    from ackstate.topic.topic import Topic
    from ackstate.topic.topics import Topics


_MOST = 2**31 - 1  # the largest number that Pulsar reads for these keys
_RELEASES = {LimitRule.PULSAR_4_2: "4.2.4", LimitRule.PULSAR_5_0: "5.0.0"}
# The release that counts ranges as the others here do: in a list it keeps the lowest ones within the limit.
_EXACT = "5.0.0-M1"


def live_version(config: CursorConfig) -> str:
    """Return the release of Pulsar whose limit on ranges the cursors follow, and the release of this library."""
    return f"{_RELEASES.get(config.range_limit_rule, _EXACT)} (ackstate {version('ackstate')})"


def live_configuration(config: CursorConfig, limits: GateLimits) -> dict[str, str]:
    """Return the settings that concern cursors and limits.

    A cursor of the native format is reported as one that writes a list, in which ranges are counted as well.
    """
    # One that counts acked entries does so in the words form alone.
    counts_entries = config.range_form is RangeForm.WORDS and config.range_limit_rule is not LimitRule.EXACT
    ranges = config.list_limits.range_count_max
    if ranges is not None and config.range_limit_rule is LimitRule.PULSAR_4_2:
        ranges -= 1  # A list of that release has one range more than the setting.
    metadata = config.metadata_range_count_max if config.format is Format.NATIVE else config.closing_range_count_max
    rate, flush_ms = config.mark_delete_rate_limit, config.flush_interval_ms
    if not rate and flush_ms:
        rate = 1_000 / flush_ms  # Pulsar has no interval without a rate.
    return {
        pulsar_conf.RANGES: _text(ranges),
        pulsar_conf.METADATA_RANGES: _text(metadata),
        pulsar_conf.AS_WORDS: "true" if counts_entries else "false",
        pulsar_conf.MARK_DELETE_RATE: f"{rate:.9f}",
        pulsar_conf.FLUSH_SECONDS: _text(max(1, -(-flush_ms // 1_000))),
        "maxMessageSize": _text(None),  # A record may span several entries.
        Rule.UNPERSISTED_ACK_RECORD_BYTES.value: _text(limits.max_unpersisted_ack_record_bytes),
        Rule.UNACKED_MESSAGES.value: _text(limits.max_unacked_messages),
        Rule.CONSUMER_UNACKED_MESSAGES.value: _text(limits.max_unacked_messages_per_consumer),
        "dispatcherPauseOnAckStatePersistentEnabled": "true" if limits.max_unacked_ranges else "false",
    }


def _text(limit: int | None) -> str:
    """Return a limit as text; None for none."""
    return str(_MOST if limit is None else min(limit, _MOST))


_HOLES_MAX = 100

_Subscription = Annotated[str | None, Query(description="Only this one; all by default.")]
_Top = Annotated[int, Query(ge=1, le=_HOLES_MAX, description="How many holes of each subscription.")]
_NowMs = Annotated[
    int | None, Query(alias="nowMs", ge=0, lt=2**63, description="Count ages from this time; now by default.")
]


async def _done(change: Awaitable[None] | None) -> None:
    if change is not None:
        await change


_LedgerId = Annotated[int, Path(alias="ledgerId", ge=0, le=LEDGER_ID_MAX)]
_EntryId = Annotated[int, Path(alias="entryId", ge=0, le=ENTRY_ID_MAX)]
_DeliverAtMs = Annotated[int, Body(strict=True, ge=0, lt=2**63, description="The new time in milliseconds.")]


@final
class LiveRoutes:
    """Pulsar's ``stats`` and ``internalStats``, the lists that lead to them, and ``explain``, which Pulsar lacks."""

    def __init__(self, topics: Topics | AsyncTopics, store: Store) -> None:
        self._topics = topics.topics if isinstance(topics, AsyncTopics) else topics
        self._async_topics = topics if isinstance(topics, AsyncTopics) else None
        self._store = store

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application, before those of the policies, which end in a parameter."""

        def add(path: str, endpoint: Any, *, names: Any = None, **options: Any) -> None:
            dependencies = [] if names is None else [Depends(names)]
            statuses: tuple[int, ...] = () if names is None else (404, 412)
            if "methods" in options:  # with a body, and a change that may come second
                statuses = (404, 409, 412, 413, 415)
            app.add_api_route(
                path, endpoint, dependencies=dependencies, responses=refusals(*statuses), tags=["broker"],
                response_description="The requested resource", **options,
            )  # fmt: skip

        add("/admin/v2/brokers/version", self.version, response_class=PlainTextResponse)
        add("/admin/v2/brokers/configuration/runtime", self.configuration)
        add("/admin/v2/tenants", self.tenants)
        add("/admin/v2/namespaces/{tenant}", self.namespaces, names=tenant_name)
        add("/admin/v2/persistent/{tenant}/{namespace}", self.names, names=namespace_names)
        add(f"{TOPIC}/partitions", self.partitions, names=topic_names)
        add(f"{TOPIC}/stats", self.stats, names=topic_names, response_model_exclude_none=True)
        add(f"{TOPIC}/internalStats", self.internal_stats, names=topic_names)
        add(f"{TOPIC}/explain", self.explain, names=topic_names)
        changes: dict[str, Any] = {"status_code": 204, "response_class": Response, "names": topic_names}
        add(f"{TOPIC}/delayedDelivery/{{ledgerId}}/{{entryId}}", self.cancel, methods=["DELETE"], **changes)
        add(f"{TOPIC}/delayedDelivery/{{ledgerId}}/{{entryId}}", self.reschedule, methods=["POST"], **changes)

    async def cancel(self, owner: NamedOwner, ledger_id: _LedgerId, entry_id: _EntryId) -> Response:
        """Take a delayed message of an open topic back before it is due, for all subscriptions."""
        await _done((await self._changed(owner)).cancel(Position(ledger_id, entry_id)))
        return Response(status_code=204)

    async def reschedule(
        self, owner: NamedOwner, ledger_id: _LedgerId, entry_id: _EntryId, deliver_at_ms: _DeliverAtMs
    ) -> Response:
        """Change when a delayed message of an open topic is delivered, before it is due, for all subscriptions."""
        topic = await self._changed(owner)
        await _done(topic.reschedule(Position(ledger_id, entry_id), deliver_at_ms=deliver_at_ms))
        return Response(status_code=204)

    async def _changed(self, owner: NamedOwner) -> Topic | AsyncTopic:
        topic = self._open(owner)
        return topic if self._async_topics is None else await self._async_topics.open(topic.name)

    async def version(self) -> str:
        """Return the release of Pulsar whose limit on ranges applies, and that of ackstate."""
        return live_version(self._topics.settings.cursor)

    async def configuration(self) -> dict[str, str]:
        """Return the settings of cursors and limits under Pulsar's names."""
        settings = self._topics.settings
        return live_configuration(settings.cursor, settings.limits)

    async def tenants(self) -> list[str]:
        """List the tenants that have an open topic."""
        return sorted({namespace.partition("/")[0] for namespace, _ in self._named()})

    async def namespaces(self, owner: NamedOwner) -> list[str]:
        """List the namespaces of a tenant that have an open topic."""
        return sorted({namespace for namespace, _ in self._named() if namespace.startswith(f"{owner.tenant}/")})

    async def names(self, owner: NamedOwner) -> list[str]:
        """List the open topics of a namespace."""
        return [name for namespace, name in self._named() if namespace == f"{owner.tenant}/{owner.namespace}"]

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
            return await run_in_threadpool(stored_stats, self._store, owner)

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

    def _named(self) -> list[tuple[str, str]]:
        """Return namespace and name of the open topics that have a name of Pulsar; no path leads to the others."""
        found = ((parse_topic(name), name) for name in self._topics)
        return sorted((parts.namespace, name) for parts, name in found if parts and parts.domain == "persistent")

    def _open(self, owner: NamedOwner) -> Topic:
        try:
            return self._topics[str(owner)]
        except KeyError:
            raise HTTPException(404, f"{owner} is not open here") from None


def stored_stats(store: Store, owner: PolicyOwner) -> PersistentTopicInternalStats:
    """Return the state of a topic in a store; a refusal if there is none."""
    found = internal_stats(store, str(owner))
    if found is None:
        raise HTTPException(404, f"the store has neither messages nor cursors of {owner}")
    return found


class RedeliveryIfCrashed(PulsarResponse):
    """The acked entries that a crash would redeliver, by cause, and the partly acked batches in addition."""

    entries: int = Field(description="Acked entries that no durable record has: the sum of the next three.")
    unwritten: int = Field(description="Those that wait for the next persist.")
    young: int = Field(description="Those that were held back because they were sent recently.")
    cut: int = Field(description="Those that the range limit excluded.")
    batches: int = Field(description="Partly acked batches with acks that no durable record has.")


class LiveCursorStats(InternalCursorStats):
    """One cursor of an open subscription."""

    redelivery_if_crashed: RedeliveryIfCrashed


class LiveTopicInternalStats(PersistentTopicInternalStats):
    """One open topic."""

    cursors: dict[str, LiveCursorStats]  # type: ignore[assignment] # narrower, and never changed


class LiveConsumerStats(PulsarResponse):
    """One consumer."""

    consumer_name: str
    unacked_messages: int
    blocked_consumer_on_unacked_msgs: bool


class LiveSubscriptionStats(PulsarResponse):
    """One open subscription."""

    type: str
    msg_backlog: int
    msg_backlog_no_delayed: int
    msg_delayed: int
    msg_in_replay: int
    unacked_messages: int
    msg_out_counter: int
    blocked_subscription_on_unacked_msgs: bool
    active_consumer_name: str | None
    key_shared_mode: str | None
    non_contiguous_deleted_messages_ranges: int
    subscription_properties: dict[str, str]
    is_durable: bool = True
    durable: bool = True
    is_replicated: bool = False
    replicated: bool = False
    consumers: list[LiveConsumerStats]


class LiveTopicStats(PulsarResponse):
    """One open topic."""

    msg_out_counter: int
    non_contiguous_deleted_messages_ranges: int
    subscriptions: dict[str, LiveSubscriptionStats]


def live_stats(topic: Topic) -> LiveTopicStats:
    """Return the numbers of an open topic; a subscription that is being closed is left out.

    Complexity: as `Subscription.stats` and O(consumers), for each subscription.
    """
    found = {}
    for name, subscription in topic.subscriptions.items():
        with suppress(CursorClosedError):
            found[name] = _subscription_stats(subscription)
    return LiveTopicStats(
        msg_out_counter=sum(each.msg_out_counter for each in found.values()),
        non_contiguous_deleted_messages_ranges=sum(
            each.non_contiguous_deleted_messages_ranges for each in found.values()
        ),
        subscriptions=found,
    )


def live_internal_stats(topic: Topic) -> LiveTopicInternalStats:
    """Return the ledgers and cursors of an open topic. Complexity: O(ledgers + ranges of the cursors)."""
    log = topic.log.ledgers
    counts, sizes = log.counts(), topic.log.sizes.known
    open_count, counts[log.current_ledger_id] = counts[log.current_ledger_id], 0  # as in Pulsar
    cursors = {}
    for name, subscription in topic.subscriptions.items():
        with suppress(CursorClosedError):
            cursors[persistence_name(name)] = _cursor_stats(subscription, log)
    return LiveTopicInternalStats(
        number_of_entries=sum(counts.values()) + open_count,
        total_size=sum(sizes.values()),
        current_ledger_entries=open_count,
        current_ledger_size=sizes.get(log.current_ledger_id, 0),
        last_confirmed_entry=str(log.last_confirmed),
        state="LedgerOpened",
        ledgers=[
            LedgerInfo(ledger_id=ledger_id, entries=entries, size=sizes.get(ledger_id, 0))
            for ledger_id, entries in counts.items()
        ],
        cursors=dict(sorted(cursors.items())),
    )


def _subscription_stats(subscription: Subscription) -> LiveSubscriptionStats:
    stats, kind, properties = subscription.stats(), subscription.kind, subscription.cursor.cursor_properties
    return LiveSubscriptionStats(
        type=kind.value,
        msg_backlog=stats.cursor.backlog,
        msg_backlog_no_delayed=stats.backlog_not_delayed,
        msg_delayed=stats.delayed_entries,
        msg_in_replay=stats.replay_entries,
        unacked_messages=stats.unacked_messages,
        msg_out_counter=stats.sent_messages,
        blocked_subscription_on_unacked_msgs=stats.is_blocked_on_unacked_messages,
        active_consumer_name=subscription.active_consumer,
        key_shared_mode="AUTO_SPLIT" if kind is SubscriptionType.KEY_SHARED else None,
        non_contiguous_deleted_messages_ranges=stats.cursor.range_count,
        subscription_properties={
            name: text for name, text in properties.items() if not name.startswith(INTERNAL_PREFIX)
        },
        consumers=[
            LiveConsumerStats(
                consumer_name=each.name,
                unacked_messages=each.unacked_messages,
                blocked_consumer_on_unacked_msgs=each.is_blocked,
            )
            for each in subscription.consumer_uses()
        ],
    )


def _cursor_stats(subscription: Subscription, log: LedgerMap) -> LiveCursorStats:
    cursor, view = subscription.cursor, subscription.cursor.view
    is_active = bool(subscription.consumers)  # takes the lock of the subscription, which precedes that of the cursor
    with cursor.lock:
        cursor.check_open()
        mark_delete, read_position = cursor.mark_delete_position, cursor.read_position
        stats, last_entry = cursor.stats(), view.last_journal_entry
        return LiveCursorStats(
            mark_delete_position=str(mark_delete),
            read_position=str(read_position),
            messages_consumed_counter=-stats.backlog,  # as right after a load: the counter of added entries is 0
            cursor_ledger=-1 if last_entry is None else last_entry.ledger_id,
            cursor_ledger_last_entry=-1 if last_entry is None else last_entry.entry_id,
            individually_deleted_messages=str(cursor.deleted),
            state="NoLedger" if last_entry is None else "Open",
            active=is_active,
            number_of_entries_since_first_not_acked_message=log.count_between(mark_delete, read_position),
            total_non_contiguous_deleted_messages_range=stats.range_count,
            properties=dict(view.properties),
            redelivery_if_crashed=RedeliveryIfCrashed(
                entries=stats.redelivery_if_crashed,
                unwritten=stats.redelivery_unwritten,
                young=stats.redelivery_young,
                cut=stats.redelivery_cut,
                batches=stats.batches_unwritten,
            ),
        )
