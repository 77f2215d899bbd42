"""Opens a subscription of a topic, or creates it: its cursor with its type, and the parts that it is composed of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from ackstate.cursor.cursor import CursorOpening
from ackstate.cursor.formats import INTERNAL_PREFIX, Repair
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.dispatch.options import Start, StartTime, SubscriptionOptions, check_parts, dead_letter, start_position
from ackstate.dispatch.subscription import Subscription
from ackstate.limits.gate import DispatchGate
from ackstate.topic.settings import subscription_settings
from ackstate.topic.subscription_type import check_type, store_type, stored_properties, type_of, type_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ackstate.cursor.cursor import ManagedCursor
    from ackstate.delay.buckets import BucketedDelayIndex
    from ackstate.delay.index import TopicDelayIndex
    from ackstate.dispatch.options import Delivery
    from ackstate.limits.gate import GateLimits
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.topic.message_log import MessageLog
    from ackstate.topic.settings import TopicSettings


class RequestedFields(TypedDict, total=False):
    """The types of the fields of a `SubscriptionRequest`, for functions that take them as named arguments."""

    start: Start | StartTime | Position
    kind: SubscriptionType | None
    limits: GateLimits | None
    options: SubscriptionOptions | None
    properties: Mapping[str, str] | None
    repair: Repair


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """A subscription to be opened or created, for `Topic.subscribe` and `Topic.subscribe_all`.

    Attributes:
        name: The name of the subscription, not empty.
        start: The first message that a new subscription reads; a stored one continues where it is.
        kind: The type; None for the stored one, Shared for a new one.
        limits: Those of this subscription; None for those of the topic. Exclusive and Failover have none.
        options: Likewise.
        properties: The application's properties of a new subscription.
        repair: Used if the stored subscription cannot be read, as for `ManagedCursor.open`.

    Raises:
        TypeError: The type is no `SubscriptionType`.
    """

    name: str
    start: Start | StartTime | Position = Start.LATEST
    kind: SubscriptionType | None = None
    limits: GateLimits | None = None
    options: SubscriptionOptions | None = None
    properties: Mapping[str, str] | None = None
    repair: Repair = Repair.NONE

    def __post_init__(self) -> None:
        if self.kind is not None:
            check_parts(self.kind, None, None, SubscriptionOptions(), publishes=False)


class PlannedSubscription(NamedTuple):
    """A subscription whose cursor is to be opened next; nothing was written yet."""

    opening: CursorOpening
    kind: SubscriptionType
    gate: DispatchGate | None
    options: SubscriptionOptions


def plan_subscription(
    log: MessageLog, request: SubscriptionRequest, *, settings: TopicSettings, publishes: bool
) -> PlannedSubscription:
    """Check a request for a subscription of a log against the stored one; errors as `Topic.subscribe`."""
    name, kind = request.name, request.kind
    options = settings.options if request.options is None else request.options
    stored = stored_properties(log.store, topic=log.topic, subscription=name)
    of_type = None if stored is None else type_of(stored, subscription=name)
    check_type(kind, of_type, subscription=name)
    kind = kind or of_type or SubscriptionType.SHARED
    config, of_topic = subscription_settings(settings, log.topic)
    gate = None if kind.is_single_active else DispatchGate(request.limits or of_topic, broker=settings.broker_limit)
    check_parts(kind, gate, None, options, publishes=publishes)
    if options.dead_letters is not None and options.dead_letters.topic == log.topic:
        if request.options is not None:
            raise ValueError(f"dead letters of topic {log.topic!r} must go to another topic, or they would come again")
        options = replace(options, dead_letters=None)
    opening = CursorOpening(
        topic=log.topic, subscription=name, ledgers=log.ledgers, config=config, repair=request.repair,
        start=start_position(log, request.start) if stored is None else None,
        properties=_application_properties(request.properties) | type_properties(kind), check=log.check_owned,
    )  # fmt: skip
    return PlannedSubscription(opening, kind, gate, options)


def compose_subscription(
    log: MessageLog,
    planned: PlannedSubscription,
    cursor: ManagedCursor,
    *,
    delays: TopicDelayIndex | BucketedDelayIndex | None,
    publish: Callable[[str, Message, int], object] | None,
) -> Subscription:
    """Return the subscription of an open cursor."""
    _, kind, gate, options = planned
    store_type(cursor, kind)
    view = None if delays is None or kind.is_single_active else delays.open_view(cursor.is_acked)
    dead_letters, publishing = options.dead_letters, None
    if publish is not None and dead_letters is not None and dead_letters.topic is not None:
        publish_there = partial(publish, dead_letters.topic)
        name = planned.opening.subscription
        publishing = partial(_publish_dead_letter, publish_there, topic=log.topic, subscription=name)
    return Subscription(
        log, cursor, gate=gate, delays=view, kind=kind, options=options, publish_dead_letter=publishing
    )  # fmt: skip


def _publish_dead_letter(
    publish: Callable[[Message, int], object], delivery: Delivery, now_ms: int, *, topic: str, subscription: str
) -> bool:
    publish(dead_letter(delivery, topic=topic, subscription=subscription), now_ms)
    return True


def _application_properties(properties: Mapping[str, str] | None) -> dict[str, str]:
    for name in properties or {}:
        if str(name).startswith(INTERNAL_PREFIX):
            raise ValueError(f"properties must not have names that begin with {INTERNAL_PREFIX!r}, got {name!r}")
    return dict(properties or {})
