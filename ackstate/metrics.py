"""Exports numbers of subscriptions and cursors to Prometheus, read when it scrapes: an ack costs nothing.

Names and labels of Pulsar have the same meaning here; a number of Pulsar's that is not counted here is left out. A time
is exported as a timestamp, so the collector needs no clock. Needs the extra ``ackstate[metrics]``.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ackstate.dispatch.subscription_metrics import SubscriptionReading, subscription_families
from ackstate.errors import CursorClosedError
from ackstate.topic_name import parse_topic, persistence_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import CursorStats
    from ackstate.dispatch.explain import DispatchStats
    from ackstate.dispatch.subscription import Subscription
    from ackstate.position import Position
    from ackstate.topic.topics import Topics


class _Labels(NamedTuple):
    """Labels of one cursor, as in Pulsar."""

    namespace: str
    ledger_name: str
    cursor_name: str


class _TopicLabels(NamedTuple):
    """Labels of one subscription, as in Pulsar, and those of its cursor to join by."""

    namespace: str
    topic: str
    subscription: str
    ledger_name: str
    cursor_name: str


@dataclass(frozen=True, slots=True)
class _CursorNumber:
    """One exported number of each cursor: a field of `CursorStats`."""

    name: str
    field: str
    meaning: str

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return the metric without a value; a name that ends in _total is a counter's."""
        if self.name.endswith("_total"):
            return CounterMetricFamily(self.name, self.meaning, labels=_Labels._fields)
        return GaugeMetricFamily(self.name, self.meaning, labels=_Labels._fields)


_NUMBERS = (
    # Pulsar exports its own as gauges, the growing ones too.
    _CursorNumber("pulsar_ml_cursor_nonContiguousDeletedMessagesRange", "range_count",
            "Individually deleted ranges in memory."),
    _CursorNumber("pulsar_ml_cursor_persistLedgerSucceed", "ledger_write_count",
            "Records written to the cursor ledger since the cursor was opened."),
    _CursorNumber("pulsar_ml_cursor_persistLedgerErrors", "ledger_error_count",
            "Times that the cursor ledger could not be written, since the cursor was opened."),
    _CursorNumber("pulsar_ml_cursor_persistZookeeperSucceed", "metadata_write_count",
            "Records written to the metadata store instead, since the cursor was opened."),
    _CursorNumber("pulsar_ml_cursor_persistZookeeperErrors", "metadata_error_count",
            "Times that the metadata store could not be written, since the cursor was opened."),
    _CursorNumber("pulsar_ml_cursor_writeLedgerLogicalSize", "ledger_bytes_written",
            "Bytes written to the cursor ledger since the cursor was opened, replicas not counted."),
    _CursorNumber("ackstate_cursor_batches_unwritten", "batches_unwritten",
            "Partly acked batches with acks that no durable record holds; "
            "not among the messages redelivered if crashed."),
    _CursorNumber("ackstate_cursor_unpersisted_record_bytes", "unpersisted_record_bytes",
            "Bytes that the ranges acked in memory and not durable would take as Pulsar writes them."),
    _CursorNumber("ackstate_cursor_ranges", "range_count", "Individually deleted ranges in memory."),
    _CursorNumber("ackstate_cursor_record_bytes", "record_bytes",
            "Bytes that the individually deleted ranges would take as Pulsar writes them."),
    _CursorNumber("ackstate_cursor_truncations_total", "truncation_count",
            "Times that the range limit began to exclude acked messages from persists, "
            "since the cursor was opened."),
    _CursorNumber("ackstate_cursor_batches_cut", "batches_cut",
            "Partly acked batches that the limit on them left out of the last record."),
    _CursorNumber("ackstate_cursor_young_age_ms", "young_age_ms",
            "Milliseconds that a message must have been sent for its ack to be persisted; 0 without generations."),
    _CursorNumber("ackstate_cursor_promotions_total", "promotion_count",
            "Times that young acks were persisted early because acks that are not durable had reached their limit."),
    _CursorNumber("ackstate_cursor_promoted_messages_total", "promoted_message_count", "Acked messages that were."),
    _CursorNumber("ackstate_cursor_journal_bytes", "journal_bytes", "Bytes that a recovery would read."),
    _CursorNumber("ackstate_cursor_snapshots_total", "snapshot_count",
            "Records written to a new cursor ledger, for compaction or roll-over among others, since it was opened."),
    _CursorNumber("ackstate_cursor_persists_total", "persist_count", "Records written since the cursor was opened."),
    _CursorNumber("ackstate_cursor_persisted_bytes_total", "bytes_persisted",
            "Bytes of the records written since the cursor was opened."),
)  # fmt: skip


