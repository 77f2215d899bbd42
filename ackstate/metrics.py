"""Exports numbers of subscriptions, cursors and topics to Prometheus, read when it scrapes: an ack costs nothing.

Names and labels of Pulsar have the same meaning here; a number of Pulsar's that is not counted here is left out. A time
is exported as a timestamp, so the collectors need no clock: a counter, for ``rate``, takes the place of
``pulsar_subscription_msg_rate_redeliver``, and a timestamp, to be subtracted from ``time()``, that of
``pulsar_storage_backlog_age_seconds``. Needs the extra ``ackstate[metrics]``.

Source: ``TopicStats`` of ``org.apache.pulsar.broker.stats.prometheus``.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ackstate.dispatch.subscription import Subscription
from ackstate.errors import CursorClosedError
from ackstate.topic.publish import OVERRIDDEN, REJECTED
from ackstate.topic_name import parse_topic, persistence_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.core import Metric

    from ackstate.cursor import CursorStats, ManagedCursor
    from ackstate.dispatch import DispatchStats
    from ackstate.position import Position
    from ackstate.topic import BacklogReport, CounterSample, PublishCounters, Topics

_CURSOR = ("namespace", "ledger_name", "cursor_name")  # as in Pulsar
_TOPIC = ("namespace", "topic")


class _TopicLabels(NamedTuple):
    """Labels of one subscription, as in Pulsar, and those of its cursor to join by."""

    namespace: str
    topic: str
    subscription: str
    ledger_name: str
    cursor_name: str


class _Reading(NamedTuple):
    """The numbers of a cursor and of its subscription, if any, and when its oldest unacked message was published."""

    cursor: CursorStats
    subscription: DispatchStats | None = None
    oldest_published_ms: int | None = None


# Each number: its name, the field of the statistics or a function of them, and its meaning.
_CURSOR_NUMBERS = (
    # Pulsar exports its own as gauges, the growing ones too.
    ("pulsar_ml_cursor_nonContiguousDeletedMessagesRange", "range_count",
            "Individually deleted ranges in memory."),
    ("pulsar_ml_cursor_persistLedgerSucceed", "ledger_write_count",
            "Records written to the cursor ledger since the cursor was opened."),
    ("pulsar_ml_cursor_persistLedgerErrors", "ledger_error_count",
            "Times that the cursor ledger could not be written, since the cursor was opened."),
    ("pulsar_ml_cursor_persistZookeeperSucceed", "metadata_write_count",
            "Records written to the metadata store instead, since the cursor was opened."),
    ("pulsar_ml_cursor_persistZookeeperErrors", "metadata_error_count",
            "Times that the metadata store could not be written, since the cursor was opened."),
    ("pulsar_ml_cursor_writeLedgerLogicalSize", "ledger_bytes_written",
            "Bytes written to the cursor ledger since the cursor was opened, replicas not counted."),
    ("ackstate_cursor_batches_unwritten", "batches_unwritten",
            "Partly acked batches with acks that no durable record holds; "
            "not among the messages redelivered if crashed."),
    ("ackstate_cursor_unpersisted_record_bytes", "unpersisted_record_bytes",
            "Bytes that the ranges acked in memory and not durable would take as Pulsar writes them."),
    ("ackstate_cursor_ranges", "range_count", "Individually deleted ranges in memory."),
    ("ackstate_cursor_record_bytes", "record_bytes",
            "Bytes that the individually deleted ranges would take as Pulsar writes them."),
    ("ackstate_cursor_truncations_total", "truncation_count",
            "Times that the range limit began to exclude acked messages from persists, "
            "since the cursor was opened."),
    ("ackstate_cursor_batches_cut", "batches_cut",
            "Partly acked batches that the limit on them left out of the last record."),
    ("ackstate_cursor_young_age_ms", "young_age_ms",
            "Milliseconds that a message must have been sent for its ack to be persisted; 0 without generations."),
    ("ackstate_cursor_promotions_total", "promotion_count",
            "Times that young acks were persisted early because acks that are not durable had reached their limit."),
    ("ackstate_cursor_promoted_messages_total", "promoted_message_count", "Acked messages that were."),
    ("ackstate_cursor_journal_bytes", "journal_bytes", "Bytes that a recovery would read."),
    ("ackstate_cursor_snapshots_total", "snapshot_count",
            "Records written to a new cursor ledger, for compaction or roll-over among others, since it was opened."),
    ("ackstate_cursor_persists_total", "persist_count", "Records written since the cursor was opened."),
    ("ackstate_cursor_persisted_bytes_total", "bytes_persisted",
            "Bytes of the records written since the cursor was opened."),
)  # fmt: skip
_SUBSCRIPTION_NUMBERS: tuple[tuple[str, Callable[[DispatchStats], int], str], ...] = (
    ("pulsar_subscription_back_log_no_delayed", lambda stats: stats.backlog_not_delayed,
            "Entries of the log that are neither acked nor known to be delayed."),
    ("pulsar_subscription_delayed", lambda stats: stats.delayed_entries,
            "Entries that the subscription has read and that are not due yet, or not queued yet."),
    ("pulsar_subscription_in_replay", lambda stats: stats.replay_entries,
            "Entries that were read and wait to be sent, most of them again."),
    ("pulsar_subscription_unacked_messages", lambda stats: stats.unacked_messages,
            "Messages in flight: sent, and neither acked nor given back."),
    ("pulsar_subscription_blocked_on_unacked_messages", lambda stats: stats.is_blocked_on_unacked_messages,
            "Is 1 if the limit on unacked messages of the subscription or of the broker keeps new messages back."),
    ("pulsar_subscription_consumers_count", lambda stats: stats.consumer_count, "Open consumers."),
    ("pulsar_out_messages_total", lambda stats: stats.sent_messages,
            "Messages sent since the subscription was opened, each time that they were."),
    ("ackstate_subscription_redelivered_messages_total", lambda stats: stats.redelivered_messages,
            "Messages sent again since the subscription was opened, each time that they were."),
    ("ackstate_subscription_dead_lettered_messages_total", lambda stats: stats.dead_lettered_messages,
            "Messages handed over as dead letters since the subscription was opened."),
)  # fmt: skip
_BACKLOG_NUMBERS: tuple[tuple[str, Callable[[BacklogReport], int], str], ...] = (
    ("pulsar_storage_size", lambda report: report.log_byte_count, "Bytes of the messages that the topic stores."),
    ("pulsar_storage_backlog_size", lambda report: report.byte_count,
            "Bytes of the messages from the first one on that the slowest subscription has not acked durably."),
    ("pulsar_storage_backlog_quota_limit", lambda report: -1 if report.bytes_max is None else report.bytes_max,
            "The limit of the backlog in bytes; -1 for no limit."),
    ("ackstate_topic_backlog_exceeded", lambda report: int(report.is_exceeded),
            "1 if the backlog is above its limit, else 0."),
    ("ackstate_topic_unreadable_subscriptions", lambda report: len(report.unreadable),
            "Stored subscriptions that cannot be read; while there is one, the topic keeps every message."),
)  # fmt: skip


def _family(name: str, meaning: str, labels: Sequence[str] = ()) -> GaugeMetricFamily | CounterMetricFamily:
    """Return a metric without a value; a name that ends in _total is a counter's."""
    # Pulsar exports its own as gauges, the growing ones too, but for the messages sent.
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, meaning, labels=labels)


