"""Polls all topics of a cluster at a steady pace, and records their events until it is stopped."""

from __future__ import annotations

import fnmatch
import heapq
import re
import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final
from urllib.parse import unquote_plus

from ackstate.analysis.pulsar.broker_settings import BrokerSettings
from ackstate.analysis.pulsar.cursor_follower import CursorFollower
from ackstate.analysis.pulsar.cursor_look import CursorLook, look_of
from ackstate.analysis.trace.events import EventKind, PolledEvent
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.pulsar.internal_stats import TopicInternals, TopicStats
    from ackstate.analysis.pulsar.sources import Listing, LiveBroker, Unread
    from ackstate.analysis.pulsar.trace_directory import Recorded, TraceDirectory


_BROKER_SHARE = 4


@final
class PollQueue:
    """Topics in the order in which they are due.

    A broker has at most a quarter of the polls under way once several brokers are known: polls of a dead one wait for
    their timeouts. Topics whose broker is unknown may have half of them.

    Complexity: O(log topics) a poll, and O(brokers) a call.
    """

    def __init__(self, at_once: int, broker_of: Callable[[str], str]) -> None:
        self._at_once = at_once
        self._broker_of = broker_of
        self._waiting: list[tuple[float, str]] = []
        self._due: dict[str, deque[tuple[float, str]]] = {}
        self._under_way: Counter[str] = Counter()
        self._brokers: set[str] = set()

    def put(self, topic: str, due_s: float) -> None:
        """Poll a topic when it is due; the topic must not be in the queue."""
        heapq.heappush(self._waiting, (due_s, topic))

    def take(self, now_s: float) -> list[tuple[str, str]]:
        """Return the topics to poll now, each with its broker, for `done`."""
        while self._waiting and self._waiting[0][0] <= now_s:
            due = heapq.heappop(self._waiting)
            broker = self._broker_of(due[1])
            self._brokers.add(broker)
            self._due.setdefault(broker, deque()).append(due)
        taken = []
        while self._under_way.total() < self._at_once:
            free = [each for each in self._due if self._under_way[each] < self._most(each)]
            if not free:
                break
            broker = min(free, key=lambda each: self._due[each][0])
            taken.append((self._due[broker].popleft()[1], broker))
            self._under_way[broker] += 1
            if not self._due[broker]:
                del self._due[broker]
        return taken

    def done(self, broker: str) -> None:
        """Note that the poll of a topic of this broker has ended."""
        self._under_way[broker] -= 1

    def _most(self, broker: str) -> int:
        if not broker:
            return max(self._at_once // 2, 1)
        return self._at_once if len(self._brokers - {""}) < 2 else max(self._at_once // _BROKER_SHARE, 1)


AT_ONCE = 32
"""Polls under way."""
LISTING_S = 60.0
"""Topics are listed this often."""
HOUR_MS = 3_600_000
HOUR_BYTES_MAX = 256 << 20
"""A recording of this size is finished before its hour is over."""
_FAILING_PER_S = 20  # polls of topics whose last poll failed, together
_PAUSE_S_MAX = 30.0  # between two polls of such a topic
_NEVER_READ = "never read"
_WHOLE_TOPIC = re.compile(r"-partition-\d+$", re.ASCII)


class Progress(NamedTuple):
    """The state of a recording."""

    topics: int  # Topics that are polled
    cursors: int  # Their cursors
    unread: int  # Topics whose last poll failed
    unlisted: Sequence[str]  # Why tenants, namespaces or partitioned topics could not be listed the last time
    polls: int  # Successful polls of a topic so far
    events: int  # Events recorded so far
    last_failure: str  # The reason of the latest failed poll; empty without one


def matches(topic: str, glob: str) -> bool:
    """Return whether a topic, or the partitioned topic that it belongs to, matches a pattern such as ``public/*/o*``.

    >>> matches("persistent://public/default/orders-partition-3", "public/default/orders")
    True
    """
    pattern = glob.removeprefix("persistent://")
    name = topic.removeprefix("persistent://")
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, _WHOLE_TOPIC.sub("", name)))