@final
class CursorCollector(Collector):
    """Exports the numbers of the subscriptions and cursors that were added; register it with a `CollectorRegistry`.

    Safe for any number of threads. A subscription or a cursor is held weakly, and is exported until it is closed. A
    cursor whose numbers cannot be read is counted in ``ackstate_cursors_unreadable``; the others are exported.

    A scrape may overlap with any other call, publishes and trims included.

    Complexity: nothing for an ack; O(subscriptions and cursors) for a scrape, which takes the lock of each once. It
    reads the oldest unacked message of a subscription if that is another one than at the scrape before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By name: Prometheus refuses a whole scrape in which two cursors have the same labels.
        self._exported: dict[_TopicLabels, _Exported] = {}
        self._topics: list[weakref.ref[Topics]] = []
        self._of_topics: dict[_TopicLabels, _Exported] = {}  # those of the last scrape

    def add(self, cursor: ManagedCursor, *, topic: str, subscription: str) -> None:
        """Export a cursor from now on, in place of the one that was added with the same names before.

        Args:
            cursor: Any open cursor.
            topic: As Pulsar names it, like ``persistent://public/default/orders``. For any other text, the namespace is
                empty and the ledger name is the text itself.
            subscription: Any text.
        """
        self._add(_Exported(cursor), topic, subscription)

    def add_subscription(self, subscription: Subscription, *, topic: str, name: str) -> None:
        """Export a subscription and its cursor from now on, in place of those that were added with the same names.

        Args:
            subscription: Any open subscription.
            topic: As in `add`.
            name: The name of the subscription, any text.
        """
        self._add(_Exported(subscription.cursor, subscription), topic, name)

    def add_topics(self, topics: Topics) -> None:
        """Export every subscription that is open in `topics`, also those that are opened later.

        One that is added by itself under the same names takes precedence. No-op for topics that were added before.

        Args:
            topics: Held weakly. For `AsyncTopics`, its attribute `topics`. Topics are named as in `add`.
        """
        with self._lock:
            if all(each() is not topics for each in self._topics):
                self._topics.append(weakref.ref(topics))

    def collect(self) -> Iterable[Metric]:
        """Read each subscription or cursor once, so that its numbers are of one instant."""
        return _families(*self._read())

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` returns, without reading a cursor."""
        return _families([], unreadable=0)

    def _add(self, exported: _Exported, topic: str, subscription: str) -> None:
        with self._lock:
            self._exported[_labels(topic, subscription)] = exported

    def _read(self) -> tuple[list[tuple[_TopicLabels, _Reading]], int]:
        """Return the numbers of those that are open, forget the others, and count those that cannot be read."""
        with self._lock:
            self._follow_topics()
            exported = self._of_topics | self._exported
        read, closed, unreadable = [], [], 0
        for labels, each in exported.items():
            try:
                read.append((labels, each.read()))
            except CursorClosedError:
                closed.append(labels)
            except Exception:  # One damaged cursor must not hide the others.
                unreadable += 1
        with self._lock:
            for labels in closed:
                if self._exported.get(labels) is exported[labels]:
                    del self._exported[labels]
        return read, unreadable

    def _follow_topics(self) -> None:
        """Update the subscriptions of topics; the caller holds the lock."""
        self._topics = [each for each in self._topics if each() is not None]
        known, self._of_topics = self._of_topics, {}
        for topics in [each() for each in self._topics]:
            for topic, name, subscription in () if topics is None else topics.open_subscriptions:
                labels = _labels(topic, name)
                exported = known.get(labels)
                if exported is None or not exported.is_of(subscription):
                    exported = _Exported(subscription.cursor, subscription)
                self._of_topics[labels] = exported


