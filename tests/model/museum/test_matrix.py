"""Every bug was killed by a layer, and the product by none; measuring distinguishes a bug from none."""

import pytest

from crash.schedules import schedules
from museum.cell import CellBudget, CellFate, run_cell
from museum.exhibits import EXHIBITS
from museum.matrix import PRODUCT, is_good, read_cells

LOST_ACK = next(exhibit for exhibit in EXHIBITS if exhibit.name == "M5")


def test_each_bug_was_killed_and_the_product_was_not():
    cells = read_cells()
    assert set(cells) == {*(exhibit.name for exhibit in EXHIBITS), PRODUCT}
    assert is_good(cells)


@pytest.mark.slow
def test_a_layer_kills_a_bug_and_not_the_product():
    killed = run_cell(schedules, LOST_ACK, CellBudget(seconds=60))
    assert (killed.fate, killed.runs) == (CellFate.KILLED, 6)
    assert killed.promise
    assert killed.story
    survived = run_cell(schedules, None, CellBudget(seconds=60, cycles_max=1))
    assert (survived.fate, survived.runs) == (CellFate.SURVIVED, 1)
    assert survived.cycles > 0