def may_match_below(name: str, glob: str) -> bool:
    """Return whether a topic of a tenant or a namespace may match a pattern; an empty one matches all.

    >>> may_match_below("public", "public/*/o*"), may_match_below("acme", "*/x/o"), may_match_below("acme", "public/*")
    (True, True, False)
    """
    literal, place = re.split(r"[*?[]", glob.removeprefix("persistent://"), maxsplit=1)[0], f"{name}/"
    return literal.startswith(place) or place.startswith(literal)


def pause_s(unread: int, every_s: float) -> float:
    """Return the seconds until the next poll of a topic whose last poll failed.

    A few topics are polled as often as others, to miss little of a broker that restarts.

    >>> pause_s(15, 1.0), pause_s(100, 1.0), pause_s(3_000, 1.0)
    (1.0, 5.0, 30.0)
    """
    return min(max(every_s, unread / _FAILING_PER_S), _PAUSE_S_MAX)


@final
class _Polled:
    """One topic that is polled. Only the main thread changes it, except for its follower."""

    def __init__(self, follower: TopicFollower) -> None:
        self.follower = follower
        self.due_s = 0.0
        self.is_gone = False


class _UnderWay(NamedTuple):
    """A poll under way, in terms of `PollQueue`."""

    topic: str
    broker: str


