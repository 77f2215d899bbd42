"""Charts: round ticks with units, exact places, and text that stays text."""

from __future__ import annotations

import re

import pytest

from ackstate.analysis.chart import (
    CALENDAR_END_MS,
    Band,
    Chart,
    Instants,
    Line,
    Marks,
    number_axis,
    seconds_axis,
    time_axis,
)

BEGIN_MS = 1_700_000_000_000  # 2023-11-14 22:13:20 UTC
X, Y = seconds_axis(4), number_axis("messages", [800])


@pytest.mark.parametrize(("axis", "expected"), [
    *((number_axis("messages", numbers), ticks) for numbers, ticks in (
        ([22_623], ["0", "10 k", "20 k", "30 k"]), ([4_819], ["0", "2,000", "4,000", "6,000"]),
        ([1], ["0", "0.5", "1"]), ([0.012], ["0", "0.005", "0.01", "0.015"]), ([], ["0", "0.5", "1"]),
        ([0], ["0", "0.5", "1"]), ([3_100_000], ["0", "1 M", "2 M", "3 M", "4 M"]),
    )),
    (number_axis("messages", [0.2, 31_000], is_log=True), ["0.1", "10", "1,000", "100 k"]),
    (number_axis("messages", [10], is_log=True), ["10", "100"]),
    *((time_axis(BEGIN_MS, BEGIN_MS + length_ms), ticks) for length_ms, ticks in (
        (290_000, ["22:14", "22:16", "22:18"]), (4_000, [f"22:13:{second}" for second in range(20, 25)]),
        (40, [f"13:20.0{ms}0" for ms in range(5)]), (6 * 86_400_000, ["Nov 15", "Nov 17", "Nov 19"]),
    )),
    (time_axis(CALENDAR_END_MS, CALENDAR_END_MS + 4), [f"{CALENDAR_END_MS + ms:,}" for ms in range(5)]),
    (seconds_axis(3.9), ["0", "1", "2", "3"]),
])  # fmt: skip
def test_ticks_are_round_and_inside(axis, expected):
    assert [tick.label for tick in axis.ticks] == expected
    assert all(axis.low <= tick.value <= axis.high for tick in axis.ticks)
    if axis.name == "messages":
        assert axis.ticks[-1].value == axis.high


def test_an_axis_is_named_and_places_what_is_outside_at_its_ends():
    assert time_axis(BEGIN_MS, BEGIN_MS + 40).name == "time on 2023-11-14, UTC"
    assert time_axis(BEGIN_MS, BEGIN_MS + 6 * 86_400_000).name == "time from 2023-11-14 to 2023-11-20, UTC"
    assert time_axis(CALENDAR_END_MS, CALENDAR_END_MS + 10).name == "time, ms"
    assert (time_axis(-10, -10).share(-10), seconds_axis(3.9).high, len(seconds_axis(0).ticks) > 0) == (0, 3.9, True)
    axis = number_axis("bytes per second", [0.2, 31_000], is_log=True)
    assert axis.share(100) == pytest.approx(0.5)
    assert (axis.share(0), axis.share(10**9)) == (0, 1)


def test_a_line_holds_its_value_and_an_area_is_closed():
    html = Chart(X, Y, [Line("a", [(0, 0), (1, 800), (1, 400), (4, 400)]), Band("b", [(0, 0, 400), (4, 0, 800)])],
                 "s").html()  # fmt: skip
    assert 'd="M0 1000H500V0V500H2000"' in html
    assert 'd="M0 500L2000 500L2000 0L2000 1000L2000 1000L0 1000Z"' in html


def test_marks_and_instants_are_at_their_values():
    html = Chart(X, Y, [Marks("m", [(2, 400, "<two>")], "○", 1), Instants("died", [1, 3])], "s").html()
    assert 'title="&lt;two&gt;" style="left:50.00%;bottom:50.00%">○</i>' in html
    assert 'd="M500 0V1000M1500 0V1000"' in html


def test_axes_have_their_units_and_each_tick_its_place():
    html = Chart(X, Y, [], "the <summary>").html()
    assert 'aria-label="the &lt;summary&gt;"' in html
    assert '<div class="unit">messages</div>' in html
    assert '<div class="x-name">seconds since the first event</div>' in html
    assert re.findall(r"bottom:([\d.]+)%\">([\d,]+)<", html) == [
        ("0.00", "0"), ("25.00", "200"), ("50.00", "400"), ("75.00", "600"), ("100.00", "800"),
    ]  # fmt: skip
    assert html.count('class="grid-line"') == 4


def test_the_key_names_layers_and_leaves_out_those_without_a_name():
    layers = [Line("<a>", [(0, 0)]), Line("", [(0, 0)]), Band("b", []), Marks("c", [], "✕"), Instants("d", [])]
    html = Chart(X, Y, layers, "s").html()
    assert re.findall(r"<bdi>(.*?)</bdi>", html) == ["&lt;a&gt;", "b", "c", "d"]
    assert "<ul" not in Chart(X, Y, layers, "s").html(has_key=False)
