"""Polls all topics of a cluster at a steady pace, and records their events until it is stopped.

A poll reads both sides of each cursor: the acks in the broker's memory from the admin interface, and the durable state
from the metadata store and the cursor ledger. They become events of a trace at the time of the poll that first shows
them: after the events of a poll, the acked entries of the trace that are not durable are those of the poll.
"""

from __future__ import annotations

import fnmatch
import heapq
import re
import time
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import unquote_plus

from pyroaring import BitMap

from ackstate.analysis.pulsar.durable import CursorGoneError
from ackstate.analysis.pulsar.sources import PARTITION, acked, acked_in
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.entry_bitmap import runs_of
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.pulsar.durable import DurableReader
    from ackstate.analysis.pulsar.sources import Acks, Listing, LiveBroker, TopicInternals, TopicStats, Unread
    from ackstate.analysis.pulsar.trace_directory import TraceDirectory


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
        self._waiting: dict[str, list[tuple[float, str]]] = defaultdict(list)  # of each broker, a heap
        self._under_way: Counter[str] = Counter()

    def put(self, topic: str, due_s: float) -> None:
        """Poll a topic when it is due; the topic must not be in the queue."""
        heapq.heappush(self._waiting[self._broker_of(topic)], (due_s, topic))

    def take(self, now_s: float) -> list[tuple[str, str]]:
        """Return the topics to poll now, each with its broker, for `done`."""
        taken = []
        while self._under_way.total() < self._at_once:
            due = [(waiting[0], each) for each, waiting in self._waiting.items() if waiting and waiting[0][0] <= now_s]
            free = [(first, each) for first, each in due if self._under_way[each] < self._most(each)]
            if not free:
                break
            (_, topic), broker = min(free)
            heapq.heappop(self._waiting[broker])
            taken.append((topic, broker))
            self._under_way[broker] += 1
        return taken

    def done(self, broker: str) -> None:
        """Note that the poll of a topic of this broker has ended."""
        self._under_way[broker] -= 1

    def _most(self, broker: str) -> int:
        if not broker:
            return max(self._at_once // 2, 1)
        return self._at_once if len(self._waiting.keys() - {""}) < 2 else max(self._at_once // _BROKER_SHARE, 1)


AT_ONCE = 32
"""Polls under way."""
LISTING_S = 60.0
"""Topics are listed this often."""
HOUR_MS = 3_600_000
HOUR_BYTES_MAX = 64 << 20
"""A recording of this size is finished before its hour is over."""
_FAILING_PER_S = 20  # polls of topics whose last poll failed, together
_PAUSE_S_MAX = 30.0  # between two polls of such a topic
_NEVER_READ = "never read"


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
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, PARTITION.sub("", name)))


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
class ClusterRecorder:
    """Records a cluster; `run` once."""

    def __init__(
        self, source: LiveBroker, durable: DurableReader, trace: TraceDirectory, *, every_s: float, glob: str = ""
    ) -> None:
        self._source = source
        self._durable = durable
        self._trace = trace
        self._every_s = every_s
        self._glob = glob
        self._topics: dict[str, TopicFollower] = {}
        self._unlisted: Sequence[Unread] = ()  # their topics go on as before
        self._queue = PollQueue(AT_ONCE, self._broker_of)
        self._under_way: dict[Future[None], tuple[str, str]] = {}  # polls, by topic and broker as in the queue
        recorded: dict[str, dict[str, Entries]] = defaultdict(dict)
        for (topic, subscription), entries in trace.resumed.recorded.items():
            if source.includes(topic) and (not glob or matches(topic, glob)):
                recorded[topic][subscription] = entries
        for topic, found in recorded.items():
            self._poll_from_now(topic, found)
        # Steady, and after every time in an earlier recording, even if the clock of the system changes.
        self._begun_s = time.monotonic()
        self._begun_ms = max(time.time_ns() // 1_000_000, trace.resumed.until_ms + 1)
        self._hour = self._begun_ms // HOUR_MS
        self._lock = Lock()
        self._poll_count = self._event_count = 0
        self._gaps_s = self._gap_count = 0.0  # between successful polls of a topic, together
        self._last_failure = ""

    def now_ms(self) -> int:
        """Return the time in ms since 1970; it never falls."""
        return self._begun_ms + int((time.monotonic() - self._begun_s) * 1_000)

    def run(self, for_s: float | None, show: Callable[[Progress], None]) -> None:
        """Record for some time; an exception of a signal handler ends it, too. The caller closes the trace."""
        end_s = None if for_s is None else time.monotonic() + for_s
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            self._follow(*self._list())
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

    def progress(self) -> Progress:
        """Return the state of the recording."""
        cursors = sum(each.cursor_count for each in self._topics.values())
        unread = self._unread_count()
        return Progress(
            len(self._topics), cursors, unread, [*map(str, self._unlisted)], self._poll_count, self._event_count,
            self._last_failure if unread else "",
        )  # fmt: skip

    def _unread_count(self) -> int:
        return sum(each.is_unread for each in self._topics.values())

    # --- Topics

    def _list(self) -> Listing:
        listing = self._source.listing()
        self._trace.note_broker(self._source.cursor_properties)
        return listing

    def _take_listing(self, listing: Future[Listing]) -> None:
        try:
            self._follow(*listing.result())
        except AckStateError as error:
            self._last_failure = str(error)

    def _follow(self, topics: Sequence[str], unlisted: Sequence[Unread]) -> None:
        """Poll the matching topics from now on, and no others, except those that could not be listed."""
        wanted = {topic for topic in topics if not self._glob or matches(topic, self._glob)}
        self._unlisted = [each for each in unlisted if may_match_below(each.name, self._glob)]
        for topic in sorted(wanted - self._topics.keys()):
            self._poll_from_now(topic, {})
        for topic, follower in self._topics.items():
            follower.is_gone = topic not in wanted and not any(each.includes(topic) for each in self._unlisted)

    def _poll_from_now(self, topic: str, recorded: Mapping[str, Entries]) -> None:
        self._topics[topic] = TopicFollower(topic, recorded, partial(self._record, topic))
        self._queue.put(topic, 0.0)

    # --- Polls

    def _broker_of(self, topic: str) -> str:
        """Return the broker for `PollQueue`; topics that never answered count as those of one broker."""
        follower = self._topics[topic]
        return follower.broker or (_NEVER_READ if follower.is_unread else "")

    def _poll_due(self, pool: ThreadPoolExecutor, now_s: float) -> None:
        self._take_done()
        while taken := self._queue.take(now_s):
            for topic, broker in taken:
                follower = self._topics[topic]
                if follower.is_gone:
                    self._queue.done(broker)
                    self._topics.pop(topic).ended(self.now_ms())
                    continue
                follower.due_s = now_s + self._every_s
                poll = pool.submit(follower.poll, self._source, self._durable, self.now_ms)
                self._under_way[poll] = topic, broker

    def _take_done(self) -> None:
        """Take note of the polls that are done."""
        for future in [each for each in self._under_way if each.done()]:
            topic, broker = self._under_way.pop(future)
            self._queue.done(broker)
            if not future.cancelled():
                self._take_result(topic, future.exception())
            self._queue.put(topic, self._topics[topic].due_s)

    def _take_result(self, topic: str, error: BaseException | None) -> None:
        follower = self._topics[topic]
        follower.is_unread = error is not None
        if error is None:
            self._poll_count += 1
            self._note_pace(follower)
        elif isinstance(error, AckStateError):
            follower.due_s = time.monotonic() + pause_s(self._unread_count(), self._every_s)
            self._last_failure = str(error)
        else:
            raise error

    def _note_pace(self, follower: TopicFollower) -> None:
        """Note the time between two polls of a topic for the trace: many topics are polled less often than wished."""
        now_s, before_s = time.monotonic(), follower.polled_s
        follower.polled_s = now_s
        if before_s is not None:
            self._gaps_s += now_s - before_s
            self._gap_count += 1
        mean_s = self._gaps_s / self._gap_count if self._gap_count else 0.0
        every_ms = max(round(self._every_s * 1_000), 1)
        poll_ms = every_ms * max(round(mean_s * 1_000 / every_ms), 1)
        self._trace.note_polls(poll_ms=poll_ms, until_ms=self.now_ms())

    def _record(self, topic: str, subscription: str, events: Sequence[Event]) -> None:
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


Entries = dict[int, BitMap]
"""Entries by ledger."""


class CursorPoll(NamedTuple):
    """A cursor at one moment."""

    ts_ms: int
    counts: Mapping[int, int]  # entries of each existing ledger of the topic
    acked: Entries  # existing entries that are acked in the broker's memory
    durable: Entries  # existing entries that are durable, read after these
    version: tuple[int, ...]  # of the durable state
    cursor_ledger: int = -1  # that the broker writes to; -1 if it has not written since the topic was loaded
    published: int = 0  # entries since the topic was loaded
    is_after_failure: bool = False  # the attempt to poll before this one failed


@final
class CursorFollower:
    """Follows one cursor, poll by poll.

    Args:
        acked: The entries that the trace has as acked.
        is_new: Whether the trace has no event of the cursor.
    """

    def __init__(self, acked: Mapping[int, BitMap] | None = None, *, is_new: bool = True) -> None:
        self._acked: Entries = dict(acked or {})
        self._undurable: Entries = {}  # of these
        self._read: Entries = {}  # as durable, at the last poll
        self._is_new = is_new
        self._before: CursorPoll | None = None
        self._persists = 0

    def follow(self, poll: CursorPoll) -> list[Event]:
        """Return the events since the last poll, in order.

        Complexity: O(size of the bitmaps).
        """
        # An entry that has become durable since the last poll is acked. But the record of a seek still has the acks
        # that the seek takes back: they are durable, and not acked.
        acked = union(poll.acked, minus(poll.durable, self._read))
        self._read = poll.durable
        poll = poll._replace(acked=acked, durable=minus(poll.durable, minus(poll.durable, acked)))
        before, self._before = self._before, poll
        # Entries of ledgers that no longer exist cannot be redelivered.
        self._acked, self._undurable = (
            {each: bitmap for each, bitmap in entries.items() if each in poll.counts}
            for entries in (self._acked, self._undurable)
        )
        events = [*(self._opened(poll) if before is None else self._continued(before, poll))]
        self._acked, self._undurable = poll.acked, minus(poll.acked, poll.durable)
        return events

    def ended(self, now_ms: int) -> list[Event]:
        """Return the events of a cursor that is gone: nothing is acked. `follow` must not be called again."""
        if not self._acked and self._before is None:
            return []
        return [Event(now_ms, EventKind.RESET), *_named(now_ms, EventKind.REDELIVER, self._acked)]

    def _opened(self, poll: CursorPoll) -> Iterator[Event]:
        """Yield the state at the first poll, which is not of the traffic: what is durable was acked before."""
        found, gone = minus(poll.durable, self._acked), minus(self._acked, poll.durable)
        opening = EventKind.RECOVER if self._is_new else EventKind.RESET
        yield from _named(poll.ts_ms, opening, found)
        if not found and self._acked:
            yield Event(poll.ts_ms, opening)
        yield from _named(poll.ts_ms, EventKind.REDELIVER, gone)
        yield from _named(poll.ts_ms, EventKind.ACK, minus(poll.acked, poll.durable))

    def _continued(self, before: CursorPoll, poll: CursorPoll) -> Iterator[Event]:
        is_written = poll.version != before.version
        gone, lost = minus(self._acked, poll.acked), minus(self._acked, poll.durable)
        # A cursor ledger that is not the last is of another load, or its successor.
        may_be_loaded = poll.is_after_failure or -1 < before.cursor_ledger != poll.cursor_ledger
        is_loaded = poll.published < before.published or before.cursor_ledger >= 0 > poll.cursor_ledger
        if not is_loaded:
            lost = gone if may_be_loaded else {}
        if lost:
            if lost != self._undurable:
                yield from self._persist(poll.ts_ms, lost)
            is_written = False
            yield Event(poll.ts_ms, EventKind.CRASH)
            yield Event(poll.ts_ms, EventKind.RECOVER)
        elif gone:
            lost = gone
            yield Event(poll.ts_ms, EventKind.RESET)
        if lost:
            yield from _named(poll.ts_ms, EventKind.REDELIVER, lost)
            self._acked, self._undurable = minus(self._acked, lost), {}
        yield from self._new(poll, is_written=is_written)

    def _new(self, poll: CursorPoll, *, is_written: bool) -> Iterator[Event]:
        new, excluded = minus(poll.acked, self._acked), minus(self._acked, poll.durable)
        later = minus(new, poll.durable)
        durable = minus(new, later)
        yield from _named(poll.ts_ms, EventKind.ACK, durable)
        if is_written or durable or excluded != self._undurable:
            yield from self._persist(poll.ts_ms, excluded)
        yield from _named(poll.ts_ms, EventKind.ACK, later)

    def _persist(self, ts_ms: int, excluded: Entries) -> Iterator[Event]:
        """Yield that all acks so far are durable, except some."""
        self._persists += 1
        displaced = minus(excluded, self._undurable)
        yield Event(ts_ms, EventKind.PERSIST_BEGUN, number=self._persists)
        yield from _named(ts_ms, EventKind.CUT_OFF, minus(excluded, displaced))
        yield from _named(ts_ms, EventKind.DISPLACED, displaced)
        yield Event(ts_ms, EventKind.PERSIST_ENDED, number=self._persists)


def existing_entries(counts: Mapping[int, int], acks: Acks) -> Entries:
    """Return the acked entries that existing ledgers have."""
    found = {ledger_id: acked_in(acks, ledger_id, count) for ledger_id, count in counts.items()}
    for ledger_id, bitmap in found.items():
        bitmap.remove_range(counts[ledger_id], 1 << 32)
    return {ledger_id: bitmap for ledger_id, bitmap in found.items() if bitmap}


def union(these: Mapping[int, BitMap], those: Mapping[int, BitMap]) -> Entries:
    """Return the entries of two sets."""
    return {each: these.get(each, BitMap()) | those.get(each, BitMap()) for each in {*these, *those}}


def minus(these: Mapping[int, BitMap], those: Mapping[int, BitMap]) -> Entries:
    """Return the entries of one set that another one lacks."""
    left = {ledger_id: bitmap - those.get(ledger_id, BitMap()) for ledger_id, bitmap in these.items()}
    return {ledger_id: bitmap for ledger_id, bitmap in left.items() if bitmap}


def _named(ts_ms: int, kind: EventKind, entries: Mapping[int, BitMap]) -> Iterator[Event]:
    """Yield an event for each run, in order."""
    for ledger_id in sorted(entries):
        firsts, lasts = runs_of(entries[ledger_id])
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            yield Event(ts_ms, kind, ledger_id, first, last)


STATS_MS = 60_000
"""`stats` are requested this often, and whenever there is another cursor."""


@final
class TopicFollower:
    """Follows one topic; one thread at a time. The first attributes belong to the main thread.

    `record` is called with a subscription, or "" for the topic itself, and its events, possibly none.
    """

    def __init__(
        self, topic: str, recorded: Mapping[str, Entries], record: Callable[[str, Sequence[Event]], None]
    ) -> None:
        self.due_s = 0.0
        self.is_gone = False
        self.is_unread = False  # whether the last poll failed
        self.polled_s: float | None = None  # when a poll last succeeded
        self._topic, self._record = topic, record
        self._cursors = {name: CursorFollower(acked, is_new=False) for name, acked in recorded.items() if name}
        self._known = set(self._cursors)  # names of which the trace has events
        self._stats: TopicStats | None = None
        self._stats_ms = -STATS_MS
        self._has_failed = False
        self._published = {each: bitmap.max() + 1 for each, bitmap in recorded.get("", {}).items() if bitmap}
        self.cursor_count = 0  # at the last poll

    @property
    def broker(self) -> str:
        """The broker that had the topic when `stats` were last read; empty if unknown."""
        return "" if self._stats is None else self._stats.owner_broker or ""

    def poll(self, source: LiveBroker, durable: DurableReader, clock: Callable[[], int]) -> None:
        """Poll once, and record the events since the last poll.

        Raises:
            AckStateError: The broker does not answer, or the durable state of a cursor cannot be read. The events of
                the other cursors are recorded.
        """
        is_after_failure, self._has_failed = self._has_failed, True
        internals = source.internals(self._topic)
        self._read_stats(source, internals, clock())
        cursors = {
            name: cursor for key, cursor in internals.cursors.items()
            if (name := unquote_plus(key)) and self._is_durable(name)
        }  # fmt: skip
        states = durable.read([(self._topic, name) for name in cursors])
        ts_ms, counts = clock(), internals.entry_counts()
        acks = {name: acked(each, counts, what=f"{self._topic}, {name}") for name, each in cursors.items()}
        for each in acks.values():  # The broker reads its ledgers before its cursors.
            for ledger_id, bitmap in each.deleted.bitmaps():
                if ledger_id in counts:
                    counts[ledger_id] = max(counts[ledger_id], bitmap.max() + 1)
        self._record("", list(self._publishes(counts, ts_ms)))
        failures = []
        for name, cursor in cursors.items():
            state = states[self._topic, name]
            if isinstance(state, AckStateError):
                failures.append(state)
                continue
            poll = CursorPoll(
                ts_ms, counts, existing_entries(counts, acks[name]), existing_entries(counts, state), state.version,
                cursor.cursor_ledger, internals.entries_added_counter, is_after_failure,
            )  # fmt: skip
            self._record(name, self._follower(name).follow(poll))
        self._end(self._cursors.keys() - cursors.keys(), ts_ms)
        self.cursor_count, self._has_failed = len(cursors), False
        # One that was just deleted, or has not been written yet.
        for failure in (each for each in failures if not isinstance(each, CursorGoneError)):
            raise failure

    def ended(self, now_ms: int) -> None:
        """Record that the topic was deleted."""
        self._end(self._cursors.keys(), now_ms)

    def _end(self, names: Iterable[str], now_ms: int) -> None:
        """Record that cursors were deleted, here or since an earlier recording."""
        for name in sorted(names):
            self._record(name, self._cursors.pop(name).ended(now_ms))

    def _read_stats(self, source: LiveBroker, internals: TopicInternals, now_ms: int) -> None:
        is_known = all(unquote_plus(key) in self._known for key in internals.cursors)
        if self._stats is None or not is_known or now_ms - self._stats_ms >= STATS_MS:
            self._stats, self._stats_ms = source.stats(self._topic), now_ms

    def _is_durable(self, name: str) -> bool:
        stats = self._stats.subscriptions.get(name) if self._stats else None
        return stats is None or stats.is_durable is not False

    def _follower(self, name: str) -> CursorFollower:
        if name not in self._cursors:
            self._cursors[name] = CursorFollower(is_new=name not in self._known)
            self._known.add(name)
        return self._cursors[name]

    def _publishes(self, counts: Mapping[int, int], ts_ms: int) -> Iterator[Event]:
        """Yield the entries that are new in the ledgers."""
        for ledger_id, count in sorted(counts.items()):
            first = self._published.get(ledger_id, 0)
            if count > first:
                self._published[ledger_id] = count
                yield Event(ts_ms, EventKind.PUBLISH, ledger_id, first, count - 1)