@final
class ClusterRecorder:
    """Records a cluster; `run` once."""

    def __init__(self, source: LiveBroker, trace: TraceDirectory, *, every_s: float, glob: str = "") -> None:
        self._source = source
        self._trace = trace
        self._every_s = every_s
        self._glob = glob
        self._topics: dict[str, _Polled] = {}
        self._unread: set[str] = set()  # topics whose last poll failed
        self._unlisted: Sequence[Unread] = ()  # their topics go on as before
        self._queue = PollQueue(AT_ONCE, self._broker_of)
        self._under_way: dict[Future[None], _UnderWay] = {}
        self._recorded: dict[str, dict[str, Recorded]] = {}
        for (topic, subscription), recorded in trace.resumed.recorded.items():
            if source.includes(topic) and (not glob or matches(topic, glob)):
                self._recorded.setdefault(topic, {})[subscription] = recorded
        # Steady, and after every time in an earlier recording, even if the clock of the system changes.
        self._begun_s = time.monotonic()
        self._begun_ms = max(time.time_ns() // 1_000_000, trace.resumed.until_ms + 1)
        self._hour = self._begun_ms // HOUR_MS
        self._lock = Lock()
        self._poll_count = self._event_count = 0
        self._last_failure = ""

    def now_ms(self) -> int:
        """Return the time in ms since 1970; it never falls."""
        return self._begun_ms + int((time.monotonic() - self._begun_s) * 1_000)

    def run(self, for_s: float | None, show: Callable[[Progress], None]) -> Progress:
        """Record for some time; an exception of a signal handler ends it, too. The caller closes the trace."""
        end_s = None if for_s is None else time.monotonic() + for_s
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            self._follow(self._list())
            self._end_missing()
            listing: Future[Listing] | None = None
            listed_s, shown_s = time.monotonic(), 0.0
            while end_s is None or time.monotonic() < end_s:
                now_s = time.monotonic()
                if listing is None and now_s - listed_s >= LISTING_S:
                    listing = pool.submit(self._list)
                if listing is not None and listing.done():
                    self._take_listing(listing)
                    listing, listed_s = None, now_s
                self._poll_due(pool, now_s)
                self._turn_hour()
                step_s = max(min(self._every_s, 1.0, (end_s or now_s + 1) - now_s) / 4, 0.01)
                if now_s - shown_s >= min(step_s, self._every_s):
                    show(self.progress())
                    shown_s = now_s
                wait(self._under_way, step_s, FIRST_COMPLETED) if self._under_way else time.sleep(step_s)
        finally:
            pool.shutdown(cancel_futures=True)
        self._take_done()
        return self.progress()

    def progress(self) -> Progress:
        """Return the state of the recording."""
        followed = self._topics.values()
        cursors = sum(each.follower.cursor_count for each in followed)
        unread = len(self._unread)
        return Progress(
            len(followed), cursors, unread, [*map(str, self._unlisted)], self._poll_count, self._event_count,
            self._last_failure if unread else "",
        )  # fmt: skip

    # --- Topics

    def _list(self) -> Listing:
        listing = self._source.listing()
        self._trace.note_broker(self._source.cursor_properties)
        return listing

    def _take_listing(self, listing: Future[Listing]) -> None:
        try:
            self._follow(listing.result())
        except AckStateError as error:
            self._last_failure = str(error)

    def _follow(self, listing: Listing) -> None:
        """Poll the matching topics from now on, and no others, except those that could not be listed."""
        wanted = {topic for topic in listing.topics if not self._glob or matches(topic, self._glob)}
        self._unlisted = [each for each in listing.unread if may_match_below(each.name, self._glob)]
        for topic in sorted(wanted - self._topics.keys()):
            self._poll_from_now(topic)
        for topic, polled in self._topics.items():
            polled.is_gone = topic not in wanted and not self._may_exist(topic)

    def _poll_from_now(self, topic: str) -> None:
        self._topics[topic] = _Polled(TopicFollower(topic, self._recorded.pop(topic, {})))
        self._queue.put(topic, 0.0)

    def _may_exist(self, topic: str) -> bool:
        return any(each.includes(topic) for each in self._unlisted)

    def _end_missing(self) -> None:
        """Record that topics of the earlier recording were deleted meanwhile; those that were not listed are polled."""
        for topic in [*filter(self._may_exist, self._recorded)]:
            self._poll_from_now(topic)
        for topic, recorded in self._recorded.items():
            TopicFollower(topic, recorded).ended(self.now_ms(), partial(self._record, topic))
        self._recorded.clear()

    # --- Polls

    def _broker_of(self, topic: str) -> str:
        """Return the broker for `PollQueue`; topics that never answered count as those of one broker."""
        polled = self._topics[topic]
        return polled.follower.broker or (_NEVER_READ if topic in self._unread else "")

    def _poll_due(self, pool: ThreadPoolExecutor, now_s: float) -> None:
        self._take_done()
        for topic, broker in self._queue.take(now_s):
            polled = self._topics[topic]
            if polled.is_gone:
                self._queue.done(broker)
                self._unread.discard(topic)
                self._topics.pop(topic).follower.ended(self.now_ms(), partial(self._record, topic))
            else:
                polled.due_s = now_s + self._every_s
                self._under_way[pool.submit(self._poll, topic, polled.follower)] = _UnderWay(topic, broker)

    def _take_done(self) -> None:
        """Take note of the polls that are done."""
        for future in [each for each in self._under_way if each.done()]:
            topic, broker = self._under_way.pop(future)
            self._queue.done(broker)
            if not future.cancelled():
                self._take_result(topic, future.exception())
            self._queue.put(topic, self._topics[topic].due_s)

    def _take_result(self, topic: str, error: BaseException | None) -> None:
        if error is None:
            self._unread.discard(topic)
            self._poll_count += 1
            self._trace.polled_until_ms = self.now_ms()
        elif isinstance(error, AckStateError):
            self._unread.add(topic)
            self._topics[topic].due_s = time.monotonic() + pause_s(len(self._unread), self._every_s)
            self._last_failure = str(error)
        else:
            raise error

    def _poll(self, topic: str, follower: TopicFollower) -> None:
        follower.poll(self._source, self.now_ms, partial(self._record, topic))

    def _record(self, topic: str, subscription: str, events: Sequence[PolledEvent]) -> None:
        if events:
            self._trace.record(topic, subscription, events)
            with self._lock:
                self._event_count += len(events)

    def _turn_hour(self) -> None:
        """Finish an hour that is over, or has recorded too much, as soon as no poll is under way."""
        hour = self.now_ms() // HOUR_MS
        if hour == self._hour and self._trace.recording_bytes < HOUR_BYTES_MAX:
            return
        wait(self._under_way)
        self._take_done()
        self._trace.finish_hour()
        self._hour = hour


STATS_MS = 60_000
"""`stats` are requested this often, and whenever a cursor's ledger has changed."""


Record: TypeAlias = "Callable[[str, Sequence[PolledEvent]], None]"
"""Called with a subscription, or "" for the topic itself, and its events, possibly none."""


@final
class TopicFollower:
    """Follows one topic; one thread at a time."""

    def __init__(self, topic: str, recorded: Mapping[str, Recorded]) -> None:
        self._topic = topic
        self._settings: BrokerSettings | None = None
        self._recorded = dict(recorded)
        self._cursors: dict[str, CursorFollower] = {}
        self._polls: dict[str, CursorLook] = {}
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

    def poll(self, source: LiveBroker, clock: Callable[[], int], record: Record) -> None:
        """Poll once, and record the events since the last poll."""
        is_after_failure, self._has_failed = self._has_failed, True
        if self._settings is None:
            self._settings = source.settings(self._topic)
        asked_ms = clock()
        internals = source.internals(self._topic)
        answered_ms = clock()
        is_fresh = self._needs_stats(internals, answered_ms)
        if is_fresh:
            self._stats, self._stats_ms = source.stats(self._topic), answered_ms
        counts = internals.entry_counts()
        moment = {
            "asked_ms": asked_ms, "answered_ms": answered_ms, "load": _load_of(self._stats),
            "is_after_failure": is_after_failure,
        }  # fmt: skip
        polls = dict(self._looks(internals, counts, moment, is_fresh=is_fresh))
        begin_ms = self._published_ms
        record("", list(self._publishes(polls, counts, asked_ms, answered_ms)))
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

    def _looks(
        self, internals: TopicInternals, counts: Mapping[int, int], moment: dict[str, Any], *, is_fresh: bool
    ) -> Iterator[tuple[str, CursorLook]]:
        for key, cursor in internals.cursors.items():
            name = unquote_plus(key)
            if name and self._is_durable(name):
                stats, what = self._stats.subscriptions.get(name) if self._stats else None, f"{self._topic}, {name}"
                yield name, look_of(cursor, counts, stats, what=what, is_fresh=is_fresh, **moment)

    def _follower(self, name: str, begin_ms: int) -> CursorFollower:
        """Return the follower of a cursor, which was created at this time or later if it is new; -1 if unknown."""
        if name not in self._cursors:
            acked, last_ms = self._recorded.pop(name, ({}, begin_ms))
            # Without settings, the topic is gone.
            self._cursors[name] = CursorFollower(self._settings or BrokerSettings(), known=acked, last_ms=last_ms)
        return self._cursors[name]

    def _publishes(
        self, polls: Mapping[str, CursorLook], known: Mapping[int, int], asked_ms: int, answered_ms: int
    ) -> Iterator[PolledEvent]:
        """Yield the entries that are new in the ledgers, which the broker reads before its cursors."""
        counts = dict(known)
        for poll in polls.values():
            for ledger_id, bitmap in poll.deleted.bitmaps():
                if ledger_id in counts:
                    counts[ledger_id] = max(counts[ledger_id], bitmap.max() + 1)
        begin_ms = max(self._published_ms, 0) or asked_ms
        for ledger_id, count in sorted(counts.items()):
            first = self._published.get(ledger_id, 0)
            if count > first:
                self._published[ledger_id] = count
                yield PolledEvent(begin_ms, EventKind.PUBLISH, ledger_id, first, count - 1, until_ms=answered_ms)
        self._published_ms = asked_ms


def _load_of(stats: TopicStats | None) -> tuple[str, int] | None:
    if stats is None or stats.topic_creation_time_stamp is None:
        return None
    return stats.owner_broker or "", stats.topic_creation_time_stamp
