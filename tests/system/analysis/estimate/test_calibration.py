"""Calibration: real cursors on SQLite are killed, and must redeliver what the estimate says from the trace alone."""

import os
import random
import signal
import threading
from bisect import bisect_right
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pytest

from ackstate import LedgerMap, ManagedCursor, MemoryStore, Position, SqliteStore
from ackstate.analysis.crash.power_cuts import LoopDisk, private_mounts
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.cursor_replay import StoreWithoutLedgers
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.generate import ENTRIES_PER_LEDGER, TracePlan, joined
from ackstate.stores.base import StoreError
from forked import in_child

EVENTS, MESSAGES_PER_SECOND = 3_000, 400.0
LEDGER_SIZE = 200  # of the generator's, a trace of some seconds would not reach the end
SHAPES = ("key_shared", "many_consumers", "one_stuck_consumer", "heavy_traffic", "in_order")
# The seconds, in powers of ten, after which a persist is interrupted; it takes a fraction of a millisecond in memory.
INTERRUPTED_AFTER = (-5.0, -2.7)
MOMENT, EVENT, PERSIST = "at the end of a millisecond", "right after an event", "during a persist"
OLD = "become_old_ack_record_seconds"
SETTINGS = (
    {"flush_interval_ms": 100},
    {"flush_interval_ms": 20, "tick_ms": 10},
    {"flush_interval_ms": 0, "tick_ms": 10},
    {"flush_interval_ms": 300, "tick_ms": 50},
    {},
    {"mark_delete_rate_limit": 1, "flush_interval_ms": 2_000},
    {"mark_delete_rate_limit": 20, "flush_interval_ms": 1_000},
    {"mark_delete_rate_limit": 0.5, "flush_interval_ms": 5_000, "tick_ms": 10},
    {"compaction_bytes_min": 0, "flush_interval_ms": 50},
    {"ledger_entry_count_max": 3, "flush_interval_ms": 50},
    {"ledger_rollover_ms": 300, "flush_interval_ms": 50},
    {"format": "PULSAR", "flush_interval_ms": 100},
    {"format": "PULSAR", "range_form": "LIST", "flush_interval_ms": 100},
    {"ledger_writable": False, "flush_interval_ms": 100},
    {"ledger_writable": False, "format": "PULSAR", "compression": "ZSTD", "compression_bytes_min": 0},
    {"range_count_max": 5, "flush_interval_ms": 100},
    {"range_count_max": 5, "keep": "WIDEST", "flush_interval_ms": 100},
    {"range_count_max": 0, "flush_interval_ms": 100},
    {"format": "PULSAR", "range_count_max": 5, "flush_interval_ms": 100},
    {"format": "PULSAR", "range_count_max": 5, "keep": "WIDEST", "flush_interval_ms": 100},
    {"format": "PULSAR", "range_form": "LIST", "range_count_max": 12, "keep": "WIDEST", "tick_ms": 10},
    {OLD: 1, "flush_interval_ms": 100},
    {OLD: 3, "flush_interval_ms": 100},
    {OLD: 2, "range_count_max": 8, "flush_interval_ms": 250},
    {OLD: 1, "format": "PULSAR", "tick_ms": 10},
    {OLD: 3, "format": "PULSAR", "mark_delete_rate_limit": 5},
    {"ledger_writable": False, "metadata_range_count_max": 3, "flush_interval_ms": 250},
    {"ledger_writable": False, "metadata_range_count_max": 3, "format": "PULSAR", "flush_interval_ms": 250},
    {"ledger_writable": False, "metadata_bytes_max": 400, "flush_interval_ms": 250, "tick_ms": 10},
)
HOLES = {"flush_interval_ms": 100, "range_count_max": 5}
WRONG = {
    "it flushes later": ({"flush_interval_ms": 100}, {"flush_interval_ms": 333}),
    "it ticks rarely": ({"flush_interval_ms": 50}, {"tick_ms": 400}),
    "no rate limit": ({"mark_delete_rate_limit": 1, "flush_interval_ms": 2_000}, {"mark_delete_rate_limit": 50}),
    "no range limit": (HOLES, {"range_count_max": "none"}),
    "the other ranges": (HOLES | {"keep": "WIDEST", "format": "PULSAR"}, {"keep": "LOWEST"}),
    "no young age": ({OLD: 1}, {OLD: 0}),
    "the other format": (HOLES | {"keep": "WIDEST", "format": "PULSAR"}, {"format": "NATIVE"}),
    "the other route": (
        {"ledger_writable": False, "metadata_range_count_max": 3, "flush_interval_ms": 100},
        {"ledger_writable": True},
    ),
}


class Played(NamedTuple):
    """An event of one entry or several of one ledger."""

    ts_ms: int
    kind: EventKind
    ledger_id: int
    first_entry: int
    last_entry: int

    @property
    def is_own(self):
        """Whether it is the subscription's: part of the trace that is replayed."""
        return self.kind is not EventKind.PUBLISH


