"""Reports the open topics of a broker in the shape of Pulsar's ``stats`` and ``internalStats``, from live objects.

Numbers that are not counted here, such as rates, are left out of ``stats``. In ``internalStats`` they have Pulsar's
empty value, as in the report about a store; a ledger whose size is not known has 0 bytes. ``redeliveryIfCrashed`` is no
field of Pulsar's, and its clients ignore it.

Source: ``TopicStats``, ``SubscriptionStats``, ``ConsumerStats`` and ``ManagedLedgerInternalStats`` of Apache Pulsar.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field

from ackstate.analysis.admin.internal_stats import (
    InternalCursorStats,
    LedgerInfo,
    PersistentTopicInternalStats,
    PulsarResponse,
)
from ackstate.cursor.formats import INTERNAL_PREFIX
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.errors import CursorClosedError
from ackstate.topic_name import persistence_name

if TYPE_CHECKING:
    from ackstate.analysis.admin.live_topics import LiveTopic
    from ackstate.dispatch.subscription import Subscription
    from ackstate.ledger_map import LedgerMap

_KEY_SHARED_MODE = "AUTO_SPLIT"


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


def live_stats(topic: LiveTopic) -> LiveTopicStats:
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


def live_internal_stats(topic: LiveTopic) -> LiveTopicInternalStats:
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
        key_shared_mode=_KEY_SHARED_MODE if kind is SubscriptionType.KEY_SHARED else None,
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
