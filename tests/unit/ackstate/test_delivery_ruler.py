from __future__ import annotations

import pytest

from ackstate import Position
from ackstate.delivery_ruler import MARKS_MAX, DeliveryRuler

P = Position


def test_the_story_of_pulsar_issue_19966():
    """Delivered 3:1 at 0 s, 4:1 at 2 s, 5:1 at 4 s, 6:1 at 5 s; an ack becomes old after 3 s."""
    ruler = DeliveryRuler(3_000)
    for second, position in [(0, "3:1"), (2, "4:1"), (4, "5:1"), (5, "6:1")]:
        ruler.record(P.parse(position), second * 1_000)
    assert (ruler.old_up_to(2_999), ruler.old_up_to(3_000)) == (None, P(3, 1))
    assert (ruler.old_up_to(5_000), ruler.old_up_to(6_999), ruler.old_up_to(7_000)) == (P(4, 1), P(4, 1), P(5, 1))
    assert ruler.times == [0, 2_000, 4_000, 5_000]


def test_an_answer_is_not_taken_back_when_its_mark_is_dropped():
    ruler = DeliveryRuler(2_560)
    for entry in range(MARKS_MAX):
        ruler.record(P(3, entry), entry)
    assert ruler.old_up_to(2_598) == P(3, 38)
    ruler.record(P(3, MARKS_MAX), MARKS_MAX)
    assert 38 not in ruler.times
    assert len(ruler.times) < 20
    assert ruler.old_up_to(2_598) == P(3, 38)
    assert ruler.old_up_to(1_000) is None, "by a clock that went back"
    assert ruler.old_up_to(2_598) == P(3, 38)
    ruler.set_back(100)
    assert ruler.old_up_to(2_498) == P(3, 38)
    ruler.clear()
    assert ruler.old_up_to(2_598) is None


def test_of_marks_that_are_old_the_last_one_stays():
    """An age of 128 ms has cells of 1 ms, so that only age drops a mark."""
    ruler = DeliveryRuler(128)
    for entry in range(MARKS_MAX + 1):
        ruler.record(P(3, entry), 2 * entry)
    newest_ms = 2 * MARKS_MAX
    assert ruler.times == list(range(newest_ms - 128, newest_ms + 1, 2))
    assert ruler.old_up_to(newest_ms) == P(3, MARKS_MAX - 64)


def test_a_refused_call_changes_nothing():
    ruler = DeliveryRuler(0)
    ruler.record(P(3, 5), 10)
    for refused, text in [
        (lambda: ruler.record(P(3, 6), 20.5), "20.5"),
        (lambda: ruler.record(P(3, 6), None), "None"),
        (lambda: ruler.record(P(3, 6), True), "True"),
    ]:
        with pytest.raises(TypeError, match=text):
            refused()
    assert ruler.old_up_to(20) == P(3, 5)


def test_huge_jumps_of_time_keep_to_the_bound():
    ruler = DeliveryRuler(1_000)
    times = sorted({sign * (2**power) + near for power in range(66) for near in (-3, -1, 0, 1, 5) for sign in (-1, 1)})
    assert len(times) > MARKS_MAX
    for entry, time in enumerate(times):
        ruler.record(P(3, entry), time)
        ruler._check()
    assert ruler.old_up_to(times[-1] + 1_000) == P(3, len(times) - 1)
