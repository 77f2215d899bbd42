"""The contents of a report: its three terms, its answers, its bands, and its size."""

import pytest

from ackstate.analysis.estimate.results import SweepResult
from ackstate.analysis.report.contents import (
    causes,
    headline,
    is_resolved,
    is_sawtooth,
    main_subscriptions,
    slices_of,
    worst_subscriptions,
)
from ackstate.analysis.report.page import DATA_BYTES_MAX, answer, grids, render
from report_contents import BEGIN_MS, BETTER, DURATION_MS, contents, pulsar_result, row, saw, sweep_result  # fmt: skip


def test_the_worst_subscriptions_have_their_share_of_the_whole():
    result = sweep_result()
    first, second, *_ = main_subscriptions(result.reference, count_max=3)
    assert (first.name, round(first.number, 1)) == ("sub-0000", 1000.5)
    assert first.share == pytest.approx(2 * second.share)
    assert worst_subscriptions(result)[0] == (first.detail, first.name)
    assert main_subscriptions(sweep_result(duration_ms=0).policies[1], count_max=3) == []


def test_causes_that_never_apply_are_left_out():
    found = causes(sweep_result().reference)
    assert [each.name for each in found] == ["not yet flushed", "young", "cut by the range limit"]
    assert sum(each.share for each in found) == pytest.approx(1)
    assert causes(sweep_result(duration_ms=0).policies[0]) == []


def test_the_answer_has_the_gain_of_each_setting_its_lines_and_its_price():
    html = answer(contents(pulsar_result(better=BETTER)))
    for each in ("managedLedgerDefaultMarkDeleteRateLimit=5", "managedLedgerMaxUnackedRangesToPersist=50000"):
        assert each in html
    assert "--ml-mark-delete-max-rate 5 public/default" in html
    assert "update-dynamic-config --config dispatcherPauseOnAckStatePersistentEnabled" in html
    assert "read from broker.conf" in html
    assert "bytes/s" in html
    single = answer(contents(pulsar_result(better={"mark_delete_rate_limit": 5})))
    assert "5 times a second instead of once a second: saves 1,828 messages" in single


def test_warnings_are_on_the_first_screen():
    html = answer(contents(pulsar_result(current=3)))
    assert "The recording does not match the current policy" in html


def test_nothing_redelivered_and_no_duration_are_said():
    still = SweepResult.of_rows("t", [None], [row(0, "total")], crashes_per_day=1)
    assert headline(still) == (
        "Had the broker crashed, no acked message would have been redelivered, at any time (recorded)"
    )
    sudden = sweep_result(flushes=(), duration_ms=0)
    assert "The trace has no duration: had the broker crashed, at" in headline(sudden)


def test_many_teeth_are_a_band_between_exact_quantiles():
    smooth, rough = saw(0, ("", ""), 1_200), saw(0, ("", ""), 1_200, points=400)
    assert not is_sawtooth(smooth)
    assert is_sawtooth(rough)
    assert is_resolved(rough)
    whole = sweep_result().policies[0].total
    found = slices_of(rough, 16, whole)
    assert [each.begin_ms for each in found[:2]] == [BEGIN_MS, BEGIN_MS + DURATION_MS / 16]
    # Each tooth takes each of twelve values for the same time.
    assert all(480 <= each.p50 <= 620 and 1_000 <= each.p99 <= 1_101 for each in found)


def test_a_page_stays_small_whatever_it_shows():
    names = [(f"persistent://t/n/{'x' * 250}{number}", "y" * 200 + str(number)) for number in range(1_000)]
    told = contents(sweep_result(names, flushes=(60_000, 5_000)))
    page = render(told)
    assert len(page.encode()) < 600_000
    views = [view for grid in grids(told) for view in grid["views"]]
    assert sum(view["omitted"] for view in views) > 500
    assert page.count("x" * 250) < DATA_BYTES_MAX // 250 + 100


def test_the_page_allows_only_its_own_script_and_every_chart_has_its_numbers():
    page = render(contents())
    policy = page[page.index("Content-Security-Policy") :].partition('">')[0]
    assert "'unsafe-inline'" not in policy.partition("style-src")[0]
    assert page.count("<script") == 2
    assert page.count("<figure") == page.count("Numbers of this chart")
