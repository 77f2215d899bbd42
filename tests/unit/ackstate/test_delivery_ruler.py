from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import Position
from ackstate.delivery_ruler import DeliveryRuler

P = Position
SECOND_MS = 1000


def is_old(ruler, position, *, age_ms, now_ms):
    old_up_to = ruler.old_up_to(age_ms, now_ms)
    return old_up_to is not None and position <= old_up_to


def test_the_story_of_pulsar_issue_19966():
    """Delivered 3:1 at 0 s, 4:1 at 2 s, 5:1 at 4 s, 6:1 at 5 s; an ack becomes old after 3 s."""
    ruler = DeliveryRuler()
    for second, position in [(0, "3:1"), (2, "4:1"), (4, "5:1"), (5, "6:1")]:
        ruler.record(P.parse(position), second * SECOND_MS)
    assert not is_old(ruler, P.parse("5:20"), age_ms=3 * SECOND_MS, now_ms=5 * SECOND_MS)
    assert is_old(ruler, P.parse("1:1"), age_ms=3 * SECOND_MS, now_ms=6 * SECOND_MS)
    assert ruler.mark_count == 4


def test_an_answer_is_not_taken_back_when_its_mark_is_dropped():
    """The 32 ages asked for last are remembered: with the clock where it was, each still has its answer."""
    ruler = DeliveryRuler(marks_max=128)
    for entry in range(129):
        ruler.record(P(3, entry), entry)
    ruler.clear()
    for entry in range(128):
        ruler.record(P(3, entry), entry)
    ages = range(60, 92)
    answers = [ruler.old_up_to(age, 127) for age in ages]
    assert answers == [P(3, 127 - age) for age in ages]
    ruler.record(P(3, 128), 128)
    assert ruler.mark_count < 100
    assert [ruler.old_up_to(age, 127) for age in ages] == answers
    fresh = DeliveryRuler(marks_max=128)
    for entry in range(129):
        fresh.record(P(3, entry), entry)
    assert [fresh.old_up_to(age, 127) for age in ages] != answers


@pytest.mark.parametrize("marks_max", [127, 0, -1])
def test_too_few_marks_are_refused(marks_max):
    with pytest.raises(ValueError, match=str(marks_max)):
        DeliveryRuler(marks_max=marks_max)


def test_a_refused_call_changes_nothing():
    ruler = DeliveryRuler()
    ruler.record(P(3, 5), 10)
    for refused, error, text in [
        (lambda: ruler.record(P(3, 2**32), 20), ValueError, str(2**32)),
        (lambda: ruler.record(P(-1, 0), 20), ValueError, "-1"),
        (lambda: ruler.record(P(3, 6.5), 20), TypeError, "6.5"),
        (lambda: ruler.record(P(3, 6), 20.5), TypeError, "20.5"),
        (lambda: ruler.record(P(3, 6), None), TypeError, "None"),
        (lambda: ruler.old_up_to(-1, 20), ValueError, "-1"),
        (lambda: ruler.old_up_to(1.5, 20), TypeError, "1.5"),
        (lambda: ruler.old_up_to(1, "20"), TypeError, "'20'"),
        (lambda: DeliveryRuler(marks_max=128.0), TypeError, "128.0"),
    ]:
        with pytest.raises(error, match=text):
            refused()
    assert ruler.mark_count == 1
    assert ruler.old_up_to(0, 20) == P(3, 5)


# Bursts of records, each some ms after the one before.
@pytest.mark.parametrize("marks_max", [128, 256])
def test_huge_jumps_of_time_keep_to_the_bound(marks_max):
    ruler = DeliveryRuler(marks_max=marks_max)
    times = sorted({sign * (2**power) + near for power in range(66) for near in (-3, -1, 0, 1, 5) for sign in (-1, 1)})
    assert len(times) > marks_max
    for entry, time in enumerate(times):
        ruler.record(P(3, entry), time)
        assert ruler.mark_count <= marks_max
        assert ruler.old_up_to(0, time) == P(3, entry)
        ruler._check()


def test_what_was_old_after_the_clock_went_back_stays_old_when_its_mark_is_dropped():
    ruler = DeliveryRuler(marks_max=128)
    for entry_id in range(40):
        ruler.record(Position(3, entry_id), 100 * (entry_id + 1))
    assert ruler.old_up_to(1_000_000, now_ms=1_004_000) == Position(3, 39)
    assert ruler.old_up_to(1_000_000, now_ms=1_003_000) == Position(3, 29)
    for entry_id in range(89):
        ruler.record(Position(3, 40 + entry_id), 1_003_001 + entry_id)
    assert ruler.old_up_to(1_000_000, now_ms=1_003_089) == Position(3, 29)
    assert ruler.old_up_to(1_000_000, now_ms=1_004_000) == Position(3, 39)


STEPS = st.lists(
    st.tuples(st.sampled_from((0, 0, 1, 1, 3, 40, 5_000)), st.sampled_from((1, 1, 2, 9)), st.integers(1, 200)),
    min_size=1, max_size=12,
)  # fmt: skip


def assert_many_are_as_each(steps, sizes):
    positions, times, now_ms, entry = [], [], 0, 0
    for wait_ms, entries, count in steps:
        for _ in range(count):
            now_ms, entry = now_ms + max(wait_ms, 1), entry + entries
            positions.append(Position(3, entry))
            times.append(now_ms)
    one, many, begin = DeliveryRuler(marks_max=128), DeliveryRuler(marks_max=128), 0
    for size in [*sizes, len(times)]:
        # The last of before comes again, at a time that is over.
        part = slice(max(begin - 1, 0), begin + size)
        repeated = [time - 1 for time in times[part][:1]] + times[part][1:]
        for position, time in zip(positions[part], repeated, strict=True):
            one.record(position, time)
        many.record_many(positions[part], repeated)
        assert (one.marks(), one.room) == (many.marks(), many.room)
        begin += size


RULER_SIZES = st.lists(st.integers(0, 300), max_size=6)
test_many_records_are_as_each_of_them = given(STEPS, RULER_SIZES)(assert_many_are_as_each)
