"""The report as a person sees it, in a headless Chromium: values, sorting, filtering, widths, colours, hostile text."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ackstate.analysis.report.contents import headline, short_name
from ackstate.analysis.report.page import render
from ackstate.analysis.wording import printable
from report_contents import contents, sweep_result, usual_names

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
MISSING = [path.name for path in (CHROMIUM, DRIVER) if not path.exists()]

# Fetched by `.ci/setup browser`.
AXE = Path(sys.prefix) / "share" / "ackstate" / "axe" / "axe.min.js"

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip


class Rectangle(NamedTuple):
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other):
        # Boxes reach a little beyond the ink.
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 2 and down > 2


def emulate(browser, *, width, scheme, height=900):
    """Set the size in pixels and the colour scheme, and forget earlier log entries."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)


def requests(browser):
    """The addresses that the page asked for, itself among them."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and not message["params"]["documentURL"].startswith("chrome:")
    ]


def luminance(colour):
    """Brightness of a colour that the browser writes as rgb(r, g, b), from 0 to 1."""
    red, green, blue = (int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def barriers(browser):
    """The violations that axe-core finds, each with the elements concerned; all of its rules apply."""
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    script = "const done = arguments[0]; axe.run().then((found) => done(found.violations))"
    found = browser.execute_async_script(script)
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]


pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} in /usr/bin"),
]

DESKTOP, WIDE, TELEPHONE, SMALL_TELEPHONE = 1280, 1920, 390, 360
CHARTS = ("total", "worst", "causes", "prices")
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<b>%{y}</b>&amp;<a href='javascript:alert(3)'>z</a>",
    "abc" + chr(0x202E) + "gpj" + chr(10) + chr(0),
    "x" * 300,
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in (*_OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser, tmp_path):
    def open_page(told, *, width=DESKTOP, height=800, scheme="light"):
        page = tmp_path / "report.html"
        page.write_text(render(told), encoding="utf-8")
        emulate(browser, width=width, height=height, scheme=scheme)
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


def labels(browser, chart):
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} .chart`)].map(chart => "
        "[...chart.querySelectorAll(':is(.x, .y) span, .unit, .x-name, .note')].map(e => "
        "{const r = e.getBoundingClientRect(); return [e.textContent, r.left, r.top, r.right, r.bottom]}))"
    )
    return [[Rectangle(*each) for each in found] for found in browser.execute_script(script, chart)]


def bottom(browser, selector):
    script = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY"
    return browser.execute_script(script, selector)


def test_every_cell_is_the_jsons_and_so_is_the_headline(browser, show):
    told = contents()
    show(told)
    found = json.loads(json.dumps(told.result.to_json()))["policies"]
    expected = [each for each in found[1]["estimates"] if each["scope"] == "subscription"]
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
    assert [policies[name][0] for name in ("flush every 60 s", "flush every 5 s", "recorded")] == [
        "current policy", "recommended policy", "",
    ]  # fmt: skip
    assert len(policies) == len(totals)
    for label, total in totals.items():
        name = "recorded" if label == "recorded" else f"flush every {int(label.partition('=')[2] or 1_000) // 1_000} s"
        assert number(policies[name][1]) == pytest.approx(total["expected"], abs=0.0501)
        assert number(policies[name][3]) == total["max"]
    assert browser.find_element(By.ID, "headline").text == f"{headline(told.result)}."
    assert (
        "2,284 acked messages would have been redelivered on average (current policy); at worst 4,112, at"
        in headline(told.result)
    )
    assert "lush every 5 s instead of 60 s" in browser.find_element(By.ID, "recommendation").text
    assert browser.find_element(By.CSS_SELECTOR, "#all-policies tr.picked").text.startswith("flush every 5 s")


def test_thousands_of_rows_sort_and_filter_by_mouse_and_keyboard(browser, show):
    show(contents(sweep_result(usual_names(3_000), flushes=(60_000,))))
    assert len(cells(browser, "estimates")) == 50
    assert sorts(browser, "estimates") == [("mean, messages", "descending")]
    head(browser, "estimates", "subscription").find_element(By.TAG_NAME, "button").click()
    assert sorts(browser, "estimates") == [("subscription", "ascending")]
    assert cells(browser, "estimates")[0][0] == "sub-0000"
    head(browser, "estimates", "subscription").find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert sorts(browser, "estimates") == [("subscription", "descending")]
    status = browser.find_element(By.CSS_SELECTOR, "#estimates .status")
    kept, omitted = (int(each.replace(",", "")) for each in re.findall(r"of ([\d,]+); ([\d,]+) more", status.text)[0])
    assert kept + omitted == 3_000
    assert kept > 500
    assert cells(browser, "estimates")[0][0] == f"sub-{kept - 1:04}"
    browser.find_element(By.XPATH, "//*[@id='estimates']//button[.='Next']").send_keys(Keys.SPACE)
    assert status.text.startswith("51 to 100 of")
    assert cells(browser, "estimates")[0][0] == f"sub-{kept - 51:04}"
    search = browser.find_element(By.CSS_SELECTOR, "#estimates input[type=search]")
    search.send_keys("SUB-12 orders-1")
    assert {row[0][:6] for row in cells(browser, "estimates")} == {"sub-12"}
    assert {row[1][-8:] for row in cells(browser, "estimates")} == {"orders-1"}
    search.send_keys(" nowhere")
    assert status.text.startswith("Nothing fits the filter")
    assert cells(browser, "estimates") == []


def test_the_first_screen_is_the_answer(browser, show):
    show(contents())
    for selector in ("#headline", ".cards", "#who", "#why", "#change", "#price"):
        assert browser.find_element(By.CSS_SELECTOR, selector).is_displayed()
        assert bottom(browser, selector) < 800
    assert browser.find_element(By.ID, "who").text.splitlines()[:2] == [
        "Most affected", "sub-0000 of persistent://public/default/orders-0",
    ]  # fmt: skip
    assert "flush every 5 s instead of 60 s" in browser.find_element(By.ID, "change").text
    assert browser.find_element(By.ID, "price").text.splitlines()[1] == "current policy recommended policy"


@pytest.mark.parametrize("width", [SMALL_TELEPHONE, TELEPHONE, DESKTOP, pytest.param(WIDE, marks=pytest.mark.soak)])
def test_nothing_sticks_out_overlaps_or_complains(browser, show, width):
    show(contents(), width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert browser.get_log("browser") == []
    assert requests(browser) == [browser.current_url]
    for chart in CHARTS:
        panels = labels(browser, chart)
        assert panels
        for found in panels:
            assert len(found) > 3
            assert [(a.text, b.text) for a, b in combinations(found, 2) if a.overlaps(b)] == []
            assert [each.text for each in found if each.left < 0 or each.right > width] == []


def test_page_and_charts_follow_the_colour_scheme(browser, show):
    ink = {}
    for scheme in ("light", "dark"):
        show(contents(), scheme=scheme)
        script = (
            "const of = (s, n) => getComputedStyle(document.querySelector(s))[n];"
            "return [of('body', 'backgroundColor'), of('body', 'color'), of('#total .c1', 'stroke'),"
            " of('#total .area', 'backgroundColor')]"
        )
        *colours, paper = browser.execute_script(script)
        assert paper == "rgba(0, 0, 0, 0)"
        ink[scheme] = [luminance(each) for each in colours]
    assert ink["light"][0] > 0.9
    assert ink["dark"][0] < 0.15
    assert max(ink["light"][1:]) < 0.4
    assert min(ink["dark"][1:]) > 0.6


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: .ci/setup browser")
@pytest.mark.parametrize(("width", "scheme"), [(DESKTOP, "light"), (TELEPHONE, "dark")])
def test_axe_finds_no_barrier(browser, show, width, scheme):
    show(contents(), width=width, scheme=scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert barriers(browser) == []


def test_the_keyboard_reaches_every_control_and_opens_the_numbers(browser, show):
    show(contents())
    script = (
        "return [...document.querySelectorAll('a[href], button:enabled, select, input, summary, [tabindex=\"0\"]')]"
        ".filter(each => each.checkVisibility())"
    )
    focusable, reached = browser.execute_script(script), []
    for _ in focusable:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.switch_to.active_element)
    assert reached == focusable
    summary = browser.find_element(By.CSS_SELECTOR, "#total summary")
    summary.send_keys(Keys.ENTER)
    assert browser.find_element(By.CSS_SELECTOR, "#total table").is_displayed()
    head = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#total thead th")]
    assert head == ["from", "recorded, p50 / p99", "current policy, p50 / p99", "recommended policy, p50 / p99"]


def test_a_print_has_the_answer_and_the_charts_on_white(browser, show):
    show(contents(), scheme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert luminance(browser.execute_script("return getComputedStyle(document.body).backgroundColor")) > 0.9
        assert browser.find_element(By.ID, "headline").is_displayed()
        assert browser.find_element(By.CSS_SELECTOR, "#total .area").is_displayed()
        assert not browser.find_element(By.TAG_NAME, "nav").is_displayed()
        printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.7})
        assert len(printed["data"]) > 10_000
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_page_without_a_script_has_the_answer_and_the_charts(browser, show):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        with pytest.raises(AssertionError):
            show(contents())
        assert browser.find_element(By.ID, "headline").text.startswith("Had the broker crashed, ")
        assert browser.find_element(By.CSS_SELECTOR, "#total path.c0").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_hostile_names_are_read_as_they_are_and_do_nothing(browser, show):
    names = [(topic, name) for topic, name in zip(HOSTILE, reversed(HOSTILE), strict=True)]
    show(contents(sweep_result(names, trace="traces/<b>" + chr(0x202E))), width=TELEPHONE)
    with pytest.raises(NoAlertPresentException):
        browser.switch_to.alert  # noqa: B018 - the look for it raises
    shown = {(row[1], row[0]) for row in cells(browser, "estimates")}
    assert shown == {(printable(topic), printable(name)) for topic, name in names}
    shown = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#worst h4 bdi")]
    assert shown[0] == short_name(printable(names[0][1]))
    assert browser.find_elements(By.CSS_SELECTOR, "figure a, img, [onerror]") == []
    body = browser.find_element(By.TAG_NAME, "body").get_property("textContent")
    assert chr(0x202E) not in body
    assert browser.execute_script("return document.documentElement.scrollWidth") == TELEPHONE
    assert browser.get_log("browser") == []
