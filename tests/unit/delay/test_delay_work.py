"""The work that the shared index does, counted: leaves, calls, bitmaps and comparisons, not time."""

import sys
from collections.abc import Callable

import numpy as np
from pyroaring import BitMap

from ackstate import Position
from ackstate.delay import TopicDelayIndex
from ackstate.delay.position_set import PositionSet
from benchmarks.delay.nothing_acked import NothingAcked

TICK = 1_000
HOUR = 3_600_000
ALL = 10**9


def attached_view(index, unsent, *, end):
    view = index.open_view(lambda _: False)
    view.attach(NothingAcked(unsent.items()))
    view.passed(end)
    return view


def calls_of(function: Callable[[], object]) -> int:
    """How many calls a function makes, of Python's functions and of others."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


# Small bulks are gathered: a call touches no leaf for a few of its messages.


def leaf_touches_of_a_bulk(index, times):
    """Feed in calls of a thousand, and return how often a leaf has grown."""
    touched = 0
    for first in range(0, len(times), 1_000):
        before = {id(leaf): len(leaf) for leaf in index._calendar._leaves}
        index.feed_many(7, np.arange(first, first + 1_000), times[first : first + 1_000], now_ms=0)
        touched += sum(len(leaf) != before.get(id(leaf)) for leaf in index._calendar._leaves)
    return touched


def test_calls_of_a_thousand_touch_a_leaf_for_dozens_of_messages_not_for_a_few():
    rng = np.random.default_rng(3)
    index = TopicDelayIndex(tick_time_ms=TICK)
    for ledger_id in range(1, 7):
        index.feed_many(ledger_id, np.arange(100_000), rng.integers(1, HOUR, 100_000), now_ms=0)
    leaf_count = len(index._calendar._leaves)
    assert leaf_count >= 20
    count = 40_000
    touched = leaf_touches_of_a_bulk(index, rng.integers(1, HOUR, count))
    # Each 4,096th message at most, and then all of them, of which one or two were divided.
    assert 0 < touched <= count // 4_096 * (leaf_count + 8)
    assert len(index) == 640_000


# A tick is drained by ledger, not by message.


def calls_of_a_tick(messages_a_ledger, *, ledger_count=20):
    index = TopicDelayIndex(tick_time_ms=TICK)
    entry_ids = np.arange(messages_a_ledger * 2)
    for ledger_id in range(1, ledger_count + 1):
        # Half of them are due now, half later.
        index.feed_many(ledger_id, entry_ids, entry_ids % 2 * HOUR + 1, now_ms=0)
    unsent = dict.fromkeys(range(1, ledger_count + 1), BitMap(entry_ids.tolist()))
    view = attached_view(index, unsent, end=Position(ledger_count, 2**32 - 1))
    view.scheduled_entries(ALL, now_ms=0)
    found = []
    calls = calls_of(lambda: found.extend(view.scheduled_entries(ALL, now_ms=TICK)))
    assert [(ledger_id, list(entries)) for ledger_id, entries in found] == [
        (ledger_id, entry_ids[::2].tolist()) for ledger_id in range(1, ledger_count + 1)
    ]
    assert len(index) == messages_a_ledger * ledger_count
    return calls


def test_a_tick_takes_a_few_calls_for_each_ledger_and_none_for_a_message():
    few, many = calls_of_a_tick(14), calls_of_a_tick(200)
    assert few <= 500, "for 280 messages in 20 ledgers"
    assert many <= few + 100, "for 4,000: more leaves, no more bitmaps"


# Messages that fall due are one bitmap for each ledger, from the calendar to the subscription.


def two_ledgers_due(view_count):
    index = TopicDelayIndex(tick_time_ms=TICK)
    unsent = dict.fromkeys((1, 2), BitMap(range(100)))
    views = [attached_view(index, unsent, end=Position(9, 0)) for _ in range(view_count)]
    for ledger_id in (1, 2):
        index.feed_many(ledger_id, np.arange(100), np.full(100, 1), now_ms=0)
    batch = index.due_log.end
    index.advance(TICK)
    return views, [batch.positions.entries_of(ledger_id) for ledger_id in (1, 2)]


def test_the_only_view_is_handed_the_bitmaps_themselves():
    (view,), bitmaps = two_ledgers_due(1)
    found = view.scheduled_entries(ALL, now_ms=TICK)
    assert all(entries is bitmap for (_, entries), bitmap in zip(found, bitmaps, strict=True))


def test_what_one_of_two_views_is_handed_is_its_own():
    (one, other), bitmaps = two_ledgers_due(2)
    for _, entries in one.scheduled_entries(ALL, now_ms=TICK):
        entries.clear()
    assert bitmaps == [BitMap(range(100))] * 2
    assert [len(entries) for _, entries in other.scheduled_entries(ALL, now_ms=TICK)] == [100, 100]


class CountedInt(int):
    """A ledger id that counts how often ids are compared."""

    comparisons = 0

    def __lt__(self, other):
        CountedInt.comparisons += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_the_lowest_of_many_ledgers_are_found_without_a_look_at_all_for_each():
    count = 1_024
    order = np.random.default_rng(5).permutation(count).tolist()
    for wanted in (count, count // 2):
        held = PositionSet()
        for ledger_id in order:
            held.add(Position(CountedInt(ledger_id), 7))
        CountedInt.comparisons = 0
        assert [ledger_id for ledger_id, _ in held.take_lowest(wanted)] == list(range(wanted))
        assert 0 < CountedInt.comparisons <= count * 10
        held._check()
        assert len(held) == count - wanted
