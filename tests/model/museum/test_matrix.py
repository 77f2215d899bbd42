"""The committed page shows the measurements, and measuring distinguishes a bug from none."""

from __future__ import annotations

import os
import signal

import pytest

from ackstate.analysis.crash.campaign import read_totals
from ackstate.analysis.crash.layer import BrokenPromise, LayerSkippedError, RunOutcome
from crash.schedules import schedules
from museum.cell import Cell, CellBudget, CellFate, run_cell
from museum.exhibits import EXHIBITS
from museum.matrix import PAGE, TOTALS, read_cells
from museum.page import LAYERS, PRODUCT, is_good, render

LOST_ACK = next(exhibit for exhibit in EXHIBITS if exhibit.name == "M5")


def test_the_page_has_a_row_for_each_bug_and_each_is_killed_and_the_product_by_none():
    page, cells = PAGE.read_text(encoding="utf-8"), read_cells()
    rows = [line for line in page.splitlines() if line.startswith("| M")]
    assert [row.split()[1] for row in rows] == [exhibit.name for exhibit in EXHIBITS]
    assert all("**killed**" in row for row in rows)
    (product,) = [line for line in page.splitlines() if line.startswith("| no bug")]
    assert "killed" not in product
    assert product.count("survived") == len(LAYERS)
    assert is_good(cells)


def test_the_page_is_made_from_what_was_measured():
    assert PAGE.read_text(encoding="utf-8") == render(read_cells(), read_totals(TOTALS))


@pytest.mark.slow
def test_a_layer_kills_a_bug_and_not_the_product():
    killed = run_cell(schedules, LOST_ACK, CellBudget(seconds=20))
    assert (killed.fate, killed.runs) == (CellFate.KILLED, 1)
    assert killed.promise
    assert killed.story
    survived = run_cell(schedules, None, CellBudget(seconds=20, cycles_max=1))
    assert (survived.fate, survived.runs) == (CellFate.SURVIVED, 1)
    assert survived.cycles > killed.cycles


def outcomes(*, fails_at=None):
    def layer(first_seed):
        for seed in range(first_seed, first_seed + 100):
            yield RunOutcome(seed, 10, broken=(BrokenPromise("I2", "lost", ("a",)),) if seed == fails_at else ())

    return layer


def test_a_cell_ends_at_the_first_broken_promise():
    cell = run_cell(outcomes(fails_at=3), None, CellBudget(seconds=60))
    assert (cell.fate, cell.cycles, cell.runs, cell.promise) == (CellFate.KILLED, 40, 4, "I2")
    assert cell.story == ("seed 3", "a")


def test_a_cell_ends_with_its_budget():
    cell = run_cell(outcomes(fails_at=3), None, CellBudget(seconds=60, cycles_max=25, first_seed=7))
    assert (cell.fate, cell.cycles) == (CellFate.SURVIVED, 30)


def test_a_layer_that_fails_has_not_seen_the_bug():
    def fails(first_seed):
        yield RunOutcome(first_seed, 1)
        raise ZeroDivisionError("not ours")

    def dies(first_seed):
        yield RunOutcome(first_seed, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_skipped(first_seed):
        raise LayerSkippedError("needs root")
        yield

    cells = [run_cell(layer, None, CellBudget(seconds=60)) for layer in (fails, dies, is_skipped)]
    assert [cell.fate for cell in cells] == [CellFate.DIED, CellFate.DIED, CellFate.SKIPPED]
    assert [cell.promise for cell in cells] == ["not ours", "it ended by itself", "needs root"]


def test_a_layer_that_hangs_has_not_seen_the_bug(monkeypatch):
    monkeypatch.setattr("museum.cell._GRACE_SECONDS", 0.3)

    def hangs(first_seed):
        yield RunOutcome(first_seed, 7)
        signal.pause()

    cell = run_cell(hangs, None, CellBudget(seconds=0.2))
    assert (cell.fate, cell.cycles) == (CellFate.HUNG, 7)


def test_a_matrix_with_a_bug_that_lives_or_a_product_that_dies_is_not_good():
    killed, survived = Cell(CellFate.KILLED, 1), Cell(CellFate.SURVIVED, 1)
    rows = {exhibit.name: dict.fromkeys(LAYERS, survived) | {"L0": killed} for exhibit in EXHIBITS}
    good = rows | {PRODUCT: dict.fromkeys(LAYERS, survived)}
    assert is_good(good)
    assert not is_good(good | {"M7": dict.fromkeys(LAYERS, survived)})
    for fate in (CellFate.KILLED, CellFate.HUNG, CellFate.DIED):
        assert not is_good(good | {PRODUCT: good[PRODUCT] | {"L3": Cell(fate)}})
