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
    Tick,
    number_axis,
    seconds_axis,
    tick_label,
    time_axis,
)

BEGIN_MS = 1_700_000_000_000  # 2023-11-14 22:13:20 UTC
X, Y = seconds_axis(4), number_axis("messages", [800])


def labels(axis):
    return [tick.label for tick in axis.ticks]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([22_623], ["0", "10 k", "20 k", "30 k"]),
        ([4_819], ["0", "2,000", "4,000", "6,000"]),
        ([1], ["0", "0.5", "1"]),
        ([0.012], ["0", "0.005", "0.01", "0.015"]),
        ([], ["0", "0.5", "1"]),
        ([0], ["0", "0.5", "1"]),
        ([3_100_000], ["0", "1 M", "2 M", "3 M", "4 M"]),
    ],
)
def test_ticks_of_numbers_are_round_and_reach_the_highest(numbers, expected):
    axis = number_axis("messages", numbers)
    assert labels(axis) == expected
    assert axis.ticks[-1].value == axis.high >= max(numbers, default=0)
    assert axis.name == "messages"


def test_a_logarithmic_axis_has_powers_of_ten():
    axis = number_axis("bytes per second", [0.2, 31_000], is_log=True)
    assert labels(axis) == ["0.1", "10", "1,000", "100 k"]
    assert axis.share(100) == pytest.approx(0.5)
    assert (axis.share(0), axis.share(10**9)) == (0, 1)
    assert labels(number_axis("x", [10], is_log=True)) == ["10", "100"]


@pytest.mark.parametrize(
    ("length_ms", "expected", "name"),
    [
        (290_000, ["22:14", "22:16", "22:18"], "time on 2023-11-14, UTC"),
        (4_000, ["22:13:20", "22:13:21", "22:13:22", "22:13:23", "22:13:24"], "time on 2023-11-14, UTC"),
        (40, ["13:20.000", "13:20.010", "13:20.020", "13:20.030", "13:20.040"], "time on 2023-11-14, UTC"),
        (6 * 86_400_000, ["Nov 15", "Nov 17", "Nov 19"], "time from 2023-11-14 to 2023-11-20, UTC"),
    ],
)
def test_ticks_of_times_are_round_instants_in_utc(length_ms, expected, name):
    axis = time_axis(BEGIN_MS, BEGIN_MS + length_ms)
    assert labels(axis) == expected
    assert axis.name == name
    assert all(axis.low <= tick.value <= axis.high for tick in axis.ticks)


def test_times_outside_the_calendar_are_plain_milliseconds():
    axis = time_axis(CALENDAR_END_MS, CALENDAR_END_MS + 10)
    assert axis.name == "time, ms"
    assert all(tick.label.replace(",", "").isdigit() for tick in axis.ticks)
    assert time_axis(-10, -10).share(-10) == 0


def test_seconds_end_where_the_run_ends():
    axis = seconds_axis(3.9)
    assert (axis.high, labels(axis)) == (3.9, ["0", "1", "2", "3"])
    assert labels(seconds_axis(0)) != []


@pytest.mark.parametrize(("value", "label"), [(9_999, "9,999"), (10_000, "10 k"), (1e6, "1 M"), (2.5e9, "2.5 G")])
def test_large_numbers_have_a_unit(value, label):
    assert tick_label(value) == label


def test_a_line_holds_its_value_and_an_area_is_closed():
    html = Chart(X, Y, [Line("a", [(0, 0), (1, 800), (1, 400), (4, 400)]), Band("b", [(0, 0, 400), (4, 0, 800)])],
                 "s").html()  # fmt: skip
    assert 'd="M0 1000H500V0V500H2000"' in html
    assert 'd="M0 500L2000 0L2000 1000L0 1000Z"' in html
    stepped = Chart(X, Y, [Band("b", [(0, 0, 400), (4, 0, 800)], is_stepped=True)], "s").html()
    assert 'd="M0 500L2000 500L2000 0L2000 1000L2000 1000L0 1000Z"' in stepped


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
    assert Tick(1, "a").label == "a"
