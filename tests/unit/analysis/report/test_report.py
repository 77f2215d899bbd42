"""The report's page: it shows the values, needs nothing else, and shows names as the text that they are."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ackstate.analysis.demo.run import render, summary_json, verdict
from demo_runs import demo_run, killed_inside_persist, recovery

HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\"'&amp; $plot {0} %{y} \\u003c",
)


class ReportPage(HTMLParser):
    """A page as a browser reads it: each section's table rows, paragraphs, scripts, and every attribute."""

    def __init__(self, html):
        super().__init__()
        self.tables, self.paragraphs, self.scripts, self.attributes = {}, [], [], []
        self._section, self._collects = "", None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "section":
            self._section = dict(attrs)["id"]
        elif tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")
            self._collects = self.tables[self._section][-1]
        elif tag in ("p", "script"):
            self._collects = self.paragraphs if tag == "p" else self.scripts
            self._collects.append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th", "p", "script"):
            self._collects = None

    def handle_data(self, data):
        if self._collects is not None:
            self._collects[-1] += data


def rows_of(page, section):
    return page.tables[section][1:]


def texts(*values):
    return [str(value) for value in values]


def test_every_number_of_the_summary_is_in_its_cell():
    run = demo_run()
    page = ReportPage(render(run))
    outcomes = summary_json(run)["subscriptions"]
    assert rows_of(page, "outcomes") == [
        texts(o["name"], o["acked"], o["durable"], o["predicted_at_kill"], o["observed"], o["lost"], o["invented"])
        for o in outcomes
    ]
    assert rows_of(page, "distribution") == [
        texts(o["name"], o["expected"], o["p50"], o["p99"], o["max"]) for o in outcomes
    ]
    summary = summary_json(run)
    expected = {**summary["settings"], "kill_ts_ms": summary["kill_ts_ms"], "lived_ms": run.kill.lived_ms}
    assert rows_of(page, "settings") == [texts(*item) for item in expected.items()]
    assert page.paragraphs[0] == "3 of 3 predictions equal to observation, 0 lost acks, 0 invented acks"


@pytest.mark.parametrize(
    ("observed", "found"),
    [
        (683, "683 were redelivered, so it was not written."),
        (12, "12 were redelivered, so it was written."),
        (5, "5 were redelivered, which fits neither."),
    ],
)
def test_a_kill_inside_a_persist_shows_both_predictions_and_which_came_true(observed, found):
    run = demo_run(["a"])
    inside = killed_inside_persist(run.subscriptions[0], not_written=683, written=12, observed=observed)
    page = ReportPage(render(replace(run, subscriptions=[inside])))
    assert rows_of(page, "outcomes")[0][3:5] == ["683 or, if written, 12", str(observed)]
    (told,) = [text for text in page.paragraphs if "inside a persist" in text]
    assert told.startswith(
        "a was killed inside a persist: 683 messages are redelivered if it was not written, 12 if it was."
    )
    assert told.endswith(found)


def test_a_failure_is_in_the_verdict_and_marked_by_more_than_a_number():
    run = demo_run(seed=2)
    wrong = replace(run.subscriptions[0], observed=5, lost=2)
    bad = ReportPage(render(run := replace(run, subscriptions=[wrong, *run.subscriptions[1:]])))
    said = "2 of 3 predictions equal to observation, 2 lost acks, 0 invented acks"
    assert bad.paragraphs[0] == verdict(run) == said
    assert ("p", "class", "lead holds") in ReportPage(render(demo_run())).attributes
    assert ("p", "class", "lead fails") in bad.attributes
    assert bad.attributes.count(("tr", "class", "fails")) == 1


def test_hostile_names_stay_text():
    run = replace(
        demo_run(HOSTILE_NAMES),
        recoveries=[recovery(name, bytes_discarded=1, discarded_reason=name) for name in HOSTILE_NAMES],
    )
    run = replace(
        run, subscriptions=[killed_inside_persist(o, not_written=9, written=2, observed=2) for o in run.subscriptions]
    )
    page = ReportPage(render(run))
    for section in ("outcomes", "distribution", "recoveries"):
        assert [row[0] for row in rows_of(page, section)] == list(HOSTILE_NAMES)
    assert page.scripts == []
    assert not any(name == "onerror" for _, name, _ in page.attributes)
