"""Opens a subscription of a topic, or creates it: its cursor with its type, and the parts that it is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from ackstate.cursor.dispatch.consumers import SubscriptionType
from ackstate.cursor.dispatch.options import SubscriptionOptions, check_parts
from ackstate.cursor.journal.cursor_properties import INTERNAL_PREFIX
from ackstate.cursor.journal.format import Repair
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.persist.opening import CursorOpening
from ackstate.cursor.subscription import Subscription
from ackstate.cursor.topic.settings import subscription_settings
from ackstate.cursor.topic.start import Start, StartTime, start_position
from ackstate.cursor.topic.subscription_type import check_type, store_type, stored_properties, type_of, type_properties
from ackstate.limits.gate import DispatchGate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.cursor.steps import Steps
    from ackstate.cursor.topic.message_log import MessageLog
    from ackstate.cursor.topic.settings import TopicSettings
    from ackstate.delay.index import TopicDelayIndex
    from ackstate.limits.gate import GateLimits
    from ackstate.position import Position


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
            check_parts(self.kind, None, None, SubscriptionOptions())


def open_subscription(
    log: MessageLog,
    request: SubscriptionRequest,
    *,
    settings: TopicSettings,
    delays: TopicDelayIndex | None,
    now_ms: int,
) -> Steps[Subscription]:
    """Open a subscription of a log where it is stored, or create it; errors as `Topic.subscribe`."""
    store, name, kind = log.store, request.name, request.kind
    options = settings.options if request.options is None else request.options
    stored = stored_properties(store, topic=log.topic, subscription=name)
    of_type = None if stored is None else type_of(stored, subscription=name)
    check_type(kind, of_type, subscription=name)
    kind = kind or of_type or SubscriptionType.SHARED
    config, of_topic = subscription_settings(settings, log.topic)
    gate = None if kind.is_single_active else DispatchGate(request.limits or of_topic, broker=settings.broker_limit)
    check_parts(kind, gate, None, options)
    opening = CursorOpening(
        topic=log.topic, subscription=name, ledgers=log.ledgers, config=config, repair=request.repair,
        start=start_position(log, request.start) if stored is None else None,
        properties=_application_properties(request.properties) | type_properties(kind),
    )  # fmt: skip
    cursor = yield from ManagedCursor.opening(store, opening, now_ms=now_ms)
    store_type(cursor, kind)
    view = None if delays is None or kind.is_single_active else delays.open_view(cursor.is_acked)
    return Subscription(log, cursor, gate=gate, delays=view, kind=kind, options=options)


def _application_properties(properties: Mapping[str, str] | None) -> dict[str, str]:
    for name in properties or {}:
        if str(name).startswith(INTERNAL_PREFIX):
            raise ValueError(f"properties must not have names that begin with {INTERNAL_PREFIX!r}, got {name!r}")
    return dict(properties or {})