@final
class CursorCollector(Collector):
    """Exports the numbers of the subscriptions and cursors that were added; register it with a `CollectorRegistry`.

    Safe for any number of threads. A subscription or a cursor is held weakly, and is exported until it is closed. A
    cursor whose numbers cannot be read is counted in ``ackstate_cursors_unreadable``; the others are exported.

    A scrape may overlap with any other call, publishes and trims included. It costs O(subscriptions and cursors), takes
    the lock of each once, and reads the oldest unacked message if that is another one than at the scrape before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By name: Prometheus refuses a whole scrape in which two cursors have the same labels.
        self._added: dict[_TopicLabels, weakref.ref[ManagedCursor | Subscription]] = {}
        self._topics: weakref.WeakSet[Topics] = weakref.WeakSet()
        # The oldest unacked message at the last scrape, and its publish time.
        self._oldest: weakref.WeakKeyDictionary[Subscription, tuple[Position, int]] = weakref.WeakKeyDictionary()

    def add(self, exported: ManagedCursor | Subscription, *, topic: str, subscription: str) -> None:
        """Export an open cursor, or a subscription with its cursor, in place of that added with the same names before.

        A topic that is not named like ``persistent://public/default/orders`` has no namespace, and its ledger name is
        the text itself.
        """
        with self._lock:
            self._added[_labels(topic, subscription)] = weakref.ref(exported)

    def add_topics(self, topics: Topics) -> None:
        """Export every subscription that is open in `topics`, also those that are opened later.

        One that is added by itself under the same names takes precedence. No-op for topics that were added before.
        They are held weakly. For `AsyncTopics`, pass its attribute `topics`.
        """
        with self._lock:
            self._topics.add(topics)

    def collect(self) -> Iterable[Metric]:
        """Read each subscription or cursor once, so that its numbers are of one instant."""
        return _families(*self._read())

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` returns, without reading a cursor."""
        return _families([], unreadable=0)

    def _read(self) -> tuple[list[tuple[_TopicLabels, _Reading]], int]:
        """Return the numbers of those that are open, forget the others, and count those that cannot be read."""
        with self._lock:
            added, topics = self._added.copy(), list(self._topics)
        opened = {
            _labels(topic, name): each for of_store in topics for topic, name, each in of_store.open_subscriptions
        }
        exported = opened | {labels: each() for labels, each in added.items()}
        read, closed, unreadable = [], [], 0
        for labels, each in exported.items():
            try:
                read.append((labels, self._reading(each)))
            except CursorClosedError:
                closed.append(labels)
            except Exception:  # One damaged cursor must not hide the others.
                unreadable += 1
        with self._lock:
            for labels in closed:
                if labels in added and self._added.get(labels) is added[labels]:
                    del self._added[labels]
        return read, unreadable

    def _reading(self, exported: ManagedCursor | Subscription | None) -> _Reading:
        """Return the present numbers; `CursorClosedError` if the cursor is closed or gone."""
        if exported is None:
            raise CursorClosedError("the cursor is gone")
        if not isinstance(exported, Subscription):
            exported.check_open()
            return _Reading(exported.stats())
        exported.cursor.check_open()
        stats = exported.stats()
        return _Reading(stats.cursor, stats, self._published_ms(exported, stats))

    def _published_ms(self, subscription: Subscription, stats: DispatchStats) -> int | None:
        """Return when the oldest unacked message was published; None if there is none, or that is unknown."""
        position, known = stats.oldest_unacked, self._oldest.get(subscription)
        if position is None:
            return None
        if known is None or known[0] != position:
            try:
                (message,) = subscription.log.read([position])
            except Exception:  # It is lost or damaged, or the store fails; the other numbers are still true.
                return None
            self._oldest[subscription] = known = position, message.publish_time_ms
        return known[1] or None  # 0 is the publish time of a message whose producer gave none.