class _Reading(NamedTuple):
    """The numbers of a cursor and, if it was added with its subscription, those of the subscription."""

    cursor: CursorStats
    subscription: SubscriptionReading | None


@final
class _Exported:
    """A cursor and perhaps its subscription, held weakly."""

    def __init__(self, cursor: ManagedCursor, subscription: Subscription | None = None) -> None:
        self._cursor = weakref.ref(cursor)
        self._subscription = None if subscription is None else weakref.ref(subscription)
        self._oldest: tuple[Position, int] | None = None  # a position, and its publish time

    def is_of(self, subscription: Subscription) -> bool:
        """Return whether this is the subscription."""
        return self._subscription is not None and self._subscription() is subscription

    def read(self) -> _Reading:
        """Return the present numbers.

        Raises:
            CursorClosedError: The cursor is closed or gone.
        """
        cursor = self._cursor()
        if cursor is None:
            raise CursorClosedError("the cursor is gone")
        cursor.check_open()
        if self._subscription is None:
            return _Reading(cursor.stats(), None)
        subscription = self._subscription()
        if subscription is None:
            raise CursorClosedError("the subscription is gone")
        stats = subscription.stats()
        return _Reading(stats.cursor, SubscriptionReading(stats, self._published_ms(subscription, stats)))

    def _published_ms(self, subscription: Subscription, stats: DispatchStats) -> int | None:
        """Return when the oldest unacked message was published; None if there is none, or that is unknown."""
        position, known = stats.oldest_unacked, self._oldest
        if position is None:
            return None
        if known is None or known[0] != position:
            try:
                (message,) = subscription.log.read([position])
            except Exception:  # It is lost or damaged, or the store fails; the other numbers are still true.
                return None
            self._oldest = known = position, message.publish_time_ms
        return known[1] or None  # 0 is the publish time of a message whose producer gave none.


def _labels(topic: str, subscription: str) -> _TopicLabels:
    """Name a cursor as Pulsar does."""
    parts = parse_topic(topic)
    namespace = parts.namespace if parts else ""
    ledger_name = f"{namespace}/{parts.domain}/{persistence_name(parts.local)}" if parts else topic
    return _TopicLabels(namespace, topic, subscription, ledger_name, persistence_name(subscription))


def _families(read: Sequence[tuple[_TopicLabels, _Reading]], unreadable: int) -> list[Metric]:
    numbers = [(number.field, number.family()) for number in _NUMBERS]
    backlog = GaugeMetricFamily(
        "pulsar_subscription_back_log", "Entries of the log that are not acked.", labels=_TopicLabels._fields
    )
    at_risk = GaugeMetricFamily(
        "ackstate_cursor_redelivery_if_crashed",
        "Acked messages that a recovery would not know, by cause: unwritten until the next persist, held back because "
        "young, or cut off by the range limit.",
        labels=(*_Labels._fields, "cause"),
    )
    for topic_labels, (stats, _) in read:
        labels = _Labels(topic_labels.namespace, topic_labels.ledger_name, topic_labels.cursor_name)
        for field, family in numbers:
            family.add_metric(labels, getattr(stats, field))
        backlog.add_metric(topic_labels, stats.backlog)
        for cause in ("unwritten", "young", "cut"):
            at_risk.add_metric((*labels, cause), getattr(stats, f"redelivery_{cause}"))
    failed = GaugeMetricFamily("ackstate_cursors_unreadable", "Open cursors whose numbers this scrape could not read.")
    failed.add_metric((), unreadable)
    subscriptions = [(labels, subscription) for labels, (_, subscription) in read if subscription is not None]
    return [
        *(family for _, family in numbers), backlog, at_risk, failed,
        *subscription_families(subscriptions, labels=_TopicLabels._fields),
    ]  # fmt: skip
