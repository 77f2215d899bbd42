"""Explains the ack holes of the open subscriptions of a broker, for its admin server and for the clients of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from ackstate.dispatch.explain import BlockReason, HoleReport
    from ackstate.dispatch.subscription import Subscription


class _Explained(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class ExplainedHole(_Explained):
    """One ack hole, with the names of `HoleReport`; `why` is the name of a `HoleReason`."""

    first: str
    last: str
    entry_count: int
    age_ms: int | None
    why: str
    detail: str
    consumers: list[str]
    deliver_at_ms: int | None
    delivery_count: int | None
    cost_bytes: int
    freed_bytes: int
    freed_ranges: int
    mark_delete_advance: int


class ExplainedBlock(_Explained):
    """One closed rule, with the names of `BlockReason`; `rule` is its setting in a ``broker.conf``."""

    rule: str
    consumer: str
    used: int
    limit: int
    released_at: int
    since_ms: int | None
    detail: str


class ExplainedSubscription(_Explained):
    """One open subscription: its state, its costliest holes, and the rules that keep new messages back."""

    subscription: str
    type: str
    mark_delete: str
    backlog: int
    range_count: int
    record_bytes: int
    redelivery_if_crashed: int
    hole_count: int
    holes: list[ExplainedHole]
    blocked: list[ExplainedBlock]


class ExplainedTopic(_Explained):
    """One open topic; ages are counted from `now_ms`."""

    topic: str
    now_ms: int
    subscriptions: list[ExplainedSubscription]


def explain_subscription(subscription: Subscription, *, name: str, top: int, now_ms: int) -> ExplainedSubscription:
    """Explain an open subscription; nothing is changed.

    Raises:
        CursorClosedError: It is closed.

    Complexity: O(holes), and reading up to 64 messages of each that is returned.
    """
    stats, cursor = subscription.stats().cursor, subscription.cursor
    return ExplainedSubscription(
        subscription=name,
        type=subscription.kind.value,
        mark_delete=str(cursor.mark_delete_position),
        backlog=stats.backlog,
        range_count=stats.range_count,
        record_bytes=stats.record_bytes,
        redelivery_if_crashed=stats.redelivery_if_crashed,
        hole_count=len(cursor.view.holes()),
        holes=[_hole(each) for each in subscription.explain_holes(top, now_ms=now_ms)],
        blocked=[_block(each) for each in subscription.why_blocked(now_ms=now_ms)],
    )


def _hole(report: HoleReport) -> ExplainedHole:
    fields: dict[str, Any] = {name: getattr(report, name) for name in ExplainedHole.model_fields}
    return ExplainedHole(
        **fields
        | {
            "first": str(report.first),
            "last": str(report.last),
            "why": report.why.name,
            "consumers": list(report.consumers),
        }
    )


def _block(reason: BlockReason) -> ExplainedBlock:
    fields: dict[str, Any] = {name: getattr(reason, name) for name in ExplainedBlock.model_fields}
    return ExplainedBlock(**fields | {"rule": reason.rule.value})
