"""Every marked figure of the pages is that of a committed result."""

from __future__ import annotations

import json
import re

import first_ten_minutes
import pytest

from benchmarks import figures, table
from benchmarks.pulsar import page as pulsar_page
from benchmarks.pulsar.results import Results
from live import page as live_page
from museum import matrix
from museum.page import render


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.relative_to(figures.ROOT).as_posix())
def test_a_page_has_the_figures_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert figures.filled(text) == text, "run python -m benchmarks.figures"


def test_a_figure_that_differs_is_replaced():
    text = "a <!--= scale :: as recorded, 10,000,000 events :: s :: .1f -->9.9<!--/--> b"
    assert re.fullmatch(r"a <!--= scale .* -->1\.\d<!--/--> b", figures.filled(text))


def test_a_figure_has_the_format_that_it_names():
    base = "scale :: as recorded, 10,000,000 events :: s ::"
    row = next(
        each for each in figures._read("scale")["figures"]
        if (each["what"], each["unit"]) == ("as recorded, 10,000,000 events", "s")
    )  # fmt: skip
    median, against = row["spread"]["median"], row["against"]["figure"]
    assert figures.figure(f"{base} .3f") == f"{median:.3f}"
    assert figures.figure(f"{base} *1000 ,.0f") == f"{median * 1000:,.0f}"
    assert figures.figure(f"{base} *2000 /60 .1f") == f"{median * 2000 / 60:.1f}"
    assert figures.figure(f"{base} *1000000 2") == f"{float(f'{median * 1e6:.1e}'):,.0f}"
    assert figures.figure(f"{base} .2f against") == f"{against:.2f}"
    assert figures.figure(f"{base} .2f inverse") == f"{against / median:.2f}"
    kills = figures._read("calibration")["totals"]["kills"]
    assert figures.figure("calibration :: totals.kills :: ,.0f") == f"{kills:,}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing :: a :: s :: .1f", "no result 'nothing'"),
        ("scale :: nothing :: s :: .1f", "0 rows 'nothing'"),
        ("scale :: DuckDB over rows, 10,000,000 events :: s :: .1f ratio", "compared with nothing"),
        ("calibration :: totals.nothing :: .1f", "no 'totals.nothing'"),
        ("scale", "a figure must be"),
    ],
)
def test_a_figure_without_a_result_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        figures.filled(f"<!--= {name} -->1<!--/-->")


def test_a_figure_that_is_not_closed_is_refused():
    with pytest.raises(ValueError, match="not closed"):
        figures.filled("<!--= scale :: a :: s :: .1f -->1 s")


def test_the_tables_of_the_benchmarks_are_those_of_the_results():
    text = (figures.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert table.filled(text) == text, "run python -m benchmarks.table"


def test_the_comparison_with_pulsar_is_that_of_its_result():
    assert pulsar_page.page(Results.read()) == pulsar_page.PAGE.read_text(encoding="utf-8")


def test_the_pages_of_the_live_comparisons_are_those_of_their_result():
    result = json.loads(live_page.RESULT.read_text(encoding="utf-8"))
    assert live_page.render(result) == live_page.PAGE.read_text(encoding="utf-8")
    text = live_page.RECORD_PAGE.read_text(encoding="utf-8")
    assert live_page.with_counts(text, result) == text


def test_the_table_of_the_first_ten_minutes_is_that_of_its_result():
    result = json.loads(first_ten_minutes.RESULT.read_text(encoding="utf-8"))
    text = first_ten_minutes.PAGE.read_text(encoding="utf-8")
    assert first_ten_minutes.filled(text, result) == text


def test_a_step_that_was_left_out_is_in_the_table():
    steps = {"clone": {"seconds": 1.25, "outcome": "abc"}}
    table = first_ten_minutes.table({"date": "2026-01-01", "machine": "2 cores", "steps": steps})
    assert "| clone the repository | 1.2 s | abc |" in table
    assert "| `make test` |  | not run |" in table


def test_the_kill_matrix_is_that_of_its_result():
    assert render(matrix.read_cells(), matrix.read_totals(matrix.TOTALS)) == matrix.PAGE.read_text(encoding="utf-8")