def _labels(topic: str, subscription: str) -> _TopicLabels:
    """Name a cursor as Pulsar does."""
    parts = parse_topic(topic)
    namespace = parts.namespace if parts else ""
    ledger_name = f"{namespace}/{parts.domain}/{persistence_name(parts.local)}" if parts else topic
    return _TopicLabels(namespace, topic, subscription, ledger_name, persistence_name(subscription))


def _families(read: Sequence[tuple[_TopicLabels, _Reading]], unreadable: int) -> list[Metric]:
    of_cursor = [(field, _family(name, meaning, _CURSOR)) for name, field, meaning in _CURSOR_NUMBERS]
    backlog = _family("pulsar_subscription_back_log", "Entries of the log that are not acked.", _TopicLabels._fields)
    at_risk = _family(
        "ackstate_cursor_redelivery_if_crashed",
        "Acked messages that a recovery would not know, by cause: unwritten until the next persist, held back because "
        "young, or cut off by the range limit.",
        (*_CURSOR, "cause"),
    )
    failed = _family("ackstate_cursors_unreadable", "Open cursors whose numbers this scrape could not read.")
    failed.add_metric((), unreadable)
    of_subscription = [
        (value, _family(name, meaning, _TopicLabels._fields)) for name, value, meaning in _SUBSCRIPTION_NUMBERS
    ]
    oldest = _family(
        "ackstate_subscription_oldest_unacked_timestamp_seconds",
        "When the oldest unacked message was published, in Unix time; absent if there is none, or if it is unknown.",
        _TopicLabels._fields,
    )
    by_rule = (*_TopicLabels._fields, "rule")
    blocked = _family(
        "ackstate_subscription_blocked",
        "Is 1 while a limit keeps new messages back, from all consumers or from at least one; the rule is the limit's "
        "setting in Pulsar.",
        by_rule,
    )
    since = _family(
        "ackstate_subscription_blocked_since_timestamp_seconds",
        "When the rule closed, in Unix time; absent while it is open, and if it is closed since the subscription was "
        "opened.",
        by_rule,
    )
    closings = _family(
        "ackstate_subscription_blocks_total",
        "How often the rule has closed since the subscription was opened, for any consumer.",
        by_rule,
    )
    for topic_labels, (cursor, stats, oldest_ms) in read:
        labels = (topic_labels.namespace, topic_labels.ledger_name, topic_labels.cursor_name)
        for field, family in of_cursor:
            family.add_metric(labels, getattr(cursor, field))
        backlog.add_metric(topic_labels, cursor.backlog)
        for cause in ("unwritten", "young", "cut"):
            at_risk.add_metric((*labels, cause), getattr(cursor, f"redelivery_{cause}"))
        if stats is None:
            continue
        for value, family in of_subscription:
            family.add_metric(topic_labels, value(stats))
        if oldest_ms is not None:
            oldest.add_metric(topic_labels, oldest_ms / 1_000)
        for rule in stats.rules:
            blocked.add_metric((*topic_labels, rule.rule.value), rule.is_closed)
            closings.add_metric((*topic_labels, rule.rule.value), rule.closed_count)
            if rule.since_ms:
                since.add_metric((*topic_labels, rule.rule.value), rule.since_ms / 1_000)
    cursors, subscriptions = ([family for _, family in each] for each in (of_cursor, of_subscription))
    return [*cursors, backlog, at_risk, failed, *subscriptions, oldest, blocked, since, closings]


