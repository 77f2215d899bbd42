"""Charts: round ticks with units, exact places, and text that stays text."""

import pytest

from ackstate.analysis.html_page import CALENDAR_END_MS, number_axis, seconds_axis, time_axis

BEGIN_MS = 1_700_000_000_000  # 2023-11-14 22:13:20 UTC


def test_an_axis_is_named_and_places_what_is_outside_at_its_ends():
    assert time_axis(BEGIN_MS, BEGIN_MS + 40).name == "time on 2023-11-14, UTC"
    assert time_axis(BEGIN_MS, BEGIN_MS + 6 * 86_400_000).name == "time from 2023-11-14 to 2023-11-20, UTC"
    assert time_axis(CALENDAR_END_MS, CALENDAR_END_MS + 10).name == "time, ms"
    assert (time_axis(-10, -10).share(-10), seconds_axis(3.9).high, len(seconds_axis(0).ticks) > 0) == (0, 3.9, True)
    axis = number_axis("bytes per second", [0.2, 31_000], is_log=True)
    assert axis.share(100) == pytest.approx(0.5)
    assert (axis.share(0), axis.share(10**9)) == (0, 1)
