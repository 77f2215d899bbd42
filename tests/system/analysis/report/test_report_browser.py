"""The report as a person sees it, in a headless Chromium: wide and narrow, light and dark, without a network."""

from __future__ import annotations

from itertools import combinations

import pytest
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.common.by import By

from ackstate.analysis.demo.report import render
from chromium import AXE, MISSING, Rectangle, barriers, emulate, luminance, requests
from demo_runs import NAMES, demo_run, killed_inside_persist, of_one_millisecond

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} in /usr/bin"),
]

DESKTOP, TELEPHONE = 1280, 390
LINES = "#curve .area path[class^=c]"
HOSTILE_NAMES = ("<script>alert(1)</script>", "</script>", "<a href='x:y'>z</a>")


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of some runs, of a width in pixels and a colour scheme."""

    def open_page(*runs, width=DESKTOP, scheme="light"):
        page = tmp_path / "report.html"
        page.write_text(render(runs), encoding="utf-8")
        emulate(browser, width=width, scheme=scheme)
        browser.get(page.as_uri())

    return open_page


def cells(browser, section):
    rows = browser.find_elements(By.CSS_SELECTOR, f"#{section} tbody tr")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]


def labels(browser):
    found = browser.execute_script(
        "return [...document.querySelectorAll('#curve :is(.x, .y, .key) :is(span, bdi), #curve :is(.note, .unit, h2)')]"
        ".filter(e => e.textContent && getComputedStyle(e).visibility !== 'hidden').map(e => "
        "{const r = e.getBoundingClientRect(); return [e.textContent, r.left, r.top, r.right, r.bottom]})"
    )
    return [Rectangle(*label) for label in found]


def style(browser, selector, name):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return browser.execute_script(script, selector, name)


def inside(run):
    """The run, killed inside each of its persists: the longest labels there are."""
    found = [killed_inside_persist(o, not_written=683, written=12, observed=12) for o in run.subscriptions]
    return type(run)(run.seed, run.kill, found, run.recoveries, run.curve, run.settings)


def test_the_tables_show_the_values(browser, show):
    runs = [demo_run(seed=2), demo_run(seed=3)]
    show(*runs)
    assert cells(browser, "outcomes") == [
        [str(n) for n in (o.name, o.acked, o.durable, o.predicted_at_kill, o.observed, o.lost, o.invented)]
        for o in runs[-1].subscriptions
    ]
    assert cells(browser, "runs")[0] == ["2", "3.90 s", "200 / 200", "211 / 211", "222 / 222", "equal"]
    verdict = browser.find_element(By.ID, "verdict").text
    assert verdict == "2 of 2 predictions equal to observation, 0 lost acks, 0 invented acks"


def test_the_plot_has_a_line_for_each_subscription_and_the_kill(browser, show):
    run = demo_run()
    show(run)
    lines = browser.find_elements(By.CSS_SELECTOR, LINES)
    assert len(lines) == len(NAMES)
    assert all(line.size["width"] > 400 and line.size["height"] > 60 for line in lines)
    texts = [label.text for label in labels(browser)]
    assert texts.count("SIGKILL") == 1
    assert len(browser.find_elements(By.CSS_SELECTOR, "#curve .area .alarm")) == len(NAMES)
    assert [text for text in texts if text in NAMES] == list(NAMES)
    for found in run.subscriptions:
        assert f"predicted {found.predicted_at_kill}observed {found.observed}" in texts


def test_the_kill_is_where_the_lines_end(browser, show):
    show(demo_run())
    kill = browser.find_element(By.CSS_SELECTOR, "#curve .area .alarm").rect
    for line in browser.find_elements(By.CSS_SELECTOR, LINES):
        assert line.rect["x"] + line.rect["width"] == pytest.approx(kill["x"] + kill["width"] / 2, abs=2)


RUNS = {
    "usual": demo_run(), "inside-persist": inside(demo_run()), "one-millisecond": of_one_millisecond(demo_run()),
    "names": inside(demo_run(["x" * 200, *HOSTILE_NAMES])),
}  # fmt: skip


def cases():
    for name, run in RUNS.items():
        yield pytest.param(run, TELEPHONE, id=f"{name} on a telephone")
        # The wide layout is the same for every run.
        marks = () if name == "usual" else pytest.mark.soak
        yield pytest.param(run, DESKTOP, id=f"{name} on a desktop", marks=marks)


@pytest.mark.parametrize(("run", "width"), list(cases()))
def test_nothing_overlaps_sticks_out_or_complains(browser, show, run, width):
    show(run, run, width=width)
    found = labels(browser)
    assert [(a.text, b.text) for a, b in combinations(found, 2) if a.overlaps(b)] == []
    assert [label.text for label in found if label.left < 0 or label.right > width] == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert browser.get_log("browser") == []


def test_the_page_makes_no_request(browser, show):
    show(demo_run())
    assert requests(browser) == [browser.current_url]


def test_hostile_names_open_no_dialog_and_are_read_as_they_are(browser, show):
    show(demo_run(HOSTILE_NAMES))
    with pytest.raises(NoAlertPresentException):
        browser.switch_to.alert  # noqa: B018 - the look for it raises
    assert [row[0] for row in cells(browser, "outcomes")] == list(HOSTILE_NAMES)
    texts = [label.text for label in labels(browser)]
    assert {"<script>alert(1)</scrip…", *HOSTILE_NAMES[1:]} < set(texts)
    assert browser.find_elements(By.CSS_SELECTOR, "#curve a, script") == []
    assert browser.get_log("browser") == []


def test_the_page_and_its_plot_follow_the_colour_scheme(browser, show):
    paper, ink = {}, {}
    for scheme in ("light", "dark"):
        show(demo_run(), scheme=scheme)
        paper[scheme] = luminance(style(browser, "body", "backgroundColor"))
        ink[scheme] = [
            luminance(style(browser, "body", "color")),
            luminance(style(browser, "#curve .note", "color")),
        ]
        # Small text has less contrast, but enough: axe-core examines it.
        soft = luminance(style(browser, "#curve .x span", "color"))
        assert soft < 0.4 if scheme == "light" else soft > 0.6
        assert style(browser, "#curve .area", "backgroundColor") == "rgba(0, 0, 0, 0)"
    assert paper["light"] > 0.9
    assert paper["dark"] < 0.15
    assert max(ink["light"]) < 0.2
    assert min(ink["dark"]) > 0.8


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: .ci/setup browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(browser, show, scheme):
    show(inside(demo_run()), demo_run(seed=9), scheme=scheme)
    assert barriers(browser) == []
