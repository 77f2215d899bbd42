"""Polls one topic, and records the events of its cursors and of its ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, final
from urllib.parse import unquote_plus

from ackstate.analysis.pulsar.record.cursor_follower import CursorFollower
from ackstate.analysis.pulsar.record.poll import CursorPoll, TopicPoll, cursor_poll
from ackstate.analysis.pulsar.snapshot.broker_settings import BrokerSettings
from ackstate.analysis.trace.events import EventKind, PolledEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.pulsar.record.trace_directory import Recorded
    from ackstate.analysis.pulsar.snapshot.internal_stats import TopicInternals, TopicStats

STATS_MS = 60_000
"""`stats` are requested this often, and whenever a cursor's ledger has changed."""


class TopicSource(Protocol):
    """Answers about one topic."""

    def settings(self) -> BrokerSettings:
        """Return the settings in effect."""

    def internals(self) -> TopicInternals:
        """Return the cursors in memory."""

    def stats(self) -> TopicStats:
        """Return the statistics."""


Record: TypeAlias = "Callable[[str, Sequence[PolledEvent]], None]"
"""Called with a subscription, or "" for the topic itself, and its events, possibly none."""


@final
class TopicFollower:
    """Follows one topic; one thread at a time.

    Args:
        topic: Its name.
        recorded: The end of an earlier recording: for each subscription, and for "" the topic itself.
    """

    def __init__(self, topic: str, recorded: Mapping[str, Recorded]) -> None:
        self._topic = topic
        self._settings: BrokerSettings | None = None
        self._recorded = dict(recorded)
        self._cursors: dict[str, CursorFollower] = {}
        self._polls: dict[str, CursorPoll] = {}
        self._stats: TopicStats | None = None
        self._stats_ms = -STATS_MS
        self._has_failed = False
        published = self._recorded.pop("", None)
        self._published = {} if published is None else {
            ledger_id: bitmap.max() + 1 for ledger_id, bitmap in published.acked.items() if bitmap
        }  # fmt: skip
        self._published_ms = -1 if published is None else published.last_ms

    @property
    def cursor_count(self) -> int:
        """The number of cursors at the last poll."""
        return len(self._polls)

    @property
    def broker(self) -> str:
        """The broker that had the topic when `stats` were last read; empty if unknown."""
        return "" if self._stats is None else self._stats.owner_broker or ""

    def poll(self, source: TopicSource, clock: Callable[[], int], record: Record) -> None:
        """Poll once, and record the events since the last poll.

        Args:
            source: Answers.
            clock: Returns the time in ms since 1970; never falls.
            record: Receives the events.

        Raises:
            AdminError: There was no answer; the next poll continues from the last one.
            SnapshotError: An answer is malformed.
            OSError: The events cannot be written.
        """
        is_after_failure, self._has_failed = self._has_failed, True
        if self._settings is None:
            self._settings = source.settings()
        asked_ms = clock()
        internals = source.internals()
        answered_ms = clock()
        is_fresh = self._needs_stats(internals, answered_ms)
        if is_fresh:
            self._stats, self._stats_ms = source.stats(), answered_ms
        topic = TopicPoll(asked_ms, answered_ms, internals.entry_counts(), _load_of(self._stats), is_after_failure)
        polls = dict(self._cursor_polls(internals, topic, is_fresh=is_fresh))
        begin_ms = self._published_ms
        record("", list(self._publishes(polls, topic)))
        for name, poll in polls.items():
            record(name, self._follower(name, begin_ms).follow(poll))
        self._end((self._cursors.keys() | self._recorded.keys()) - polls.keys(), answered_ms, record)
        self._polls, self._has_failed = polls, False

    def ended(self, now_ms: int, record: Record) -> None:
        """Record that the topic was deleted."""
        self._end(self._cursors.keys() | self._recorded.keys(), now_ms, record)
        self._polls = {}

    def _end(self, names: Iterable[str], now_ms: int, record: Record) -> None:
        """Record that cursors were deleted, here or since an earlier recording."""
        for name in sorted(names):
            record(name, self._follower(name, -1).ended(now_ms))
            del self._cursors[name]

    def _needs_stats(self, internals: TopicInternals, now_ms: int) -> bool:
        if self._stats is None or now_ms - self._stats_ms >= STATS_MS:
            return True
        ledgers = {unquote_plus(name): each.cursor_ledger for name, each in internals.cursors.items()}
        before = {name: each.cursor_ledger for name, each in self._polls.items()}
        return any(before.get(name) != ledger_id for name, ledger_id in ledgers.items() if self._is_durable(name))

    def _is_durable(self, name: str) -> bool:
        stats = self._stats.subscriptions.get(name) if self._stats else None
        return stats is None or stats.is_durable is not False

    def _cursor_polls(
        self, internals: TopicInternals, topic: TopicPoll, *, is_fresh: bool
    ) -> Iterator[tuple[str, CursorPoll]]:
        for key, cursor in internals.cursors.items():
            name = unquote_plus(key)
            if not name or not self._is_durable(name):
                continue
            stats = self._stats.subscriptions.get(name) if self._stats else None
            is_loaded = is_fresh and stats is not None and stats.last_mark_delete_advanced_timestamp == 0
            what = f"{self._topic}, {name}"
            yield name, cursor_poll(cursor, topic, what=what, is_mark_delete_loaded=is_loaded)

    def _follower(self, name: str, begin_ms: int) -> CursorFollower:
        """Return the follower of a cursor, which was created at this time or later if it is new; -1 if unknown."""
        if name not in self._cursors:
            acked, last_ms = self._recorded.pop(name, ({}, begin_ms))
            # Without settings, the topic is gone.
            self._cursors[name] = CursorFollower(self._settings or BrokerSettings(), known=acked, last_ms=last_ms)
        return self._cursors[name]

    def _publishes(self, polls: Mapping[str, CursorPoll], topic: TopicPoll) -> Iterator[PolledEvent]:
        """Yield the entries that are new in the ledgers, which the broker reads before its cursors."""
        counts = dict(topic.counts)
        for poll in polls.values():
            for ledger_id, bitmap in poll.deleted.bitmaps():
                if ledger_id in counts:
                    counts[ledger_id] = max(counts[ledger_id], bitmap.max() + 1)
        begin_ms = max(self._published_ms, 0) or topic.asked_ms
        for ledger_id, count in sorted(counts.items()):
            first = self._published.get(ledger_id, 0)
            if count > first:
                self._published[ledger_id] = count
                yield PolledEvent(begin_ms, EventKind.PUBLISH, ledger_id, first, count - 1, until_ms=topic.answered_ms)
        self._published_ms = topic.asked_ms


def _load_of(stats: TopicStats | None) -> tuple[str, int] | None:
    if stats is None or stats.topic_creation_time_stamp is None:
        return None
    return stats.owner_broker or "", stats.topic_creation_time_stamp