class Moment(NamedTuple):
    """When a process dies: after some events and the ticks before a time."""

    when: str
    events: list[Played]
    until_ms: int


class Death(NamedTuple):
    """How many acked messages were to be redelivered, during a persist one of two numbers, and how many were."""

    when: str
    predicted: set[int]
    observed: int


def traffic(shape, seed=1):
    """Return some seconds of a shape of `ackstate trace generate`, in ledgers of 200 entries."""
    plan = TracePlan(shape, EVENTS, seed=seed, subscriptions=1, topics=1, messages_per_second=MESSAGES_PER_SECOND)
    events = []
    own, published = map(joined, zip(*plan.series_of(0).parts(EVENTS), strict=True))
    for chunk in (published, own):
        for ts_ms, kind, ledger_id, first, last in zip(*(column.tolist() for column in chunk[:5]), strict=True):
            if kind in (EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK):
                begin, end = ((ledger_id - 1_000) * ENTRIES_PER_LEDGER + each for each in (first, last + 1))
                for ledger in range(begin // LEDGER_SIZE, (end - 1) // LEDGER_SIZE + 1):
                    low, high = max(begin, ledger * LEDGER_SIZE), min(end, (ledger + 1) * LEDGER_SIZE)
                    part = low - ledger * LEDGER_SIZE, high - 1 - ledger * LEDGER_SIZE
                    events.append(Played(ts_ms, EventKind(kind), 1 + ledger, *part))
    events.sort(key=lambda event: event.ts_ms)
    while not events[-1].is_own:
        events.pop()
    return events


def log_of(events):
    """Return ledger id -> entry count as far as was published."""
    return {event.ledger_id: event.last_entry + 1 for event in events if event.kind is EventKind.PUBLISH}


class Broker:
    """A small broker with the real cursor, by the clock of the traffic."""

    def __init__(self, events, policy, store):
        self._events, self._policy = events, policy
        self._store = store if policy.ledger_writable else StoreWithoutLedgers(store)
        self._ledgers = LedgerMap(events[0].ledger_id)
        self._cursor = None
        self._next_tick_ms = 0
        self.persisted_ms = []

    def play(self, moment):
        for event in moment.events:
            self._tick_until(event.ts_ms)
            if event.kind is EventKind.PUBLISH:
                if event.ledger_id > self._ledgers.current_ledger_id:
                    self._ledgers.roll(event.ledger_id)
                self._ledgers.append(event.last_entry + 1 - event.first_entry)
                continue
            if self._cursor is None:
                self._cursor = opened(self._store, self._ledgers, self._policy, event.ts_ms)
                self._next_tick_ms = -(-event.ts_ms // self._policy.tick_ms) * self._policy.tick_ms
            if event.kind is EventKind.DELIVER:
                self._cursor.delivered(Position(event.ledger_id, event.last_entry), now_ms=event.ts_ms)
            else:
                entries = range(event.first_entry, event.last_entry + 1)
                self._cursor.ack_entries(event.ledger_id, entries, now_ms=event.ts_ms)
        self._tick_until(moment.until_ms)

    def tick(self, now_ms):
        try:
            if self._cursor.tick(now_ms=now_ms) is not None:
                self.persisted_ms.append(now_ms)
        except StoreError:
            pass  # a state too large for the metadata store is retried at the next tick

    def _tick_until(self, end_ms):
        while self._cursor is not None and self._next_tick_ms < end_ms:
            self.tick(self._next_tick_ms)
            self._next_tick_ms += self._policy.tick_ms


def opened(store, ledgers, policy, now_ms):
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=ledgers, config=policy.cursor, now_ms=now_ms)


def predicted(events, policy, moment):
    """Return how many acked messages the estimate redelivers at a moment, from the subscription's trace."""
    own = [event for event in moment.events if event.is_own]
    if not own:
        return 0
    replay = SubscriptionReplay([policy], log_of(events))
    (taken,) = replay.take(EventChunk(*np.array(own, np.int64).T))
    (rest,) = replay.end(moment.until_ms)
    return int([*taken.value, *rest.value[rest.ts_ms < moment.until_ms]][-1])


def moments_of(events, policy, chance, counts):
    """Return moments of each kind, as many as `counts` has."""
    times = [event.ts_ms for event in events]

    def end_of(when, now_ms, until_ms):
        return Moment(when, events[: bisect_right(times, now_ms)], until_ms)

    ends = [chance.randrange(times[0], times[-1]) for _ in range(counts[MOMENT])]
    found = [end_of(MOMENT, now_ms, now_ms + 1) for now_ms in ends]
    own = [number for number, event in enumerate(events) if event.is_own]
    last = chance.choices(own, k=counts[EVENT])
    found += [Moment(EVENT, events[: number + 1], times[number]) for number in last]
    broker = Broker(events, policy, MemoryStore())
    broker.play(Moment("", events, times[-1] + 1))
    persisted = chance.choices(broker.persisted_ms, k=counts[PERSIST]) if broker.persisted_ms else ()
    return [*found, *(end_of(PERSIST, now_ms, now_ms) for now_ms in persisted)]


def live(events, policy, moment, directory, interrupted_after_s):
    """Play in a child until it is killed; return what it says if a persist ends before that."""

    def play():
        broker = Broker(events, policy, SqliteStore(directory))
        broker.play(moment)
        if moment.when == PERSIST:
            threading.Timer(interrupted_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            broker.tick(moment.until_ms)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        return "persisted"

    said = in_child(play)
    assert said in ("", "persisted")
    return said


def recovered(events, policy, moment, directory):
    """Return how many acked messages a recovery redelivers; it must not treat an unacked one as acked."""
    acked = {
        (event.ledger_id, entry)
        for event in moment.events
        if event.kind is EventKind.ACK
        for entry in range(event.first_entry, event.last_entry + 1)
    }
    log = log_of(moment.events)
    with closing(SqliteStore(directory)) as sqlite:
        store = sqlite if policy.ledger_writable else StoreWithoutLedgers(sqlite)
        cursor = opened(store, LedgerMap.from_counts(log), policy, moment.until_ms)
        found = {
            (ledger, entry)
            for ledger, count in log.items()
            for entry in range(count)
            if cursor.is_acked(Position(ledger, entry))
        }
    assert found <= acked
    return len(acked - found)


def died(events, policy, moment, directory, *, chance, lose_power=lambda: None):
    """Die at a moment, recover, and compare with the estimate."""
    before = predicted(events, policy, moment)
    after = predicted(events, policy, moment._replace(until_ms=moment.until_ms + (moment.when == PERSIST)))
    said = live(events, policy, moment, directory, 10 ** chance.uniform(*INTERRUPTED_AFTER))
    lose_power()
    observed = recovered(events, policy, moment, directory)
    return Death(moment.when, {after} if said else {before, after}, observed)


def deaths_of(settings, shape, directory, counts):
    """Die at some moments under a policy and some traffic."""
    policy, events = Policy.from_mapping(settings), traffic(shape)
    chance = random.Random(f"{settings} {shape}")
    return [
        died(events, policy, moment, directory / str(number), chance=chance)
        for number, moment in enumerate(moments_of(events, policy, chance, counts))
    ]


def shape_of(number):
    """Return another shape for each setting; in order there is never more than one range."""
    return SHAPES[number % (len(SHAPES) - bool(set(SETTINGS[number]) & {"range_count_max", OLD}))]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_kill_redelivers_exactly_what_the_estimate_says(tmp_path, number):
    when = (MOMENT, EVENT, PERSIST)[number % 3]
    counts = {MOMENT: 0, EVENT: 0, PERSIST: 0} | {when: 1}
    (death,) = deaths_of(SETTINGS[number], shape_of(number), tmp_path, counts)
    assert death.observed in death.predicted


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_many_kills_redeliver_exactly_what_the_estimate_says(tmp_path, number, shape):
    deaths = deaths_of(SETTINGS[number], shape, tmp_path, {MOMENT: 20, EVENT: 5, PERSIST: 5})
    assert [death for death in deaths if death.observed not in death.predicted] == []


@pytest.mark.slow
@pytest.mark.parametrize(("real", "wrong"), WRONG.values(), ids=WRONG)
def test_an_estimate_with_a_wrong_setting_is_found_out(tmp_path, real, wrong):
    policy, events, chance = Policy.from_mapping(real), traffic("many_consumers"), random.Random(1)
    assumed = Policy.from_mapping(policy.to_mapping() | {key: str(value) for key, value in wrong.items()})
    moments = moments_of(events, policy, chance, {MOMENT: 10, EVENT: 0, PERSIST: 0})
    off = [abs(predicted(events, policy, each) - predicted(events, assumed, each)) for each in moments]
    moment = moments[off.index(max(off))]
    death = died(events, policy, moment, tmp_path / "store", chance=chance)
    assert death.observed in death.predicted
    assert death.observed != predicted(events, assumed, moment)


@pytest.mark.slow
@pytest.mark.root
def test_a_power_cut_redelivers_at_most_what_the_estimate_says(power_can_be_cut):
    def cut_all():
        for number, options in ((0, ""), (19, "noauto_da_alloc,data=writeback")):
            policy, events = Policy.from_mapping(SETTINGS[number]), traffic(shape_of(number))
            chance = random.Random(number)
            for moment in moments_of(events, policy, chance, {MOMENT: 1, EVENT: 0, PERSIST: 1}):
                with LoopDisk(options) as disk:

                    def lose_power(disk=disk):
                        disk.cut_power()
                        disk.power_on()

                    yield died(events, policy, moment, disk.directory / "store", chance=chance, lose_power=lose_power)

    with private_mounts():
        deaths = list(cut_all())
    assert len(deaths) == 4
    assert [death for death in deaths if death.observed > max(death.predicted)] == []
