"""The state of a topic in the shape of Pulsar's ``PersistentTopicInternalStats``, and the explanation of its ack holes.

A store has no history and no messages in flight. So a topic is reported as by a broker that has just loaded it and has
served no request yet, in the state ``Closed``. Fields that a store cannot fill have Pulsar's empty value: 0, an empty
text or list, the time 1970-01-01T00:00:00Z. Sizes in bytes are among them, because computing them would require reading
every message.

Source: ``ManagedLedgerInternalStats`` and ``ManagedCursorImpl`` of Apache Pulsar.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from ackstate.inspect import find_cursors, inspect_cursor
from ackstate.topic.log import MessageLog
from ackstate.topic_name import persistence_name

if TYPE_CHECKING:
    from ackstate.dispatch.explain import BlockReason, HoleReport
    from ackstate.dispatch.subscription import Subscription
    from ackstate.inspect import CursorInspection
    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.base import Store

_NEVER = "1970-01-01T00:00:00Z"
_NO_POSITION = "-1:-1"


class PulsarResponse(BaseModel):
    """A model with Pulsar's names in JSON."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True)


class LedgerInfo(PulsarResponse):
    """One ledger of the topic's messages."""

    ledger_id: int = -1
    entries: int = -1
    size: int = -1
    offloaded: bool = False
    under_replicated: bool = False


class InternalCursorStats(PulsarResponse):
    """One cursor. If it cannot be opened, only the name is known, and `state` is ``Uninitialized``."""

    mark_delete_position: str = _NO_POSITION
    read_position: str = _NO_POSITION
    waiting_read_op: bool = False
    pending_read_ops: int = 0
    messages_consumed_counter: int = 0
    cursor_ledger: int = -1
    cursor_ledger_last_entry: int = -1
    individually_deleted_messages: str = "[]"
    last_ledger_switch_timestamp: str = _NEVER
    state: str = "Uninitialized"
    active: bool = False
    number_of_entries_since_first_not_acked_message: int = 0
    total_non_contiguous_deleted_messages_range: int = 0
    subscription_have_pending_read: bool = False
    subscription_have_pending_replay_read: bool = False
    properties: dict[str, int] = {}


class PersistentTopicInternalStats(PulsarResponse):
    """One topic."""

    entries_added_counter: int = 0
    number_of_entries: int = 0
    total_size: int = 0
    current_ledger_entries: int = 0
    current_ledger_size: int = 0
    last_ledger_created_timestamp: str = _NEVER
    last_ledger_creation_failure_timestamp: str | None = None
    waiting_cursors_count: int = 0
    pending_add_entries_count: int = 0
    last_confirmed_entry: str = _NO_POSITION
    state: str = "Closed"
    ledgers: list[LedgerInfo] = []
    cursors: dict[str, InternalCursorStats] = {}
    schema_ledgers: list[LedgerInfo] = []
    compacted_ledger: LedgerInfo = LedgerInfo()


def internal_stats(store: Store, topic: str) -> PersistentTopicInternalStats | None:
    """Return a store's state of a topic, None if it has neither messages nor cursors of it.

    Complexity: O(cursors and ledgers of the store, and the size of the journals of the topic's cursors).
    """
    found = MessageLog.find(store, topic=topic)
    log = None if found is None else found.ledgers
    counts = {} if log is None else log.counts()
    names = [name for name in find_cursors(store) if name.topic == topic]
    if not counts and not names:
        return None
    # Pulsar's keys are the URL-encoded names, in order.
    cursors = {persistence_name(name.subscription): cursor_stats(inspect_cursor(store, name), log) for name in names}
    return PersistentTopicInternalStats(
        number_of_entries=sum(counts.values()),
        current_ledger_entries=counts[log.current_ledger_id] if log else 0,
        last_confirmed_entry=str(log.last_confirmed) if log else _NO_POSITION,
        ledgers=[LedgerInfo(ledger_id=ledger_id, entries=entries, size=0) for ledger_id, entries in counts.items()],
        cursors=dict(sorted(cursors.items())),
    )


def cursor_stats(found: CursorInspection, log: LedgerMap | None) -> InternalCursorStats:
    """Return the stats of a cursor; without the topic's log they omit the number of remaining entries."""
    record, content = found.record, found.content
    if record is None or content is None or found.problems:
        return InternalCursorStats()
    mark_delete, acked = content.mark_delete, content.deleted.copy()
    read = mark_delete._replace(entry_id=mark_delete.entry_id + 1) if log is None else log.next_valid(mark_delete)
    backlog = 0
    if log:
        acked.discard_missing(log)
        backlog = log.count_between(mark_delete, log.last_confirmed) - len(acked)
    return InternalCursorStats(
        mark_delete_position=str(mark_delete),
        read_position=str(read),
        messages_consumed_counter=-backlog,  # as in Pulsar after a load: the counter of added entries is 0
        cursor_ledger=-1 if record.cursor_ledger_id is None else record.cursor_ledger_id,
        cursor_ledger_last_entry=len(found.records) - 1,
        individually_deleted_messages=str(content.deleted),
        state="Closed",
        number_of_entries_since_first_not_acked_message=log.count_between(mark_delete, read) if log else 0,
        total_non_contiguous_deleted_messages_range=content.deleted.range_count,
        properties=dict(content.properties),
    )


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
    next_delivery_ms: int | None = None
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
    texts = {"first": str(report.first), "last": str(report.last), "why": report.why.name}
    return ExplainedHole(**asdict(report) | texts | {"consumers": list(report.consumers)})


def _block(reason: BlockReason) -> ExplainedBlock:
    fields: dict[str, Any] = {name: getattr(reason, name) for name in ExplainedBlock.model_fields}
    return ExplainedBlock(**fields | {"rule": reason.rule.value})
