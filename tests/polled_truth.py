"""A simulated cursor of Pulsar whose every instant is known, and the polls that an observer makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ackstate import Position
from ackstate.analysis.pulsar.broker_settings import BrokerSettings
from ackstate.analysis.pulsar.cursor_follower import CursorFollower
from ackstate.analysis.pulsar.cursor_look import CursorLook
from ackstate.analysis.replay.polled import PolledChunk
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.deleted_ranges import DeletedRanges

T0_MS = 1_700_000_000_000
SETTINGS = BrokerSettings(flush_seconds=1, mark_delete_rate=4.0, range_count_max=6)
SIZES = {3: 7, 5: 0, 6: 30}


class Write(NamedTuple):
    """A record under way: when it is durable, its acks, and its ledger."""

    end_ms: int
    entries: frozenset
    ledger: int


class Cursor:
    """One cursor in one broker, a millisecond at a time. Whether a write under way survives a crash is random."""

    def __init__(self, rng, *, has_limit):
        self.rng = rng
        self.has_limit = has_limit
        self.log = [Position(ledger, entry) for ledger, count in SIZES.items() for entry in range(count)]
        self.acked, self.durable = set(), set()
        self.under_way = []
        self.ledger, self.last_entry, self.load = -1, -1, 1
        self.next_ledger, self.dirty_ms = 100, None
        self.is_moved = False  # by a seek that no poll has seen

    @property
    def mark_delete(self):
        count = next((at for at, each in enumerate(self.log) if each not in self.acked), len(self.log))
        return self.log[count - 1] if count else Position(3, -1)

    def ack(self, now_ms):
        left = [each for each in self.log if each not in self.acked]
        if not left or self.is_moved:
            return
        chosen = self.rng.choice([left[:1], self.rng.sample(left, min(len(left), self.rng.randint(1, 4)))])
        self.acked |= set(chosen)
        self.dirty_ms = self.dirty_ms or now_ms
        if self.rng.random() < 0.5:
            self.write(now_ms)

    def write(self, now_ms):
        if len(self.under_way) >= 2:
            return
        if self.ledger < 0:
            self.roll()
        below = {each for each in self.acked if each <= self.mark_delete}
        ranges = sorted(self.acked - below)
        if self.has_limit and len(ranges) > SETTINGS.range_count_max:
            ranges = self.rng.sample(ranges, self.rng.randint(0, len(ranges)))
        end_ms = now_ms + self.rng.randint(1, 400)
        if self.under_way:
            end_ms = max(end_ms, self.under_way[-1].end_ms)
        self.under_way.append(Write(end_ms, frozenset(below | set(ranges)), self.ledger))
        self.dirty_ms = None

    def roll(self):
        """Continue in a new ledger, whose first entry has the mark-delete alone; all writes must be done."""
        self.ledger, self.next_ledger, self.last_entry = self.next_ledger, self.next_ledger + 1, 0
        self.durable = {each for each in self.acked if each <= self.mark_delete} if self.dirty_ms is None else {
            each for each in self.durable if each <= self.mark_delete
        }  # fmt: skip

    def crash(self):
        if self.under_way and self.rng.random() < 0.5:
            self.durable = set(self.under_way[-1].entries)
        self.acked = set(self.durable)
        self.under_way, self.dirty_ms = [], None
        self.ledger, self.last_entry, self.load = -1, -1, self.load + 1

    def seek(self):
        """Move durably; the new state has no ranges. A seek after which everything is acked again cannot be seen."""
        target = self.rng.randint(0, len(self.log))
        self.acked = set(self.log[:target])
        self.durable, self.dirty_ms, self.is_moved = set(self.acked), None, True
        self.last_entry += 1

    def tick(self, now_ms):
        for each in [each for each in self.under_way if each.end_ms <= now_ms]:
            self.under_way.remove(each)
            self.durable, self.last_entry = set(each.entries), self.last_entry + 1
        if self.dirty_ms is not None and now_ms - self.dirty_ms >= 1_000:
            self.write(now_ms)

    def poll(self, asked_ms, *, knows_load):
        deleted = DeletedRanges()
        for each in self.acked:
            if each > self.mark_delete:
                deleted.add(each)
        return CursorLook(
            dict(SIZES), self.mark_delete, deleted, state="NoLedger" if self.ledger < 0 else "Open",
            cursor_ledger=self.ledger, last_entry=self.last_entry, asked_ms=asked_ms, answered_ms=-1,
            load=("broker", self.load) if knows_load else None,
        )  # fmt: skip


def truth(seed, *, has_limit=False, has_restarts=True, knows_load=True, length_ms=9_000):
    """Return the polls of a random life, and every instant of it.

    An ack that no poll sees before a crash or a seek undoes it is omitted from all instants.
    """
    rng = random.Random(seed)
    cursor, polls, acks = Cursor(rng, has_limit=has_limit), [], []
    instants, sets = [], []
    ack_share = rng.choice([0.002, 0.01, 0.03])
    asked_ms = rng.randint(0, 300)
    snapshot_ms = asked_ms + rng.randint(0, 20)
    answered_ms = snapshot_ms + rng.randint(0, 20)
    waiting = None
    for ms in range(length_ms):
        now_ms = T0_MS + ms
        cursor.tick(now_ms)
        if rng.random() < ack_share and not (length_ms // 3 < ms < length_ms // 2):
            cursor.ack(now_ms)
        chance = rng.random()
        if has_restarts and chance < 0.0002:
            cursor.crash()
        elif has_restarts and chance < 0.0003 and not cursor.under_way and cursor.ledger >= 0:
            cursor.seek()
        elif chance < 0.0006 and not cursor.under_way and cursor.ledger >= 0 and cursor.dirty_ms is None:
            cursor.roll()
        if ms == snapshot_ms:
            waiting = cursor.poll(T0_MS + asked_ms, knows_load=knows_load)
            # The acks that this poll sees have been there since their own time.
            acks.append((now_ms, frozenset(cursor.acked)))
            cursor.is_moved = False
        if waiting is not None and ms == answered_ms:
            polls.append(replace(waiting, answered_ms=now_ms))
            waiting = None
            asked_ms = ms + rng.randint(500, 900)
            snapshot_ms = asked_ms + rng.randint(0, 20)
            answered_ms = snapshot_ms + rng.randint(0, 20)
        sets.append((now_ms, frozenset(cursor.acked), frozenset(cursor.durable),
                     tuple(each.entries for each in cursor.under_way)))  # fmt: skip
    # An ack is seen if a poll comes before it is undone.
    seen_from = {}
    for number in range(len(sets) - 1, -1, -1):
        now_ms, acked, durable, under_way = sets[number]
        for each in list(seen_from):
            if each not in acked:
                del seen_from[each]
        for at_ms, found in acks:
            if at_ms == now_ms:
                seen_from.update(dict.fromkeys(found, True))
        known = {each for each in acked if each in seen_from}
        counts = [len(known - durable), *(len(known - each) for each in under_way)]
        instants.append((now_ms, min(counts), max(counts)))
    return polls, instants[::-1]


def events_of(polls, settings=SETTINGS):
    follower = CursorFollower(settings)
    return [event for poll in polls for event in follower.follow(poll)]


def polled_chunk(events):
    columns = np.array(events, np.int64).reshape(len(events), 7).T
    exact = [columns[0], columns[1].astype(np.uint8), *columns[2:5]]
    return PolledChunk.of(exact, until_ms=columns[6], number=columns[5])


def bounds(events, policies=(None,), *, sizes=(), log=SIZES, end_ms=None):
    """Return for each policy (ms, low) and (ms, high), each from its time on, and the replay."""
    replay, begin, parts = SubscriptionReplay(list(policies), log, is_polled=True), 0, []
    for size in [*sizes, len(events)]:
        if events[begin : begin + size]:
            parts.append(replay.take(polled_chunk(events[begin : begin + size])))
        begin += size
    parts.append(replay.end(events[-1].ts_ms if end_ms is None else end_ms))
    curves = [[] for _ in range(2 * len(policies))]
    for part in parts:
        for mine, points in zip(curves, part, strict=True):
            mine.extend(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    count = len(policies)
    return [(curves[count + number], curves[number]) for number in range(count)], replay


def at(points, times):
    """Return the value at each time; 0 before the first."""
    last = dict(points)
    keys = sorted(last)
    found = np.searchsorted(keys, times, "right") - 1
    return [last[keys[index]] if index >= 0 else 0 for index in found.tolist()]
