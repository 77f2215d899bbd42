"""The report as a person sees it, in a headless Chromium: values, sorting, filtering, widths, colours, hostile text."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ackstate.analysis.html_page import printable
from ackstate.analysis.report.contents import headline
from ackstate.analysis.report.inputs import ReportInputs
from ackstate.analysis.report.page import render
from chromium import MISSING, Rectangle, emulate, luminance, requests
from report_contents import contents, sweep_result, usual_names

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} in /usr/bin"),
]

DESKTOP, WIDE, TELEPHONE = 1280, 1920, 360
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<b>%{y}</b>&amp;<a href='javascript:alert(3)'>z</a>",
    "abc" + chr(0x202E) + "gpj" + chr(10) + chr(0),
    "x" * 300,
)


@pytest.fixture
def show(browser, tmp_path):
    def open_page(told, *, width=DESKTOP, scheme="light"):
        page = tmp_path / "report.html"
        page.write_text(render(told), encoding="utf-8")
        emulate(browser, width=width, scheme=scheme)
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.dataset.ready") == "true"

    return open_page


def cells(browser, grid):
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return browser.execute_script(script, grid)


def number(text):
    return None if text == "-" else float(text.replace(",", ""))


def head(browser, grid, label):
    heads = browser.find_elements(By.CSS_SELECTOR, f"#{grid} th")
    return next(each for each in heads if each.text.startswith(label))


def sorts(browser, grid):
    heads = browser.find_elements(By.CSS_SELECTOR, f"#{grid} th[aria-sort]")
    return [(each.text, each.get_attribute("aria-sort")) for each in heads]


def labels(browser, plot):
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} text`)].filter(e => e.textContent).map(e => "
        "{const r = e.getBoundingClientRect(); return [e.textContent, r.left, r.top, r.right, r.bottom]})"
    )
    return [Rectangle(*each) for each in browser.execute_script(script, plot)]


def test_every_cell_is_the_jsons_and_so_is_the_headline(browser, show):
    told = contents()
    show(told)
    found = json.loads(json.dumps(told.result.to_json()))["policies"]
    expected = [each for each in found[0]["estimates"] if each["scope"] == "subscription"]
    rows = {(row[0], row[1]): row[2:] for row in cells(browser, "estimates")}
    assert len(rows) == len(expected) == 5
    for each in expected:
        *before, at, per_day, writes, written, kept = rows[each["subscription"], each["topic"]]
        assert [number(text) for text in before] == [
            pytest.approx(each[name], abs=0.0501) for name in ("expected", "p50", "p90", "p99", "max")
        ]
        assert at == "2023-11-14 22:20:00.000"
        assert number(per_day) == pytest.approx(each["duplicates_per_day"], abs=0.0501)
        names = ("write_count", "bytes_written", "bytes_kept")
        assert [number(text) for text in (writes, written, kept)] == [each[name] for name in names]
    totals = {each["label"]: each["estimates"][0] for each in found}
    policies = {row[0]: row[1:] for row in cells(browser, "all-policies")}
    assert policies.keys() == totals.keys()
    for label, total in totals.items():
        assert number(policies[label][0]) == pytest.approx(total["expected"], abs=0.0501)
        assert number(policies[label][2]) == total["max"]
    assert browser.find_element(By.ID, "headline").text == f"{headline(told.result)}."
    assert "2,284 acked messages would be redelivered; at the worst, 4,112 at" in headline(told.result)
    assert "flush every 5 s instead of 60 s" in browser.find_element(By.ID, "recommendation").text
    assert browser.find_element(By.CSS_SELECTOR, "#all-policies tr.picked").text.startswith("flush_interval_ms=5000")


def test_other_scopes_and_the_recommended_policy_can_be_chosen(browser, show):
    show(contents())
    options = browser.find_elements(By.CSS_SELECTOR, "#estimates option")
    named = {each.get_property("textContent"): each for each in options}
    named["topics, flush_interval_ms=5000"].click()
    assert [row[0] for row in cells(browser, "estimates")] == ["(all)"] * 3
    named["all at once, recorded"].click()
    assert [row[2] for row in cells(browser, "estimates")] == ["2,284.5"]


def test_thousands_of_rows_sort_and_filter_by_mouse_and_keyboard(browser, show):
    show(contents(sweep_result(usual_names(3_000), flushes=(60_000,)), inputs=ReportInputs()))
    assert len(cells(browser, "estimates")) == 50
    assert sorts(browser, "estimates") == [("expected", "descending")]
    head(browser, "estimates", "subscription").find_element(By.TAG_NAME, "button").click()
    assert sorts(browser, "estimates") == [("subscription", "ascending")]
    assert cells(browser, "estimates")[0][0] == "sub-0000"
    head(browser, "estimates", "subscription").find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert sorts(browser, "estimates") == [("subscription", "descending")]
    assert cells(browser, "estimates")[0][0] == "sub-2999"
    status = browser.find_element(By.CSS_SELECTOR, "#estimates .status")
    assert status.text == "1 to 50 of 3,000"
    browser.find_element(By.XPATH, "//*[@id='estimates']//button[.='Next']").send_keys(Keys.SPACE)
    assert (status.text, cells(browser, "estimates")[0][0]) == ("51 to 100 of 3,000", "sub-2949")
    search = browser.find_element(By.CSS_SELECTOR, "#estimates input[type=search]")
    search.send_keys("SUB-12 orders-1")
    assert {row[0][:6] for row in cells(browser, "estimates")} == {"sub-12"}
    assert {row[1][-8:] for row in cells(browser, "estimates")} == {"orders-1"}
    search.send_keys(" nowhere")
    assert (status.text, cells(browser, "estimates")) == ("Nothing fits the filter", [])


@pytest.mark.parametrize("width", [TELEPHONE, DESKTOP, pytest.param(WIDE, marks=pytest.mark.soak)])
def test_nothing_sticks_out_overlaps_or_complains(browser, show, width):
    show(contents(), width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert browser.get_log("browser") == []
    assert requests(browser) == [browser.current_url]
    for plot in ("total", "worst", "causes", "prices", "calibrated", "runs-plot"):
        found = labels(browser, plot)
        assert len(found) > 3
        assert [(a.text, b.text) for a, b in combinations(found, 2) if a.overlaps(b)] == []
        assert [each.text for each in found if each.left < 0 or each.right > width] == []
        inside = browser.find_element(By.ID, plot).rect
        top = inside["y"] - browser.execute_script("return scrollY")
        assert [each.text for each in found if each.top < top - 2 or each.bottom > top + inside["height"] + 2] == []


def test_page_and_plots_follow_the_colour_scheme(browser, show):
    ink = {}
    for scheme in ("light", "dark"):
        show(contents(), scheme=scheme)
        script = (
            "const of = (s, n) => getComputedStyle(document.querySelector(s))[n];"
            "return [of('body', 'backgroundColor'), of('body', 'color'), of('#total [class$=tick] text', 'fill'),"
            " of('#total .main-svg', 'backgroundColor')]"
        )
        *colours, plot_paper = browser.execute_script(script)
        assert plot_paper == "rgba(0, 0, 0, 0)"
        ink[scheme] = [luminance(each) for each in colours]
    assert ink["light"][0] > 0.9
    assert ink["dark"][0] < 0.15
    assert max(ink["light"][1:]) < 0.2
    assert min(ink["dark"][1:]) > 0.8


def test_hostile_names_are_read_as_they_are_and_do_nothing(browser, show):
    names = [(topic, name) for topic, name in zip(HOSTILE, reversed(HOSTILE), strict=True)]
    show(contents(sweep_result(names, trace="traces/<b>" + chr(0x202E))), width=TELEPHONE)
    with pytest.raises(NoAlertPresentException):
        browser.switch_to.alert  # noqa: B018 - looking for it is what raises
    shown = {(row[1], row[0]) for row in cells(browser, "estimates")}
    assert shown == {(printable(topic), printable(name)) for topic, name in names}
    legend = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "figure:has(#worst) .legend bdi")]
    assert printable(names[0][1]) in legend[0]
    assert browser.find_elements(By.CSS_SELECTOR, ".plot a, img, [onerror]") == []
    body = browser.find_element(By.TAG_NAME, "body").get_property("textContent")
    assert chr(0x202E) not in body.replace(browser.execute_script("return document.scripts[0].text"), "")
    assert browser.execute_script("return document.documentElement.scrollWidth") == TELEPHONE
    assert browser.get_log("browser") == []


def test_a_line_is_hidden_and_time_is_zoomed_by_buttons(browser, show):
    show(contents())
    script = "return document.getElementById('total').layout.xaxis.range.map(end => +new Date(end))"
    begin, end = browser.execute_script(script)
    figure = browser.find_element(By.CSS_SELECTOR, "figure:has(#total)")
    buttons = {each.text: each for each in figure.find_elements(By.TAG_NAME, "button")}
    buttons["Closer"].send_keys(Keys.ENTER)
    closer_begin, closer_end = browser.execute_script(script)
    assert closer_end - closer_begin == pytest.approx((end - begin) / 2, rel=0.01)
    buttons["recorded"].click()
    assert buttons["recorded"].get_attribute("aria-pressed") == "false"
    # The other policy, and the crashes.
    assert len(browser.find_elements(By.CSS_SELECTOR, "#total .scatterlayer .trace")) == 2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (contents(sweep_result(usual_names(1), flushes=()), crashes=(), inputs=ReportInputs()),
         ["No process died", "No other policy was compared", "No calibration was given", "No recorded runs"]),
        (contents(sweep_result(usual_names(1), flushes=(), duration_ms=0), duration_ms=0, inputs=ReportInputs()),
         ["The trace has no duration: had the broker died at", "there is no mean"]),
    ],
    ids=["one-subscription", "one-millisecond"],
)  # fmt: skip
def test_what_is_not_there_is_said_in_words(browser, show, told, said):
    show(told)
    text = browser.find_element(By.TAG_NAME, "body").text
    assert [each for each in said if each not in text] == []
    assert len(cells(browser, "estimates")) == 1
    assert browser.get_log("browser") == []


def test_a_sweep_that_recommends_nothing_still_shows_its_policies(browser, show):
    dearer = sweep_result(flushes=(90_000, 120_000)).compared_with("recorded")
    assert dearer.recommended is None
    show(contents(dearer))
    assert len(cells(browser, "all-policies")) == 3
    legend = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "figure:has(#prices) .legend bdi")]
    assert "recommended" not in legend
    assert browser.get_log("browser") == []
