"""The work that the shared index does, counted: leaves, calls, bitmaps and comparisons, not time."""

import sys
from collections.abc import Callable

import numpy as np
from pyroaring import BitMap

from ackstate import Position
from ackstate.delay import TopicDelayIndex
from ackstate.position_set import PositionSet
from benchmarks.delay.nothing_acked import NothingAcked

TICK = 1_000
HOUR = 3_600_000
ALL = 10**9


def attached_view(index, unsent):
    """Its reader has passed everything that is not sent, of which the index holds the first and the last."""
    view = index.open_view(lambda _: False)
    view.attach(NothingAcked(unsent.items()))
    for ledger_id, entry_id in ((min(unsent), unsent[min(unsent)].min()), (max(unsent), unsent[max(unsent)].max())):
        assert view.skip(Position(ledger_id, entry_id), now_ms=0)
    return view


def learn(index, ledger_id, entry_ids, times):
    positions = [Position(ledger_id, entry_id) for entry_id in entry_ids]
    index.learn(zip(positions, times, strict=True))


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


# A tick is drained by ledger, not by message.


def calls_of_a_tick(messages_a_ledger, *, ledger_count=20):
    index = TopicDelayIndex(tick_time_ms=TICK)
    entry_ids = range(messages_a_ledger * 2)
    for ledger_id in range(1, ledger_count + 1):
        # Half of them are due now, half later.
        learn(index, ledger_id, entry_ids, [each % 2 * HOUR + 1 for each in entry_ids])
    view = attached_view(index, dict.fromkeys(range(1, ledger_count + 1), BitMap(entry_ids)))
    assert view.scheduled_messages(ALL, now_ms=0) == []
    found = []
    calls = calls_of(lambda: found.extend(view.scheduled_messages(ALL, now_ms=TICK)))
    assert found == [
        Position(ledger_id, entry_id) for ledger_id in range(1, ledger_count + 1) for entry_id in entry_ids[::2]
    ]
    assert len(index) == messages_a_ledger * ledger_count
    return calls


def test_a_tick_takes_a_few_calls_for_each_ledger_and_none_for_a_message():
    few, many = calls_of_a_tick(14), calls_of_a_tick(200)
    assert few <= 600, "for 280 messages in 20 ledgers"
    assert many <= few + 100, "for 4,000: more leaves, no more bitmaps"


# Messages that fall due are one bitmap for each ledger; each view is handed its own.


def test_what_one_of_two_views_is_handed_is_its_own():
    index = TopicDelayIndex(tick_time_ms=TICK)
    for ledger_id in (1, 2):
        learn(index, ledger_id, range(100), [1] * 100)
    unsent = dict.fromkeys((1, 2), BitMap(range(100)))
    one, other = (attached_view(index, unsent) for _ in range(2))
    assert len(one.scheduled_messages(ALL, now_ms=TICK)) == 200
    assert len(other.scheduled_messages(ALL, now_ms=TICK)) == 200


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