@final
class PublishCollector(Collector):
    """Exports `PublishCounters`, the effects of delivery-delay policies; register it with a `CollectorRegistry`.

    Names and labels are those that the OpenTelemetry exporter for Prometheus derives from Pulsar's.
    """

    _LABELS = ("pulsar_cluster", "pulsar_namespace", "pulsar_topic")
    _MEANINGS = (
        (REJECTED, "Messages rejected because their delivery delay was above the maximum."),
        (OVERRIDDEN, "Messages stored with the fixed delay in place of the delivery time that their client had set."),
    )

    def __init__(self, counters: PublishCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        """Read every counter."""
        return self._families(self._counters.samples())

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` returns."""
        return self._families([])

    def _families(self, samples: Iterable[CounterSample]) -> Iterable[Metric]:
        # A unit in braces is a remark to OpenTelemetry, and adds nothing to the name.
        families = {
            name: _family(f"{name.replace('.', '_')}_total", meaning, self._LABELS) for name, meaning in self._MEANINGS
        }
        for name, attributes, value in samples:
            families[name].add_metric([attributes[label.replace("_", ".")] for label in self._LABELS], value)
        return families.values()


@final
class BacklogCollector(Collector):
    """Exports the backlog reports of the topics that were added; to be registered with a `CollectorRegistry`.

    ``ackstate_topic_backlog_entries`` has the subscription that holds the messages as a label, and no value for a topic
    without a backlog. ``ackstate_topic_retained_ledger`` has none if the retention keeps no ledger.

    Safe for any number of threads. A topic whose report cannot be read is left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, Callable[[], BacklogReport]] = {}

    def add(self, topic: str, report: Callable[[], BacklogReport]) -> None:
        """Export a topic from now on, in place of one that was added with the same name before.

        The report is read in the thread that scrapes: as the log of a topic is not safe for several threads, return the
        last report that the thread of the topic made.
        """
        with self._lock:
            self._reports[topic] = report

    def remove(self, topic: str) -> None:
        """Export a topic no longer; no-op if it was not added."""
        with self._lock:
            self._reports.pop(topic, None)

    def collect(self) -> Iterable[Metric]:
        """Read each report once."""
        with self._lock:
            reports = list(self._reports.items())
        return self._families(reports)

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` returns."""
        return self._families([])

    def _families(self, reports: Iterable[tuple[str, Callable[[], BacklogReport]]]) -> Iterable[Metric]:
        numbers = [(value, _family(name, meaning, _TOPIC)) for name, value, meaning in _BACKLOG_NUMBERS]
        held = _family(
            "ackstate_topic_backlog_entries",
            "Entries from the first one on that this subscription, the slowest of the topic, has not acked durably.",
            (*_TOPIC, "subscription"),
        )
        retained = _family(
            "ackstate_topic_retained_ledger",
            "The first ledger that the retention keeps although no subscription needs it, nor one before it.",
            _TOPIC,
        )
        for topic, read in reports:
            try:
                report = read()
            except Exception:  # noqa: S112 - one damaged topic must not hide the others.
                continue
            parts = parse_topic(topic)
            labels = (parts.namespace if parts else "", topic)
            for value, family in numbers:
                family.add_metric(labels, value(report))
            if report.held_by is not None:
                held.add_metric((*labels, report.held_by), report.entry_count)
            if report.retained_ledger_id is not None:
                retained.add_metric(labels, report.retained_ledger_id)
        return [*(family for _, family in numbers), held, retained]
