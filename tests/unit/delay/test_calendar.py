"""What `test_calendar_model` cannot show of the calendar: large numbers, bounded work, and memory."""

import gc
import tracemalloc

import numpy as np
import pytest

from ackstate import Position
from ackstate.delay import index as calendar_module
from ackstate.delay.index import Calendar
from ackstate.position_set import PositionSet

TIME_MAX = 2**63 - 1
ERA_MS = 2**24  # 4 h 39 min 37 s: the most by which the times of a leaf may differ
HOUR = 3_600_000
YEAR = 365 * 24 * HOUR


def taken(calendar, now_ms):
    return list(zip(*(column.tolist() for column in calendar.take_until(now_ms)), strict=True))


def array_of(numbers):
    return np.array(numbers, dtype=np.int64)


# Eras: the times of a leaf differ by less than 4 h 40 min, those of a calendar by anything.


@pytest.mark.parametrize(
    "times",
    [
        [0, ERA_MS - 1, ERA_MS, ERA_MS + 1, 2 * ERA_MS],
        [5 * HOUR, 10 * HOUR, 15 * HOUR],
        [0, YEAR, 50 * YEAR],
        [0, 1, TIME_MAX - 1, TIME_MAX],
    ],
)
@pytest.mark.parametrize("repeats", [1, 2_000])
def test_times_may_be_hours_years_and_all_of_time_apart(times, repeats):
    one_by_one, together = Calendar(), Calendar()
    messages = [(due_ms, entry_id) for entry_id in range(repeats) for due_ms in reversed(times)]
    for due_ms, entry_id in messages:
        one_by_one.add(Position(3, entry_id), due_ms)
    together.add_many(3, array_of([entry_id for _, entry_id in messages]), array_of([each for each, _ in messages]))
    for calendar in (one_by_one, together):
        calendar._check()
        for due_ms in times:
            assert calendar.first_due_ms == due_ms
            assert taken(calendar, due_ms - 1) == []
            assert taken(calendar, due_ms) == [(due_ms, 3, entry_id) for entry_id in range(repeats)]
        assert len(calendar) == 0


# Pages: where 2**16 entries of a ledger stand in a table.


def test_pages_are_used_again_once_nothing_is_on_them():
    """A ledger a minute for a year, of which a thousand wait at a time, besides one message for the end of time."""
    calendar = Calendar()
    calendar.add(Position(1, 5), TIME_MAX)
    for ledger_id in range(2, 20_000):
        calendar.add(Position(ledger_id, 0), ledger_id)
        if ledger_id % 1_000 == 0:
            assert len(calendar.take_until(ledger_id - 1_000).entry_ids) in {0, 999, 1_000}
    calendar._check()
    assert len(calendar._pages._highs) <= 8 * 1_024, "not 20,000"
    calendar.take_until(20_000)
    assert taken(calendar, TIME_MAX) == [(TIME_MAX, 1, 5)]
    assert len(calendar._pages._highs) == 0, "nor one that nothing is on once all is taken"


def test_one_page_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(calendar_module, "PAGE_BITS", 2)
    calendar = Calendar()
    many = array_of(range(4_096)), array_of([10] * 4_096)  # Fewer are gathered first.
    for ledger_id in range(4):
        calendar.add_many(ledger_id, *many)
    with pytest.raises(OverflowError, match="on 4 pages"):
        calendar.add_many(9, *many)


# Memory.


def test_what_need_not_be_kept_goes_once_it_is_the_greater_part():
    calendar, kept = Calendar(), PositionSet()
    calendar.add_many(3, np.arange(12_000), np.arange(12_000))
    calendar.add(Position(4, 0), TIME_MAX)
    kept.update_entries(3, range(3_900))
    calendar.keep_only(kept)
    assert len(calendar) == 3_900


def measured_bytes(calendar_of):
    # What is set up at the first use is not the calendar's.
    calendar_of()
    gc.collect()
    tracemalloc.start()
    try:
        calendar = calendar_of()
        gc.collect()
        return len(calendar), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def uniform(count, *, ledger_count):
    """In steps, as they are read: `count` messages that are due within an hour, uniformly."""
    calendar = Calendar()
    times = np.random.default_rng(5).integers(1, HOUR, count)
    entries_each = count // ledger_count
    for ledger_id in range(ledger_count):
        first = ledger_id * entries_each
        calendar.add_many(ledger_id, np.arange(entries_each), times[first : first + entries_each])
    return calendar


def one_by_one(count, *, ledger_count=1):
    calendar = Calendar()
    times = np.random.default_rng(5).integers(1, HOUR, count).tolist()
    for each, due_ms in enumerate(times):
        calendar.add(Position(3 + each % ledger_count, each // ledger_count), due_ms)
    return calendar


def each_in_its_own_era(count):
    calendar = Calendar()
    for entry_id in range(count):
        calendar.add(Position(3, entry_id), entry_id * ERA_MS)
    calendar._check()
    return calendar


def half_taken(calendar):
    calendar.take_until(HOUR // 2)
    return calendar


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calendar_of", "count", "bytes_each_max"),
    [
        (lambda: one_by_one(3_000), 3_000, 40),
        (lambda: one_by_one(30_000, ledger_count=30_000), 30_000, 140),
        pytest.param(lambda: uniform(1_000_000, ledger_count=100), 1_000_000, 10, marks=pytest.mark.soak),
        (lambda: each_in_its_own_era(5_000), 5_000, 300),
        pytest.param(lambda: half_taken(uniform(1_000_000, ledger_count=100)), 500_000, 12, marks=pytest.mark.soak),
    ],
    ids=["3,000", "one a ledger", "1,000,000", "far apart", "half of 1,000,000"],
)
def test_a_message_takes_few_bytes(calendar_of, count, bytes_each_max):
    found, measured = measured_bytes(calendar_of)
    assert abs(found - count) <= count // 20
    assert measured <= bytes_each_max * count
